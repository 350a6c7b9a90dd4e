"""Stack files and run files report a mistake in one form: FILE:LINE: KEY: VALUE is not WHAT IS ALLOWED."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from support.configs import errors, recipe, unplaced

from stacks import load
from stacks.errors import StackError

pytestmark = pytest.mark.usefixtures("runs")
ROOT = Path(load.__file__).parents[1]
STACK = "config:\n  flotilla:cloud: local\n  flotilla:fleets:\n    - name: laptop\n      nodes: 1\n"
RUN = "model: {path: gpt2}\ntrainer:\n  steps: 1\ndata:\n  path: a.b:rows\n"
ARGV = ["model.path=gpt2", "data.path=a.b:rows"]


class Mistake(NamedTuple):
    """A line in place of another (the last where there is none), and the error from its line number on."""

    line: str
    error: str
    instead_of: str = ""

    def text(self, file: str) -> str:
        return file.replace(self.instead_of, self.line) if self.instead_of else f"{file}{self.line}\n"


# What is wrong in a stack file, in a run file, and in what is typed
MISTAKES = {
    "wrong type": (
        Mistake("nodes: x", "5: flotilla:fleets[0].nodes: 'x' is not an integer >= 1", "nodes: 1"),
        Mistake("steps: x", "3: trainer.steps: 'x' is not an integer >= 1", "steps: 1"),
        "trainer.steps=x",
    ),
    "a boolean for a number": (
        Mistake("nodes: true", "5: flotilla:fleets[0].nodes: True is not an integer >= 1", "nodes: 1"),
        Mistake("steps: true", "3: trainer.steps: True is not an integer >= 1", "steps: 1"),
        "trainer.steps=true",
    ),
    "a word for a boolean": (
        Mistake("  flotilla:task: {retry: maybe}", "6: flotilla:task.retry: 'maybe' is not true or false"),
        Mistake("  shuffle: maybe", "6: data.shuffle: 'maybe' is not true or false"),
        "data.shuffle=maybe",
    ),
    "no text": (
        Mistake("  flotilla:task:\n    env: {A: [1]}", "7: flotilla:task.env.A: [1] is not text"),
        Mistake("path: [1]", "5: data.path: [1] is not text", "path: a.b:rows"),
        None,  # what is typed for a text is one
    ),
    "no list": (
        Mistake("  flotilla:task: {volumes: home}", "6: flotilla:task.volumes: 'home' is not a list"),
        Mistake("run: {allow: optim.lr}", "6: run.allow: 'optim.lr' is not a list of text"),
        "run.allow=optim.lr",
    ),
    "no map": (
        Mistake("  flotilla:task: fast", "6: flotilla:task: 'fast' is not a map of settings"),
        Mistake("optim: fast", "6: optim: 'fast' is not a map of settings"),
        "optim=fast",
    ),
    "below the least": (
        Mistake("nodes: 0", "5: flotilla:fleets[0].nodes: 0 is not an integer >= 1", "nodes: 1"),
        Mistake("steps: 0", "3: trainer.steps: 0 is not an integer >= 1", "steps: 1"),
        "trainer.steps=0",
    ),
    "out of a range": (
        Mistake("  flotilla:task: {dashboard_port: 70000}", "6: flotilla:task.dashboard_port: 70000 is not an integer between 1 and 65535"),
        Mistake("reward: {retries: 700}", "6: reward.retries: 700 is not an integer between 0 and 100"),
        "reward.retries=700",
    ),
    "an empty list": (
        Mistake("  flotilla:fleets: []", "3: flotilla:fleets: [] is not a list of at least 1", STACK.partition("local\n")[2].rstrip()),
        Mistake(
            "model: {path: gpt2, lora: {targets: []}}",
            "1: model.lora.targets: [] is not a list of at least 1 text or null",
            "model: {path: gpt2}",
        ),
        "model.lora.targets=[]",
    ),
    "a wrong item of a list": (
        Mistake(
            "  flotilla:task:\n    volumes:\n      - /a:/b\n      - home", "9: flotilla:task.volumes[1]: 'home' is not a mount such as "
        ),
        Mistake("optim:\n  betas:\n    - 0.9\n    - 2", "9: optim.betas[1]: 2 is not a number >= 0 and < 1"),
        "optim.betas=[0.9, 2]",
    ),
    "an unknown choice": (
        Mistake("      role: spot", "6: flotilla:fleets[0].role: 'spot' is not one of cluster, rollout"),
        Mistake("run: {resume: maybe}", "6: run.resume: 'maybe' is not one of auto, never, must"),
        "run.resume=maybe",
    ),
    "an unknown key that is like another": (
        Mistake("      nodez: 1", "6: flotilla:fleets[0].nodez: unknown key; did you mean nodes? (allowed: name, "),
        Mistake("stepz: 1", "3: trainer.stepz: unknown key; did you mean trainer.steps?", "steps: 1"),
        "trainer.stepz=1",
    ),
    "an unknown key": (
        Mistake("  flotilla:checkpoints: {zzz: 1}", "6: flotilla:checkpoints.zzz: unknown key (allowed: "),
        Mistake("log: {zzz: 1}", "6: log.zzz: unknown key (allowed: tensorboard, "),
        "log.zzz=1",
    ),
    "a missing key": (
        Mistake(
            "- nodes: 1", "4: flotilla:fleets[0].name: is missing; it is a name of 2 to 41 characters", "- name: laptop\n      nodes: 1"
        ),
        Mistake("reward: {terms: {near: {weight: 1}}}", "6: reward.terms.near.function: is missing; it is text"),
        "reward.terms.near.weight=1",
    ),
}


def stack_errors(folder: Path, text: str) -> list[str]:
    shutil.copy(ROOT / "Pulumi.yaml", folder)
    (folder / "stacks").mkdir()
    (folder / "stacks/Pulumi.mine.yaml").write_text(text)
    with pytest.raises(StackError) as caught:
        load.load("mine", folder)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_reads_alike_in_a_stack_file_in_a_run_file_and_on_the_command_line(kind, tmp_path):
    in_stack, in_run, typed = MISTAKES[kind]
    (line,) = stack_errors(tmp_path, in_stack.text(STACK))
    assert line.startswith(f"stacks/Pulumi.mine.yaml:{in_stack.error}")
    file = recipe(tmp_path, in_run.text(RUN))
    (line,) = errors("--config", file)
    assert line.startswith(f"{file}:{in_run.error}")
    if typed is None:
        return
    (of_typed,) = errors(*(argument for argument in ARGV if argument.partition("=")[0] != typed.partition("=")[0]), typed)
    assert of_typed == f"command line: {unplaced(line)}"
