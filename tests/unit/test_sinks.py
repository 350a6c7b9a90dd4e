"""What else takes a run's metrics, read back by the libraries' own readers and records."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainer import preflight
from trainer.configs.sft import SftConfig
from trainer.errors import ConfigError
from trainer.metrics import Metrics
from trainer.sinks import sinks, wandb_mode

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
        yield wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])  # pyright: ignore[reportAttributeAccessIssue]
        at += 7 + length


def test_wandb_without_credentials_has_the_same_numbers_offline_and_says_so(tmp_path, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    folder = tmp_path / "demo"
    folder.mkdir()
    with Metrics(folder, total=2, sinks=sinks(config(wandb="sorting"), folder), console=QUIET) as metrics:
        metrics.log(1, {"reward": 0.5, "loss": 2})
        metrics.log(2, {"reward": 0.75, "loss": 1})
    [file] = folder.glob("wandb/offline-run-*/run-demo.wandb")
    assert f"wandb: offline, as there is no WANDB_API_KEY; `wandb sync {file.parent}` uploads it" in capsys.readouterr().out
    found = [*records(file)]
    rows = [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item} for r in found if r.HasField("history")]
    assert [(row["step"], row["reward"], row["loss"]) for row in rows] == [(1, 0.5, 2), (2, 0.75, 1)]
    [run] = [record.run for record in found if record.HasField("run")]
    assert (run.project, run.run_id, run.display_name) == ("sorting", "demo", "demo")
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


def test_wandb_that_is_not_installed_is_one_error_before_the_start(monkeypatch):
    assert preflight.sinks(config(wandb="sorting")) == []
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    assert preflight.sinks(config()) == []
    [line] = preflight.sinks(config(wandb="sorting"))
    assert line.startswith("log.wandb=sorting: wandb is not installed in this environment; pip install wandb")
