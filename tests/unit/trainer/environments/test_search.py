"""The server of an index, and the environment `search` that asks it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.searches import ask, build_index, ready, write_corpus

from retrieval import serve
from retrieval.serve import Index
from trainer.environments import ENVIRONMENTS
from trainer.environments.policy import LimitReached, Limits, Policy, Request
from trainer.environments.search import VARIABLE, addresses, check, exact_match, retrieve
from trainer.environments.search import f1 as words_in_common
from trainer.episodes import Prompt, Turn
from trainer.errors import ConfigError
from trainer.models import character_tokenizer


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_index(write_corpus(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def server(index: Path) -> Iterator[str]:
    """Two processes, as the file beside the index runs them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [sys.executable, str(index / "serve.py"), "--port", str(port), "--processes", "2"]
    with subprocess.Popen(line, cwd="/") as process:
        yield ready(f"http://127.0.0.1:{port}", process)
        process.terminate()
        assert process.wait(20) == 0


def test_the_server_answers_as_search_r1s_does(server):
    """Request and reading are those of search_r1/llm_agent/generation.py."""
    found = ask(f"{server}/retrieve", queries=["capital of france", "dog"], topk=1, return_scores=True)["result"]
    contents = [[each["document"]["contents"] for each in one] for one in found]
    assert contents == [['"Paris"\nParis is the capital of France.'], ["A retriever is a dog that fetches."]]
    assert ask(f"{server}/retrieve", queries=[]) == {"result": []}
    plain = ask(f"{server}/retrieve", queries=["capital"])["result"]
    assert {each["id"] for each in plain[0]} == {"0", "1"}
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "retriever_queries_total 3.0" in text, "of both processes together"


@pytest.mark.parametrize(
    "body, said",
    [
        ({"queries": "a"}, "queries: 'a' is no list of texts"),
        ({"queries": [1]}, "is no list of texts"),
        ({"queries": ["a"] * 1025}, "queries: 1025; allowed are at most 1024"),
        ({"queries": ["a"], "topk": 0}, "topk: 0; allowed are 1 to 100"),
        ({"queries": ["a"], "topk": True}, "topk: True; allowed are 1 to 100"),
        ([], "the body is no JSON object"),
    ],
)
def test_a_request_that_is_wrong_is_refused_with_the_reason(server, body, said):
    request = urllib.request.Request(f"{server}/retrieve", json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 422 and said in json.load(caught.value)["detail"]


def test_requests_that_come_together_are_searched_together(index, monkeypatch):
    opened, sizes = Index(index), []
    whole = opened.search
    monkeypatch.setattr(opened, "search", lambda queries, k: sizes.append(len(queries)) or whole(queries, k))

    async def ten() -> list[Any]:
        together = serve.Together(opened)
        work = asyncio.create_task(together.work())
        found = await asyncio.gather(*(together.search(["capital"], 1 + number % 2) for number in range(10)))
        work.cancel()
        return found

    assert [len(one) for [one] in asyncio.run(ten())] == [1, 2] * 5
    assert sizes == [10]


def test_another_address_is_asked_where_one_is_gone_and_after_a_pause_again(server):
    dead = "http://127.0.0.1:9"
    [found] = asyncio.run(retrieve([dead, server], ["dog"], 1, 10))
    assert found[0]["document"]["id"] == "2"
    with pytest.raises(TimeoutError, match=r"no retriever answered within 0.6 s; the last said: http://127.0.0.1:9"):
        asyncio.run(retrieve([dead], ["dog"], 1, 0.6))
    with pytest.raises(ValueError, match=r"the retriever refused: .* 422 .*topk: 101"):
        asyncio.run(retrieve([server], ["dog"], 101, 10))


def test_a_process_of_the_server_that_is_killed_is_started_again(server):
    port = server.rpartition(":")[2]
    mine = [process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE]
    [parent] = [process for process in mine if port in process.cmdline()]
    child = next(each for each in parent.children() if "spawn_main" in " ".join(each.cmdline()))
    child.kill()
    for _ in range(20):
        [found] = asyncio.run(retrieve([server], ["dog"], 1, 30))
        assert found[0]["document"]["id"] == "2"


@pytest.mark.parametrize(
    "text, answer, em, f1",
    [
        (" The Beatles. ", "beatles", 1, 1),
        ("Paris, France", "Paris", 0, 2 / 3),
        ("", "Paris", 0, 0),
        ("an apple a day", "the apple", 0, 2 / 3),
    ],
)
def test_answers_are_compared_as_squad_does(text, answer, em, f1):
    assert exact_match(text, answer) == em and words_in_common(text, answer) == pytest.approx(f1)


@pytest.mark.parametrize(
    "args, said",
    [
        ({}, "environment.args.url is missing, as the stack has no service named retriever"),
        ({"url": "localhost:8000"}, "environment.args.url='localhost:8000' is not an address"),
        ({"url": "http://127.0.0.1:9"}, "no retriever answers; http://127.0.0.1:9: [Errno 111] Connection refused"),
        ({"url": "{server}", "score": "bleu"}, "environment.args.score='bleu'; allowed are em, f1"),
        ({"url": "{server}", "answers": "golden"}, "environment.args.answers='golden': the data have no such column, only prompt, answer"),
        ({"url": "{server}", "topk": 0}, "environment.args.topk=0; more than 0"),
        ({"url": "{server}", "document": "{page}"}, "environment.args.document='{page}': 'page'; known are {number}, {title}"),
    ],
)
def test_a_search_environment_that_could_not_work_is_refused_before_the_run(server, monkeypatch, args, said):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError) as caught:
        check({"prompt": "a", "answer": "b"}, **(args | ({"url": server} if args.get("url") == "{server}" else {})))
    assert said in str(caught.value)


