"""How a run ends that is asked to stop before it looks for signals itself: one line, and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainer import train_ppo
from trainer.cluster import start_signals


@pytest.fixture
def sigterm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(start_signals, "ENDED", ended := [])
    monkeypatch.setattr(train_ppo, "ENDED", ended)
    old = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, old)


def asked() -> None:
    start_signals.end_by_sigterm()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit:
        raise SystemExit(1) from None  # as Ray has it, where it waits


def by_ray() -> None:
    raise SystemExit(signal.SIGTERM)  # its own handler, while it starts


def otherwise() -> None:
    raise SystemExit(7)


@pytest.mark.parametrize(("how", "code"), [(asked, 143), (by_ray, 143), (otherwise, None)])
def test_sigterm_during_the_start_is_one_line_and_143(how, code, sigterm, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(train_ppo, "run_folder", lambda config: tmp_path / "run")
    monkeypatch.setattr(train_ppo, "dated", lambda config, folder: config)
    monkeypatch.setattr(train_ppo, "save_resolved", lambda *_: None)
    monkeypatch.setattr(train_ppo, "train", lambda *_: how())
    if code is None:
        with pytest.raises(SystemExit) as ended:
            train_ppo.main(cast(Any, SimpleNamespace()))
        assert ended.value.code == 7
    else:
        assert train_ppo.main(cast(Any, SimpleNamespace())) == code
        assert capsys.readouterr().out == "SIGTERM: stopped before it began; the same command starts again\n"


@pytest.mark.parametrize("inside", [True, False])
def test_ctrl_c_before_a_run_begins_is_one_line(inside):
    """Imports that take seconds follow the settings."""
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    body = f"with exits_cleanly():\n    {interrupt if inside else 'pass'}\n{interrupt}"
    code = f"import os, signal\nfrom trainer.cli import exits_cleanly\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{body}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (130 if inside else -signal.SIGINT, "interrupted\n")


def test_ctrl_c_in_the_first_imports_is_one_line(tmp_path):
    """`python -m trainer.NAME` imports the package before the module; what that imports first interrupts it."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich/__init__.py").write_text("raise KeyboardInterrupt\n")  # what trainer.compare imports first
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "trainer.compare", "a", "b"]
    cold = {name: value for name, value in os.environ.items() if name != "FLOTILLA_TEST_WARM"}
    done = subprocess.run(command, env=cold | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "interrupted\n")
