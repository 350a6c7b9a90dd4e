"""Agents that know nothing of training talk with a policy: by clients of OpenAI and Anthropic, and as programs of their own."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import anthropic
import openai
import pytest
from support.talks import CHARACTERS, CHATML, TOOL, Talk, with_template
from transformers import PreTrainedTokenizerFast

from trainer.environments.policy import LimitReached, Misuse, Policy
from trainer.models import character_tokenizer

CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'  # without the blanks that the template would write
ADD = TOOL["function"]
LOUD = {"temperature": 0.3, "top_p": 0.9}  # which the run's settings decide


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return with_template(character_tokenizer(CHARACTERS), CHATML)


async def by_openai(policy: Policy, **more: Any) -> list[Any]:
    """A tool is called and its result told, as OpenAI's documentation has it."""
    async with policy.endpoint() as api, openai.AsyncOpenAI(base_url=api.url, api_key=api.key, max_retries=0) as client:
        messages: list[Any] = [{"role": "system", "content": "hm"}, {"role": "user", "content": [{"type": "text", "text": "1+1"}]}]
        first = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL], max_tokens=80, **LOUD, **more)  # type: ignore[arg-type]
        choice = first.choices[0]
        [call] = choice.message.tool_calls or []
        assert json.loads(call.function.arguments) == {"a": 1}  # type: ignore[union-attr]
        messages += [choice.message, {"role": "tool", "content": "2", "tool_call_id": call.id}]
        second = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL], **more)  # type: ignore[arg-type]
        assert second.usage
        usage = second.usage.prompt_tokens, second.usage.completion_tokens
        return [choice.finish_reason, choice.message.content, second.choices[0].finish_reason, second.choices[0].message.content, usage]


async def by_responses(policy: Policy) -> list[Any]:
    """The same by OpenAI's Responses API."""
    async with policy.endpoint() as api, openai.AsyncOpenAI(base_url=api.url, api_key=api.key, max_retries=0) as client:
        said: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1+1"}]}]
        tools: list[Any] = [{"type": "function", **ADD, "strict": True}]
        first = await client.responses.create(model="any", instructions="hm", input=said, tools=tools, max_output_tokens=80)
        [call] = [item for item in first.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"a": 1}
        said += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        second = await client.responses.create(model="any", instructions="hm", input=said, tools=tools)
        assert second.usage and second.incomplete_details
        usage = second.usage.input_tokens, second.usage.output_tokens
        return [first.status, first.output_text, second.incomplete_details.reason, second.output_text, usage]


async def by_anthropic(policy: Policy) -> list[Any]:
    """The same as Anthropic's has it."""
    async with policy.endpoint() as api, anthropic.AsyncAnthropic(base_url=api.origin, api_key=api.key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "1+1"}]
        tools: list[Any] = [{"name": "add", "input_schema": ADD["parameters"]}]
        first = await client.messages.create(model="any", system="hm", messages=messages, tools=tools, max_tokens=80)
        [call] = [block for block in first.content if block.type == "tool_use"]
        assert call.input == {"a": 1}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2"}]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await client.messages.create(model="any", system="hm", messages=messages, tools=tools, max_tokens=80)
        texts = ["".join(block.text for block in message.content if block.type == "text") for message in (first, second)]
        usage = second.usage.input_tokens, second.usage.output_tokens
        return [first.stop_reason, texts[0], second.stop_reason, texts[1], usage]


@pytest.mark.parametrize(
    ("talk", "reasons"),
    [
        (by_openai, ("tool_calls", "length")),
        (by_responses, ("completed", "max_output_tokens")),
        (by_anthropic, ("tool_use", "max_tokens")),
    ],
    ids=["openai", "responses", "anthropic"],
)
def test_clients_of_all_lengthen_one_sequence_of_the_tokens_that_were_written(tokenizer, talk, reasons):
    told: list[Any] = []

    async def listening(policy: Policy) -> None:
        told.extend(await talk(policy))

    made = Talk(tokenizer, f"hm {CALL}", "2...", turn_tokens=90)
    [sequence] = made.run(listening)
    assert f"[system]hm<eos>\n[user]1+1<eos>\n[assistant]|hm {CALL}<eos>|\n[tool]2<eos>\n[assistant]|2|" in sequence
    assert told == [reasons[0], "hm", reasons[1], "2", (len(made.requests[1].token_ids), 1)]
    assert made.requests[0].max_tokens == 80


