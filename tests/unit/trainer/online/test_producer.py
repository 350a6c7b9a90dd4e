"""Groups without a signal replaced within a step, and greedy baselines, without the processes that sample."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.configs import settings

from trainer.cluster.stopping import Stopped, Stopping
from trainer.data.loader import Loader
from trainer.episodes import Episode, Prompt, Turn
from trainer.online.clock import Clock
from trainer.online.producer import ROUNDS, Batches, alike

PROMPTS = [Prompt(i, [1], {}) for i in range(100)]


class Play:
    """Rollout engines whose answer says its prompt, its number and whether it is greedy; and a reward that looks it up."""

    def __init__(self, path: Path, worth: Any, **changes: Any):
        self.config = settings(path, **{"trainer": {"prompts_per_step": 4}, "algorithm": {"group_size": 2}, **changes})
        self.worth, self.asked = worth, []
        self.loader = Loader(PROMPTS, 4, seed=0, shuffle=False)
        workers: Any = SimpleNamespace(start=self.start, sync=lambda: None, episodes=lambda pending: pending)
        self.producer = Batches(self.config, workers, self.loader, self.score)

    def start(self, prompts: list[Prompt], samples: int, seed: int, greedy: bool = False) -> list[Episode]:
        self.asked.append((len(prompts), samples, seed, greedy))
        return [
            Episode(prompt, group, [Turn([number], [-0.5], "stop")], text="greedy" if greedy else str(number))
            for group, prompt in enumerate(prompts)
            for number in range(samples)
        ]

    def score(self, episodes: list[Episode], step: int, stopping: Stopping) -> None:
        for episode in episodes:
            episode.reward = self.worth(episode)

    def step(self, number: int) -> list[Episode]:
        self.producer.sync_and_begin(number, Clock())
        return self.producer.next(number, Stopping(), Clock())


def differ_at(*indices: int):
    return lambda episode: float(episode.text == "1" and episode.prompt.index in indices)


def shown(episodes: list[Episode]) -> list[tuple[int, int]]:
    return [(e.group, e.prompt.index) for e in episodes[::2]]


def test_groups_without_a_signal_are_replaced_by_the_next_prompts_in_their_places(tmp_path):
    play = Play(tmp_path, differ_at(0, 2, 5, 6), rollout={"no_signal": "replace"})
    # 1 and 3 are alike: 4 and 5 come in their places; 4 is alike too: 6.
    assert shown(play.step(1)) == [(0, 0), (1, 6), (2, 2), (3, 5)]
    assert [(prompts, samples) for prompts, samples, *_ in play.asked] == [(4, 2), (2, 2), (1, 2)]
    assert len({seed for *_, seed, _ in play.asked}) == 3
    assert play.producer.metrics() == {"no_signal": 3 / 7, "thrown_tokens": 6}
    assert play.loader.served == 7


def test_what_is_left_after_the_rounds_is_kept(tmp_path):
    play = Play(tmp_path, differ_at(), rollout={"no_signal": "replace"})
    assert len(play.step(1)) == 8
    assert len(play.asked) == 1 + ROUNDS
    assert play.producer.metrics()["no_signal"] == 16 / 20
    few = Play(tmp_path, differ_at(), rollout={"no_signal": "replace", "extra_rounds": 1})
    few.step(1)
    assert few.loader.served == 8


def test_by_default_nothing_is_replaced(tmp_path):
    play = Play(tmp_path, differ_at())
    assert shown(play.step(1)) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert (play.asked, play.producer.metrics()) == ([(4, 2, 1 << 12, False)], {})


def test_a_run_that_resumes_goes_on_with_the_very_prompts_and_seeds(tmp_path):
    rule = differ_at(*range(0, 100, 3))
    whole = Play(tmp_path, rule, rollout={"no_signal": "replace"})
    first = whole.step(1)
    whole.producer.sync_and_begin(2, Clock())
    state = whole.producer.state()  # as a checkpoint after step 1 has it
    asked = len(whole.asked) - 1
    second = whole.step(2)
    resumed = Play(tmp_path, rule, rollout={"no_signal": "replace"})
    resumed.producer.load(state)
    assert shown(resumed.step(2)) == shown(second) != shown(first)
    assert resumed.asked == whole.asked[asked:]


def test_a_step_that_is_stopped_while_it_replaces_leaves_the_prompts_to_the_next_start(tmp_path):
    def stop_at_4(episode: Episode) -> float:
        if episode.prompt.index >= 4:
            raise Stopped("asked to stop")
        return 0.0

    play = Play(tmp_path, stop_at_4, rollout={"no_signal": "replace"})
    with pytest.raises(Stopped):
        play.step(1)
    assert (play.loader.served, play.producer.state()["served"]) == (8, 0)


def test_a_step_that_is_stopped_while_the_next_is_sampled_leaves_the_prompts_of_both(tmp_path):
    def stop(episode: Episode) -> float:
        raise Stopped("asked to stop")

    play = Play(tmp_path, stop, rollout={"mode": "one_step"})
    with pytest.raises(Stopped):
        play.step(1)
    assert (play.loader.served, play.producer.state()["served"]) == (8, 0)


REMAX = {"name": "remax", "group_size": 2}


def test_remax_scores_a_greedy_answer_to_each_prompt_and_does_not_learn_from_it(tmp_path):
    play = Play(tmp_path, lambda e: 10.0 * e.prompt.index + (0.5 if e.text == "greedy" else float(e.text)), algorithm=REMAX)
    episodes = play.step(1)
    assert play.asked == [(4, 2, 1 << 12, False), (4, 1, 1 << 12, True)]
    assert shown(episodes) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [e.reward - e.baseline for e in episodes] == [-0.5, 0.5] * 4
    assert "greedy" not in {e.text for e in episodes}
    assert play.producer.metrics() == {"reward_greedy": 15.5}


def test_an_answer_that_cannot_be_compared_is_left_out_where_failed_ones_are(tmp_path):
    def fails_greedily(episode: Episode) -> float:
        episode.failed = episode.text == "greedy" and episode.prompt.index == 1
        return 0.0

    for on_error, failed in (("drop", [2, 3]), ("zero", [])):
        play = Play(tmp_path, fails_greedily, algorithm=REMAX, reward={"on_error": on_error})
        assert [i for i, e in enumerate(play.step(1)) if e.failed] == failed


def test_remax_has_a_signal_where_answers_differ_from_the_greedy_one():
    pair = [Episode(PROMPTS[0], 0, [], reward=1.0, baseline=baseline) for baseline in (0.0, 0.0)]
    assert alike(pair, "grpo")
    assert not alike(pair, "remax")
    assert alike([Episode(PROMPTS[0], 0, [], reward=1.0, baseline=1.0)], "remax")
    assert alike([Episode(PROMPTS[0], 0, [], failed=True, baseline=1.0)], "remax")
