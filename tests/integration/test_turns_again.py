"""A run with sandboxes that is killed between turns says again what it had said, and names episodes whose commands do something else."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import recorded
from support.configs import here, settings
from support.paths import python_path

from trainer import train_ppo
from trainer.compare import compare
from trainer.configs.ppo import PpoConfig
from trainer.metrics import read

pytestmark = [pytest.mark.wide, pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")]
SETTINGS: dict[str, Any] = {
    "data": {"path": "support.environments:rows", "args": {"count": 60}, "max_prompt_tokens": 8},
    "reward": {"function": "exact"},
    "trainer": {"eval_prompts": 0, "steps": 4, "prompts_per_step": 4, "checkpoint_every": 2},
}
RUN = """
import pickle, sys
from pathlib import Path
from trainer import train_ppo
train_ppo.train(pickle.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
"""


def played(model: Path, folder: Path) -> PpoConfig:
    """Kills its process once, unless the file `killed` is there."""
    args = {"run": str(folder / "run"), "kill": str(folder / "killed")}
    sandbox = {"provider": "namespaces", "memory_mb": 64, "disk_mb": 4, "folders": {"/clock": str(folder / "clock")}}
    environment = {"function": "support.environments:by_the_clock", "args": args, "max_turns": 4, "max_tokens": 20, "sandbox": sandbox}
    return here(settings(model, **SETTINGS, environment=environment))


@pytest.fixture(scope="module")
def killed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one that was killed before the third turns of step 4, with a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "clock").mkdir()
    (folder / "clock/now").write_text("1")
    (folder / "config").write_bytes(pickle.dumps(played(tiny_model, folder)))
    words = [sys.executable, "-c", RUN, str(folder / "config"), str(folder / "run")]
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert (folder / "run/checkpoints/step_2").is_dir() and not (folder / "run/checkpoints/step_4").exists()
    shutil.copytree(folder / "run", folder / "killed-run")
    return folder


def again(line: str, out: str) -> dict[int, int]:
    return {int(step): int(count) for step, count in re.findall(rf"step (\d+): (\d+) {line}", out)}


def test_what_was_said_is_said_again_without_an_engine_and_the_numbers_are_those_of_a_run_that_nobody_killed(
    tiny_model, killed, tmp_path, capfd
):
    config = played(tiny_model, killed)
    group = config.algorithm.group_size
    assert train_ppo.train(config, tmp_path / "whole") == 0
    assert not again("turns are", capfd.readouterr().out)
    assert train_ppo.train(config, killed / "run") == 0
    out = capfd.readouterr().out
    assert again("turns are those from before", out) == {3: 4 * group * 3, 4: 4 * group * 2}, out
    assert not again("episodes did not", out)
    assert not [*(killed / "run/turns").glob("*-*")], "nothing is kept for longer than it is of use"
    assert all(not result.different for result in compare(read(tmp_path / "whole"), read(killed / "run")))
    assert (tmp_path / "whole/model/model.safetensors").read_bytes() == (killed / "run/model/model.safetensors").read_bytes()


def test_episodes_whose_commands_do_something_else_are_named_and_go_on_with_that(tiny_model, killed, tmp_path, capfd):
    shutil.copytree(killed / "killed-run", tmp_path / "run")
    (killed / "clock/now").write_text("2")
    config = played(tiny_model, killed)
    assert train_ppo.train(config, tmp_path / "run") == 0
    out = capfd.readouterr().out
    known = recorded.commands(tmp_path / "run", 4)
    late = sum(steps[0][0].startswith('{"exec": "cat /clock/now"') for steps in known)
    assert 0 < late < len(known), "some episodes read the clock"
    assert again("turns are those from before", out)[4] == 2 * len(known) - late, "not the turns after the clock"
    assert again("episodes did not do what they did before", out)[4] == late
    assert re.search(r'step 4: .* before: row \d+: \{"exec": "cat /clock/now"', out), out
