"""The trainer's own checks of every point of a search space, before the first trial starts."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import islice

from sweeps.space import FILE, Parameter, Point, corners
from trainer import preflight
from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.configs.preferences import DpoConfig, RmConfig
from trainer.configs.sections import Config
from trainer.configs.sft import SftConfig
from trainer.errors import ConfigError

MODELS: dict[str, type[Config]] = {"ppo": PpoConfig, "sft": SftConfig, "rm": RmConfig, "dpo": DpoConfig}
MOST_CORNERS = 1024  # at about 5 ms each; of a larger space, one parameter at a time, and each trial once it is drawn


def overrides(fixed: Sequence[str], point: Point) -> list[str]:
    """As typed behind a trainer's command."""
    return [*fixed, *(f"{key}={text}" for key, text in point.items() if key != FILE)]


def config_of(entry: str, file: str, fixed: Sequence[str], point: Point) -> Config:
    """The settings of a trial. Raises ConfigError with a line per mistake, as the trainer itself would."""
    model = MODELS[entry]
    words = ["--config", point.get(FILE, file), *overrides(fixed, point)]
    with redirect_stdout(io.StringIO()):  # what the reward function reads is said once, by the trials
        return parse(words, prog=f"python -m trainer.train_{entry}", model=model, checks=preflight.CHECKS[model.ENTRY])


def named(point: Point) -> str:
    return " ".join(f"{key}={text}" for key, text in point.items())


def require_space(entry: str, file: str, fixed: Sequence[str], space: Sequence[Parameter]) -> None:
    """Raises ConfigError: of the first corner that the trainer refuses, its lines."""
    count = math.prod(len(each.ends()) for each in space)
    chosen = corners(space) if count <= MOST_CORNERS else _one_at_a_time(space)
    for number, point in enumerate(islice(chosen, MOST_CORNERS)):
        try:
            config_of(entry, file, fixed, point)
        except ConfigError as error:
            lines = [line if number == 0 and len(space) == 1 else f"{line} (at {named(point)})" for line in str(error).splitlines()]
            raise ConfigError("\n".join(lines)) from None


def allowed(entry: str, file: str, fixed: Sequence[str], grid: Sequence[Point]) -> tuple[list[Point], list[tuple[Point, str]]]:
    """Combinations of a grid, and those that are left out with the reason. Raises ConfigError where a value is right in none of them."""
    kept: list[Point] = []
    left: list[tuple[Point, str]] = []
    for point in grid:
        try:
            config_of(entry, file, fixed, point)
            kept.append(point)
        except ConfigError as error:
            left.append((point, str(error).splitlines()[0]))
    right = {pair for point in kept for pair in point.items()}
    if wrong := next((line for point, line in left if not right.issuperset(point.items())), None):
        raise ConfigError(wrong)
    return kept, left


def _one_at_a_time(space: Sequence[Parameter]) -> list[Point]:
    first = {each.key: each.ends()[0] for each in space}
    return [first | {each.key: text} for each in space for text in each.ends()]
