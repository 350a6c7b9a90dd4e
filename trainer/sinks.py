"""Where a run's metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, and Ray's metrics (trainer/gauges.py)."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from trainer.configs.sections import Config, LogConfig, values_read
from trainer.errors import ConfigError
from trainer.gauges import gauges

SITE = "https://api.wandb.ai"
SIGN_IN = "WANDB_API_KEY"


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
    return [*found, gauges(folder.name)]


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
