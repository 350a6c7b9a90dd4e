"""Rewards over HTTP and by a judge, against servers of this machine."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy
import pytest
from support.json_server import JsonHandler, served

from trainer.configs.reward import RewardConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.rewards.scorer import Scorer


def episodes(*texts: str) -> list[Episode]:
    return [Episode(Prompt(i, [1], {"answer": "a"}), i, [Turn([1], [0.0], "stop")], text=text) for i, text in enumerate(texts)]


def score(batch: list[Episode], function: str, **args: Any) -> list[float]:
    on_error = args.pop("on_error", "fail")
    with Scorer(RewardConfig(function=function, args=args, timeout=60, on_error=on_error)) as rewards:
        return rewards.score(batch)


def service(busy: int = 0) -> tuple[type[JsonHandler], list[Any]]:
    """Worth is the length of the text; 503 at first, and for ever at the text "bad"; the bodies that it was sent."""
    seen: list[Any] = []

    class Service(JsonHandler):
        def do_POST(self) -> None:
            body = json.loads(self.body())
            seen.append((self.path, self.headers.get("Authorization"), body))
            if len(seen) <= busy or "bad" in json.dumps(body):
                return self.send(503, {})
            if self.path.endswith("/chat/completions"):
                said = body["messages"][0]["content"]
                return self.send(200, {"choices": [{"message": {"content": "none" if "dumb" in said else f"Of 10: {len(said)}"}}]})
            return self.send(200, {"rewards": [len(answer["text"]) for answer in body["answers"]]})

    return Service, seen


def test_answers_are_sent_in_batches_with_what_the_environment_holds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVICE_TOKEN", "Bearer secret")
    handler, seen = service(busy=1)
    with served(handler) as url:
        found = score(episodes("a", "bb", "ccc"), "http", url=url, batch_size=2, headers={"Authorization": "SERVICE_TOKEN"})
    assert found == [1.0, 2.0, 3.0]
    assert {authorization for _, authorization, _ in seen} == {"Bearer secret"}
    assert sorted(len(body["answers"]) for _, _, body in seen[-2:]) in ([1, 2], [1, 1], [2, 2])
    assert seen[0][2]["answers"][0]["row"] == {"answer": "a"}


def test_a_request_that_fails_fails_its_answers_alone():
    handler, _ = service()
    with served(handler) as url:
        batch = episodes("a", "bad", "ccc")
        assert score(batch, "http", url=url, batch_size=1, retries=1, on_error="zero") == [1.0, 0.0, 3.0]
        assert [e.failed for e in batch] == [False, True, False]
        with pytest.raises(ConfigError, match=r"http on row 1 with the text 'bad' raised ClientResponseError\(.*503"):
            score(episodes("a", "bad"), "http", url=url, batch_size=1, retries=0)


def test_a_judge_is_asked_with_the_template_and_its_last_number_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "k")
    handler, seen = service()
    with served(handler) as url:
        batch = episodes("bb", "dumb")
        args = {"base_url": f"{url}/v1", "model": "m", "prompt": "{answer}:{text} {other}", "api_key_env": "JUDGE_KEY"}
        assert score(batch, "judge", on_error="zero", **args) == [float(len("a:bb {other}")), 0.0]
    assert [e.failed for e in batch] == [False, True]
    assert seen[0][:2] == ("/v1/chat/completions", "Bearer k")


def test_a_row_is_sent_as_json_whatever_it_holds():
    handler, seen = service()
    values: dict[Any, Any] = {
        "time": datetime(2026, 1, 2),
        "day": date(2026, 1, 2),
        "price": Decimal("1.50"),
        "raw": b"\xff",
        "nan": float("nan"),
    }
    values |= {
        "scalar": numpy.float32("inf"),
        "list": numpy.array([1.0, float("nan")]),
        "set": {1},
        "half": "\ud800",
        (1, 2): complex(1, 2),
    }
    batch = [Episode(Prompt(0, [1], values), 0, [Turn([1], [0.0], "stop")], text="abc")]
    with served(handler) as url:
        assert score(batch, "http", url=url, retries=0) == [3.0]
    [answer] = seen[0][2]["answers"]
    assert answer["row"] == {
        **{"time": "2026-01-02T00:00:00", "day": "2026-01-02", "price": "1.50", "raw": "_w==", "nan": None},
        **{"scalar": None, "list": [1.0, None], "set": [1], "half": "\ud800", "1,2": "1+2j"},
    }
