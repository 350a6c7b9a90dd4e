"""Requests that are awaited, over an engine that works in steps."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from itertools import count

from trainer.episodes import Turn
from trainer.rollout import Sampling


class SteppedEngine(ABC):
    """Takes steps while it has requests. Between two of them others get their turn: to read answers and to add requests.

    All requests that are made before the event loop runs again are in the engine at the next step, in the order in which they were made,
    so that what is sampled together does not depend on time.
    """

    def __init__(self) -> None:
        self.version = 0
        self.steps = 0  # that it has taken
        self._answers: dict[int, asyncio.Future[list[Turn]]] = {}
        self._numbers = count()
        self._asked: dict[int, int] = {}  # number of a request that is not awaited: what it was called by who asked
        self._complete: dict[int, list[Turn]] = {}  # answers to such requests, by that
        self._stepping: asyncio.Task[None] | None = None

    @abstractmethod
    def add(self, number: int, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queue a request. Raises ValueError for one that the engine can never run."""

    @abstractmethod
    def step(self) -> dict[int, list[Turn]]:
        """Work for a while on what was added; the answers that are complete, by the number of their request."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> list[Turn]:
        """See `RolloutEngine.generate`."""
        number = next(self._numbers)
        self.add(number, prompt_ids, sampling)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step_while_asked())
        return await answer

    def ask(self, name: int, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queue a request whose answer `work` returns by this name. Raises ValueError for one that the engine can never run."""
        number = next(self._numbers)
        self.add(number, prompt_ids, sampling)
        self._asked[number] = name

    def asked(self) -> int:
        """Requests that `work` has not answered."""
        return len(self._asked)

    def work(self, seconds: float) -> dict[int, list[Turn]]:
        """Work on what was asked for so long; less where nothing is left of it. Requests stay where they are from one call to the next,
        and while weights are received in between. Returns the answers that are complete.
        """
        deadline = time.perf_counter() + seconds
        while self._asked and time.perf_counter() < deadline:
            self._step()
        complete, self._complete = self._complete, {}
        return complete

    def _step(self) -> None:
        self.steps += 1
        for number, turns in self.step().items():
            if number in self._asked:
                self._complete[self._asked.pop(number)] = turns
                continue
            answer = self._answers.pop(number)
            if not answer.done():  # who asked may have been cancelled
                answer.set_result(turns)

    async def _step_while_asked(self) -> None:
        try:
            while self._answers:
                self._step()
                await asyncio.sleep(0)
        except Exception as error:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(error)
            self._answers.clear()
        finally:
            self._stepping = None
