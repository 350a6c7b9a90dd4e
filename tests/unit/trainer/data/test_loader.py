import json

import pytest

from trainer.data.loader import Loader
from trainer.episodes import Prompt
from trainer.errors import ConfigError


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, [i + 1], {"answer": str(i)}) for i in range(count)]


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def indices(loader: Loader, batches: int) -> list[list[int]]:
    return [[p.index for p in loader.next()] for _ in range(batches)]


def test_every_epoch_serves_every_prompt_once_in_its_own_order():
    served = flat(indices(Loader(prompts(10), batch=4, seed=1), 5))  # two epochs; the third batch spans both
    assert sorted(served[:10]) == sorted(served[10:]) == list(range(10))
    assert served[:10] != served[10:] != list(range(10))


def test_without_shuffling_the_order_is_the_files():
    assert indices(Loader(prompts(3), batch=2, seed=1, shuffle=False), 3) == [[0, 1], [2, 0], [1, 2]]


def test_the_seed_decides_the_order():
    assert indices(Loader(prompts(20), 20, seed=1), 1) == indices(Loader(prompts(20), 20, seed=1), 1)
    assert indices(Loader(prompts(20), 20, seed=1), 1) != indices(Loader(prompts(20), 20, seed=2), 1)


@pytest.mark.parametrize("stop", range(8))
def test_a_restart_goes_on_exactly(stop: int):
    whole = indices(Loader(prompts(7), batch=3, seed=5), 10)
    loader = Loader(prompts(7), batch=3, seed=5)
    before = indices(loader, stop)
    state = json.loads(json.dumps(loader.state()))
    again = Loader(prompts(7), batch=3, seed=5)
    again.load(state)
    assert before + indices(again, 10 - stop) == whole
    assert again.epoch == 30 // 7


def test_a_batch_may_be_larger_than_the_data():
    served = indices(Loader(prompts(2), batch=5, seed=0), 2)
    assert [sum(batch.count(i) for batch in served) for i in (0, 1)] == [5, 5]


def test_another_batch_size_goes_on_from_the_same_prompt():
    loader = Loader(prompts(7), batch=3, seed=5)
    indices(loader, 2)
    wider = Loader(prompts(7), batch=4, seed=5)
    wider.load(loader.state())
    assert flat(indices(loader, 4)) == flat(indices(wider, 3))


@pytest.mark.parametrize(
    "other", [prompts(8), [*prompts(6), Prompt(6, [7], {"answer": "changed"})], [*prompts(6), Prompt(6, [99], {"answer": "6"})]]
)
def test_a_state_of_other_data_is_refused(other: list[Prompt]):
    with pytest.raises(ConfigError, match=r"data\.path: the checkpoint was trained on other data"):
        Loader(other, 3, seed=5).load(Loader(prompts(7), 3, seed=5).state())


def test_a_state_of_another_order_is_refused():
    state = Loader(prompts(7), 3, seed=5).state()
    with pytest.raises(ConfigError, match=r"run\.seed: the checkpoint has 5, this run 6"):
        Loader(prompts(7), 3, seed=6).load(state)
    with pytest.raises(ConfigError, match=r"data\.shuffle: the checkpoint has True, this run False"):
        Loader(prompts(7), 3, seed=5, shuffle=False).load(state)


def test_no_prompts_are_refused():
    with pytest.raises(ConfigError, match="0 prompts"):
        Loader([], 3, seed=0)