@pytest.mark.parametrize("stream", ["openai", "responses", "anthropic"])
def test_answers_come_as_streams_too(tokenizer, stream):
    async def talk(policy: Policy) -> None:
        async with policy.endpoint() as api:
            if stream == "openai":
                client = openai.AsyncOpenAI(base_url=api.url, api_key=api.key)
                tools: Any = [{**TOOL, "function": {**ADD, "strict": True}}]
                messages: Any = [{"role": "user", "content": "1"}]
                async with client.chat.completions.stream(model="any", messages=messages, tools=tools) as events:
                    whole = await events.get_final_completion()
                calls: Any = whole.choices[0].message.tool_calls
                assert (whole.choices[0].message.content, json.loads(calls[0].function.arguments)) == ("hm", {"a": 1})
            elif stream == "responses":
                client = openai.AsyncOpenAI(base_url=api.url, api_key=api.key)
                async with client.responses.stream(model="any", input="1", tools=[{"type": "function", **ADD, "strict": True}]) as happened:  # type: ignore[list-item]
                    answer: Any = await happened.get_final_response()
                assert answer.output_text == "hm" and json.loads(answer.output[1].arguments) == {"a": 1}
            else:
                other = anthropic.AsyncAnthropic(base_url=api.origin, api_key=api.key)
                tools = [{"name": "add", "input_schema": ADD["parameters"]}]
                async with other.messages.stream(
                    model="any", max_tokens=90, messages=[{"role": "user", "content": "1"}], tools=tools
                ) as events:
                    message: Any = await events.get_final_message()
                assert [block.type for block in message.content] == ["text", "tool_use"] and message.content[1].input == {"a": 1}

    Talk(tokenizer, f"hm {CALL}", turn_tokens=90).run(talk)


async def refused(policy: Policy, path: str = "/chat/completions", key: str = "", **body: Any) -> tuple[int, str]:
    import aiohttp

    async with policy.endpoint() as api, aiohttp.ClientSession() as session:
        given = {"model": "any", **body}
        if "input" not in given:
            given = {"messages": [{"role": "user", "content": "1"}], **given}
        headers = {"Authorization": f"Bearer {key or api.key}"}
        async with session.post(f"{api.url}{path}", json=given, headers=headers) as answer:
            told = await answer.json()
    return answer.status, told["error"]["message"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"n": 2}, r"n: 2; ask 2 times for 2 answers"),
        ({"logprobs": True}, r"logprobs: the run keeps them"),
        ({"response_format": {"type": "json_object"}}, r"response_format: only text"),
        ({"tool_choice": "required"}, r"tool_choice: 'required'; the policy chooses: auto or none"),
        ({"messages": []}, r"messages: a list of at least one message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            r"content of user: 'input_audio'; the policy reads text and pictures",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}]}, "f are not JSON"),
        ({"messages": [{"role": "tool", "tool_calls": [{}]}]}, r"the request is not understood: KeyError\('id'\)"),
        ({"path": "/responses", "input": []}, r"input: a text, or a list of at least one item"),
        ({"path": "/responses", "input": "1", "previous_response_id": "r"}, r"previous_response_id: nothing is kept between requests"),
        ({"path": "/responses", "input": "1", "tools": [{"type": "web_search"}]}, r"tools: 'web_search'; only functions"),
        ({"path": "/responses", "input": "1", "tool_choice": "required"}, r"tool_choice: 'required'; the policy chooses"),
        ({"path": "/responses", "input": "1", "text": {"format": {"type": "json_schema"}}}, r"text.format: only text"),
        ({"path": "/responses", "input": [{"type": "item_reference", "id": "1"}]}, r"input: an item of type 'item_reference'"),
        (
            {"path": "/responses", "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            r"content of user: image_url None; only data: URLs are read, and nothing is fetched",
        ),
        *(({"max_tokens": wrong}, rf"^max_tokens: {wrong!r}; must be an integer >= 1$") for wrong in (0, -1, True, 1.5, "5")),
        ({"max_completion_tokens": 0, "max_tokens": 5}, r"^max_completion_tokens: 0; must be an integer"),
        ({"path": "/messages", "max_tokens": 0}, r"^max_tokens: 0; must be an integer"),
        ({"path": "/responses", "input": "1", "max_output_tokens": -1}, r"^max_output_tokens: -1; must be an integer"),
        ({"functions": [{"name": "f"}], "top_logprobs": 2}, r"^functions, top_logprobs: not supported here; the fields are include_stop"),
        ({"guided_json": {"type": "object"}}, r"^guided_json: not supported here"),
        (
            {"path": "/messages", "mcp_servers": [{}]},
            r"^mcp_servers: not supported here; the fields are max_tokens, messages, model, stop_",
        ),
        (
            {"path": "/responses", "input": "1", "background": True},
            r"^background: not supported here; the fields are conversation, include",
        ),
        (
            {"path": "/responses", "input": "1", "include": ["message.output_text.logprobs"]},
            r"^include: message.output_text.logprobs; the run",
        ),
        ({"path": "/responses", "input": "1", "truncation": "auto"}, r"^truncation: 'auto'; nothing is cut: disabled"),
        ({"stop": [""]}, r"^stop: \[''\]; a text, or a list of texts, none of them empty"),
        ({"stop": 5}, r"^stop: 5; a text"),
        ({"path": "/messages", "stop_sequences": [5]}, r"^stop_sequences: \[5\]; a text"),
        ({"stream_options": {"include_usage": True}}, r"^stream_options: stream is not set; set it, or leave it out"),
        ({"modalities": ["text", "audio"]}, r"^modalities: \['text', 'audio'\]; text alone"),
        (
            {"messages": [{"role": "function", "content": "1"}]},
            r"^messages: role 'function'; allowed are system, developer, user, assistant, tool$",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            r"^messages: function_call of assistant: not supported here",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]},
            r"^the last message is a tool call of the assistant; what came of it must follow",
        ),
        ({"path": "/messages", "tool_choice": {"type": "any"}}, r"tool_choice: 'any'"),
        ({"path": "/messages", "thinking": {"type": "enabled"}}, r"thinking: 'enabled'"),
        ({"path": "/messages", "tools": [{"type": "web_search", "name": "web"}]}, r"tools: 'web' has no input_schema"),
        (
            {"path": "/messages", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"an image whose source has the type None; only base64",
        ),
    ],
)
def test_what_the_policy_cannot_do_is_refused_by_name(tokenizer, body, text):
    async def talk(policy: Policy) -> None:
        status, told = await refused(policy, **body)
        assert status == 400
        assert re.search(text, told), told

    Talk(tokenizer).run(talk)