def test_the_service_of_the_stack_is_asked_the_nodes_own_first(server, monkeypatch):
    monkeypatch.setenv(VARIABLE, server)
    monkeypatch.setenv(f"{VARIABLE}_ALL", f"http://127.0.0.1:9,{server}")
    assert addresses("") == [server, "http://127.0.0.1:9"]
    check({"prompt": "a", "answer": "b"})


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789<>/?.,:()\"' \n"


def play(server: str, *said: str, **args: Any) -> tuple[float, Policy, str]:
    """What an episode is worth whose policy says these, one after the other; and all of it as text, what is trained between bars."""
    tokenizer, texts = character_tokenizer(LETTERS), [*said]

    async def answer(request: Request) -> Turn:
        ids = tokenizer(texts.pop(0))["input_ids"]
        return Turn(ids, [-1.0] * len(ids), "stop")  # type: ignore[arg-type]

    row = {"prompt": "Capital?", "answer": ["berlin", "Paris"]}
    prompt = Prompt(0, tokenizer(row["prompt"])["input_ids"], row)  # type: ignore[arg-type]
    policy = Policy(prompt, tokenizer, Limits(len(said), 900, 4000, 60), answer)
    worth = asyncio.run(ENVIRONMENTS["search"](policy, row, url=server, **args))  # type: ignore[arg-type]
    [spoken] = policy.sequences
    whole = "".join(f"|{text}|" if turn.sampled else text for turn in spoken.turns for text in [str(tokenizer.decode(turn.token_ids))])
    return worth, policy, whole


def test_an_episode_searches_reads_and_answers_and_what_it_read_is_not_trained(server):
    worth, policy, whole = play(server, "<search> france </search>", "So <answer>Paris.</answer>", topk=1)
    assert worth == 1 and policy.metrics == {"searches": 1}
    read = '\n\n<information>Doc 1(Title: "Paris") Paris is the capital of France.\n</information>\n\n'
    assert whole == f"|<search> france </search>|{read}|So <answer>Paris.</answer>|"


def test_a_turn_without_query_and_answer_is_corrected_or_ends_it_and_what_is_too_long_is_cut(server):
    worth, policy, whole = play(server, "Hm", "<answer>the capital of Paris</answer>", score="f1")
    assert worth == pytest.approx(1 / 2) and policy.metrics == {"invalid": 1} and "My previous action is invalid" in whole
    worth, policy, whole = play(server, "Hm", correction="")
    assert worth == 0 and whole == "|Hm|"
    worth, policy, whole = play(server, "<search>dog</search>", "<answer></answer>", max_observation_tokens=7, document="{contents}")
    assert worth == 0 and policy.metrics == {"searches": 1, "cut": 1} and "<information>A retri</information>" in whole


def test_an_episode_without_turns_left_raises_its_limit(server):
    with pytest.raises(LimitReached, match=r"1 turns are over"):
        play(server, "<search>dog</search>")
