"""Agents that send screenshots, by clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import base64
import re
from typing import Any

import anthropic
import openai
import pytest
from support.seeing import PLACE, of_qwen, seen
from support.talks import CHARACTERS, CHATML, TOOL, Talk, with_template
from transformers import PreTrainedTokenizerFast

from trainer.chat.pictures import Limits as PictureLimits
from trainer.chat.tokenizer import character_tokenizer
from trainer.environments.eyes import Eyes
from trainer.environments.policy import LimitReached, Misuse, Policy

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SHOTS = [seen(1).encoded(), seen(2, (64, 32)).encoded(), seen(3).encoded()]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return of_qwen()


def url(shot: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(shot).decode()}"


def block(shot: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(shot).decode()}}


async def by_openai(policy: Policy) -> None:
    """Each turn a screenshot, first beside the question, then as what a tool returned."""
    async with policy.endpoint() as api, openai.AsyncOpenAI(base_url=api.url, api_key=api.key, max_retries=0) as client:
        parts = [{"type": "text", "text": "1+1"}, {"type": "image_url", "image_url": {"url": url(SHOTS[0]), "detail": "low"}}]
        messages: list[Any] = [{"role": "user", "content": parts}]
        for shot in SHOTS[1:]:
            answer = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL])  # type: ignore[arg-type]
            [call] = answer.choices[0].message.tool_calls or []
            result = [{"type": "image_url", "image_url": {"url": url(shot)}}, {"type": "text", "text": "2"}]
            messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        await client.chat.completions.create(model="any", messages=messages, tools=[TOOL])  # type: ignore[arg-type]


async def by_responses(policy: Policy) -> None:
    async with policy.endpoint() as api, openai.AsyncOpenAI(base_url=api.url, api_key=api.key, max_retries=0) as client:
        parts = [{"type": "input_text", "text": "1+1"}, {"type": "input_image", "image_url": url(SHOTS[0])}]
        said: list[Any] = [{"role": "user", "content": parts}]
        tools: list[Any] = [{"type": "function", **TOOL["function"], "strict": True}]
        for shot in SHOTS[1:]:
            answer = await client.responses.create(model="any", input=said, tools=tools)
            [call] = [item for item in answer.output if item.type == "function_call"]
            result = [{"type": "input_image", "image_url": url(shot)}, {"type": "input_text", "text": "2"}]
            said += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": result}]
        await client.responses.create(model="any", input=said, tools=tools)


async def by_anthropic(policy: Policy) -> None:
    async with policy.endpoint() as api, anthropic.AsyncAnthropic(base_url=api.origin, api_key=api.key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+1"}, block(SHOTS[0])]}]
        tools: list[Any] = [{"name": "add", "input_schema": TOOL["function"]["parameters"]}]
        for shot in SHOTS[1:]:
            answer = await client.messages.create(model="any", messages=messages, tools=tools, max_tokens=80)
            [call] = [each for each in answer.content if each.type == "tool_use"]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [block(shot), {"type": "text", "text": "2"}]}
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        counted = await client.messages.count_tokens(model="any", messages=messages, tools=tools)
        last = await client.messages.create(model="any", messages=messages, tools=tools, max_tokens=80)
        assert counted.input_tokens == last.usage.input_tokens


@pytest.mark.parametrize("talk", [by_openai, by_responses, by_anthropic])
def test_an_agent_s_screenshots_lengthen_one_sequence(tokenizer, talk):
    made = Talk(tokenizer, CALL, CALL, "2", turn_tokens=90, tokens=900)
    [sequence] = made.run(talk)
    [spoken] = made.policy.sequences
    assert [one.encoded() for one in spoken.pictures] == SHOTS
    assert [len(request.pictures) for request in made.requests] == [1, 2, 3]
    own = tokenizer.__dict__["flotilla_processor"]
    short = re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", sequence)
    assert f"[user]1+1{PLACE}<eos>\n[assistant]|{CALL}<eos>|\n[tool]{PLACE}2<eos>\n[assistant]|{CALL}<eos>|\n[tool]{PLACE}2<eos>" in short
    images = [[one.image() for one in spoken.pictures]]
    [ids] = own.own(text=[short.replace("|" + CALL + "<eos>|", CALL + "<eos>").replace("|2<eos>|", "2<eos>")], images=images)["input_ids"]
    assert list(ids) == spoken.token_ids, "they are the processor's"


async def refused(policy: Policy, content: Any, path: str = "/chat/completions", role: str = "user") -> tuple[int, str]:
    import aiohttp

    async with policy.endpoint() as api, aiohttp.ClientSession() as session:
        message = {"role": role, "content": content}
        body = {"model": "any", "input" if path == "/responses" else "messages": [message]}
        async with session.post(f"{api.url}{path}", json=body, headers={"Authorization": f"Bearer {api.key}"}) as answer:
            told = await answer.json()
    return answer.status, told["error"]["message"]


def openai_part(value: Any) -> list[Any]:
    return [{"type": "image_url", "image_url": {"url": value}}]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"content": openai_part("https://a.b/c.png")}, r"^messages: content of user: image_url 'https://a.b/c.png'; only data: URLs"),
        ({"content": openai_part("/etc/passwd")}, r"image_url '/etc/passwd'; only data: URLs"),
        ({"content": openai_part("file:///etc/passwd")}, r"only data: URLs"),
        ({"content": openai_part(5)}, r"image_url 5; only data: URLs"),
        ({"content": openai_part("data:image/png,abc")}, r"^message 0: 'data:image/png,abc': a data: URL needs ;base64"),
        ({"content": openai_part("data:image/png;base64,?!")}, r"^message 0: the picture's data are not base64"),
        ({"content": openai_part(url(b"no picture"))}, r"^message 0: not a picture of PNG, JPEG"),
        ({"content": openai_part(url(SHOTS[0][:200]))}, r"^message 0: the picture is damaged"),
        ({"content": [{"type": "image", "image": "/etc/passwd"}]}, r"source has the type None; only base64"),
        ({"content": [{"type": "image", "path": "/etc/passwd"}]}, r"source has the type None; only base64"),
        ({"content": [{"type": "image", "hash": seen(1).hash}]}, r"source has the type None; only base64"),
        ({"content": openai_part(url(SHOTS[0])), "role": "assistant"}, r"^message 0 is the assistant's and has a picture"),
        ({"content": "what is <|image_pad|>?"}, r"^message 0: its text has the token that stands for a picture"),
        ({"content": [{"type": "text", "text": "<|image_pad|>"}]}, r"^message 0: its text has the token"),
        (
            {"path": "/messages", "content": [{"type": "image", "source": {"type": "url", "url": "https://a.b"}}]},
            r"^messages: content of user: an image whose source has the type 'url'; only base64 is read, and nothing is fetched",
        ),
        (
            {"path": "/messages", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]},
            r"^messages: tool_result: an image whose source has the type None",
        ),
        ({"path": "/messages", "content": [{"type": "document"}]}, r"'document'; the policy reads text and pictures"),
        ({"path": "/responses", "content": [{"type": "input_image", "file_id": "f"}]}, r"image_url None; only data: URLs"),
        ({"path": "/responses", "content": [{"type": "input_file"}]}, r"'input_file'; the policy reads text and pictures"),
    ],
)
def test_a_picture_that_is_none_is_refused_and_nothing_is_read_for_it(tokenizer, body, text):
    async def talk(policy: Policy) -> None:
        status, told = await refused(policy, **body)
        assert (status, bool(re.search(text, told))) == (400, True), told
        assert "\n" not in told

    Talk(tokenizer).run(talk)


def test_a_text_model_says_so_once_and_the_run_ends():
    async def talk(policy: Policy) -> None:
        status, told = await refused(policy, openai_part(url(SHOTS[0])))
        assert status == 400 and told.startswith("message 0 has a picture: the policy has no processor that reads pictures; give a model")

    with pytest.raises(Misuse, match="message 0 has a picture: the policy has no processor"):
        Talk(with_template(character_tokenizer(CHARACTERS), CHATML)).run(talk)


def test_pictures_of_a_sequence_have_a_limit_that_an_agent_can_tell_from_errors(tokenizer):
    made = Talk(tokenizer, "1", "2")
    made.policy.eyes.most = 2

    async def talk(policy: Policy) -> None:
        async with policy.endpoint() as api, openai.AsyncOpenAI(base_url=api.url, api_key=api.key, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": openai_part(url(SHOTS[0])) + openai_part(url(SHOTS[1]))}]
            await client.chat.completions.create(model="any", messages=messages)
            messages += [{"role": "assistant", "content": "1"}, {"role": "user", "content": openai_part(url(SHOTS[2]))}]
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(model="any", messages=messages)
            assert error.value.code == "context_length_exceeded"
            await client.chat.completions.create(model="any", messages=[messages[-1]])  # which forgets the others
            raise RuntimeError

    with pytest.raises(LimitReached, match=r"turn 2 would show 3 pictures \(data\.max_images is 2\)"):
        asyncio.run(talk(made.policy))


def test_a_larger_picture_is_made_smaller_or_refused_by_setting(tokenizer):
    made = Talk(tokenizer, "1")
    made.policy.eyes = Eyes(tokenizer, limits=PictureLimits(most=400, resize=False))

    async def refusing(policy: Policy) -> None:
        _, told = await refused(policy, openai_part(url(SHOTS[0])))
        assert told.startswith("message 0: the picture has 48x48 pixels, data.max_pixels is 400; raise it, or set data.oversized=resize")
        policy.eyes = Eyes(tokenizer, limits=PictureLimits(most=400))
        await policy.chat([{"role": "user", "content": openai_part(url(SHOTS[0]))}])

    made.run(refusing)
    assert made.requests[0].pictures[0].size == (20, 20)


def test_a_client_that_sends_all_again_has_each_picture_decoded_once(tokenizer, monkeypatch):
    from trainer.environments import eyes

    decoded = []
    look = eyes.picture
    monkeypatch.setattr(eyes, "picture", lambda *given: decoded.append(1) or look(*given))
    Talk(tokenizer, CALL, CALL, "2", turn_tokens=90, tokens=900).run(by_openai)
    assert len(decoded) == len(SHOTS)