def test_a_text_that_ends_an_answer_is_named_and_is_no_part_of_it(tokenizer):
    messages: Any = [{"role": "user", "content": "1"}]

    async def talk(policy: Policy) -> None:
        async with policy.endpoint() as api:
            asks = openai.AsyncOpenAI(base_url=api.url, api_key=api.key).chat.completions.create
            first = (await asks(model="any", messages=messages, stop=["end"])).choices[0]
            assert (first.message.content, first.finish_reason) == ("12. ", "stop")
            history = [*messages, first.message, {"role": "user", "content": "2"}]
            kept = (await asks(model="any", messages=history, stop="end", extra_body={"include_stop_str_in_output": True})).choices[0]
            assert kept.message.content == "4 end"
            said = await anthropic.AsyncAnthropic(base_url=api.origin, api_key=api.key).messages.create(
                model="any", messages=messages, max_tokens=50, stop_sequences=["or", "end"]
            )
            assert [said.content[0].text, said.stop_reason, said.stop_sequence] == ["5 ", "stop_sequence", "end"]  # type: ignore[union-attr]

    made = Talk(tokenizer, "12. end|", "4 end|", "5 end|").run(talk)
    assert made[0] == "[user]1<eos>\n[assistant]|12. end|<eos>\n[user]2<eos>\n[assistant]|4 end|"


def test_a_text_that_ends_an_answer_is_not_written_again_where_the_template_has_it(tokenizer):
    async def talk(policy: Policy) -> None:
        async with policy.endpoint() as api:
            asks = openai.AsyncOpenAI(base_url=api.url, api_key=api.key).chat.completions.create
            messages: Any = [{"role": "user", "content": "1"}]
            first = (await asks(model="any", messages=messages, stop=["?"])).choices[0]
            again: Any = [*messages, first.message, *messages]
            await asks(model="any", messages=again)

    textual = "{% for m in messages %}[{{ m.role }}]{{ m.content }}?\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    made = Talk(with_template(tokenizer, textual), "2?|", "3").run(talk)
    assert made == ["[user]1?\n[assistant]|2?|\n[user]1?\n[assistant]|3<eos>|"]


