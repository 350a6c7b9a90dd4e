"""Requests and answers of OpenAI's and Anthropic's APIs, in the words of `policy.Policy.reply`, and back. Pure functions.

https://platform.openai.com/docs/api-reference/chat and https://docs.anthropic.com/en/api/messages: text, pictures and tools. What the
policy cannot do, such as a tool that must be called, is refused, and so are fields that are not known (`fields.py`); temperature and the
like are ignored, as the run's settings say how it is sampled. A last message of the assistant is gone on with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.environments.fields import Json, Refused, limit, require, texts
from trainer.environments.policy import Message, Reply

OPENAI = (
    *("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"),
    *("n", "logprobs", "response_format", "modalities", "include_stop_str_in_output"),
)
ANTHROPIC = ("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "thinking")
PICTURES = ("image_url", "input_image", "image")  # blocks: of OpenAI's two APIs, of Anthropic's
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Asked:
    """A request, as the policy takes it."""

    messages: list[Message]
    tools: list[Any]
    max_tokens: int | None
    stop: tuple[str, ...]
    model: str
    stream: bool
    usage: bool = False  # a stream says at its end what the answer took
    keep_stop: bool = False  # the text that ended an answer is a part of it, as vLLM's API has it


class Dialect(Protocol):
    def read(self, body: Json) -> Asked:
        """Raises Refused."""
        ...

    def answer(self, asked: Asked, reply: Reply, number: str) -> Json: ...

    def events(self, asked: Asked, reply: Reply, number: str) -> Iterator[tuple[str, str]]:
        """The same answer as a stream, all at once: the name of each event, "" where it has none, and its data."""
        ...

    def error(self, status: int, text: str, code: str | None = None) -> Json: ...


class OpenAi:
    """POST /v1/chat/completions."""

    def read(self, body: Json) -> Asked:
        require(body, OPENAI)
        _one_answer(body, "n", 1)
        if body.get("logprobs"):
            raise Refused("logprobs: the run keeps them; leave it out")
        if (body.get("response_format") or {"type": "text"}).get("type") != "text":
            raise Refused("response_format: only text; there is no guided decoding")
        if (choice := body.get("tool_choice") or "auto") not in ("auto", "none"):
            raise Refused(f"tool_choice: {choice!r}; the policy chooses: auto or none")
        if (kinds := body.get("modalities") or ["text"]) != ["text"]:
            raise Refused(f"modalities: {kinds}; text alone")
        stream, options = bool(body.get("stream")), body.get("stream_options") or {}
        if options and not stream:
            raise Refused("stream_options: stream is not set; set it, or leave it out")
        return Asked(
            messages=[_openai_message(message) for message in _messages(body)],
            tools=[] if choice == "none" else list(body.get("tools") or []),
            max_tokens=limit(body, "max_completion_tokens", "max_tokens"),
            stop=texts(body, "stop"),
            model=_model(body),
            stream=stream,
            usage=bool(options.get("include_usage")),
            keep_stop=bool(body.get("include_stop_str_in_output")),
        )

    def answer(self, asked: Asked, reply: Reply, number: str) -> Json:
        choice = {"index": 0, "message": self._message(reply), "finish_reason": self._finish(reply), "logprobs": None}
        return self._head(asked, number, "chat.completion") | {"choices": [choice], "usage": self._usage(reply)}

    def events(self, asked: Asked, reply: Reply, number: str) -> Iterator[tuple[str, str]]:
        head = self._head(asked, number, "chat.completion.chunk") | ({"usage": None} if asked.usage else {})
        message = self._message(reply)
        for i, call in enumerate(message.get("tool_calls", [])):
            call["index"] = i
        for delta, finish in ((message, None), ({}, self._finish(reply))):
            yield "", json.dumps(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
        if asked.usage:
            yield "", json.dumps(head | {"choices": [], "usage": self._usage(reply)})
        yield "", "[DONE]"

    def error(self, status: int, text: str, code: str | None = None) -> Json:
        return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}

    def _head(self, asked: Asked, number: str, kind: str) -> Json:
        return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": asked.model}

    def _message(self, reply: Reply) -> Json:
        calls = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in reply.message.get("tool_calls", [])
        ]
        return {"role": "assistant", "content": reply.message["content"], **({"tool_calls": calls} if calls else {})}

    def _finish(self, reply: Reply) -> str:
        return "tool_calls" if reply.message.get("tool_calls") else reply.finish

    def _usage(self, reply: Reply) -> Json:
        total = reply.prompt_tokens + reply.tokens
        return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.tokens, "total_tokens": total}


class Anthropic:
    """POST /v1/messages."""

    def read(self, body: Json) -> Asked:
        require(body, ANTHROPIC)
        if (choice := (body.get("tool_choice") or {"type": "auto"}).get("type")) not in ("auto", "none"):
            raise Refused(f"tool_choice: {choice!r}; the policy chooses: auto or none")
        if (thinking := (body.get("thinking") or {"type": "disabled"}).get("type")) != "disabled":
            raise Refused(f"thinking: {thinking!r}; the policy writes what it was trained to; leave it out")
        system = _text(body.get("system") or "", "system")
        messages = [{"role": "system", "content": system}] if system else []
        for message in _messages(body):
            messages += _anthropic_message(message)
        tools = [] if choice == "none" else [_anthropic_tool(tool) for tool in body.get("tools") or []]
        return Asked(messages, tools, limit(body, "max_tokens"), texts(body, "stop_sequences"), _model(body), bool(body.get("stream")))

    def answer(self, asked: Asked, reply: Reply, number: str) -> Json:
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.tokens}
        return {
            **{"id": f"msg_{number}", "type": "message", "role": "assistant", "model": asked.model, "content": self._blocks(reply)},
            **{"stop_reason": (reason := self._finish(reply)), "stop_sequence": reply.stop if reason == "stop_sequence" else None},
            **{"usage": usage},
        }

    def events(self, asked: Asked, reply: Reply, number: str) -> Iterator[tuple[str, str]]:
        whole = self.answer(asked, reply, number)
        blocks, end = whole["content"], {key: whole[key] for key in ("stop_reason", "stop_sequence")}
        yield _event({"type": "message_start", "message": whole | {"content": [], "stop_reason": None, "stop_sequence": None}})
        for i, block in enumerate(blocks):
            if block["type"] == "text":
                empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield _event({"type": "content_block_start", "index": i, "content_block": empty})
            yield _event({"type": "content_block_delta", "index": i, "delta": delta})
            yield _event({"type": "content_block_stop", "index": i})
        yield _event({"type": "message_delta", "delta": end, "usage": whole["usage"]})
        yield _event({"type": "message_stop"})

    def error(self, status: int, text: str, code: str | None = None) -> Json:
        kind = {401: "authentication_error", 404: "not_found_error"}.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": text}}

    def _blocks(self, reply: Reply) -> list[Json]:
        calls = [
            {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": call["function"]["arguments"]}
            for call in reply.message.get("tool_calls", [])
        ]
        text = reply.message["content"]
        return [*([{"type": "text", "text": text}] if text or not calls else []), *calls]

    def _finish(self, reply: Reply) -> str:
        if reply.message.get("tool_calls"):
            return "tool_use"
        if reply.stop is not None:
            return "stop_sequence"
        return "end_turn" if reply.finish == "stop" else "max_tokens"


def _event(data: Json) -> tuple[str, str]:
    return data["type"], json.dumps(data)


def _model(body: Json) -> str:
    return str(body.get("model") or "policy")


def _one_answer(body: Json, key: str, allowed: int) -> None:
    if (value := body.get(key) or allowed) != allowed:
        raise Refused(f"{key}: {value}; ask {value} times for {value} answers")


def _messages(body: Json) -> list[Json]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise Refused("messages: a list of at least one message")
    return messages


def _role(message: Json) -> str:
    if (role := message.get("role")) not in ROLES:
        raise Refused(f"messages: role {role!r}; allowed are {', '.join(ROLES)}")
    return role


def _text(content: Any, where: str) -> str:
    """Of a text, or of blocks of text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for block in content:
        if isinstance(block, Mapping) and block.get("type") == "text":
            texts.append(str(block["text"]))
        elif not (isinstance(block, Mapping) and block.get("type") in ("thinking", "redacted_thinking")):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise Refused(f"{where}: {kind!r}; the policy reads text and pictures")
    return "".join(texts)


