"""Metrics: exact on disk, cut at the checkpoint on resume, readable while running, comparable afterwards."""

from __future__ import annotations

import io
import json
import math
import struct
from pathlib import Path

import numpy
import pytest
import torch
from rich.console import Console

from trainer.cli import exits_cleanly
from trainer.compare import compare, main
from trainer.errors import ConfigError
from trainer.metrics import FILE, Metrics, plot, read, smoothed

QUIET = Console(file=io.StringIO())


def write(folder: Path, steps: range, done: int = 0, **extra: float) -> None:
    with Metrics(folder, total=100, done=done, console=QUIET) as metrics:
        for step in steps:
            metrics.log(
                step, {"reward": step / 7, "loss": -1 / step, "seconds": 0.1 * done + step, "tokens_per_second": 1e4 - done, **extra}
            )


# --- the file --------------------------------------------------------------------------------------------------------------


def test_floats_come_back_with_the_same_bits(tmp_path):
    values = [0.1 + 0.2, -0.0, 5e-324, 1.7976931348623157e308, float(numpy.float32(0.1)), math.pi]
    with Metrics(tmp_path, total=1, console=QUIET) as metrics:
        metrics.log(1, {f"v{i}": value for i, value in enumerate(values)})
    (row,) = read(tmp_path)
    assert [struct.pack("d", row[f"v{i}"]) for i in range(len(values))] == [struct.pack("d", value) for value in values]


def test_tensor_and_numpy_scalars_are_numbers(tmp_path):
    with Metrics(tmp_path, total=1, console=QUIET) as metrics:
        metrics.log(1, {"a": torch.tensor(0.5), "b": numpy.float32(0.25), "c": 3})  # pyright: ignore[reportArgumentType]
    assert (tmp_path / FILE).read_text() == '{"step": 1, "a": 0.5, "b": 0.25, "c": 3}\n'


def test_each_step_is_on_disk_when_log_returns(tmp_path):
    with Metrics(tmp_path, total=9, console=QUIET) as metrics:
        for step in (1, 2):
            metrics.log(step, {"loss": 0.5})
            assert [row["step"] for row in read(tmp_path)] == list(range(1, step + 1))


def test_resuming_cuts_what_came_after_the_checkpoint_and_what_a_kill_left_unfinished(tmp_path):
    write(tmp_path, range(1, 9))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 9, "rew')
    write(tmp_path, range(6, 11), done=5)
    assert [row["step"] for row in read(tmp_path)] == list(range(1, 11))
    assert [row["tokens_per_second"] for row in read(tmp_path)] == [1e4] * 5 + [1e4 - 5] * 5


def test_the_evaluation_before_the_first_step_stays_on_resume_but_not_on_a_new_start(tmp_path):
    with Metrics(tmp_path, total=9, console=QUIET) as metrics:
        metrics.log(0, {"eval_reward": 0.5})
        metrics.log(1, {"loss": 0.5})
    Metrics(tmp_path, total=9, done=1, console=QUIET).close()
    assert [row["step"] for row in read(tmp_path)] == [0, 1]
    Metrics(tmp_path, total=9, console=QUIET).close()
    assert read(tmp_path) == []


def test_a_step_is_logged_once(tmp_path):
    with Metrics(tmp_path, total=9, done=3, console=QUIET) as metrics:
        for step in (2, 3):
            with pytest.raises(ValueError, match=f"metrics of step {step} after step 3"):
                metrics.log(step, {"loss": 0.5})
        metrics.log(4, {"loss": 0.5})
        metrics.log(4, {"eval_reward": 0.5})


def test_numbers_that_are_not_finite_are_valid_json(tmp_path):
    with Metrics(tmp_path, total=1, console=QUIET) as metrics:
        metrics.log(1, {"kl": math.nan, "ratio_max": math.inf, "loss": 1.0})

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    row = json.loads((tmp_path / FILE).read_text(), parse_constant=refuse)
    assert row == {"step": 1, "kl": None, "ratio_max": None, "loss": 1.0}


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / FILE).write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=rf"{FILE}:2: not JSON"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "elsewhere")


# --- for people ------------------------------------------------------------------------------------------------------------


