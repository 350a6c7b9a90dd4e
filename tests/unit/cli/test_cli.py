"""`flotilla`: what it finds, refuses and prints before anything is started. Whole clusters: tests/integration/test_flotilla.py."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import yaml

from cli import init, main, project, verbs
from cli.places import slurm
from cluster_tasks.client import tunnel
from stacks.errors import UserError
from stacks.load import load
from stacks.reference import between

ROOT = Path(__file__).parents[3]


class Called(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Flotilla = Callable[..., Called]


@pytest.fixture
def flotilla(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Flotilla]:
    """What `flotilla ARGUMENTS` does in a folder, in this process; nobody is at the terminal."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str, folder: Path = ROOT, **env: str) -> Called:
        with monkeypatch.context() as here, open(os.devnull) as nobody:  # noqa: PTH123
            here.chdir(folder)
            here.setattr(sys, "stdin", nobody)
            for name, value in {"COLUMNS": "80", **env}.items():
                here.setenv(name, value)
            capsys.readouterr()
            try:
                code = main.main([*arguments])
            except SystemExit as end:  # argparse's
                code = end.code
            said = capsys.readouterr()
            return Called(int(code or 0), said.out, said.err)

    yield call
    signal.signal(signal.SIGTERM, before)


def typed(*arguments: str, folder: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """The same as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def error(done: Called | subprocess.CompletedProcess[str]) -> str:
    """The one line of a mistake."""
    assert done.returncode == 2 and done.stdout == "", done
    [line] = done.stderr.splitlines()
    return line


def test_help_is_one_screen_with_every_verb(flotilla):
    done = typed()
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == flotilla("--help").stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 41 and max(map(len, lines)) <= 80
    assert {verb.name for verb in verbs.VERBS} == set(main.VERBS)


def test_the_page_of_the_command_has_a_row_for_every_verb_as_its_help_says_it():
    page = verbs.PAGE.read_text()
    assert between(page, "verbs", verbs.table()) == page, "run python -m cli.verbs"
    assert all(verb.about in verbs.help_text() and verb.about in page for verb in verbs.VERBS)
    with pytest.raises(ValueError, match="no <!-- verbs"):
        between("no marks", "verbs", "")


@pytest.mark.parametrize("verb", [*main.PASSED, *main.OURS])
def test_every_verb_has_help_everywhere_without_a_traceback(verb, tmp_path, flotilla):
    done = flotilla(verb, "--help", folder=tmp_path, NO_COLOR="1")
    assert done.returncode == 0 and f"usage: flotilla {verb} " in done.stdout and done.stderr == ""
    assert "\x1b" not in done.stdout


LONG = {"init": 41, "check": 26, "serve": 32, "submit": 36, "queue": 32}  # lines of help; its flags depend on the place


@pytest.mark.parametrize("verb", [*main.PASSED, *main.OURS])
def test_help_fits_on_a_screen_says_one_thing_of_stack_and_ends_with_commands_to_copy(verb, flotilla):
    shown = flotilla(verb, "--help").stdout
    lines = shown.splitlines()
    assert len(lines) <= LONG.get(verb, 25)
    assert [line.split(maxsplit=1)[1] for line in lines if re.match(r"  STACK ", line)] in (
        [],
        ["stack name, e.g. onprem (stacks/Pulumi.onprem.yaml)"],
        ["stack name, e.g. onprem (stacks/Pulumi.onprem.yaml), deployed to"],
        ["stack name, e.g. onprem (stacks/Pulumi.onprem.yaml); its account"],
    )
    examples = shown.partition("\nexamples:\n")[2].replace("\\\n", " ").splitlines()
    assert examples
    for example in examples:
        name, known, *words = shlex.split(example.partition(" -- ")[0])
        assert (name, known) == ("flotilla", verb), example
        kind = words[:1] if "|" in shown and f"flotilla {verb} {words[0]}" in shown and "STACK" not in shown.splitlines()[0] else []
        more = flotilla(verb, *kind, "--help").stdout if kind and not kind[0].startswith("-") else shown
        more += flotilla(verb, "--recipe", "x", "--help").stdout if verb == "launch" else ""
        assert all(word in more for word in words if word.startswith("--")), example


def test_recipe_list_shows_what_each_needs(flotilla):
    head, first, *rest = flotilla("recipe", "list").stdout.splitlines()
    assert head.split() == ["RECIPE", "GPUS", "MODEL", "RUNS"]
    assert first.split()[:3] == ["verl/ppo-gsm8k", "1", "Qwen/Qwen2.5-7B-Instruct"]
    assert any(line.startswith("openrlhf/ppo-70b ") and " 4 x 8 " in line for line in rest)
    listed = json.loads(flotilla("recipe", "list", "--json").stdout)
    assert len(listed) == len(rest) + 1 and listed[0]["gpus"] == 1 and listed[0]["model"] == "Qwen/Qwen2.5-7B-Instruct"


def test_a_word_that_is_no_verb_and_a_stack_that_is_none_are_one_line(flotilla):
    assert error(typed("qz")) == "error: 'qz' is not a verb; flotilla --help lists them"
    assert "there is no stack 'nowhere'" in error(flotilla("up", "nowhere"))


def test_the_project_is_found_from_any_folder_in_it(flotilla):
    assert project.find_root(ROOT / "docs") == ROOT == project.find_root(ROOT)
    done = flotilla("preview", "nowhere", folder=ROOT / "trainer/recipes")
    assert "there is no stack 'nowhere'" in done.stderr


def test_flags_behind_the_dashes_are_those_of_the_job(tmp_path, flotilla):
    """Help is given everywhere, and this asks for that of the job."""
    line = error(flotilla("submit", "local", "--", "python", "x.py", "--help", folder=tmp_path))
    assert line.startswith(f"error: no Flotilla project in {tmp_path}")


def test_outside_of_a_project_it_is_one_line(tmp_path, flotilla):
    assert error(flotilla("status", "local", folder=tmp_path)).startswith(f"error: no Flotilla project in {tmp_path} or above it")


def test_another_clone_is_not_worked_on_by_this_ones_code(tmp_path, flotilla):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "Pulumi.yaml").touch()
    line = error(flotilla("status", "local", folder=tmp_path))
    assert str(ROOT) in line and f". {tmp_path}/.venv/bin/activate" in line


def test_a_part_that_is_not_installed_is_named_with_its_target(tmp_path):
    """An environment without dstack: its name leads to a module that is missing as pip would leave it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Missing:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'dstack': raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    line = error(typed("launch", "onprem", "--", "true", PYTHONPATH=f"{tmp_path}:{ROOT}"))
    assert line.startswith("error: flotilla launch needs dstack") and line.endswith("make install-server brings it")


def test_a_clouds_network_needs_pulumis_cli(tmp_path, flotilla):
    line = error(flotilla("up", "aws-dev", PATH=str(tmp_path)))
    assert "Pulumi's CLI has to be on PATH" in line


def test_train_lists_the_entry_points_and_runs_one(flotilla):
    for words, code in (([], 2), (["nothing"], 2), (["--config", "run.yaml"], 2), (["--help"], 0)):
        done = flotilla("train", *words)
        assert done.returncode == code and "dpo|ppo|rm|sft" in done.stderr
    assert "error: RUN=no-such-run: no run of that name in runs" in typed("export", "no-such-run").stderr
    done = typed("train", "sft", "trainer.stepz=1", folder=ROOT / "docs")
    assert done.returncode == 2 and "did you mean trainer.steps" in done.stdout + done.stderr
    done = typed("train", "ppo", "--one-process", "placement.ranks=2")
    assert done.returncode == 2 and "one process is one rank; set ranks to 1" in done.stdout + done.stderr


def test_jobs_need_a_rendered_stack_and_a_command(tmp_path, flotilla):
    assert "COMMAND is missing; write it after --" in flotilla("submit", "local").stderr
    with pytest.raises(UserError, match=r"build/local/env\.sh does not exist; first: flotilla up local"):
        project.folder("local", tmp_path)


def test_the_environment_is_that_of_env_sh(tmp_path):
    (tmp_path / "build/x").mkdir(parents=True)
    (tmp_path / "build/x/env.sh").write_text("export RAY_ADDRESS=http://localhost:8300\nexport TWO='a\nb=c'\n")
    found = project.environment("x", tmp_path)
    assert (found["RAY_ADDRESS"], found["TWO"]) == ("http://localhost:8300", "a\nb=c")


# init

ANSWERS = {
    "local": [],
    "ssh": ["--hosts", "a.example.com=10.0.0.1,b.example.com=10.0.0.2", "--user", "me", "--gpu", "H100:8", "--checkpoints", "/mnt/x"],
    "slurm": ["--partition", "gpu", "--checkpoints", "/shared/x", "--login", "me@login.example.com"],
    "aws": ["--nodes", "3"],
    "gcp": ["--project", "my-project-1"],
}


@pytest.fixture
def empty(tmp_path) -> Path:
    """A project without stacks."""
    shutil.copy(ROOT / "Pulumi.yaml", tmp_path)
    (tmp_path / "stacks").mkdir()
    return tmp_path


@pytest.mark.parametrize("place", init.QUESTIONS)
def test_flags_make_a_stack_that_loads(place, empty):
    assert init.main("init", ["mine", "--place", place, *ANSWERS[place]], empty) == 0
    stack = load("mine", empty)
    assert stack.cloud == place and stack.fleets[0].nodes == (3 if place == "aws" else 2)
    assert yaml.safe_load((empty / "stacks/Pulumi.mine.yaml").read_text())["config"]["flotilla:cloud"] == place


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["mine", "--place", "slurm"], "--partition is missing: partition"),
        (["mine", "--place", "local", "--region", "x"], "--region: local does not read it; it reads --cpus, --nodes"),
        (["Mine", "--place", "local"], "STACK: 'Mine' is not a stack name"),
        (["mine", "--place", "local", "--nodes", "x"], "flotilla:fleets[0].nodes: 'x' is not an integer"),
    ],
)
def test_a_mistake_writes_nothing(flags, said, empty, monkeypatch):
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115, PTH123
    with pytest.raises(UserError, match=said.replace("[", r"\[")):
        init.main("init", flags, empty)
    assert not list((empty / "stacks").iterdir())


