"""Types of the built-in rewards' arguments: what pydantic checks before a run starts, as it does settings."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from trainer.errors import ConfigError
from trainer.rewards import containers


def _regular(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


def _set(name: str) -> str:
    if name not in os.environ:
        raise ValueError("no such environment variable; it names one, which holds the secret")
    return name


def _image(name: str) -> str:
    if containers.engine() is None:
        raise ValueError("this node has neither docker nor podman on PATH; install one, or leave image out")
    return name


def _model(name: str) -> str:
    if name.startswith((".", "/", "~")) and not (Path(name).expanduser() / "config.json").is_file():
        raise ValueError("no folder with a model here; a hub name has the form organization/name")
    return name


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Regex = Annotated[str, AfterValidator(_regular)]
Url = Annotated[str, Field(pattern=r"^https?://")]
Image = Annotated[str, Field(min_length=1), AfterValidator(_image)]
ModelName = Annotated[str, AfterValidator(_model)]
Variable = Annotated[str, AfterValidator(_set)]


def check(function: Callable[..., Any], args: dict[str, Any], setting: str) -> None:
    """Raises ConfigError with a line for each argument that is not of the annotated type."""
    hints, errors = typing.get_type_hints(function, include_extras=True), []
    for name, value in args.items():
        if name in hints:
            try:
                TypeAdapter(hints[name]).validate_python(value)
            except ValidationError as error:
                found = error.errors()[0]
                where = "".join(f".{part}" for part in found["loc"] if isinstance(part, str) and part in str(value))
                errors.append(f"{setting}.{name}{where}={found['input']!r}: {found['msg'].removeprefix('Value error, ')}")
    if errors:
        raise ConfigError("\n".join(errors))
