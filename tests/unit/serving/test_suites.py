"""What suites are asked, and what is read of their results; each package's own program is stood in for by what it writes."""

from __future__ import annotations

import argparse
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from support.json_server import JsonHandler, served

from serving import packages, suites
from serving.models import Model
from serving.packages import SUITES, Ask
from trainer.errors import ConfigError, RunError

ASK = Ask("http://h/v1", "demo", "secret", ("a", "b"), 5, 8, Path("/own"))
# Parts of what lm-eval 0.4.13, inspect 0.3.285 and lighteval 0.13.0 wrote of a task with four rows.
LM_EVAL = {
    "results": {"tiny": {"alias": "tiny", "sample_len": 4, "exact_match,none": 0.5, "exact_match_stderr,none": 0.25, "f1,strict": 0.1}},
    "n-samples": {"tiny": {"original": 4, "effective": 3}},
}
INSPECT = {
    "status": "success",
    "eval": {"task": "tiny"},
    "results": {
        "completed_samples": 4,
        "scores": [{"name": "includes", "metrics": {"accuracy": {"value": 0.5}, "stderr": {"value": 0.25}}}],
    },
}
LIGHTEVAL = {
    "results": {"tiny|0": {"em": 0.5, "em_stderr": 0.25}, "all": {"em": 0.5, "em_stderr": 0.25}},
    "config_tasks": {"tiny|0": {"effective_num_docs": -1}},
}
NO_KEY = {"lm-eval": "OPENAI_API_KEY", "inspect": "FLOTILLA_API_KEY", "lighteval": "OPENAI_API_KEY"}


@pytest.mark.parametrize(
    ("name", "said", "found"),
    [
        ("lm-eval", LM_EVAL, [("tiny", "exact_match", 0.5, 0.25, 3), ("tiny", "f1,strict", 0.1, None, 3)]),
        ("inspect", INSPECT, [("tiny", "accuracy", 0.5, 0.25, 4)]),
        ("inspect", INSPECT | {"status": "error"}, []),
        ("lighteval", LIGHTEVAL, [("tiny", "em", 0.5, 0.25, None)]),
    ],
)
def test_results_are_one_row_for_each_metric(name, said, found):
    rows = [*SUITES[name].results(said)]
    assert [(row["task"], row["metric"], row["value"], row["stderr"], row["samples"]) for row in rows] == found


@pytest.mark.parametrize("name", SUITES)
def test_the_command_has_the_tasks_and_the_server_but_not_its_key(name):
    words, env = SUITES[name].command("program", ASK, "/out")
    line = " ".join(words)
    assert "secret" not in line and env[NO_KEY[name]] == "secret" and "/out" in line and " 5" in line and "demo" in line
    assert "http://h/v1" in line + str(env)
    assert SUITES[name].command("program", Ask("u", "m", "", ("a",)), "/out")[1][NO_KEY[name]] == "none"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("foo:x", "--suite foo:x: 'foo' is no suite; must be lm-eval, inspect, lighteval, e.g. lm-eval:gsm8k,ifeval"),
        ("lm-eval", "--suite lm-eval: names no task, e.g. lm-eval:gsm8k,ifeval"),
    ],
)
def test_a_suite_that_is_none_is_one_line(text, said):
    with pytest.raises(ConfigError) as caught:
        suites.suite_of(text)
    assert str(caught.value) == said
    assert suites.suite_of("inspect:a.py@b,c")[1] == ["a.py@b", "c"]


def test_a_package_that_is_missing_is_one_line_with_the_line_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "serving/packages.py"))  # a clone may have it
    with pytest.raises(ConfigError) as caught:
        packages.program(SUITES["lm-eval"])
    how = "python3 -m venv .venv-lm-eval && .venv-lm-eval/bin/pip install 'lm-eval[api]==0.4.13'"
    assert str(caught.value) == f"--suite lm-eval: lm_eval is not installed: {how}"


