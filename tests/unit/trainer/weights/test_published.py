"""Weights in Ray's object store; a dict of this process stands for it."""

from typing import Any

import pytest
import ray
import torch

from trainer import weights
from trainer.weights import Parameter
from trainer.weights.published import Fetcher, Published, Publisher

PLAN = weights.plan([Parameter("a", (4, 25), "float32"), Parameter("b", (30,), "float32")], bucket_bytes=400)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was put there, in order; a reference is its number."""
    kept: list[Any] = []

    def put(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", kept.__getitem__)
    return kept


def publish(version: int, last: Published | None, changed: int = 0) -> Published:
    """Of all weights `version`, but for the first `changed` ones of each bucket, which are 100 more; all are 0 to begin with."""
    publisher = Publisher(version, last)
    for size in (100, 30):
        flat = torch.zeros(size)
        flat[:changed] = float(version)
        publisher.add(flat)
    return publisher.end()


def fetched(fetcher: Fetcher, what: Published) -> list[torch.Tensor]:
    fetcher.begin(what)
    assert fetcher.done.wait(60)
    named = fetcher.take()
    assert named is not None and [name for bucket in named for name, _ in bucket] == ["a", "b"]
    return [tensor for bucket in named for _, tensor in bucket]


def test_changes_alone_are_fetched_by_who_has_the_version_before(store):
    fetcher = Fetcher(PLAN)
    first = publish(1, None)
    second = publish(2, first, changed=3)
    assert (second.before, second.changed) == (1, 6 / 130)
    assert second.bytes == 6 * (4 + 4), "a position and a value each"
    fetched(fetcher, first)
    for reference in second.whole:
        store[reference] = None  # is not to be read
    a, b = fetched(fetcher, second)
    assert a.shape == (4, 25) and a.flatten().tolist() == [2.0] * 3 + [0.0] * 97
    assert b.tolist() == [2.0] * 3 + [0.0] * 27
    assert fetcher.version == 2


@pytest.mark.parametrize("has", [None, 1], ids=["nothing", "an older version"])
def test_who_has_not_the_version_before_fetches_everything(has):
    """Version 3 has the first two weights changed back: its changes on version 1 would leave the third as it is in 2."""
    fetcher = Fetcher(PLAN)
    first = publish(1, None, changed=5)
    second = publish(2, first)
    third = publish(3, second, changed=2)
    if has:
        fetched(fetcher, first)
    a, _ = fetched(fetcher, third)
    assert a.flatten().tolist() == [3.0] * 2 + [0.0] * 98


def test_a_bucket_of_which_most_has_changed_is_whole():
    first = publish(1, None)
    second = publish(2, first, changed=60)
    assert second.changes == (None, None) and second.bytes == 130 * 4


def test_what_could_not_be_fetched_is_raised_once_it_is_taken(store):
    fetcher, first = Fetcher(PLAN), publish(1, None)
    store.clear()
    fetcher.begin(first)
    assert fetcher.done.wait(60)
    with pytest.raises(IndexError):
        fetcher.take()
