"""Agents that are programs of their own talk with a policy."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from support.talks import CHARACTERS, CHATML, with_template
from transformers import PreTrainedTokenizerFast

from trainer import environments
from trainer.environments.policy import Limits
from trainer.environments.runner import Asked, Job, Runner
from trainer.episodes import Prompt, Turn
from trainer.errors import ConfigError
from trainer.models import character_tokenizer
from trainer.rewards.terms import Reward

PROGRAM = """
    import json, os, sys, urllib.request
    row = json.load(sys.stdin)
    def ask(text):
        body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}).encode()
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return with_template(character_tokenizer(CHARACTERS), CHATML)


def program(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "agent.py"
    file.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(text))
    return [sys.executable, str(file)]


def played(tokenizer: PreTrainedTokenizerFast, seconds: float = 120, texts: tuple[str, ...] = ("2",), **args: Any) -> Any:
    """What one episode of the environment `agent` comes to, in a runner as a run has it."""
    function = environments.resolve("agent", args)
    runner = Runner(Reward("agent", function, batched=False, awaited=True), tokenizer, Limits(9, 50, 500, seconds))
    runner.begin([Job((0, 0), Prompt(0, [5], {"prompt": "1", "answer": "2"}), 7)])
    said = iter(texts)

    def turn(asked: Asked) -> Turn:
        ids: Any = tokenizer(next(said) + "<eos>", add_special_tokens=False)["input_ids"]
        return Turn(ids, [-0.5] * len(ids), "stop")

    while True:
        asked, ended = runner.advance(whole=True)
        if ended:
            return ended[0]
        runner.answer({each.name: turn(each) for each in asked})


def test_a_program_asks_and_its_last_line_is_the_reward(tokenizer, tmp_path):
    command = program(tmp_path, "said = ask(row['prompt']); print('said', said); print(0.5 if said == row['answer'] else 0)")
    ended = played(tokenizer, command=command)
    assert (ended.reward, ended.mistake) == (0.5, None)
    assert [spoken.said for spoken in ended.sequences] == ["2"]


def test_what_a_program_prints_may_be_scored_by_a_reward_function(tokenizer, tmp_path):
    command = program(tmp_path, "print(ask(row['prompt']))")
    assert played(tokenizer, command=command, reward="exact").reward == 1
    assert played(tokenizer, command=command, reward="exact", texts=("3",)).reward == 0
    assert played(tokenizer, command=command, reward="format_regex", reward_args={"pattern": "[0-9]"}).reward == 1


def test_a_program_sees_no_secret_of_the_run_and_the_same_seed_again(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("SEARCH_KEY", "given")
    said = "e = os.environ; print(json.dumps([e.get('WANDB_API_KEY'), e.get('SEARCH_KEY'), e['MODE'], int(e['FLOTILLA_EPISODE_SEED'])]))"
    command = program(tmp_path, said)
    results = [played(tokenizer, command=command, pass_env=["SEARCH_KEY"], env={"MODE": "fast"}).mistake.text for _ in range(2)]
    assert results[0] == results[1]
    assert results[0].startswith("returned [None, 'given', 'fast', ")


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("print('?', file=sys.stderr); sys.exit(3)", r"python\S* ended with exit code 3: \?"),
        ("print('done')", r"its last line is 'done'; a number or an object of terms, in JSON, is needed \(or args.reward\)"),
        ("", r"its last line is ''; a number"),
        ("print('{\"right\": 1}')", r"returned the terms right, which have no weights; set reward.weights"),
    ],
)
def test_a_program_that_fails_has_a_reason(tokenizer, tmp_path, text, mistake):
    ended = played(tokenizer, command=program(tmp_path, text))
    assert ended.reward == 0
    assert ended.mistake is not None and re.search(mistake, ended.mistake.text), ended.mistake


def test_a_program_that_hangs_is_ended_with_all_that_it_started(tokenizer, tmp_path):
    file = tmp_path / "pid"
    text = f"import subprocess; child = subprocess.Popen(['sleep', '600']); open({str(file)!r}, 'w').write(str(child.pid)); child.wait()"
    begin = time.monotonic()
    ended = played(tokenizer, seconds=10, command=program(tmp_path, text))
    assert ended.mistake.text == "did not end within 10 s (environment.timeout)"
    assert time.monotonic() - begin < 300
    child = Path(f"/proc/{int(file.read_text())}/stat")
    for _ in range(600):
        if not child.exists() or child.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("its child goes on")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"command": "python agent.py"}, r"environment\.args\.command: 'python agent\.py'; a list of words is needed"),
        ({"command": []}, r"environment\.args\.command: \[\]; a list of words is needed"),
        (
            {"command": ["no-such-agent"]},
            r"environment\.args\.command: no-such-agent: no such program on PATH, or below the working directory",
        ),
        ({"command": ["sh"], "cwd": "/no/such"}, r"environment\.args\.cwd: /no/such: no such folder"),
        ({"command": ["sh"], "pass_env": ["NO_SUCH_KEY"]}, r"environment\.args\.pass_env: NO_SUCH_KEY: not set where the run starts"),
        ({"command": ["sh"], "reward": "exakt"}, r"environment\.args.*exakt.*did you mean 'exact'"),
        (
            {"command": ["sh"], "reward": "overlong", "reward_args": {"max_length": 9, "buffer": 1}},
            r"overlong looks at more than text and row",
        ),
        ({"comand": ["sh"]}, r"environment\.args: missing a required argument: 'command'"),
    ],
)
def test_a_program_that_cannot_be_started_is_refused_before_the_run(args, text):
    os.environ.pop("NO_SUCH_KEY", None)
    with pytest.raises(ConfigError, match=text):
        environments.check("agent", args, {"prompt": "1", "answer": "2"})
