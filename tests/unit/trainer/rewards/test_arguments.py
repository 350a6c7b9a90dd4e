"""Arguments of built-in rewards are checked before a run starts."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.errors import ConfigError
from trainer.rewards import resolve

URL = "http://127.0.0.1:1/score"
JUDGE = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "prompt": "{text}"}


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("overlong", {"max_length": 0, "buffer": 1}, r"reward\.args\.max_length=0: Input should be greater than or equal to 1"),
        ("overlong", {"max_length": 8, "buffer": -1}, r"reward\.args\.buffer=-1: Input should be greater than or equal to 0"),
        ("overlong", {"max_length": "long", "buffer": 1}, r"reward\.args\.max_length='long': Input should be a valid integer"),
        ("length", {"longest": 2.5}, r"reward\.args\.longest=2\.5: Input should be a valid integer"),
        ("digits_share", {"partial": 2}, r"reward\.args\.partial=2: Input should be less than or equal to 1"),
        ("numeric", {"tolerance": float("nan")}, r"reward\.args\.tolerance=nan: "),
        ("numeric", {"tolerance": -1}, r"reward\.args\.tolerance=-1: Input should be greater than or equal to 0"),
        ("format_regex", {"pattern": "("}, r"reward\.args\.pattern='\(': not a regular expression: missing \)"),
        ("format_regex", {"pattern": 3}, r"reward\.args\.pattern=3: Input should be a valid string"),
        ("code", {"seconds": 0}, r"reward\.args\.seconds=0: Input should be greater than 0"),
        ("code", {"memory_mb": "much"}, r"reward\.args\.memory_mb='much': Input should be a valid integer"),
        ("http", {"url": "service:80"}, r"reward\.args\.url='service:80': String should match pattern '\^https\?://'"),
        (
            "reward_model",
            {"model": "./no-model"},
            r"reward\.args\.model='\./no-model': no folder with a model here; a hub name",
        ),
        ("reward_model", {"model": "a/b", "gpus": -1}, r"reward\.args\.gpus=-1: Input should be greater than or equal to 0"),
        ("reward_model", {"gpus": 1}, r"reward\.args: .*model"),
        ("http", {"url": URL, "batch_size": 0}, r"reward\.args\.batch_size=0: "),
        ("http", {"url": URL, "concurrency": -2}, r"reward\.args\.concurrency=-2: "),
        ("http", {"url": URL, "timeout": 0}, r"reward\.args\.timeout=0: Input should be greater than 0"),
        ("http", {"url": URL, "retries": 0.5}, r"reward\.args\.retries=0\.5: "),
        ("http", {"url": URL, "headers": {"Key": "NO_SUCH"}}, r"reward\.args\.headers\.Key='NO_SUCH': no such environment"),
        ("judge", JUDGE | {"api_key_env": "NO_SUCH"}, r"reward\.args\.api_key_env='NO_SUCH': no such environment variable"),
        ("judge", JUDGE | {"base_url": ""}, r"reward\.args\.base_url='': "),
    ],
)
def test_an_argument_out_of_range_is_one_error(function: str, args: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"^{message}"):
        resolve(function, args)


def test_every_wrong_argument_is_named_and_right_ones_pass(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError) as error:
        resolve("http", {"url": "x", "batch_size": 0})
    assert [line.partition("=")[0] for line in str(error.value).splitlines()] == ["reward.args.url", "reward.args.batch_size"]
    monkeypatch.setenv("SERVICE_TOKEN", "secret")
    assert resolve("http", {"url": URL, "headers": {"Authorization": "SERVICE_TOKEN"}, "timeout": 5}).batched
    assert resolve("judge", JUDGE | {"api_key_env": None}).awaited
