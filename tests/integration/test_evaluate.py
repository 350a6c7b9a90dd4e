"""`flotilla eval`: the numbers that a run logs before its first step, without the run; by a server elsewhere; and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.configs import settings
from support.json_server import JsonHandler, served
from support.paths import python_path

from trainer import evaluate, train_ppo
from trainer.chat.tokenizer import load_tokenizer
from trainer.cli import yaml_io
from trainer.cluster.actors import free_port
from trainer.configs.sections import values_read
from trainer.errors import ConfigError
from trainer.metrics import read
from trainer.online import servers

ROOT = Path(__file__).parents[2]


def written(tmp_path: Path, model: Path, **changes: Any) -> tuple[str, Any]:
    """A file of settings, and what they are."""
    sets = {"short": {"path": "trainer.data.tasks:sort_digits", "args": {"rows": 8, "length": 2}}}
    trainer = {"eval_prompts": 16, "eval_samples": 4, "eval_pass": 0.3, "steps": 1, "prompts_per_step": 4, "checkpoint_every": 1}
    config = settings(model, **{"evals": sets, "trainer": trainer, **changes})
    file = tmp_path / "run.yaml"
    file.write_text(yaml_io.dump(values_read(config)))
    return str(file), config


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, float]]:
    args, rest = evaluate.arguments([*words, "--json"])
    capsys.readouterr()  # of a run before
    assert evaluate.main(evaluate.read(args, rest), args) == 0
    return json.loads(capsys.readouterr().out)


def test_it_says_what_a_run_says_before_its_first_step(tiny_model, tmp_path, capsys):
    file, config = written(tmp_path, tiny_model, placement={"processes": "one"})
    assert train_ppo.train(config, tmp_path / "run") == 0
    before = read(tmp_path / "run")[0]
    out = tmp_path / "answers.jsonl"
    found = evaluated(capsys, file, "--out", str(out))
    for name, shown in (("", "held out"), ("short", "short")):
        for key in ("eval_reward", "eval_pass@1", "eval_pass@2", "eval_pass@4"):
            assert found[shown][key] == before[f"{key}/{name}" if name else key]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == (16 + 8) * 4
    held_out = [line["reward"] for line in lines if not line["set"]]
    assert sum(held_out) / len(held_out) == pytest.approx(found["held out"]["eval_reward"])


@pytest.mark.usefixtures("cluster")
def test_a_trained_model_by_name_one_greedy_answer_each_and_an_environment(tiny_model, tmp_path, capsys):
    file, _ = written(
        tmp_path,
        tiny_model,
        data={"path": "support.environments:rows", "args": {"count": 60}, "max_prompt_tokens": 8},
        environment={"function": "support.environments:two_turns", "max_turns": 4, "max_tokens": 20},
        evals={},
        reward={"function": "exact"},
    )
    found = evaluated(capsys, file, "--model", str(tiny_model), "--samples", "1", "trainer.eval_prompts=6")
    assert found["held out"]["prompts"] == 6 and not any("@" in key for key in found["held out"])
    assert found["held out"]["tokens"] == 5, "two turns of two and three"


class Sorting(JsonHandler):
    """A server that completes token ids: it puts the prompt's digits in order. Busy once."""

    tokenizer: Any
    busy = 1
    bodies: list[dict[str, Any]] = []  # noqa: RUF012  # of the class

    def do_POST(self) -> None:
        body = json.loads(self.body())
        if Sorting.busy:
            Sorting.busy -= 1
            return self.send(503, {"error": "busy"})
        if self.path != "/v1/completions" or self.headers["Authorization"] != "Bearer key":
            return self.send(401, {"error": f"{self.path}: not for you"})
        Sorting.bodies.append(body)
        digits = [i for i in body["prompt"] if self.tokenizer.decode([i]).isdigit()]
        text = self.tokenizer.decode(sorted(digits))
        return self.send(200, {"choices": [{"text": text, "finish_reason": "stop"}]})