def test_a_stream_says_what_it_took_only_where_that_is_asked(tokenizer):
    async def talk(policy: Policy) -> None:
        async with policy.endpoint() as api:
            asks = openai.AsyncOpenAI(base_url=api.url, api_key=api.key).chat.completions.create
            messages: Any = [{"role": "user", "content": "1"}]
            plain = [chunk async for chunk in await asks(model="any", messages=messages, stream=True)]
            assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in plain)
            counted = [
                chunk async for chunk in await asks(model="any", messages=messages, stream=True, stream_options={"include_usage": True})
            ]
            assert [len(chunk.choices) for chunk in counted] == [1, 1, 0]
            assert counted[-1].usage and counted[-1].usage.completion_tokens == 2

    Talk(tokenizer, "2", "2").run(talk)


def test_a_last_message_of_the_assistant_is_gone_on_with_and_then_is_one_message(tokenizer):
    async def talk(policy: Policy) -> None:
        async with policy.endpoint() as api:
            client = anthropic.AsyncAnthropic(base_url=api.origin, api_key=api.key)
            messages: Any = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "it is"}]
            said = await client.messages.create(model="any", messages=messages, max_tokens=50)
            assert said.content[0].text == " 2"  # type: ignore[union-attr]
            history: Any = [messages[0], {"role": "assistant", "content": "it is 2"}, {"role": "user", "content": "3"}]
            await client.messages.create(model="any", messages=history, max_tokens=50)

    made = Talk(tokenizer, " 2", "4").run(talk)
    assert made == ["[user]1<eos>\n[assistant]it is| 2<eos>|\n[user]3<eos>\n[assistant]|4<eos>|"]


def test_tokens_are_counted_as_the_policy_would_read_them(tokenizer):
    async def talk(policy: Policy) -> None:
        async with policy.endpoint() as api:
            client = anthropic.AsyncAnthropic(base_url=api.origin, api_key=api.key)
            messages: Any = [{"role": "user", "content": "1"}]
            tools: Any = [{"name": "add", "input_schema": ADD["parameters"]}]
            counted = await client.messages.count_tokens(model="any", messages=messages, tools=tools, system="hm")
            said = await client.messages.create(model="any", messages=messages, tools=tools, system="hm", max_tokens=9)
            assert counted.input_tokens == said.usage.input_tokens

    Talk(tokenizer, "2").run(talk)


def test_a_key_is_good_for_its_episode_while_that_is_open(tokenizer):
    async def talk(policy: Policy) -> None:
        assert await refused(policy, key="guessed") == (401, "this key is of no episode that is played now")
        status, told = await refused(policy, path="/embeddings")
        assert status == 404 and told.startswith("POST /v1/embeddings: not here; there are POST /v1/chat/completions, POST /v1/responses")
        async with policy.endpoint() as api:
            client = openai.AsyncOpenAI(base_url=api.url, api_key=api.key, max_retries=0)
            assert [model.id async for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1"}])

    Talk(tokenizer).run(talk)


def test_an_agent_that_fails_at_a_limit_has_reached_it_and_one_that_goes_on_has_not(tokenizer):
    seen = []

    async def goes_on(policy: Policy) -> None:
        async with policy.endpoint() as api:
            client = openai.AsyncOpenAI(base_url=api.url, api_key=api.key)
            ask: Any = {"model": "any", "messages": [{"role": "user", "content": "1"}]}
            await client.chat.completions.create(**ask)
            try:
                await client.chat.completions.create(**ask)
            except openai.BadRequestError as error:
                seen.append(error.code)
                if policy.metrics["fails"]:
                    raise

    Talk(tokenizer, "2", turns=1).run(goes_on)
    talk = Talk(tokenizer, "2", turns=1)
    talk.policy.metrics["fails"] = 1
    with pytest.raises(LimitReached, match=r"1 turns are over \(environment.max_turns\)"):
        asyncio.run(goes_on(talk.policy))
    assert seen == ["context_length_exceeded"] * 2


def test_tools_that_the_template_leaves_out_end_the_run_even_where_the_agent_goes_on(tokenizer):
    async def talk(policy: Policy) -> None:
        async with policy.endpoint() as api:
            client = openai.AsyncOpenAI(base_url=api.url, api_key=api.key)
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1"}], tools=[TOOL])  # type: ignore[list-item]

    with pytest.raises(Misuse, match="template leaves tools out"):
        asyncio.run(talk(Talk(with_template(tokenizer, CHATML.replace("[tools]{{ tools | tojson }}<eos>\n", "")), "2").policy))