def test_a_log_gets_one_line_per_step(tmp_path):
    out = io.StringIO()
    with Metrics(tmp_path, total=12, console=Console(file=out, soft_wrap=True)) as metrics:
        metrics.log(1, {"reward": 0.53125, "loss": -0.0123456, "kl": 0.0, "seconds": 0.8, "tokens_per_second": 8450.4, "entropy": 1.0})
        metrics.log(12, {"reward": 1.0, "eval_reward": 0.75})
    first, last = out.getvalue().splitlines()
    assert first.startswith("step  1/12  reward     0.5312  loss   -0.01235      8,450 tokens/s     0.80 s  0:00 left")
    assert last.rstrip() == "step 12/12  reward          1  eval reward 0.75"


def test_the_columns_of_all_steps_are_below_each_other_and_one_that_is_always_0_is_left_out(tmp_path):
    out = io.StringIO()
    with Metrics(tmp_path, total=100, console=Console(file=out, soft_wrap=True)) as metrics:
        for step, size in enumerate((1.0, -0.0123456, 1234.567, 0.0), 1):
            numbers = {"reward": size / 2000, "loss": size, "kl": 0.0, "seconds": abs(size), "tokens_per_second": abs(size) * 100}
            metrics.log(step, numbers | ({"eval_reward": 0.5} if step == 2 else {}))
    lines = out.getvalue().splitlines()
    assert len({(line.index(" loss"), line.index(" tokens/s"), line.index(" s  ")) for line in lines}) == 1
    assert not any("kl" in line for line in lines)


def test_a_terminal_gets_a_bar_with_the_time_left(tmp_path):
    out = io.StringIO()
    with Metrics(tmp_path, total=10, done=4, console=Console(file=out, force_terminal=True, width=120)) as metrics:
        metrics.log(5, {"reward": 0.5})
    assert "━" in out.getvalue() and "0:00 left" in out.getvalue() and "step  5/10  reward        0.5" in out.getvalue()


# --- plot ------------------------------------------------------------------------------------------------------------------


def test_smoothing_keeps_a_constant_and_does_not_lag():
    assert smoothed([3.0] * 9, 2) == pytest.approx([3.0] * 9)
    line = [float(x) for x in range(41)]
    assert smoothed(line, 3)[20] == pytest.approx(20)
    assert smoothed([], 3) == []


@pytest.mark.parametrize("keys", [("reward", "eval_reward"), ("loss", "eval_loss")])
def test_the_plot_is_an_image_that_changes_with_the_numbers(tmp_path, keys):
    def draw(shift: float) -> bytes:
        with Metrics(tmp_path, total=9, console=QUIET) as metrics:
            for step in range(1, 9):
                metrics.log(step, {keys[0]: step / 10 + shift, "tokens_per_second": 100.0 * step})
            metrics.log(8, {keys[1]: 0.5})
        path = plot(tmp_path)
        assert path == tmp_path / "plot.png"
        return path.read_bytes()

    first = draw(0)
    assert first.startswith(b"\x89PNG")
    assert draw(0) == first != draw(0.1)


# --- comparing -------------------------------------------------------------------------------------------------------------


def test_runs_are_equal_when_all_but_time_and_memory_is(tmp_path, capsys):
    write(tmp_path / "a", range(1, 9), peak_memory_bytes=1)
    write(tmp_path / "b", range(1, 6), peak_memory_bytes=2)
    write(tmp_path / "b", range(5, 9), done=4, peak_memory_bytes=3)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "equal bit for bit: 2 metrics over 8 steps" in capsys.readouterr().out
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--keys", "reward", "seconds"]) == 1


def test_the_last_bit_counts(tmp_path, capsys):
    a = [{"step": step, "loss": 0.1, "kl": 0.0} for step in (1, 2, 3)]
    b = [{"step": step, "loss": 0.1 if step < 2 else math.nextafter(0.1, 1), "kl": -0.0 if step == 3 else 0.0} for step in (1, 2, 3)]
    loss, kl = compare(a, b)
    assert (loss.equal, loss.different, loss.first) == (1, 2, (2, 0.1, math.nextafter(0.1, 1)))
    assert (kl.equal, kl.different, kl.first) == (2, 1, (3, 0.0, -0.0))


def test_a_missing_step_is_a_difference(tmp_path, capsys):
    write(tmp_path / "a", range(1, 9))
    write(tmp_path / "b", range(1, 8))
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "step 8" in out and "missing" in out


def test_comparing_finds_runs_by_name_and_names_what_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    write(tmp_path / "a", range(1, 3))
    assert main(["a", "a"]) == 0
    for argv, message in ((["a", "b"], "RUN=b: no run of that name"), (["a", "a", "--keys", "los"], "--keys los: in neither run")):
        with pytest.raises(SystemExit) as ended, exits_cleanly():
            main(argv)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
