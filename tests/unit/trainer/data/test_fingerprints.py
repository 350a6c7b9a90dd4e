"""Equal rows have equal fingerprints in every process, and other rows others; what cannot be told apart is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date, datetime
from pathlib import Path
from threading import Lock

import numpy as np
import pytest

from trainer.data.fingerprints import canonical, fingerprint
from trainer.episodes import Prompt
from trainer.errors import ConfigError

ROOT = Path(__file__).parents[4]
IN_A_PROCESS = """
import enum, functools, re, uuid
from collections import Counter, deque
from dataclasses import dataclass
from trainer.data.fingerprints import fingerprint
from trainer.episodes import Prompt
class Checker:
    def __init__(self): self.tests = {*"abcdefgh"}
    def check(self): pass
class Slotted:
    __slots__ = ("tests",)
    def __init__(self): self.tests = frozenset("abcdefgh")
@dataclass(frozen=True)
class Case: tests: frozenset
Color = enum.Enum("Color", "RED BLUE")
others = [bytearray(1 << 17) for _ in range(int(__import__("sys").argv[1]))]  # so that objects have other addresses
values = [{*"abcdefgh"}, {frozenset("abc"), "x", 1, None}, Checker(), Checker().check, Slotted(), Case(frozenset("abcdefgh")), Color.RED,
          {1: "a", "b": 2, None: {(1, 2): {*"abc"}}}, functools.partial(len, {*"abc"}), lambda: 0, re.compile("a+"), uuid.UUID(int=3),
          Counter("aab"), deque([{*"abc"}]), object(), len]
print(*(fingerprint([Prompt(0, [1], {"column": value})]) for value in values))
"""


def of(value: object) -> str:
    return fingerprint([Prompt(0, [1], {"column": value})])


def test_rows_with_sets_and_objects_have_one_fingerprint_in_every_process():
    seen = [
        subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, seed],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("5", "17")
    ]
    assert seen[0] == seen[1]
    assert len({*seen[0]}) == len(seen[0]) == 16


def test_what_differs_in_one_place_has_another_fingerprint():
    pairs = [
        ({1, 2}, {1, 3}),
        ({1: "a", "b": 2}, {"1": "a", "b": 2}),
        (np.arange(5000), np.arange(5000)[::-1]),  # whose texts are both "[0 1 2 ... ", but for a few
        (np.where(np.arange(5000) == 2500, 0, np.arange(5000)), np.arange(5000)),
        (date(2026, 1, 2), datetime(2026, 1, 2)),
        ([{1: {1}}, {"a": {2}, 2: 0}], [{1: {1}}, {"a": {3}, 2: 0}]),
        (int, str),
    ]
    assert all(of(one) != of(other) for one, other in pairs)


def test_the_order_of_keys_is_no_difference():
    assert of({1: "a", "b": 2}) == of({"b": 2, 1: "a"})


def test_rows_of_json_have_the_fingerprint_that_checkpoints_know():
    assert of({"b": [1, 2.5, None, True], "a": "é"}) == "92008837d84ff524"
    assert canonical(date(2026, 1, 2)) == '"2026-01-02"'


def circle() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


@pytest.mark.parametrize("value", [Lock(), (i for i in ()), circle(), sys])
def test_what_no_start_could_recognize_is_refused_with_its_column(value):
    with pytest.raises(ConfigError, match=r"data\.path: row 0: column 'column' has what cannot be written down \(.*give text, numbers"):
        of(value)
