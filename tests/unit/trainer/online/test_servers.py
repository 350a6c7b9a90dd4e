"""Servers that answer in place of rollout engines: what they are not asked."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from support.seeing import seen
from support.sighted import sighted

from trainer.chat.messages import IMAGE
from trainer.chat.pictures import Limits, picture
from trainer.configs.ppo import PpoConfig
from trainer.environments.policy import Request
from trainer.episodes import Prompt
from trainer.errors import ConfigError
from trainer.online.servers import ChatCompletions, Completions


def server_of(kind: type[Completions], folder: Path) -> Any:
    given = {"model": {"path": str(sighted("llava", folder))}, "data": {"path": "a:b"}, "reward": {"function": "exact"}}
    args = argparse.Namespace(endpoint="http://127.0.0.1:9/v1", concurrency=1, served=None, model=None, key_env=None)
    return kind(PpoConfig.model_validate(given), args)


def test_pictures_are_not_left_out_in_silence(tmp_path):
    server = server_of(Completions, tmp_path)
    said = r"^--endpoint http://127\.0\.0\.1:9/v1: a request has 1 pictures, which no server is sent beside token ids; add --chat for one"
    with pytest.raises(ConfigError, match=said):
        server.of_prompt(Prompt(0, [5], {"prompt": "x"}, (seen(1),)))
    with pytest.raises(ConfigError, match=said):
        server.of_request(Request([5], 4, pictures=(seen(1),)))
    assert server.of_prompt(Prompt(0, [5], {"prompt": "x"}))


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ("<image>a<image>b", "0a1b"),
        ("ab", "01ab"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, IMAGE]}], "a0b1"),
    ],
)
def test_messages_have_a_prompts_pictures_in_their_places(tmp_path, asked, order):
    pictures = (seen(1), seen(2))
    [message] = server_of(ChatCompletions, tmp_path).of_prompt(Prompt(0, [5], {"prompt": asked}, pictures))["messages"]
    said = ""
    for part in message["content"]:
        if part["type"] == "text":
            said += part["text"]
            continue
        shown = picture(part["image_url"]["url"], "it", Limits()).image()
        said += str([each.image().tobytes() for each in pictures].index(shown.tobytes()))
    assert said == order
