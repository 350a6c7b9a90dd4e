"""OpenAI's Responses API, POST /v1/responses, in the words of its chat API. Pure functions.

https://platform.openai.com/docs/api-reference/responses: text, pictures and tools. Nothing is kept between requests, so each
has the whole input.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.environments.dialects import Asked, OpenAi
from trainer.environments.fields import Json, Refused, limit, require
from trainer.environments.policy import Reply

FIELDS = (
    *("model", "input", "instructions", "max_output_tokens", "tools", "tool_choice", "stream", "text"),
    *("previous_response_id", "conversation", "include", "truncation"),
)
KEPT = ["reasoning.encrypted_content"]  # of `include`: there is none, as nothing is kept
TEXTS = ("input_text", "output_text")


class Responses(OpenAi):
    """Its errors are those of the chat API."""

    def read(self, body: Json) -> Asked:
        require(body, FIELDS)
        for key in ("previous_response_id", "conversation"):
            if body.get(key):
                raise Refused(f"{key}: nothing is kept between requests; send the complete input")
        if others := [each for each in body.get("include") or [] if each not in KEPT]:
            raise Refused(f"include: {', '.join(map(str, others))}; the run keeps what it needs; leave it out")
        if (cut := body.get("truncation") or "disabled") != "disabled":
            raise Refused(f"truncation: {cut!r}; nothing is cut: disabled")
        if ((body.get("text") or {}).get("format") or {"type": "text"}).get("type") != "text":
            raise Refused("text.format: only text; there is no guided decoding")
        given = {key: body[key] for key in ("model", "stream", "tool_choice") if body.get(key)}
        given["messages"] = _messages(body)
        given["max_tokens"] = limit(body, "max_output_tokens")
        given["tools"] = [_tool(tool) for tool in body.get("tools") or []]
        return super().read(given)

    def answer(self, asked: Asked, reply: Reply, number: str) -> Json:
        output: list[Json] = []
        calls = self._message(reply).get("tool_calls", [])
        if reply.message["content"] or not calls:
            text = {"type": "output_text", "text": reply.message["content"], "annotations": []}
            output.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [text]})
        output += [
            {"type": "function_call", "id": f"fc_{number}_{i}", "call_id": call["id"], "status": "completed", **call["function"]}
            for i, call in enumerate(calls)
        ]
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.tokens, "total_tokens": reply.prompt_tokens + reply.tokens}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        cut = reply.finish == "length" and not calls
        return {
            **{"id": f"resp_{number}", "object": "response", "created_at": int(time.time()), "model": asked.model, "output": output},
            **{"status": "incomplete" if cut else "completed", "incomplete_details": {"reason": "max_output_tokens"} if cut else None},
            **{"error": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": usage},
        }

    def events(self, asked: Asked, reply: Reply, number: str) -> Iterator[tuple[str, str]]:
        for sequence, event in enumerate(self._events(self.answer(asked, reply, number))):
            yield event["type"], json.dumps(event | {"sequence_number": sequence})

    def _events(self, whole: Json) -> Iterator[Json]:
        yield {"type": "response.created", "response": whole | {"status": "in_progress", "output": [], "usage": None}}
        for i, item in enumerate(whole["output"]):
            place = {"item_id": item["id"], "output_index": i}
            is_text = item["type"] == "message"
            empty: Json = {"content": []} if is_text else {"arguments": ""}
            yield {"type": "response.output_item.added", "output_index": i, "item": item | {"status": "in_progress"} | empty}
            if is_text:
                [part] = item["content"]
                place |= {"content_index": 0}
                yield {"type": "response.content_part.added", **place, "part": part | {"text": ""}}
                yield {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []}
                yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
                yield {"type": "response.content_part.done", **place, "part": part}
            else:
                said = item["arguments"]
                yield {"type": "response.function_call_arguments.delta", **place, "delta": said}
                yield {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": said}
            yield {"type": "response.output_item.done", "output_index": i, "item": item}
        yield {"type": f"response.{whole['status']}", "response": whole}


def _messages(body: Json) -> list[Json]:
    """As the chat API has them. What the policy said in one turn comes as several items: a text, and each call."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items or not all(isinstance(item, Mapping) for item in items):
        raise Refused("input: a text, or a list of at least one item")
    messages: list[Json] = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    said: Json | None = None  # the policy's turn that goes on
    for item in items:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            continue
        if kind == "function_call_output":
            said = None
            messages.append({"role": "tool", "content": _content(item["output"]), "tool_call_id": item["call_id"]})
        elif kind == "function_call" or (kind == "message" and item["role"] == "assistant"):
            if said is None or kind == "message":
                said = {"role": "assistant", "content": ""}
                messages.append(said)
            if kind == "message":
                said["content"] = _content(item["content"])
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                said.setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})
        elif kind == "message":
            said = None
            messages.append({"role": item["role"], "content": _content(item["content"])})
        else:
            raise Refused(f"input: an item of type {kind!r}; the policy reads messages, function_call and function_call_output")
    return messages


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [{**part, "type": "text"} if part.get("type") in TEXTS else part for part in content]


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise Refused(f"tools: {tool.get('type')!r}; only functions; tools that a server would run do not exist")
    return {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}}
