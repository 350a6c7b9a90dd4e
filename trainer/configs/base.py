"""What every section of settings is made of. pydantic only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Check = Callable[[Any], list[str]]  # of an entry point: settings that were read -> a line for each mistake in what they name


@dataclass(frozen=True)
class Only:
    """Marks a setting, or a section, that is read only while another one has certain values; otherwise it is refused when named."""

    setting: str
    values: tuple[Any, ...] = ()  # () stands for any but null, 0, false and empty
    why: str = ""
    other: str = ""  # a setting in whose place this one may be

    def holds(self, value: Any) -> bool:
        return value in self.values if self.values else bool(value)

    def __str__(self) -> str:
        text = f"{self.setting}={' or '.join(map(str, self.values))}" if self.values else self.setting
        return f"{text} or {self.other}" if self.other else text


@dataclass(frozen=True)
class Form:
    """What a text may be, in words, where its type does not say it."""

    words: str

    def __str__(self) -> str:
        return self.words


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would read `trainer.steps=true` as 1."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation in (int, float, int | None, float | None):
            raise PydanticCustomError("bool_as_number", "must be a number")
        return value
