"""Fine-tuning, a reward model and DPO over two nodes of a real Slurm: two ranks of torchrun learn what a Ray job does alone."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.metrics import read

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

STEPS = 12
SHORT = [
    f"trainer.steps={STEPS}",
    "trainer.prompts_per_step=16",
    "placement.threads=1",
    "log.tensorboard=false",
    "log.plot=false",
]
PAIRS = ["data.args={rows: 400, length: 4, seed: 1}", "trainer.eval_prompts=32"]
LEARNERS = {
    "sft": ["data.args={rows: 400, length: 4, seed: 1}"],
    "rm": PAIRS,
    "dpo": [*PAIRS, "model.path=run:sft-torchrun"],
}
SAME = {"sft": ("loss",), "rm": ("loss", "accuracy"), "dpo": ("loss", "accuracy", "margin")}


def command(learner: str, name: str) -> list[str]:
    return [
        "-m",
        f"trainer.train_{learner}",
        "--config",
        f"trainer/recipes/demo-{learner}.yaml",
        *SHORT,
        *LEARNERS[learner],
        f"run.name={name}",
    ]


def test_two_ranks_on_two_nodes_learn_what_a_ray_job_does(projects: Any, slurm: Any) -> None:
    project = projects("learners")
    for learner in LEARNERS:
        job = project.submit("torchrun", *command(learner, f"{learner}-torchrun"))
        state, log = slurm.ended(job), project.log("torchrun", job)
        assert state["JobState"] == "COMPLETED", log
    alone = " && ".join(" ".join(["python", *(f"'{word}'" for word in command(learner, f"{learner}-ray"))]) for learner in LEARNERS)
    job = project.submit("ray-ppo", "sh", "-c", alone)
    state, log = slurm.ended(job), project.log("ray-ppo", job)
    assert state["JobState"] == "COMPLETED", log
    for learner in LEARNERS:
        two, one = ([row for row in read(project.folder / f"runs/{learner}-{way}") if "loss" in row] for way in ("torchrun", "ray"))
        assert [row["step"] for row in two] == [row["step"] for row in one] == list(range(1, STEPS + 1))
        for name in SAME[learner]:
            assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=1e-3, abs=1e-4), (learner, name)
        assert two[-1]["loss"] < two[0]["loss"]
        assert (project.folder / f"runs/{learner}-torchrun/model/config.json").is_file()
