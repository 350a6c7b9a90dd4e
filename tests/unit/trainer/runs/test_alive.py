"""A run's sign of life: there while it lives, with what it does, and an end that a kill does not write."""

from __future__ import annotations

import json
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from trainer.runs import alive


def told(folder: Path) -> dict[str, object]:
    return json.loads((folder / alive.FILE).read_text())


def test_it_is_written_while_the_run_lives_and_says_that_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(alive, "EVERY", 0.02)
    with alive.signs():
        time.sleep(0.1)
        assert not (tmp_path / alive.FILE).exists(), "the folder is not the run's yet: it may still be moved aside"
        alive.begin(tmp_path)
        alive.say(doing="step 3: learning")
        while not (tmp_path / alive.FILE).exists() or "doing" not in told(tmp_path):
            time.sleep(0.01)
        first = told(tmp_path)
        assert first["doing"] == "step 3: learning" and not first["ended"] and abs(time.time() - float(str(first["time"]))) < 60
        while told(tmp_path)["time"] == first["time"]:
            time.sleep(0.01)
    assert told(tmp_path)["ended"] is True


def test_a_folder_that_is_gone_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(alive, "EVERY", 0.01)
    with alive.signs():
        alive.begin(tmp_path / "gone")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("env", "page"),
    [
        ({}, None),
        ({alive.URL: "http://127.0.0.1:8265"}, None),
        ({alive.ROUTES: "/r", alive.URL: "http://127.0.0.1:8265"}, "http://127.0.0.1:8265/flotilla/at/runs/#/run/a%2Fb"),
    ],
)
def test_a_job_says_where_its_page_is(env, page):
    assert alive.page("a/b", env) == page


def test_a_sign_tells_what_was_asked_for_and_does_not_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(alive, "EVERY", 0.01)
    answers, free = count(), threading.Event()

    def slow() -> dict[str, int]:
        if (number := next(answers)) == 2:
            free.wait(300)
        return {"asked": number}

    with alive.signs(), alive.asking(slow):
        alive.begin(tmp_path)
        while not (tmp_path / alive.FILE).exists() or told(tmp_path).get("asked") != 1:
            time.sleep(0.005)
        first = told(tmp_path)["time"]
        while told(tmp_path)["time"] == first:
            time.sleep(0.005)
        free.set()
        while told(tmp_path)["asked"] == 1:
            time.sleep(0.005)
    assert told(tmp_path)["ended"] is True
