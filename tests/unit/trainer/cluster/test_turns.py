"""The order in which ranks and rollout engines use the devices that they share, without either."""

from __future__ import annotations

import pytest

from trainer.cluster.turns import Memory, Turns


class Played:
    """Both sides. Raises at `fails`, and checks that both are never large at once."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.awake, self.loaded, self.fails = {"weights", "kv_cache"}, False, ""

    def _do(self, what: str) -> None:
        if what == self.fails:
            self.fails = ""
            raise RuntimeError(what)
        self.done.append(what)

    def sleep(self) -> None:
        self._do("sleep")
        self.awake = set()

    def wake(self, memory: Memory) -> None:
        self._do(f"wake {memory}")
        assert memory == "weights" or not self.loaded
        self.awake.add(memory)

    def offload(self) -> None:
        self._do("offload")
        self.loaded = False

    def reload(self) -> None:
        self._do("reload")
        assert "kv_cache" not in self.awake
        self.loaded = True

    def send(self) -> None:
        self._do("send")
        assert self.loaded and "weights" in self.awake

    def start(self) -> None:
        self._do("start")
        assert not self.loaded
        self.awake = {"weights", "kv_cache"}


TO_RANKS, TO_ENGINES = ["sleep", "reload"], ["wake weights", "send", "offload", "wake kv_cache"]


def test_a_step_takes_turns_in_order():
    both = Played()
    turns = Turns(both, both, shared=True)
    for _ in range(2):
        turns.to_engines(both.send)
        turns.to_ranks()
        turns.to_ranks()
    assert both.done == [*TO_RANKS, *TO_ENGINES, *TO_RANKS, *TO_ENGINES, *TO_RANKS]


def test_weights_that_are_sent_again_while_engines_sample_take_a_whole_round():
    both = Played()
    turns = Turns(both, both, shared=True)
    turns.to_engines(both.send)
    both.done.clear()
    turns.to_engines(both.send)
    assert both.done == [*TO_RANKS, *TO_ENGINES]


@pytest.mark.parametrize("fails", [*TO_RANKS, *TO_ENGINES])
def test_whatever_fails_the_next_round_is_whole(fails):
    both = Played()
    turns = Turns(both, both, shared=True)
    both.fails = fails
    with pytest.raises(RuntimeError, match=fails):
        turns.to_engines(both.send)
    both.done.clear()
    turns.start_engines(both.start)
    turns.to_engines(both.send)
    assert both.done == ["offload", "start", *TO_RANKS, *TO_ENGINES]


def test_with_devices_of_their_own_nobody_sleeps():
    both = Played()
    turns = Turns(both, both, shared=False)
    both.loaded = True
    turns.to_engines(both.send)
    turns.to_ranks()
    assert both.done == ["send"]
