"""Search before the answer, as Search-R1 has it (https://arxiv.org/abs/2503.09516): turns of <search>, <information> and <answer>."""

from __future__ import annotations

import asyncio
import json
import os
import re
import string
import urllib.request
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from trainer.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

    from trainer.environments.policy import Policy

VARIABLE = "FLOTILLA_SERVICE_RETRIEVER"  # the node agent names the service `retriever` of the stack by it
SCORES = ("em", "f1")
TURN = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
DOCUMENT = "Doc {number}(Title: {title}) {text}\n"
CORRECTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
WAIT = 0.5  # seconds before the first address is asked again; twice as long each time, up to 8
ARTICLES = re.compile(r"\b(a|an|the)\b")
_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()


async def search(
    policy: Policy,
    row: dict[str, Any],
    url: str = "",
    topk: int = 3,
    answers: str = "answer",
    score: str = "em",
    max_observation_tokens: int = 500,
    document: str = DOCUMENT,
    correction: str = CORRECTION,
    timeout: float = 60,
) -> float:
    """1 where the text in <answer> is the row's answer (`em`), or its share of words in common with it (`f1`); 0 without one.

    - url: of the retriever, several with commas; default: of the stack's service `retriever`, the node's own first.
    - answers: the column of the data, a text or a list of texts of which one is enough.
    - document: how one found is written, with {number}, {title}, {text}, {contents}.
    - correction: what follows on a turn without query and answer; "" ends the episode.
    - timeout: seconds within which one of the addresses must answer.
    """
    known = row[answers] if isinstance(row[answers], list) else [row[answers]]
    answer = await policy.generate(stop=("</search>", "</answer>"))
    while True:
        found = TURN.search(answer.text)
        if found and found[1] == "answer":
            return max(SCORING[score](found[2], each) for each in known)
        if found:
            policy.metrics["searches"] += 1
            [documents] = await retrieve(addresses(url), [found[2].strip()], topk, timeout)
            observation = information(policy, documents, document, max_observation_tokens)
        elif correction:
            policy.metrics["invalid"] += 1
            observation = correction
        else:
            return 0.0
        answer = await policy.generate(observation=observation, stop=("</search>", "</answer>"))


def check(row: dict[str, Any], url: str = "", score: str = "em", answers: str = "answer", document: str = DOCUMENT, **rest: Any) -> None:
    """Before anything is started. Raises ConfigError."""
    if score not in SCORES:
        raise ConfigError(f"environment.args.score={score!r}; allowed are {', '.join(SCORES)}")
    if answers not in row:
        raise ConfigError(f"environment.args.answers={answers!r}: the data have no such column, only {', '.join(map(str, row))}")
    for name in ("topk", "max_observation_tokens", "timeout"):
        if (value := rest.get(name, 1)) <= 0:
            raise ConfigError(f"environment.args.{name}={value}; more than 0")
    try:
        document.format(number=1, title="", text="", contents="")
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(
            f"environment.args.document={document!r}: {error}; known are {{number}}, {{title}}, {{text}}, {{contents}}"
        ) from error
    wrong: list[str] = []
    for address in addresses(url):
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=10) as answer:
                json.load(answer)
            return
        except (OSError, ValueError) as error:
            wrong.append(f"{address}: {getattr(error, 'reason', error)}")
    raise ConfigError(f"environment.args.url: no retriever answers; {'; '.join(wrong)}; docs/search.md says how one is started")


search.check = check  # type: ignore[attr-defined]


def addresses(url: str) -> list[str]:
    """Of the retrievers, the nearest first. Raises ConfigError where there is none."""
    given = url or ",".join(filter(None, (os.environ.get(VARIABLE), os.environ.get(f"{VARIABLE}_ALL"))))
    found = [*dict.fromkeys(each.strip().removesuffix("/").removesuffix("/retrieve") for each in given.split(",") if each.strip())]
    if not found:
        raise ConfigError(
            f"environment.args.url is missing, as the stack has no service named retriever ({VARIABLE}); such as http://127.0.0.1:8000"
        )
    if wrong := [each for each in found if not each.startswith(("http://", "https://"))]:
        raise ConfigError(f"environment.args.url={wrong[0]!r} is not an address such as http://127.0.0.1:8000")
    return found


async def retrieve(urls: Sequence[str], queries: list[str], topk: int, timeout: float) -> list[list[dict[str, Any]]]:
    """What each query finds: {"document": {"contents": ...}, "score": ...}. Another address is asked where one does not answer.

    Raises TimeoutError where none has within `timeout` seconds.
    """
    import aiohttp

    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        _sessions[loop] = aiohttp.ClientSession()
    body, why, rounds = {"queries": queries, "topk": topk, "return_scores": True}, "", 0
    end = loop.time() + timeout
    while True:
        for url in urls:
            left = aiohttp.ClientTimeout(total=max(0.01, end - loop.time()))
            try:
                async with _sessions[loop].post(f"{url}/retrieve", json=body, timeout=left) as answer:
                    if answer.status == 200:
                        return (await answer.json())["result"]
                    why = f"{url}: {answer.status} {(await answer.text())[:200]}"
                    if answer.status < 500:
                        raise ValueError(f"the retriever refused: {why}")
            except (aiohttp.ClientError, TimeoutError, KeyError) as error:
                why = f"{url}: {type(error).__name__} {error}".strip()
        pause = min(8.0, WAIT * 2**rounds)
        if loop.time() + pause >= end:
            raise TimeoutError(f"no retriever answered within {timeout:g} s; the last said: {why}")
        await asyncio.sleep(pause)
        rounds += 1


def information(policy: Policy, documents: list[dict[str, Any]], document: str, most: int) -> str:
    """What the policy reads of them; what is beyond `most` tokens is cut, and counted as `cut`."""
    texts = []
    for number, each in enumerate(documents, 1):
        contents = str(each["document"]["contents"])
        title, _, text = contents.partition("\n")
        texts.append(document.format(number=number, title=title, text=text, contents=contents))
    text = "".join(texts)
    ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []  # type: ignore[assignment]
    if len(ids) > most:
        policy.metrics["cut"] += 1
        text = str(policy.tokenizer.decode(ids[:most]))
    return f"\n\n<information>{text}</information>\n\n"


def normal(text: str) -> str:
    """As SQuAD's evaluation has it: lower case, without punctuation, articles and spaces that say nothing (https://arxiv.org/abs/1606.05250)."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", plain).split())


def exact_match(text: str, answer: str) -> float:
    return float(normal(text) == normal(answer))


def f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall of words."""
    said, known = normal(text).split(), normal(answer).split()
    common = sum((Counter(said) & Counter(known)).values())
    return 2 * common / (len(said) + len(known)) if common else 0.0


SCORING = {"em": exact_match, "f1": f1}