@pytest.fixture
def played(monkeypatch, tmp_path):
    """A program in place of lm-eval's, whose script a test gives."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / ".venv-lm-eval/bin/lm_eval"
    file.parent.mkdir(parents=True)

    def play(script: str) -> None:
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    return play


def test_what_a_suite_measured_is_added_to_the_runs_file(played, tmp_path, capsys):
    (tmp_path / "said.json").write_text(json.dumps(LM_EVAL))
    played(f'while [ "$1" != --output_path ]; do shift; done; mkdir "$2/m" && cp {tmp_path}/said.json "$2/m/results_1.json"')
    suite = SUITES["lm-eval"]
    rows = suites.kept(suites.measure(suite, ASK), suite, "0.4.13", Model("demo", "/m", 20, tmp_path), "demo@20")
    for _ in range(2):
        suites.append(tmp_path / "suites.jsonl", rows)
    found = [json.loads(line) for line in (tmp_path / "suites.jsonl").read_text().splitlines()]
    assert found == [*rows, *rows] and len(rows) == 2
    assert {key: value for key, value in found[0].items() if key != "time"} == {
        "suite": "lm-eval",
        "package": "lm_eval",
        "version": "0.4.13",
        "task": "tiny",
        "metric": "exact_match",
        "value": 0.5,
        "stderr": 0.25,
        "model": "demo@20",
        "step": 20,
        "samples": 3,
    }
    assert "secret" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        (
            "echo 'ValueError: Tasks not found: a'; exit 1",
            ConfigError,
            "no such task (ValueError: Tasks not found: a); lm_eval ls tasks",
        ),
        ("echo broken; exit 3", RunError, "lm-eval ended with exit code 3 and 0 results: broken"),
        ("exit 0", RunError, "lm-eval ended with exit code 0 and 0 results: no output"),
    ],
)
def test_a_suite_that_fails_says_why(played, script, kind, said):
    played(script)
    with pytest.raises(kind) as caught:
        suites.measure(SUITES["lm-eval"], ASK)
    assert said in str(caught.value)


def test_a_server_says_what_it_has_or_why_not():
    class Server(JsonHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization") != "Bearer k":
                return self.send(401, {})
            return self.send(200, {"data": [{"id": "demo"}, {"id": "demo@4"}]} if self.path == "/v1/models" else [])

    with served(Server) as url:
        assert suites.models_at(f"{url}/v1", "k") == ["demo", "demo@4"]
        with pytest.raises(ConfigError, match="it asks for another token; --key-env VARIABLE names the one that holds it"):
            suites.models_at(f"{url}/v1", "")
        with pytest.raises(ConfigError, match="does not answer as a server of models"):
            suites.models_at(f"{url}/other", "k")
    with pytest.raises(ConfigError, match="does not answer as a server of models"):
        suites.models_at("http://127.0.0.1:1/v1", "k")


@pytest.mark.parametrize(
    ("step", "asked", "found"),
    [
        (4, None, "demo@4"),
        (2, None, "--model run:demo: u has demo, demo@4; --served NAME says which is meant"),
        (2, "demo", "demo"),
        (None, None, "demo"),
        (4, "other", "--served other: u has demo, demo@4"),
    ],
)
def test_a_step_is_never_written_of_another_that_is_served(step, asked, found):
    options = argparse.Namespace(endpoint="u", served=asked, model="run:demo")
    given: dict[str, Any] = {"options": options, "model": Model("demo", "/m", step), "there": ["demo", "demo@4"], "url": "u"}
    if found.startswith("--"):
        with pytest.raises(ConfigError) as caught:
            suites.named(**given)
        assert str(caught.value) == found
    else:
        assert suites.named(**given) == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model is missing, e.g. run:demo; or --endpoint URL of a server"),
        (["--endpoint", "localhost:8000"], "--endpoint localhost:8000: not a URL, e.g. http://localhost:8265/flotilla/at/demo/v1"),
        (["--model", "m", "--limit", "0"], "--limit 0 is not an integer >= 1"),
        (["--model", "m", "--tasks-from", "/nothing"], "--tasks-from /nothing: no such file or folder"),
    ],
)
def test_mistakes_are_one_line(played, words, said):
    played("exit 0")
    with pytest.raises(ConfigError) as caught:
        suites.main(["--suite", "lm-eval:a", *words])
    assert str(caught.value) == said