def test_a_stack_that_is_there_is_not_overwritten(empty):
    (empty / "stacks/Pulumi.mine.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"stacks/Pulumi\.mine\.yaml already exists"):
        init.main("init", ["mine", "--place", "local"], empty)
    assert (empty / "stacks/Pulumi.mine.yaml").read_text() == "mine"


# Waiting, tunnels


def test_waiting_says_what_for_and_gives_up_at_the_deadline(monkeypatch, capsys):
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0)
    answers = iter([("", "job 1: PENDING Resources"), ("", "job 1: PENDING Resources"), ("", "job 1: Ray"), ("up", "")])
    assert slurm.wait(lambda: next(answers), 60) == "up"
    assert capsys.readouterr().err.splitlines() == ["waiting for job 1: PENDING Resources", "waiting for job 1: Ray"]
    with pytest.raises(project.CommandError, match=r"waiting for job 1: PENDING: not within 0 s \(--timeout\)") as late:
        slurm.wait(lambda: ("", "job 1: PENDING"), 0)
    assert late.value.code == 76


def test_a_tunnel_is_found_again_and_ended_and_nobody_elses_process(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        tunnel.keep(process, tmp_path)
        note = (tmp_path / "tunnel.json").read_text()
        assert (found := tunnel.running(tmp_path)) and found.pid == process.pid
        (tmp_path / "tunnel.json").write_text(note.replace('"started": ', '"started": 1'))  # a later process with the same id
        assert not tunnel.close(tmp_path) and process.poll() is None
        (tmp_path / "tunnel.json").write_text(note)
        assert tunnel.close(tmp_path)
        assert not tunnel.close(tmp_path)


def test_a_tunnel_that_nobody_reaps_is_ended_within_the_deadline(tmp_path, monkeypatch):
    """Its parent, `flotilla up`, is gone, and the first process of a container may reap nothing."""
    monkeypatch.setattr(tunnel, "END_SECONDS", 0.5)
    parent = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        tunnel.keep(cast(Any, SimpleNamespace(pid=pid)), tmp_path)
        closing = threading.Thread(target=tunnel.close, args=(tmp_path,), daemon=True)
        closing.start()
        closing.join(30)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        process.kill()
    assert (closing.is_alive(), state) == (False, "Z")


def test_a_tunnel_that_opens_is_kept_and_one_that_does_not_says_why(tmp_path):
    there = tmp_path / "there"
    assert tunnel.open_kept(["sh", "-c", "echo connecting; echo no route; exit 1"], tmp_path, there.exists, 60) == "no route"
    assert tunnel.open_kept(["sleep", "60"], tmp_path, there.exists, 0.1) == "no answer"
    assert tunnel.running(tmp_path) is None
    assert tunnel.open_kept(["sh", "-c", 'touch "$0"; exec sleep 60', str(there)], tmp_path, there.exists, 60) is None
    assert tunnel.close(tmp_path)


# Pages


def test_every_line_of_the_pages_names_a_verb_and_flags_that_there_are(flotilla):
    lines = [
        line.strip()
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for block in re.findall(r"```\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
        if line.startswith("flotilla ")
    ]
    assert len(lines) > 5
    helps: dict[str, str] = {}
    for line in lines:
        verb, *words = shlex.split(line.partition(" -- ")[0])[1:]
        assert verb in (*main.VERBS, "--help"), line
        known = (
            [verb, *words[:1]] if verb in ("debug", "index", "node", "recipe", "server", "train") else [verb]
        )  # verbs with kinds, each with flags of its own
        if (name := " ".join(known)) not in helps:
            of_trainer = verb in (*main.TRAINER, "train", "plan")  # in place of this process
            shown = (typed if of_trainer else flotilla)(*known, "--help")
            more = flotilla("train").stderr if verb == "train" else ""  # which says without a trainer what it takes
            helps[name] = shown.stdout + shown.stderr + more
        assert all(word in helps[name] for word in words if word.startswith("--")), line


@pytest.mark.parametrize(("verb", "last"), [("status", "aws: not found"), ("down", "pulumi destroy --stack aws-dev")])
def test_a_control_node_that_is_not_reached_is_said_beside_what_was_tried(verb, last, tmp_path, flotilla):
    for program in ("sh", "cat", "sleep", "git"):  # and no aws
        (tmp_path / program).symlink_to(shutil.which(program) or program)
    done = flotilla(verb, "aws-dev", PATH=str(tmp_path))
    tried, error = done.stderr.splitlines()
    assert done.returncode == 2 and tried.startswith("$ aws ssm start-session --region us-east-1 --target ")
    assert error.startswith("error: the control node is not reached: ") and error.endswith(last)
