"""Who gets a sandbox of a node, and who waits."""

from __future__ import annotations

import asyncio

import pytest

from trainer.environments.sandboxes.host.room import USUAL, Room, kind, read
from trainer.environments.sandboxes.namespaces import asked
from trainer.environments.sandboxes.spec import Spec

SMALL = {**USUAL, "memory_mb": 100, "disk_mb": 20}


def test_a_run_that_sets_nothing_asks_for_what_is_kept_warm():
    assert asked(Spec()) == USUAL


def test_who_came_first_goes_first_and_one_that_gives_up_is_forgotten():
    async def body() -> None:
        room = Room(1)
        assert await room.enter("a", SMALL, 0)
        assert not await room.enter("b", SMALL, 0.01)
        waiting = [asyncio.ensure_future(room.enter(name, SMALL, 20)) for name in "cde"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        room.leave("a")
        assert await waiting[1] and [*room.taken] == ["d"] and not waiting[2].done()
        room.leave("d")
        assert await waiting[2] and not room.line

    asyncio.run(body())


def test_a_large_one_at_the_head_of_the_line_is_not_passed_by_small_ones():
    async def body() -> None:
        room = Room(10, memory_mb=300)
        assert await room.enter("a", SMALL, 0) and await room.enter("b", SMALL, 0)
        large = asyncio.ensure_future(room.enter("large", {**SMALL, "memory_mb": 200}, 20))
        await asyncio.sleep(0)
        small = asyncio.ensure_future(room.enter("small", {**SMALL, "memory_mb": 10}, 20))
        await asyncio.sleep(0)
        assert not small.done() and len(room.line) == 2
        room.leave("a")
        room.leave("b")
        assert await large and await small

    asyncio.run(body())


def test_a_place_that_was_just_given_to_one_who_gives_up_is_free_again():
    async def body() -> None:
        room = Room(1)
        await room.enter("a", SMALL, 0)
        waiting = asyncio.ensure_future(room.enter("b", SMALL, 20))
        await asyncio.sleep(0)
        room.leave("a")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not room.taken

    asyncio.run(body())


def test_warm_ones_are_of_the_kind_that_is_asked_for_most_and_leave_room():
    room = Room(4, memory_mb=360, warm=3)
    assert room.most_asked() == kind(USUAL) and room.to_keep() == 0
    room.asked.extend([kind(SMALL)] * 2)
    assert room.most_asked() == kind(SMALL) and room.to_keep() == 3
    room.taken = {"a": 120, "b": 120}
    assert room.to_keep() == 1
    assert Room(4, warm=3, taken=room.taken).to_keep() == 2
    assert "= 768, and all sandboxes of this node have 360" in room.never(USUAL) and not room.never(SMALL)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_mb": "64"}, "memory_mb='64' is not like 512"),
        ({"memory_mb": -1}, "memory_mb=-1 is not like 512"),
        ({"processes": True}, "processes=True is not like 64"),
        ({"folders": []}, "folders=[] is not like {}"),
        ({"new": 1}, "settings ['new']: the pool runs another version of Flotilla than the job"),
    ],
)
def test_what_a_pool_cannot_read_is_one_line(changes, said):
    with pytest.raises(ValueError) as raised:
        read({**USUAL, **changes})
    assert str(raised.value) == said
