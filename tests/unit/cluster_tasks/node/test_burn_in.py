"""Load on a node's GPUs before it joins; here on CPUs, and by memory and products that lie."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster_tasks.node import burn_in, fitness
from cluster_tasks.node.errors import UNFIT, Failure, Stopped
from cluster_tasks.node.settings import read_settings
from cluster_tasks.node.waiting import signals

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burn_in, "CPU_NUMBERS", 100_000)
    monkeypatch.setattr(burn_in, "BLOCK", 30_000)
    monkeypatch.setattr(burn_in, "CPU_SIZE", 32)


class Lies:
    """torch, one of whose blocks of memory has a bit that does not change."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, numbers: int, **where: Any) -> Any:
        block = torch.empty(numbers, **where)
        return Stuck(block) if numbers < 30_000 else block


class Stuck:
    def __init__(self, block: torch.Tensor):
        self.block = block

    def fill_(self, value: int) -> None:
        self.block.fill_(value)
        self.block[7] |= 1 << 4

    def chunk(self, parts: int) -> Any:
        return self.block.chunk(parts)


def test_a_machine_that_is_fit_has_no_errors():
    found = burn_in.burn_in(torch, [CPU], 0.0)
    assert found["errors"] == [] and found["rounds"] == 1 and found["tflops"][0] > 0


def test_a_bit_that_does_not_change_is_found_by_the_pattern_that_has_it_as_0():
    assert burn_in.changed(torch, CPU, 100_000) == 0
    assert burn_in.changed(Lies(), CPU, 100_000) == 1
    found = burn_in.burn_in(Lies(), [CPU], 0.0)
    assert found["errors"] == ["CPU: 1 numbers of 100,000 came back from memory changed"]


def test_a_product_that_is_another_once_is_found(monkeypatch: pytest.MonkeyPatch):
    randn, drawn = torch.randn, []

    class Sometimes(torch.Tensor):
        """Its fifth product is a little too large."""

        def __matmul__(self, other: Any) -> Any:
            drawn.append(None)
            return torch.Tensor.__matmul__(self, other) + (1e-3 if len(drawn) == 5 else 0)

    monkeypatch.setattr(torch, "randn", lambda *size, **options: randn(*size, **options).as_subclass(Sometimes))
    wrong, _ = burn_in.product(torch, CPU, 0.0)
    assert wrong == 1


@pytest.mark.parametrize(("speeds", "found"), [([700.0, 710.0, 400.0, 705.0], [2]), ([700.0, 690.0], []), ([5.0], [])])
def test_a_gpu_that_is_slower_than_its_neighbours(speeds: list[float], found: list[int]):
    assert burn_in.slow(speeds) == found


def test_the_program_says_what_it_found_in_a_line_whatever_the_agents_modules_are_called():
    """In their folder, where one of them would be found in place of the package ray."""
    command = [sys.executable, str(fitness.PROGRAM), "0", "--cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=fitness.PROGRAM.parent)
    assert json.loads(done.stdout.splitlines()[-1])["devices"] == ["CPU"]


def burn(program: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program.write_text(text)
    monkeypatch.setattr(fitness, "PROGRAM", program)
    fitness.burn_in(read_settings(["--rank", "0", "--addresses", "127.0.0.1", "--burn-in", "1"], {}))


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ('print(\'{"errors": ["GPU 3 (H100): 5 numbers"]}\'); exit(1)', UNFIT, "127.0.0.1: burn-in: GPU 3 (H100): 5 numbers"),
        ('print(\'{"errors": ["torch cannot be imported: no"]}\'); exit(2)', 2, "127.0.0.1: burn-in: torch cannot be imported: no"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", UNFIT, "127.0.0.1: the burn-in ended with -11: it said nothing"),
        ("raise SystemExit('CUDA error: device-side assert')", UNFIT, "ended with 1: CUDA error: device-side assert"),
        ("import time; time.sleep(60)", UNFIT, r"127.0.0.1: the burn-in did not end within 2 s: a GPU hangs"),
    ],
)
def test_a_node_that_fails_says_why_and_which_it_is(program, code, said, tmp_path, monkeypatch):
    monkeypatch.setattr(fitness, "LATE_SECONDS", 1 if "sleep" in program else 60)
    with pytest.raises(Failure) as failed:
        burn(tmp_path / "program.py", program, monkeypatch)
    assert failed.value.code == code and said in str(failed.value)


def test_a_node_whose_gpus_torch_does_not_see_has_not_passed_on_its_cpus(monkeypatch):
    settings = read_settings(["--rank", "0", "--addresses", "127.0.0.1", "--num-gpus", "8", "--burn-in", "1"], {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(Failure, match=r"^127\.0\.0\.1: burn-in: torch sees 0 GPUs, this node is to have 8$"):
        fitness.burn_in(settings)


def test_a_signal_ends_it(tmp_path, monkeypatch):
    threading.Timer(0.5, signals.append, [signal.SIGTERM]).start()
    begin = time.monotonic()
    try:
        with pytest.raises(Stopped):
            burn(tmp_path / "program.py", "import time; time.sleep(600)", monkeypatch)
    finally:
        signals.clear()
    assert time.monotonic() - begin < 150
