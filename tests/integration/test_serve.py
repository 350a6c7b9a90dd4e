"""`flotilla serve` on a real Ray cluster of this machine with real vLLM: answers, tokens, a newer export, the end."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_project import Project

from lab.waiting import wait_for

pytestmark = [pytest.mark.wide, pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")]


def exported(runs: Path, model: Path, step: int) -> None:
    """As trainer.export_every does: complete, or not there."""
    draft = runs / f"demo/models/tmp_step_{step}"
    shutil.copytree(model, draft)
    draft.rename(draft.with_name(f"step_{step}"))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, wide_model: Path) -> Iterator[Project]:
    """Its cluster is up, and has a run that has exported step 2."""
    made = Project(tmp_path_factory.mktemp("serve"))
    try:
        code, output, error = made.run("up", "local")
        assert code == 0, output + error
        runs = made.folder / "build/local/runs"
        (runs / "demo").mkdir(parents=True)
        (runs / "demo/run.yaml").write_text("{}\n")
        exported(runs, wide_model, 2)
        yield made
    finally:
        made.run("down", "local")


def asked(url: str, token: str | None, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_run_that_is_not_there_ends_with_the_jobs_own_line(project: Project) -> None:
    code, output, error = project.run("serve", "local", "run:nothing")
    assert (code, output) == (2, "") and error.splitlines()[-1].startswith("error: RUN=nothing: no run of that name in "), error
    code, _, error = project.run("serve", "local", "run:demo@3")
    assert code == 2 and error.splitlines()[-1].startswith("error: run:demo@3: not exported; steps that are: 2."), error
    assert project.run("serve", "local", "--list")[1] == ""
    code, _, error = project.run("serve", "local", "--stop", "demo")
    assert code == 2 and "--stop demo: the cluster local serves no such name (there are: none)" in error


@pytest.mark.slow
def test_a_model_answers_who_has_its_token_follows_its_run_and_ends(project: Project, wide_model: Path) -> None:
    code, output, error = project.run("serve", "local", "run:demo", "--follow", "--", "--dtype", "float32")
    assert code == 0, error
    url = output.strip()
    file = project.folder / "build/local/serve-demo.token"
    token = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600 and token not in output + error
    body = {"model": "demo", "prompt": "12", "max_tokens": 4, "temperature": 0}
    assert asked(f"{url}/completions", None, body)[0] == 401
    status, first = asked(f"{url}/completions", token, body)
    assert status == 200 and len(first["choices"][0]["text"]) == 4
    code, listed, _ = project.run("serve", "local", "--list", "--json")
    [known] = json.loads(listed)
    assert (known["name"], known["state"], known["models"], known["url"]) == ("demo", "ready", ["demo", "demo@2"], url)
    code, _, error = project.run("serve", "local", "run:demo")
    assert code == 2 and "demo: the cluster local serves it already (ready, job serve-demo-" in error
    answers: list[int] = []
    over = threading.Event()

    def ask_on() -> None:
        while not over.is_set():
            answers.append(asked(f"{url}/completions", token, body)[0])
            time.sleep(0.3)

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        exported(project.folder / "build/local/runs", wide_model, 4)
        wait_for("step 4", lambda: "demo@4" in str(asked(f"{url}/models", token)[1]), 300)
    finally:
        over.set()
        asking.join(60)
    assert len(answers) > 5 and set(answers) == {200}
    assert asked(f"{url}/completions", token, body)[1]["choices"][0]["text"] == first["choices"][0]["text"]  # the same weights
    code, _, error = project.run("serve", "local", "--stop", "demo")
    assert code == 0 and not file.exists(), error
    assert project.run("serve", "local", "--list")[1] == ""
    assert asked(f"{url}/models", token)[0] == 401  # as for a name that there never was
