"""A command that misses a library says in one line which target of `make` brings it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stacks.host.extras import target_of

ROOT = Path(__file__).parents[3]
# What an environment with the dependencies alone, and none of the extras, does not have.
EXTRAS = ("aiohttp", "ray", "dstack", "psutil", "boto3", "botocore", "pulumi_aws", "google.auth", "pulumi_gcp", "aiohttp_cors")
EXTRAS += ("filelock", "huggingface_hub", "torch", "transformers", "tokenizers", "matplotlib", "trl")
# Python reads this file before anything else; what is hidden is not found, by nobody.
HIDE = """
import os
from importlib.machinery import PathFinder
hidden = set(os.environ["HIDDEN"].split(","))
find_spec, find_distributions = PathFinder.find_spec, PathFinder.find_distributions
def spec(name, path=None, target=None):
    return None if hidden & {name, name.partition(".")[0]} else find_spec(name, path, target)
def distributions(context):
    return [] if context.name in hidden else find_distributions(context)
PathFinder.find_spec, PathFinder.find_distributions = staticmethod(spec), staticmethod(distributions)
"""
COMMANDS = {
    "cluster_tasks.cache Qwen/Qwen3-8B": "needs huggingface_hub, which is not installed; make install brings it",
    "cluster_tasks.checks.speed": "needs torch, which is not installed; make install brings it",
    "cluster_tasks.client.launch onprem -- ls": "needs dstack, which is not installed; make install-server brings it",
    "cluster_tasks.client.status onprem": "needs dstack, which is not installed; make install-server brings it",
    "cluster_tasks.client.submit --address http://localhost:9 -- ls": "needs ray, which is not installed; make install-client brings it",
    "cluster_tasks.local up": "needs psutil, which is not installed; make install brings it",
    "lab.demo": "needs psutil, which is not installed; make install brings it",
    "fleets.server login": "needs psutil, which is not installed; make install-server brings it",
    "infra.preflight aws-dev": "needs boto3, which is not installed; make install-aws brings it",
    "infra.preflight gcp-dev": "needs google.auth, which is not installed; make install-gcp brings it",
    "infra.preview aws-dev": "needs pulumi_aws, which is not installed; make install-aws brings it",
    "infra.preview gcp-dev": "needs pulumi_gcp, which is not installed; make install-gcp brings it",
    "cli up onprem": "needs dstack, which is not installed; make install-server brings it",
    "cli status local": "needs psutil, which is not installed; make install brings it",
    "cli submit onprem -- ls": "needs ray, which is not installed; make install-client brings it",
    "cli launch onprem -- ls": "needs dstack, which is not installed; make install-server brings it",
    "cli server login": "needs psutil, which is not installed; make install-server brings it",
    "cli preflight aws-dev": "needs boto3, which is not installed; make install-aws brings it",
    "benchmarks schedulers": "needs psutil, which is not installed; make install-dev brings it",
    "trainer.train_ppo data.path=x": "not installed in this environment: torch, transformers, ray; make install brings them",
    "trainer.train_sft data.path=x": "not installed in this environment: torch, transformers, ray; make install brings them",
    "trainer.metrics .": "plot.png: matplotlib is not installed; make install brings it",
}


# Then this: each line is a folder for what is printed and the words of a command, which a fork runs: it does not read Python's own
# modules and the stacks' again.
SERVE = """
import os, runpy, sys
import stacks.load, stacks.host.extras
for line in sys.stdin:
    folder, what, *words = line.rstrip("\\n").split("\\t")
    if not (child := os.fork()):
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0)
        if what == "-m":
            sys.argv = [words[0], *words[1:]]
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            exec(words[0], {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Python]:
    """Runs `python WORDS` in the project's folder, without any of EXTRAS."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(HIDE)
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "HIDDEN": ",".join(EXTRAS), "COLUMNS": "80"}
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        requests, answers = server.stdin, server.stdout
        assert requests and answers

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            print(folder, *words, sep="\t", file=requests, flush=True)
            code = int(answers.readline())
            return subprocess.CompletedProcess(words, code, *((folder / name).read_text() for name in ("stdout", "stderr")))

        yield run
        requests.close()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_the_target_that_brings_what_it_misses(command, bare):
    done = bare("-m", *command.split())
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].endswith(COMMANDS[command])


@pytest.mark.parametrize("stack", ["local", "onprem", "slurm", "aws-dev", "gcp-dev"])
def test_stacks_are_read_without_any_extra(stack, bare):
    done = bare("-c", f"from pathlib import Path; from stacks.load import load; load({stack!r}, Path())")
    assert done.returncode == 0, done.stderr


def test_a_module_that_no_target_brings_keeps_its_traceback(bare):
    done = bare("-c", "from stacks.host.extras import explain_missing; explain_missing(); import stacks.nothing")
    assert done.returncode == 1 and "Traceback" in done.stderr and "No module named 'stacks.nothing'" in done.stderr


@pytest.mark.parametrize(
    ("module", "target"),
    {
        "aiohttp": "install-client",
        "ray.dashboard": "install-client",
        "dstack.api": "install-server",
        "boto3": "install-aws",
        "pulumi_aws": "install-aws",
        "google.auth.transport": "install-gcp",
        "torch": "install",
        "huggingface_hub": "install",
        "trl": "install-dev",
        "google": None,
        "stacks.nothing": None,
    }.items(),
)
def test_the_smallest_set_that_has_a_library_is_named(module, target):
    assert target_of(module) == target


def test_one_target_brings_all_that_own_machines_need():
    sets = [
        set(re.findall(r"^([\w.-]+)==", (ROOT / f"requirements/{which}.txt").read_text(), re.MULTILINE)) for which in ("client", "server")
    ]
    assert sets[0] < sets[1]