def _content(content: Any, where: str) -> Any:
    """Of a text, or of blocks of text and pictures: a text where there is no picture."""
    if content is None or isinstance(content, str) or not any(map(_is_picture, content)):
        return _text(content, where)
    parts = [_picture(block, where) if _is_picture(block) else {"type": "text", "text": _text([block], where)} for block in content]
    return [part for part in parts if part.get("text") != ""]


def _is_picture(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") in PICTURES


def _picture(block: Mapping[str, Any], where: str) -> Json:
    """As `chat.pictures` takes it: its data alone, as no client reads files of this machine, and nothing is fetched."""
    if block["type"] == "image":
        source = block.get("source")
        kind = source.get("type") if isinstance(source, Mapping) else None
        if not isinstance(source, Mapping) or kind != "base64":
            raise Refused(f"{where}: an image whose source has the type {kind!r}; only base64 is read, and nothing is fetched")
        return {"type": "image", "source": {"type": "base64", "data": source.get("data")}}
    url = block.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or not url.startswith("data:"):
        shown = f"{url[:60]!r}" if isinstance(url, str) else f"{url!r}"
        raise Refused(f"{where}: image_url {shown}; only data: URLs are read, and nothing is fetched")
    return {"type": "image_url", "image_url": url}


def _openai_message(message: Json) -> Message:
    """Only what a chat template reads; clients send more of their own."""
    role = {"developer": "system"}.get(_role(message), _role(message))
    if unknown := [key for key in ("audio", "function_call") if message.get(key)]:
        raise Refused(f"messages: {', '.join(unknown)} of {role}: not supported here; texts and tool_calls are read")
    read: Message = {"role": role, "content": _content(message.get("content"), f"messages: content of {role}")}
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": _arguments(call)}}
            for call in calls
        ]
    return read | {key: message[key] for key in ("tool_call_id", "name") if message.get(key)}


def _arguments(call: Json) -> Any:
    given = call["function"].get("arguments") or "{}"
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise Refused(f"messages: tool_calls: arguments of {call['function']['name']} are not JSON: {error}") from error


def _anthropic_message(message: Json) -> list[Message]:
    """One of Anthropic's: results of tools are messages of their own."""
    role, content = _role(message), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    results = [block for block in blocks if block.get("type") == "tool_result"]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    rest = [block for block in blocks if block.get("type") not in ("tool_result", "tool_use")]
    messages: list[Message] = [
        {"role": "tool", "content": _content(block.get("content"), "messages: tool_result"), "tool_call_id": block["tool_use_id"]}
        for block in results
    ]
    if rest or calls or not results:
        own: Message = {"role": role, "content": _content(rest, f"messages: content of {role}")}
        if calls:
            own["tool_calls"] = [
                {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block.get("input") or {}}}
                for block in calls
            ]
        messages.append(own)
    return messages


def _anthropic_tool(tool: Json) -> Json:
    if "input_schema" not in tool:
        raise Refused(f"tools: {tool.get('name')!r} has no input_schema; tools that the server would run are not there")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}
