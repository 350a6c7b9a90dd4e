"""A taskset of the library verifiers, as its documentation has them; loaded by the Python that has the library."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]


class Data(vf.TaskData):
    answer: str


class Digits(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages[-1].content or ""))

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        print("a taskset may print")
        return float((trace.assistant_messages[-1].content or "").count(self.data.answer)) / 5


class Config(vf.TasksetConfig):
    count: int = 5


class Taskset(vf.Taskset[Digits, Config]):
    def load(self) -> Iterable[Digits]:
        for i in range(self.config.count):
            yield Digits(Data(prompt=f"{i % 5}=", answer=str(i % 5)), self.config.task)


__all__ = ["Taskset"]
