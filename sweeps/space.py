"""What is searched: `optim.lr=[1e-6,3e-6]` is a list of values, `algorithm.clip_high=0.2..0.3` a range.

A range may end with a step (`0.1..0.5/0.1`) and with its scale (`1e-6..1e-3 log`, `1..500 linear`); without a scale it is logarithmic
where both ends are positive and the ratio is at least 100. Ranges of integer settings have integers. A trial's values are texts,
as a person would type them behind `key=`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import yaml

from trainer.cli import as_written, yaml_io
from trainer.cli.help import allowed_at, find
from trainer.configs.sections import Config
from trainer.errors import ConfigError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"\s*({NUMBER})\s*\.\.\s*({NUMBER})\s*(?:/\s*({NUMBER}))?\s*(log|linear)?\s*")
LOG_RATIO = 100  # of the ends of a range that is logarithmic without a word
FILE = "--config"  # the parameter whose values are settings files
OWN = {
    "run.name": "each trial has a name of its own; --name is the sweep's",
    "run.resume": "trials go on from their checkpoints",
    "run.pause_at": "the sweep pauses trials",
}
Point = dict[str, str]  # dotted setting -> text behind `key=`


@dataclass(frozen=True)
class Choice:
    key: str
    texts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}: {', '.join(self.texts)}"

    def grid(self) -> tuple[str, ...]:
        return self.texts

    def ends(self) -> tuple[str, ...]:
        return self.texts


@dataclass(frozen=True)
class Range:
    key: str
    low: float
    high: float
    step: float | None = None
    log: bool = False
    whole: bool = False  # integers alone

    def __str__(self) -> str:
        step = f" in steps of {self.step:g}" if self.step else ""
        return f"{self.key}: {self.low:g} to {self.high:g}{step}{', log scale' if self.log else ''}"

    def text(self, value: float) -> str:
        return str(round(value)) if self.whole else repr(float(value))

    def grid(self) -> tuple[str, ...]:
        """Every value. Raises ConfigError for a range without a step."""
        if self.step is None:
            raise ConfigError(
                f"command line: {self.key}={self.low:g}..{self.high:g}: a grid needs a step ({self.key}={self.low:g}..{self.high:g}/STEP) "
                "or a list; or --search random or tpe"
            )
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return tuple(self.text(round(self.low + i * self.step, 12)) for i in range(count))

    def ends(self) -> tuple[str, ...]:
        return (self.text(self.low), self.text(self.high))


Parameter = Choice | Range


def read(model: type[Config], words: Sequence[str]) -> tuple[list[Parameter], list[str]]:
    """The parameters among `key=value` words, and the other words, which every trial has. Raises ConfigError, a line per mistake."""
    space: list[Parameter] = []
    fixed: list[str] = []
    errors: list[str] = []
    for word in words:
        try:
            found = parameter(model, word)
        except ConfigError as error:
            errors.append(str(error))
            continue
        if found is None:
            fixed.append(word)
        elif any(found.key == other.key for other in space):
            errors.append(f"command line: {found.key}: is searched twice; give one list or range")
        else:
            space.append(found)
    for key in {word.partition("=")[0] for word in fixed} & {each.key for each in space}:
        errors.append(f"command line: {key}: is searched and set as well; leave one out")
    if errors:
        raise ConfigError("\n".join(errors))
    return space, fixed


def parameter(model: type[Config], word: str) -> Parameter | None:
    """None for a word that sets one value. Raises ConfigError."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"command line: {word}: not understood; settings are written key=value, key=[a,b] or key=low..high")
    kinds = _kinds(model, key)
    if key in OWN and (text.strip().startswith("[") or ".." in text or key != "run.resume"):
        raise ConfigError(f"command line: {word}: cannot be set; {OWN[key]}")
    if match := RANGE.fullmatch(text):
        return _range(model, key, text, kinds, match)
    if ".." in text and {int, float} & set(kinds):
        raise ConfigError(f"command line: {word}: is no range; write low..high, low..high/step, and log or linear at the end")
    return _choice(key, text, kinds) if text.lstrip().startswith("[") else None