def test_a_server_elsewhere_is_asked_by_token_ids(tiny_model, tmp_path, capsys, monkeypatch):
    file, config = written(tmp_path, tiny_model, evals={})
    Sorting.tokenizer = load_tokenizer(config.model)
    monkeypatch.setenv("SORTING_KEY", "key")
    with served(Sorting) as address:
        given = (file, "--endpoint", f"{address}/v1/", "--key-env", "SORTING_KEY", "--served", "sorter")
        found = evaluated(capsys, *given)
        assert found["held out"]["eval_reward"] == 1 and found["held out"]["eval_pass@4"] == 1
        body = Sorting.bodies[0]
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("sorter", 5, 1)
        assert len(body["prompt"]) == 5, "s, three digits and ="
        args, rest = evaluate.arguments([file, "--endpoint", f"{address}/v1"])
        assert evaluate.main(evaluate.read(args, rest), args) == 1
    assert f"error: --endpoint {address}/v1: HTTP 401: " in capsys.readouterr().err


def test_a_server_that_is_not_there_is_not_waited_for(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(servers, "CONNECT_SECONDS", 3)
    file, _ = written(tmp_path, tiny_model, evals={})
    url = f"http://127.0.0.1:{free_port()}/v1"
    args, rest = evaluate.arguments([file, "--endpoint", url])
    assert evaluate.main(evaluate.read(args, rest), args) == 1
    assert f"error: --endpoint {url}: no answer within 3 s; the last: ClientConnectorError: " in capsys.readouterr().err


def test_a_server_of_messages_alone_is_asked_by_them(tiny_model, tmp_path, capsys):
    class Chatting(JsonHandler):
        bodies: list[dict[str, Any]] = []  # noqa: RUF012

        def do_POST(self) -> None:
            body = json.loads(self.body())
            Chatting.bodies.append(body | {"path": self.path})
            digits = sorted(each for each in body["messages"][-1]["content"] if each.isdigit())
            self.send(200, {"choices": [{"message": {"role": "assistant", "content": "".join(digits)}, "finish_reason": "stop"}]})

    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    file, _ = written(tmp_path, model, evals={}, data={"system": "0"})
    with served(Chatting) as address:
        found = evaluated(capsys, file, "--endpoint", f"{address}/v1", "--chat", "--served", "sorter", "--samples", "1")
    assert found["held out"]["eval_reward"] == 1 and found["held out"]["tokens"] == 3
    [first, *_] = Chatting.bodies
    assert (first["path"], first["model"], first["temperature"], first["max_tokens"]) == ("/v1/chat/completions", "sorter", 0, 5)
    assert [message["role"] for message in first["messages"]] == ["system", "user"] and "prompt" not in first


class Writing(JsonHandler):
    """A server whose answers have characters that the run's tokenizer lacks."""

    def do_POST(self) -> None:
        self.body()
        text = "^1\n2"
        choice = {"message": {"content": text}} if "chat" in self.path else {"text": text}
        self.send(200, {"choices": [choice | {"finish_reason": "stop"}]})


@pytest.mark.parametrize("chat", [["--chat"], []])
def test_what_a_server_wrote_is_scored_as_it_was_served(tiny_model, tmp_path, capsys, chat):
    pattern = {"function": "format_regex", "args": {"pattern": r"\^1\n2"}}
    file, _ = written(tmp_path, tiny_model, evals={}, reward=pattern)
    with served(Writing) as address:
        assert evaluated(capsys, file, "--endpoint", f"{address}/v1", *chat)["held out"]["eval_reward"] == 1


def test_a_prompt_that_is_to_be_gone_on_with_is_not_asked_of_a_server_of_messages(tiny_model, tmp_path):
    talk = [{"role": "user", "content": "21"}, {"role": "assistant", "content": "1"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": talk, "answer": "2"}) + "\n" for _ in range(20)))
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    file, _ = written(tmp_path, model, evals={}, data={"path": str(rows), "args": {}})
    args, rest = evaluate.arguments([file, "--endpoint", "http://127.0.0.1:1/v1", "--chat"])
    with pytest.raises(
        ConfigError, match=r"--chat: row 4 ends with the assistant's message, which such a server does not go on with; give a"
    ):
        evaluate.main(evaluate.read(args, rest), args)


def test_an_environment_is_not_played_with_other_tokens_than_were_served(tiny_model, tmp_path, capsys):
    data = {"path": "support.environments:rows", "args": {"count": 60}, "max_prompt_tokens": 8}
    played = {"function": "support.environments:two_turns", "max_turns": 4, "max_tokens": 20}
    file, _ = written(tmp_path, tiny_model, data=data, environment=played, evals={}, reward={"function": "exact"})
    with served(Writing) as address:
        args, rest = evaluate.arguments([file, "--endpoint", f"{address}/v1", "trainer.eval_prompts=5"])
        assert evaluate.main(evaluate.read(args, rest), args) == 1
    assert "it sends no token ids, and the run's tokenizer cannot write '^1\\n2'; give a server that sends them" in capsys.readouterr().err


def test_an_environment_is_played_against_a_server(tiny_model, tmp_path, capsys, monkeypatch):
    data = {"path": "support.environments:rows", "args": {"count": 60}, "max_prompt_tokens": 8}
    played = {"function": "support.environments:two_turns", "max_turns": 4, "max_tokens": 20}
    file, config = written(tmp_path, tiny_model, data=data, environment=played, evals={}, reward={"function": "exact"})
    Sorting.tokenizer, Sorting.busy = load_tokenizer(config.model), 0
    monkeypatch.setenv("SORTING_KEY", "key")
    with served(Sorting) as address:
        found = evaluated(capsys, file, "--endpoint", f"{address}/v1", "--key-env", "SORTING_KEY", "trainer.eval_prompts=5")
    assert 0 < found["held out"]["eval_reward"] <= 1.5 and found["held out"]["prompts"] == 5


def failed(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.evaluate", *words],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": python_path(ROOT)},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["trainer.eval_prompts=0"],
            "error: trainer.eval_prompts=0: there is nothing to evaluate on; hold out part of data, or add sets to evals",
        ),
        (["--model", "run:nobody"], "error: command line: model.path=run:nobody: "),
        (
            ["--endpoint", "http://127.0.0.1:1", "--key-env", "NO_SUCH_KEY"],
            "error: --key-env NO_SUCH_KEY: the environment variable is not set",
        ),
        (["--endpoint", "127.0.0.1:8000"], "error: --endpoint 127.0.0.1:8000: not a URL, e.g. http://"),
        (["--endpoint", "http://127.0.0.1:1", "--concurrency", "0"], "error: --concurrency 0 is not an integer >= 1"),
        (["--chat"], "error: --chat needs --endpoint"),
        (
            ["--endpoint", "http://127.0.0.1:1", "--chat", "environment.function=guess", "reward.function=null"],
            "error: --chat: environment.function=guess needs token ids",
        ),
        (["--out", "/no/such/answers.jsonl"], "error: --out /no/such/answers.jsonl: the folder /no/such does not exist"),
        (["--samples", "0"], "error: command line: trainer.eval_samples: 0 is not "),
        (["trainer.eval_promts=3"], "error: command line: trainer.eval_promts: unknown key"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(tiny_model, tmp_path, words, text):
    changed = {"trainer": {"eval_prompts": 0}} if "trainer.eval_prompts=0" in words else {}
    file, _ = written(tmp_path, tiny_model, evals={}, **changed)
    said = failed(file, *words)
    assert text in said and "Traceback" not in said


def test_random_weights_are_refused(tiny_model, tmp_path):
    file, _ = written(tmp_path, tiny_model, evals={})
    said = failed(file, "model.path=null", "model.init.model_type=qwen2", "model.tokenizer=characters:0123456789s=")
    assert said.startswith("error: model.init: random weights cannot be evaluated; name a model with --model, e.g. run:NAME")
