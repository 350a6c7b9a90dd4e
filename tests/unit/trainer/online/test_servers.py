"""Servers that answer in place of rollout engines: what they are not asked."""

from __future__ import annotations

import argparse

import pytest
from support.seeing import seen
from support.sighted import sighted

from trainer.configs.ppo import PpoConfig
from trainer.environments.policy import Request
from trainer.episodes import Prompt
from trainer.errors import ConfigError
from trainer.online.servers import ChatCompletions, Completions


@pytest.mark.parametrize("kind", [Completions, ChatCompletions])
def test_pictures_are_not_left_out_in_silence(kind, tmp_path):
    given = {"model": {"path": str(sighted("llava", tmp_path))}, "data": {"path": "a:b"}, "reward": {"function": "exact"}}
    args = argparse.Namespace(endpoint="http://127.0.0.1:9/v1", concurrency=1, served=None, model=None, key_env=None)
    server = kind(PpoConfig.model_validate(given), args)
    said = r"^--endpoint http://127\.0\.0\.1:9/v1: a request has 1 pictures, which no server is sent; leave --endpoint out$"
    with pytest.raises(ConfigError, match=said):
        server.of_prompt(Prompt(0, [5], {"prompt": "x"}, (seen(1),)))
    with pytest.raises(ConfigError, match=said):
        server.of_request(Request([5], 4, pictures=(seen(1),)))
    assert server.of_prompt(Prompt(0, [5], {"prompt": "x"}))
