"""What an asynchronous run learns from; engines, rewards and restarts are random: nothing twice, nothing lost, nothing too old."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.configs import settings

from trainer.data.loader import Loader
from trainer.episodes import Prompt, Turn
from trainer.errors import RunError
from trainer.online.groups import IN_VAIN, Groups

BATCH, STEPS, OLDEST = 4, 30, 2


def made(folder: Path, state: dict[str, Any] | None = None, **rollout: Any) -> Groups:
    config = settings(
        folder,
        rollout={"mode": "async", "max_staleness": OLDEST, **rollout},
        trainer={"prompts_per_step": BATCH, "steps": STEPS},
        algorithm={"group_size": 2},
    )
    groups = Groups(config, Loader([Prompt(i, [i], {}) for i in range(1000)], BATCH, seed=0))
    if state:
        groups.load(json.loads(json.dumps(state)))
    return groups


class Run:
    """Prompts are at engines, in any order; some of these die, and some answers are alike."""

    def __init__(self, groups: Groups, random: Random):
        self.groups, self.random = groups, random
        self.asked: set[int] = set()

    def act(self) -> None:
        groups, random = self.groups, self.random
        what = random.choice(["ask", "ask", "answer", "answer", "reward", "lose"])
        some = random.sample(sorted(self.asked), min(len(self.asked), random.randint(1, 3)))
        if what == "ask":
            if group := groups.next():
                assert groups.learned - OLDEST <= group.version <= groups.learned
                self.asked.add(group.number)
        elif what == "answer":
            for number in some:
                groups.answered(number, [Turn([1], [-1.0]), Turn([2], [-1.0])], ["", ""])
                self.asked.discard(number)
        elif what == "reward":
            done = groups.sampled[: random.randint(1, 3)]
            for group in done:
                for i, episode in enumerate(group.episodes):
                    episode.reward = float(i and random.random() < 0.8)
            groups.rewarded(done)
        elif random.random() < 0.2:
            self.asked -= set(some)
            groups.lost(some)

    def step(self, number: int) -> list[int]:
        """The prompts of a step, once there are enough."""
        for _ in range(10_000):
            if chosen := self.groups.choose(number):
                break
            self.act()
        else:
            raise AssertionError(f"step {number} never came: {len(self.groups.open)} are open")
        assert all(number - 1 - OLDEST <= group.version < number for group in chosen)
        self.groups.take(chosen)
        for _ in range(self.random.randint(0, 20)):
            self.act()  # while it is learned
        self.groups.learned, self.groups.learning = number, 0
        return [group.prompt.index for group in chosen]


@pytest.mark.parametrize("rollout", [{}, {"stragglers": "drop"}, {"no_signal": "replace"}], ids=["wait", "drop", "replace"])
@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_is_learned_once_and_none_too_late_also_over_restarts(rollout, seed, tmp_path):
    random, learned = Random(seed), []
    run = Run(made(tmp_path, **rollout), random)
    for number in range(1, STEPS + 1):
        learned += run.step(number)
        if random.random() < 0.2:  # killed, after its checkpoint
            run = Run(made(tmp_path, run.groups.state(), **rollout), random)
            run.groups.learned = number
    assert len(learned) == STEPS * BATCH == len({*learned})
    if "no_signal" not in rollout:  # else those without one are gone
        state = run.groups.state()
        begun = [index for _, index in state["open"]]
        served = [prompt.index for prompt in made(tmp_path).loader.next(state["served"])]
        assert sorted(learned + begun) == sorted(served)


def test_where_no_answer_differs_from_another_the_run_ends_and_says_what_to_do(tmp_path):
    groups = made(tmp_path, no_signal="replace")
    with pytest.raises(RunError, match=f"in {IN_VAIN * BATCH} groups in a row all answers had the same reward, the last time 0; look at"):
        for _ in range(IN_VAIN * BATCH):
            group = groups.next()
            assert group
            groups.answered(group.number, [Turn([1], [-1.0])] * 2, ["", ""])
            groups.rewarded([group])
    assert groups.counts["no_signal"] == IN_VAIN * BATCH
