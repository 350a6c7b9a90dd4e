"""Episodes that are played without pause: each asks for its next turn as soon as it can, whatever the others do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from trainer.environments.pool import Environments, Lost
from trainer.environments.runner import Asked, Ended, Job, Key, Name
from trainer.episodes import Episode, Prompt, Turn


@dataclass
class Table:
    """A process, and what it has to play."""

    jobs: dict[Key, Job] = field(default_factory=dict)  # not ended
    fresh: list[Job] = field(default_factory=list)  # of which it does not know yet
    turns: dict[Name, Turn] = field(default_factory=dict)
    unwanted: list[int] = field(default_factory=list)
    call: Any = None
    since: float = 0.0
    deaths: int = 0  # since it last answered


class Playing:
    """All episodes at work. For one thread; nothing here waits."""

    def __init__(self, pool: Environments, samples: int):
        self.pool, self.samples = pool, samples
        self.tables = [Table() for _ in pool.processes]
        self.names = count(1)
        self.wanted: deque[tuple[int, Asked]] = deque()  # turns that nobody was asked for; names below 0 are of no group
        self.asked: dict[int, tuple[int, Asked]] = {}  # and those that are being written, with the process
        self.ended: dict[int, list[Ended]] = {}  # by prompt, until all of its episodes have
        self.prompts: dict[int, Prompt] = {}
        self.versions: dict[int, int] = {}  # of the weights that a prompt was begun with

    def begin(self, number: int, prompt: Prompt, seed: int, version: int) -> None:
        """All episodes of a prompt."""
        self.prompts[number], self.ended[number], self.versions[number] = prompt, [], version
        for i in range(self.samples):
            job, table = Job((number, i), prompt, seed), min(self.tables, key=lambda table: len(table.jobs))
            table.jobs[job.key] = job
            table.fresh.append(job)

    def turns(self, free: Callable[[int], object]) -> Iterator[tuple[int, Asked, int]]:
        """Those to be asked for, under names of their own, with the version of the weights that each may be written with, or newer ones:
        no older ones than its episode was begun with. `free`: whether there is an engine that has them.

        Those that may have the oldest come first: who can write the others can write these too.
        """
        wanted = [each for each in self.wanted if each[1].key in self.tables[each[0]].jobs]
        self.wanted = deque(sorted(wanted, key=lambda each: self.versions[each[1].key[0]]))
        while self.wanted and free(version := self.versions[self.wanted[0][1].key[0]]):
            name, (process, asked) = -next(self.names), self.wanted.popleft()
            self.asked[name] = process, asked
            yield name, asked, version

    def answer(self, name: int, turn: Turn) -> None:
        if found := self.asked.pop(name, None):
            self.tables[found[0]].turns[found[1].name] = turn

    def lose(self, names: list[int]) -> None:
        """Those whose rollout engine is gone: they are asked for anew."""
        self.wanted.extendleft(found for name in names if (found := self.asked.pop(name, None)))

    def drop(self, number: int) -> None:
        """Episodes of a prompt that nobody waits for any more."""
        if self.prompts.pop(number, None) is None:
            return
        del self.ended[number], self.versions[number]
        for table in self.tables:
            table.jobs = {key: job for key, job in table.jobs.items() if key[0] != number}
            table.fresh = [job for job in table.fresh if job.key[0] != number]
            table.unwanted.append(number)

    def look(self) -> dict[int, list[Episode]]:
        """Have all processes go on. Returns the episodes of the prompts all of whose episodes have ended.

        Raises as `Environments.episodes` does, and RunError where a process dies again and again.
        """
        for i, table in enumerate(self.tables):
            if table.call is not None:
                self._collect(i, table)
            if table.call is None and (table.jobs or table.unwanted):
                table.call = self.pool.processes[i].advance.remote(table.fresh, table.turns, table.unwanted, whole=False)
                table.fresh, table.turns, table.unwanted, table.since = [], {}, [], time.monotonic()
        found = [number for number, ended in self.ended.items() if len(ended) == self.samples]
        complete: dict[int, list[Episode]] = {}
        for number in found:
            del self.versions[number]
            prompt, ended = self.prompts.pop(number), sorted(self.ended.pop(number), key=lambda each: each.key)
            complete[number] = self.pool.episodes([(prompt, each) for each in ended])
        return complete

    def _collect(self, number: int, table: Table) -> None:
        late = time.monotonic() - table.since > self.pool.patience(number)
        ready, _ = self.pool.launcher.done([table.call])
        if not ready and not late:
            return
        try:
            if not ready:
                raise self.pool.hang(number)
            asked, ended = self.pool.get(number, table.call, 0)
        except Lost as lost:
            return self._lost(number, table, lost)
        table.call, table.deaths = None, 0
        self.wanted.extend((number, each) for each in asked)
        for each in ended:
            self._end(table, each)
        return None

    def _lost(self, number: int, table: Table, lost: Lost) -> None:
        """The episode that it hangs in has failed; others begin anew, in another process."""
        table.deaths += lost.died
        failed, fresh = self.pool.replace(number, lost, table.deaths, table.jobs)
        self.wanted = deque(each for each in self.wanted if each[0] != number)
        self.asked = {name: each for name, each in self.asked.items() if each[0] != number}
        for each in failed:
            self._end(table, each)
        table.fresh, table.turns, table.unwanted, table.call = fresh, {}, [], None

    def _end(self, table: Table, ended: Ended) -> None:
        if table.jobs.pop(ended.key, None):
            self.ended[ended.key[0]].append(ended)
