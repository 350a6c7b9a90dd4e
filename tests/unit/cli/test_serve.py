"""`flotilla serve`, `push`, `eval --suite` and `ssh`: what is said before anything is started, and what a cluster's jobs say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli import main, serve, serve_elsewhere, shell
from cli.project import CommandError
from cluster_tasks.node import endpoint
from cluster_tasks.node.dashboard import Dashboard
from stacks.load import load

ROOT = Path(__file__).parents[3]


@pytest.fixture
def said(monkeypatch, capsys):
    """The one line of a mistake of a command that was typed in the project."""
    monkeypatch.chdir(ROOT)

    def call(*words: str) -> str:
        capsys.readouterr()
        try:
            code = main.main([*words])
        except SystemExit as end:  # argparse's, below its usage
            code = end.code
        out, error = capsys.readouterr()
        assert (code, out) == (2, ""), error
        return error.splitlines()[-1]

    return call


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "error: MODEL is missing, e.g. run:demo; or --list, --stop NAME"),
        ("run:a --list", "error: run:a: --list takes no MODEL"),
        ("run:a --stop a", "error: run:a: --stop takes no MODEL"),
        ("run:a --name A/b", "--name A/b: must be lower-case letters, digits, - or _, up to 60, and not runs; it is a part of the address"),
        ("run:runs", "--name runs: must be lower-case letters, digits, - or _, up to 60, and not runs; it is a part of the address"),
        ("run:a run:b --follow", "--follow: run:a run:b: must be one run:NAME without a step"),
        ("run:a@2 --follow", "--follow: run:a@2: must be one run:NAME without a step"),
        ("org/model --follow", "--follow: org/model: must be one run:NAME without a step"),
        ("run:a --gpus -1", "--gpus -1: must be 0 or more"),
        ("run:a --drain -1", "--drain -1.0: must be 0 or more"),
        ("run:a --service", "--service is for a stack that dstack drives; flotilla:cloud of local is local: leave it out"),
        ("run:a --sbatch", "--sbatch is for a Slurm stack; flotilla:cloud of local is local: leave it out"),
    ],
)
def test_mistakes_are_one_line(said, words, line):
    assert said("serve", "local", *words.split()).endswith(line)


def test_a_stack_that_is_none_and_a_cluster_that_is_down_are_one_line(said):
    assert "stacks/Pulumi.nothing.yaml" in said("serve", "nothing", "run:a")
    for words in (("ssh", "slurm"), ("code", "slurm"), ("serve", "slurm", "--list")):
        assert said(*words).endswith("first: flotilla up slurm")
    assert said("ssh", "local").endswith("first: flotilla up local")


@pytest.mark.parametrize(
    ("model", "name"),
    [("run:Demo.1@20", "demo-1"), ("Qwen/Qwen3-8B", "qwen3-8b"), ("/checkpoints/mine/", "mine"), ("run:a", "a")],
)
def test_an_endpoint_is_called_after_its_model(model, name):
    assert serve.called(model) == name


class Played(Dashboard):
    """With two endpoints, one that has ended, and a job that is none."""

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        command = "python -m serving.serve run:a --name a --timeout 1800 --id 20260101-000000 -- --id no"
        kept: dict[str, Any] = {"start_time": 1, "entrypoint": command, "driver_node_id": "n", "message": "waiting for  resources"}
        jobs = {"serve-a": ("a", "RUNNING"), "serve-b": ("b", "PENDING"), "serve-c": ("c", "STOPPED"), "job": (None, "RUNNING")}
        return [
            kept | {"submission_id": job, "status": status, "metadata": {endpoint.JOB: name} if name else {}}
            for job, (name, status) in jobs.items()
        ]

    def read(self, path: str, *_: Any, **__: Any) -> bytes:
        assert "filename=serve-serve-a.json" in path
        return json.dumps({"state": "ready", "models": ["a", "a@2"], "why": ""}).encode()


def test_endpoints_are_the_jobs_that_say_so():
    found = serve.served(Played("http://localhost:8265", "t"))
    assert [each.line() for each in found] == [
        "a  ready  a,a@2  http://localhost:8265/flotilla/at/a/v1",
        "b  PENDING  http://localhost:8265/flotilla/at/b/v1  waiting for resources",
    ]
    assert serve.started(Played("", None).ask("")[0]["entrypoint"]) == "20260101-000000"


def test_slurms_job_is_the_rendered_script_with_the_endpoint_as_its_job(tmp_path, monkeypatch, capsys):
    place = tmp_path / "build/slurm"
    place.mkdir(parents=True)
    (place / "env.sh").write_text("")
    (place / "ray.token").write_text("secret")
    asked: list[list[str]] = []
    monkeypatch.setattr(serve_elsewhere, "output", lambda words, *_: asked.append(words) or said[-1])
    said = ["42\n"]
    stack = load("slurm", ROOT)
    assert serve_elsewhere.start(stack, tmp_path, "a", ["run:a"], ["--timeout", "9", "--", "--dtype", "float32"], as_service=False) == 0
    [words] = asked
    assert words[:4] == ["sbatch", "--parsable", "--job-name=serve-a", "--nodes=1"] and words[4] == "build/slurm/ray-ppo.sbatch"
    begin = words[words.index("--id") + 1]
    assert words[5:10] == ["python", "-m", "serving.serve", "run:a", "--name"] and words[-3:] == ["--", "--dtype", "float32"]
    token = place / "serve-a.token"
    assert token.read_text() == endpoint.token("secret", "a", begin) and token.stat().st_mode & 0o777 == 0o600
    assert token.read_text() not in " ".join(words) + capsys.readouterr().err
    assert serve_elsewhere.noted(stack, tmp_path) == {"a": {"job": "42", "log": "build/slurm/serve-a-42.log"}}
    with pytest.raises(CommandError, match="a: slurm serves it already; end it first: flotilla serve slurm --stop a"):
        serve_elsewhere.start(stack, tmp_path, "a", ["run:a"], [], as_service=False)
    assert serve_elsewhere.line(stack, tmp_path, "a", {"job": "42", "log": "x"}) == "a  job 42 42  x"
    for state, ends in (
        ("RUNNING n1\n", ["scancel", "--signal=USR2", "--batch", "42"]),
        ("PENDING \n", ["scancel", "42"]),
        ("", ["squeue", "-h", "-j", "42", "-o", "%T %N"]),  # it has ended
    ):
        said.append(state)
        (place / "serve-a.json").write_text("{}")
        serve_elsewhere.stop(stack, tmp_path, "a", {"job": "42", "log": "x"})
        assert asked[-1] == ends and serve_elsewhere.noted(stack, tmp_path) == {}


def test_a_node_is_called_by_its_rank_its_address_or_its_name():
    stack = load("local", ROOT)
    nodes = [shell.Node(0, "10.0.0.1", "n1"), shell.Node(1, "10.0.0.2", "n2")]
    assert [shell.chosen(nodes, wanted, stack).rank for wanted in (None, "0", "10.0.0.2", "n2")] == [0, 0, 1, 1]
    with pytest.raises(CommandError, match=r"^NODE n3: the cluster local has no such node; it has 0 \(n1\), 1 \(n2\)$"):
        shell.chosen(nodes, "n3", stack)


def test_a_commands_exit_code_is_kept_and_a_program_that_is_missing_is_127():
    assert shell.call([sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert shell.call([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 137
    with pytest.raises(CommandError, match="`nothing-of-the-kind` is not on PATH") as caught:
        shell.call(["nothing-of-the-kind"])
    assert caught.value.code == 127
    assert shell.remote("ray", "/checkpoints") == "vscode://vscode-remote/ssh-remote+ray/checkpoints"


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("push run:a s3://b/c --yes", "serving.push"),
        ("eval --suite lm-eval:a --model run:a", "serving.suites"),
        ("eval --suite=lm-eval:a", "serving.suites"),
        ("eval run.yaml", "trainer.evaluate"),
    ],
)
def test_verbs_lead_to_their_modules(monkeypatch, words, module):
    monkeypatch.chdir(ROOT)
    run: list[list[str]] = []

    def execve(program: str, words: list[str], env: dict[str, str]) -> None:
        run.append(words[1:])
        raise SystemExit(0)

    monkeypatch.setattr("os.execve", execve)
    with pytest.raises(SystemExit):
        main.main(words.split())
    assert run == [["-m", module, *words.split()[1:]]]


def test_with_a_stack_a_push_is_a_job_on_its_cluster(monkeypatch):
    monkeypatch.chdir(ROOT)
    run: list[Any] = []
    monkeypatch.setattr("cli.jobs.run_job", lambda stack, job, root: run.append((stack.name, job)) or 0)
    assert main.main(["push", "local", "run:a", "hub:me/a", "--force"]) == 0
    [(stack, job)] = run
    assert (stack, job.command) == ("local", ["python", "-m", "serving.push", "run:a", "hub:me/a", "--force"])
