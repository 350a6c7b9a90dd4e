"""Where a run's metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Ray's metrics (gauges.py)."""

from __future__ import annotations

import contextlib
import netrc
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from trainer.cli.changes import flatten
from trainer.configs.sections import Config, LogConfig, unread, values_read
from trainer.errors import ConfigError
from trainer.metrics.gauges import gauges
from trainer.metrics.progress import Progress, among_logs

SITE = "https://api.wandb.ai"
SIGN_IN = "WANDB_API_KEY"
SWEEP = "FLOTILLA_SWEEP"  # name of the sweep whose trial a run is (sweeps/): its group in W&B, and a tag in MLflow


class Sink(Protocol):
    def show(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Safe to call twice."""
        ...


def sinks(config: Config, folder: Path, done: int = 0) -> Sequence[Sink]:
    """Those that `log` names, and Ray's where this process is connected to a cluster. `done`: steps in the checkpoint that is resumed.

    Raises ConfigError where a library is not installed.
    """
    found: list[Sink] = [TensorBoard(folder / "tensorboard", done)] if config.log.tensorboard else []
    if config.log.wandb is not None:
        found.append(Wandb(folder, config.log, values_read(config)))
    if config.log.mlflow is not None:
        found.append(Mlflow(folder, config.log.mlflow, config))
    return [*found, gauges(folder.name), Progress(folder, done, config.trainer.steps, among_logs("progress"))]


class TensorBoard:
    def __init__(self, folder: Path, done: int) -> None:
        """Imported late: it takes seconds, and only who asked for it needs it installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"log.tensorboard=true: {error}; install tensorboard or set log.tensorboard=false") from None
        self.board = SummaryWriter(str(folder), purge_step=done + 1)

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            self.board.add_scalar(key, value, step)
        self.board.flush()

    def close(self) -> None:
        self.board.close()


class Wandb:
    """One W&B run of the run's name, which a resumed run goes on with. https://docs.wandb.ai/guides/runs/resuming/

    W&B keeps what it was sent: a step that is computed again after a kill is there twice, with the same numbers.
    """

    def __init__(self, folder: Path, config: LogConfig, settings: dict[str, Any]) -> None:
        import wandb

        mode = wandb_mode()
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, x_disable_machine_info=True)
        self.run = wandb.init(
            project=config.wandb,
            id=folder.name,
            name=folder.name,
            group=os.environ.get(SWEEP),
            dir=str(folder),
            config=settings,
            resume="allow",
            mode=mode,
            settings=quiet,
        )
        self.run.define_metric("*", step_metric="step")
        if mode == "offline":
            print(f"wandb: offline, as there is no {SIGN_IN}; `wandb sync {self.run.dir.removesuffix('/files')}` uploads it", flush=True)

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({"step": step, **numbers})

    def close(self) -> None:
        self.run.finish()


def wandb_mode(env: Mapping[str, str] = os.environ) -> Any:
    """What WANDB_MODE says, else online where there are credentials, so that no run waits at a prompt."""
    if said := env.get("WANDB_MODE"):
        return said
    host = urlsplit(env.get("WANDB_BASE_URL") or SITE).hostname or ""
    try:
        signed_in = bool(env.get(SIGN_IN)) or netrc.netrc(env.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        signed_in = False
    return "online" if signed_in else "offline"


class Mlflow:
    """One MLflow run of the run's name. Its id is in the run's folder, for a resumed run to go on with.

    What the server does not take is sent again with the next step: one that is away for a while ends no run.
    """

    def __init__(self, folder: Path, experiment: str, config: Config) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # by default a step would wait minutes for a server that is away
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        local = f"sqlite:///{folder.resolve()}/mlflow.db"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or local
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.metric, self.param, self.error = Metric, Param, MlflowException
        self.left: list[Any] = []  # metrics that are not sent yet
        try:
            self.client = MlflowClient(uri)
            self.run = self._run(folder, experiment, config)
        except (ImportError, MlflowException) as error:
            raise ConfigError(f"log.mlflow={experiment}: {uri}: {_first_line(error)}; check MLFLOW_TRACKING_URI") from None
        if uri == local:
            print(f"mlflow: local, as there is no MLFLOW_TRACKING_URI; `mlflow ui --backend-store-uri {uri}` shows it", flush=True)

    def _run(self, folder: Path, experiment: str, config: Config) -> str:
        file = folder / "mlflow_run"
        if file.exists():
            try:
                self.client.update_run(run := file.read_text().strip(), "RUNNING")
                return run
            except self.error as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # else this is another server, or its database is a new one
                    raise
        try:
            found = self.client.create_experiment(experiment)
        except self.error as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = self.client.get_experiment_by_name(experiment).experiment_id  # pyright: ignore[reportOptionalMemberAccess]
        tags = {"sweep": sweep} if (sweep := os.environ.get(SWEEP)) else {}
        run = self.client.create_run(found, run_name=folder.name, tags=tags).info.run_id
        skipped = {key for key, *_ in unread(config)}
        settings = {key: str(value)[:500] for key, value in flatten(config).items() if key not in skipped}  # older servers take no more
        self.client.log_batch(run, params=[self.param(mlflow_name(key), value) for key, value in settings.items()])
        file.write_text(run)
        return run

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self.left += [self.metric(mlflow_name(key), float(value), now, step) for key, value in numbers.items()]
        self._send()

    def _send(self) -> None:
        try:
            self.client.log_batch(self.run, self.left)
            self.left = []
        except self.error as error:
            print(f"mlflow: {_first_line(error)}; {len(self.left)} values wait for the next step", flush=True)

    def close(self) -> None:
        if self.left:
            self._send()
        with contextlib.suppress(self.error):  # the step before said so
            self.client.set_terminated(self.run)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def mlflow_name(key: str) -> str:
    """MLflow takes letters, digits and _-. :/ in a name."""
    return key.replace("@", "_at_")
