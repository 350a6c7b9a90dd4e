"""What else takes a run's metrics, read back by the libraries' own readers and records."""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainer import preflight
from trainer.configs.sft import SftConfig
from trainer.errors import ConfigError
from trainer.metrics import Metrics
from trainer.metrics.sinks import SWEEP, sinks, wandb_mode

QUIET = Console(quiet=True)


def config(**log: Any) -> SftConfig:
    values = {"model": {"path": "gpt2"}, "data": {"path": "a:b"}, "log": {"tensorboard": False, **log}}
    return SftConfig.model_validate(values)


def test_tensorboard_has_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, steps in ((0, range(1, 6)), (3, range(4, 6))):  # killed after 5, resumed at 3
        both = sinks(config(tensorboard=True), tmp_path, done)
        with Metrics(tmp_path, total=5, done=done, sinks=both, console=QUIET) as metrics:
            for step in steps:
                metrics.log(step, {"reward": step + done / 10})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, round(event.value, 4)) for event in events.Scalars("reward")] == [(1, 1), (2, 2), (3, 3), (4, 4.3), (5, 5.3)]


def test_without_tensorboard_the_setting_to_change_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"log\.tensorboard=false"):
        sinks(config(tensorboard=True), tmp_path)


def records(file: Path) -> Iterator[Any]:
    """Of W&B's file of a run: protobuf records in LevelDB's log format, after 7 bytes. None here is longer than a block."""
    from wandb.proto import wandb_internal_pb2

    data, at = file.read_bytes(), 7
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, _ = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):  # being written
            return
        yield wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])  # pyright: ignore[reportAttributeAccessIssue]
        at += 7 + length


def whole(file: Path) -> list[Any]:
    """Its records once the last one is there: W&B's own process writes them, and finishes a moment after the run is closed."""
    deadline = time.monotonic() + 120
    while not (found := [*records(file)]) or not found[-1].HasField("exit"):
        assert time.monotonic() < deadline, [record.WhichOneof("record_type") for record in found]
        time.sleep(0.05)
    return found


def test_wandb_without_credentials_has_the_same_numbers_offline_and_says_so(tmp_path, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv(SWEEP, "rates")
    folder = tmp_path / "demo"
    folder.mkdir()
    with Metrics(folder, total=2, sinks=sinks(config(wandb="sorting"), folder), console=QUIET) as metrics:
        metrics.log(1, {"reward": 0.5, "loss": 2})
        metrics.log(2, {"reward": 0.75, "loss": 1})
    [file] = folder.glob("wandb/offline-run-*/run-demo.wandb")
    assert f"wandb: offline, as there is no WANDB_API_KEY; `wandb sync {file.parent}` uploads it" in capsys.readouterr().out
    found = whole(file)
    rows = [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item} for r in found if r.HasField("history")]
    assert [(row["step"], row["reward"], row["loss"]) for row in rows] == [(1, 0.5, 2), (2, 0.75, 1)]
    [run] = [record.run for record in found if record.HasField("run")]
    assert (run.project, run.run_id, run.display_name, run.run_group) == ("sorting", "demo", "demo", "rates")
    assert {"/".join(item.nested_key) or item.key for item in run.config.update} >= {"model", "optim", "trainer"}


@pytest.mark.parametrize(
    ("env", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "x"}, "online"),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}, "disabled"),
        ({"NETRC": "{file}"}, "online"),
        ({"NETRC": "{file}", "WANDB_BASE_URL": "https://wandb.example.com"}, "offline"),
    ],
)
def test_wandb_is_online_where_there_are_credentials_for_its_server(tmp_path, env, mode):
    file = tmp_path / "netrc"
    file.write_text("machine api.wandb.ai login user password 0123\n")
    file.chmod(0o600)
    assert wandb_mode({"NETRC": str(tmp_path / "none")} | {key: value.format(file=file) for key, value in env.items()}) == mode


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_library_that_is_not_installed_is_one_error_before_the_start(monkeypatch, name):
    assert preflight.sinks(config(**{name: "sorting"})) == []
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    assert preflight.sinks(config()) == []
    [line] = preflight.sinks(config(**{name: "sorting"}))
    assert line == f"log.{name}=sorting: {name} is not installed in this environment; pip install {name}, or leave log.{name} out"


@pytest.fixture
def demo(tmp_path, monkeypatch) -> Path:
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "demo"
    folder.mkdir()
    return folder


def mlflow_history(uri: str, run: str, *keys: str) -> list[list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    return [[(metric.step, metric.value) for metric in MlflowClient(uri).get_metric_history(run, key)] for key in keys]


def test_mlflow_without_a_server_has_the_same_numbers_locally_in_one_run_across_a_resume(demo, capsys, monkeypatch):
    monkeypatch.setenv(SWEEP, "rates")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{demo}/mlflow.db"
    with Metrics(demo, total=3, sinks=sinks(config(mlflow="sorting"), demo), console=QUIET) as metrics:
        metrics.log(1, {"reward": 0.5, "reward/math": 1})
        metrics.log(2, {"reward": 0.75, "eval_pass@2": 0.25})
    assert f"mlflow: local, as there is no MLFLOW_TRACKING_URI; `mlflow ui --backend-store-uri {uri}` shows it" in capsys.readouterr().out
    with Metrics(demo, total=3, done=2, sinks=sinks(config(mlflow="sorting"), demo, 2), console=QUIET) as metrics:
        metrics.log(3, {"reward": 1.0})
    client = MlflowClient(uri)
    [run] = client.search_runs([found.experiment_id for found in client.search_experiments(filter_string="name = 'sorting'")])
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    assert run.data.params["model.path"] == "gpt2"
    assert run.data.tags["sweep"] == "rates"
    assert run.data.params["trainer.steps"] == "100"
    reward, term, passed = mlflow_history(uri, run.info.run_id, "reward", "reward/math", "eval_pass_at_2")
    assert (reward, term, passed) == ([(1, 0.5), (2, 0.75), (3, 1.0)], [(1, 1.0)], [(2, 0.25)])


def test_what_mlflow_does_not_take_is_sent_with_the_next_step(demo, capsys):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{demo}/mlflow.db"
    with Metrics(demo, total=3, sinks=sinks(config(mlflow="sorting"), demo), console=QUIET) as metrics:
        client, run = MlflowClient(uri), (demo / "mlflow_run").read_text()
        client.delete_run(run)
        metrics.log(1, {"reward": 0.5})
        metrics.log(2, {"reward": 0.75})
        assert "; 2 values wait for the next step" in capsys.readouterr().out
        client.restore_run(run)
        metrics.log(3, {"reward": 1.0})
    assert mlflow_history(uri, run, "reward") == [[(1, 0.5), (2, 0.75), (3, 1.0)]]


def test_another_mlflow_store_gets_a_new_run_and_one_that_is_not_there_is_one_error(demo, tmp_path, monkeypatch):
    sinks(config(mlflow="sorting"), demo)[0].close()
    before = (demo / "mlflow_run").read_text()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/team.db")
    both = [sinks(config(mlflow="sorting"), folder) for folder in (demo, tmp_path)]  # the experiment is there for the second
    assert (demo / "mlflow_run").read_text() != before
    for one in both:
        one[0].close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address := f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(ConfigError, match=rf"log\.mlflow=sorting: {address}: .*; check MLFLOW_TRACKING_URI"):
            sinks(config(mlflow="sorting"), demo)
