"""Which steps of a run have a timeline, and what it is made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from trainer.configs.base import Form, Section


def _steps(text: str) -> str:
    _ranges(text)
    return text


def _ranges(text: str) -> list[range]:
    """Of 3,20..22. Raises ValueError."""
    if text in ("off", "none"):
        return []
    found = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        steps = range(_number(first), (_number(last) if dots else _number(first)) + 1)
        if not steps:
            raise ValueError(f"{part} is reversed")
        found.append(steps)
    return found


def _number(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and int(text)):
        raise ValueError(f"{text!r} is not the number of a step")
    return int(text)


Steps = Annotated[str, AfterValidator(_steps), Form("steps such as 20, 20..22 or 3,20..22, or off")]


class TraceConfig(Section):
    steps: Steps = Field(default="3", description="Steps whose timeline is recorded, such as 20, 20..22 or 3,20..22; off records none.")
    __annotations__["with"] = list[Literal["spans", "torch", "nsys"]]  # the word that a person writes; to Python it is a keyword
    vars()["with"] = Field(
        default=["spans"],
        description="spans are always recorded; torch adds torch's profiler of ranks and rollout engines, nsys runs them under nsys.",
    )

    @property
    def parts(self) -> list[str]:
        return list(getattr(self, "with"))

    def ranges(self) -> list[range]:
        return _ranges(self.steps)

    def traced(self, step: int) -> bool:
        return any(step in steps for steps in self.ranges())