def _kinds(model: type[Config], key: str) -> list[Any]:
    """The types that a setting may have; none where nobody knows."""
    kind = as_written.at(model, key.split("."))
    return [] if kind in (None, Any) else as_written.choices(kind)


def _choice(key: str, text: str, kinds: list[Any]) -> Choice | None:
    """None for a list that is itself the value of a setting. Raises ConfigError."""
    try:
        node = yaml_io.compose(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"command line: {key}: {text!r} is not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(node, yaml.SequenceNode) or text[node.end_mark.index :].strip():
        raise ConfigError(f"command line: {key}={text}: is no list; write [a, b]")
    lists = any(getattr(kind, "__origin__", kind) in (list, tuple) for kind in kinds)
    if lists and not all(isinstance(each, yaml.SequenceNode) or each.tag.endswith("null") for each in node.value):
        return None
    texts = [text[each.start_mark.index : each.end_mark.index].strip() for each in node.value]
    if not texts:
        raise ConfigError(f"command line: {key}=[]: the list is empty; name at least one value")
    values = [(isinstance(value := yaml_io.construct(each), bool), value) for each in node.value]  # 1 and 1.0 are one, 1 and true are not
    if twice := next((texts[i] for i, value in enumerate(values) if value in values[:i]), None):
        raise ConfigError(f"command line: {key}={text}: {twice} is there twice")
    sorts = {each.tag.rpartition(":")[2].replace("int", "number").replace("float", "number") for each in node.value} - {"null"}
    if len(sorts) > 1 and not kinds:
        raise ConfigError(f"command line: {key}={text}: has values of several types ({', '.join(sorted(sorts))}); give them one")
    return Choice(key, tuple(texts))


def _range(model: type[Config], key: str, text: str, kinds: list[Any], match: re.Match[str]) -> Range:
    """Raises ConfigError."""
    where = f"command line: {key}={text}"
    low, high = float(match[1]), float(match[2])
    step = float(match[3]) if match[3] else None
    parts = [part for part in match.groups()[:3] if part]
    written_whole = all(re.fullmatch(r"[-+]?\d+", part) for part in parts)
    if kinds and not {int, float} & set(kinds):
        allowed = allowed_at(model, key.split("."))
        raise ConfigError(f"{where}: a range is of numbers, and {find(model, key)[0]} is {allowed}; write a list")
    whole = written_whole if not kinds else float not in kinds
    if whole and not written_whole:
        raise ConfigError(f"{where}: {key} is an integer, and so are the ends and the step of its range")
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{where}: the ends must be finite")
    if low > high:
        raise ConfigError(f"{where}: the range is reversed; write {match[2]}..{match[1]}")
    if low == high:
        raise ConfigError(f"{where}: the range is empty; write {key}={match[1]}, or two ends that differ")
    if step is not None and not 0 < step <= high - low:
        raise ConfigError(f"{where}: the step must be above 0 and at most {high - low:g}")
    if match[4] == "log" and low <= 0:
        raise ConfigError(f"{where}: a log scale needs ends above 0")
    if match[4] == "log" and step is not None:
        raise ConfigError(f"{where}: a log scale has no step; leave one of them out")
    log = match[4] == "log" or (match[4] is None and step is None and low > 0 and high / low >= LOG_RATIO)
    return Range(key, low, high, step, log, whole)


def points(space: Sequence[Parameter]) -> Iterator[Point]:
    """Every combination of a grid, the last parameter fastest. Raises ConfigError where one has no end."""
    for texts in product(*(each.grid() for each in space)):
        yield {each.key: text for each, text in zip(space, texts, strict=True)}


def corners(space: Sequence[Parameter]) -> Iterator[Point]:
    """Every combination of listed values and ends of ranges."""
    for texts in product(*(each.ends() for each in space)):
        yield {each.key: text for each, text in zip(space, texts, strict=True)}
