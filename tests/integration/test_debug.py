"""A job hung on purpose in three ways, on a real Ray cluster of two nodes: `flotilla debug stacks` names who holds it up."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import debug, node_logs
from cluster_tasks.client.jobs import submitted
from cluster_tasks.debug import gather, stacks
from cluster_tasks.identity import TOKEN, KnownDashboard, environment
from lab.local import Cluster, render
from lab.waiting import wait_for
from stacks.schema import Stack

pytestmark = [pytest.mark.wide, pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")]

ROOT = Path(__file__).parents[2]
FLEET = {"name": "laptop", "nodes": 2, "cpus": 1}
STACK = Stack.model_validate({"name": "local", "cloud": "local", "fleets": [FLEET], "task": {"fleets": ["laptop"]}})
# By where they are planted; all end in the same word.
CANARIES = {name: f"{name}-5up3r-canary" for name in ("stack", "env.sh", "shell", "job", "argument", "header", "named")}
CANARIES["url"] = "https://user:url-5up3r-canary@judge.example.com"
DUMPED = "build/local/volumes/checkpoints/flight-recorder"
TRACE = f"{DUMPED}/policy/nccl_trace_rank_0"
LEAK = f"""
import os, sys
print("bare", os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["HF_TOKEN"], os.environ["WANDB_API_KEY"], os.environ["JUDGE_URL"])
print(dict(os.environ), sys.argv)
print({{"openai_api_key": "{CANARIES["named"]}"}}, "Authorization: Bearer {CANARIES["header"]}", os.environ["RAY_AUTH_TOKEN"])
print("LEAKED", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("debug")
    env = {"WANDB_API_KEY": CANARIES["stack"], "JUDGE_URL": CANARIES["url"]}
    made = render(folder, FLEET, env=env | {"TORCH_FR_DUMP_TEMP_FILE": str(folder / DUMPED / "nccl_trace_rank_")})
    token = f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={made.root / TOKEN}\n"
    (made.root / "env.sh").write_text(f"{token}export DB_PASSWORD='{CANARIES['env.sh']}'\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", CANARIES["shell"])
        done = made.local("up")
    assert done.returncode == 0, done.stdout + done.stderr
    yield made
    made.local("down", "--timeout", "20")


def dashboard(cluster: Cluster) -> KnownDashboard:
    return KnownDashboard.of(cluster.url, environment(cluster.root, cluster.url))


@pytest.fixture
def hang(cluster: Cluster) -> Iterator[Hang]:
    hung = Hang(cluster)
    yield hung
    hung.end()


class Hang:
    """Jobs that are stopped when the test is over."""

    def __init__(self, cluster: Cluster):
        self.asked, self.jobs = dashboard(cluster), []

    def __call__(self, way: str, runtime_env: dict[str, Any] | None = None) -> None:
        line = f"{sys.executable} {ROOT}/tests/support/hanging.py {way} {ROOT}"
        name = self.asked.ask("/api/jobs/", {"entrypoint": line, "runtime_env": runtime_env or {}})["submission_id"]
        self.jobs.append(name)
        wait_for(f"{name} to hang", lambda: "HUNG" in (self.asked.ask(f"/api/jobs/{name}/logs").get("logs") or ""), 120)

    def end(self) -> None:
        for name in self.jobs:
            self.asked.stop(name)
            wait_for(f"{name} to end", lambda name=name: self.asked.exit_code(name) is not None, 60)


def page(cluster: Cluster, capsys: pytest.CaptureFixture[str], node: str | None = None, everything: bool = False) -> str:
    """What `flotilla debug stacks local` prints."""
    options = argparse.Namespace(all=everything, node=node)
    assert debug.show_stacks(STACK, cluster.root.parents[1], options) == 0
    return capsys.readouterr().out


def page_with(cluster: Cluster, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The first that has all of them: a process may be on its way to where it hangs, and Ray may take its time to name it."""

    def seen() -> str:
        said = page(cluster, capsys)
        return said if all(word in said for word in words) else ""

    return wait_for(" and ".join(words), seen, 60)


def test_a_rank_that_sleeps_is_who_the_driver_waits_for(cluster, hang, capsys):
    hang("sleep")
    said = page_with(cluster, capsys, "2 processes, time.sleep", "waits in ray.get", "sleeper-0 (node ")
    waits = said.partition("who waits for whom")[2]
    assert "hanging.py" in waits and "waits in ray.get" in waits, said
    assert "sleeper-0 (node " in waits and "in nap, time.sleep at sleep.<locals>.Sleeper.nap" in waits, said
    assert "time.sleep(3600)" in waits


def test_a_rank_that_does_not_come_to_a_collective_is_named(cluster, hang, capsys):
    hang("collective")
    said = page_with(cluster, capsys, "2 processes, all_reduce", "policy-1", "for policy-2 (node ")
    waits = said.partition("who waits for whom")[2]
    first, second = waits.strip().splitlines()[:2]
    assert "policy-0" in first and "policy-1" in first and "wait in all_reduce" in first and "policy-2" not in first, waits
    assert "for policy-2 (node " in second and "time.sleep" in second and "policy-0" not in second, waits


def test_a_reward_that_does_not_end_is_named_with_its_line(cluster, hang, capsys):
    hang("reward")
    said = page_with(cluster, capsys, "stuck_reward", "for its own reward scorer (node 0")
    waits = said.partition("who waits for whom")[2]
    assert "hanging.py (node 0" in waits and "for its own reward scorer (node 0" in waits, waits
    assert "at stuck_reward (" in waits and "tests/support/hanging.py:" in waits and "time.sleep(3600)" in waits, waits


def test_a_job_of_ours_sees_the_same_where_the_nodes_are_elsewhere_and_all_cpus_are_taken(cluster, hang):
    hang("reward")
    asked = dashboard(cluster)
    nodes = wait_for("the reward to hang", lambda: found if "stuck_reward" in json.dumps(found := gather.by_job(asked)) else {}, 120)
    assert sorted(nodes) == ["127.0.0.2", "127.0.0.3"]
    found = stacks.processes(nodes, gather.known(asked))
    [scorer] = [process for process in found if process.role == "scorer"]
    assert scorer.at.startswith("stuck_reward") and scorer.waits_in == "time.sleep"
    assert sum(process.role == "agent" for process in found) == 2
    assert asked.token and asked.token not in json.dumps(nodes)
    assert all(gather.PREFIX not in process.name for process in found), "who looks is not seen"
    assert all(not job["submission_id"].startswith(gather.PREFIX) for job in submitted(asked)), "nor in lists of jobs"


def leak(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "leak.py").write_text(LEAK)
    flags = ("--runtime-env-json", json.dumps({"env_vars": {"AWS_SECRET_ACCESS_KEY": CANARIES["job"]}}))
    done = cluster.job(sys.executable, str(tmp_path / "leak.py"), "--api-key", CANARIES["argument"], flags=flags)
    assert "LEAKED" in done.stdout and all(value in done.stdout for value in CANARIES.values() if value != CANARIES["env.sh"]), done.stdout


def dump(cluster: Cluster, *canaries: str) -> None:
    """What the flight recorder of a rank whose code names secrets leaves."""
    frames = [{"name": f"step(key={CANARIES[name]!r})", "filename": "a.py", "line": 3} for name in canaries]
    entry = {"profiling_name": "nccl:all_reduce", "state": "started", "frames": frames, "api_key": CANARIES["named"]}
    file = cluster.root.parents[1] / TRACE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps({"version": "2.10", "entries": [entry]}))


def texts(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        return {m.name.partition("/")[2]: (archive.extractfile(m) or io.BytesIO()).read().decode() for m in archive.getmembers()}


def test_the_archive_has_what_every_node_wrote_and_none_of_the_secrets(cluster, tmp_path):
    leak(cluster, tmp_path)
    dump(cluster, "stack", "shell", "env.sh")
    file = tmp_path / "out.tar.gz"
    assert debug.collect(STACK, cluster.root.parents[1], argparse.Namespace(output=str(file))) == 0
    found = texts(file)
    driver = next(text for name, text in found.items() if "job-driver-" in name and "LEAKED" in text)
    assert "bare [secret] [secret] [secret]" in driver
    for wanted in ("node-0/logs/gcs_server.out", "node-1/logs/raylet.out", "stack/logs/node-1.log", "stack/ray-cluster.dstack.yml"):
        assert wanted in found, sorted(found)
    [state, collective] = map(json.loads, found["flight-recorder/policy/nccl_trace_rank_0.jsonl"].splitlines())
    assert state["collectives"] == 1 and collective["profiling_name"] == "nccl:all_reduce"
    assert all(frame["name"] == "step(key='[secret]')" for frame in collective["frames"]), collective
    assert "node agent (node 1" in found["stacks.txt"] and "ray==" in found["here/versions.txt"]
    token = (cluster.root / TOKEN).read_text().strip()
    leaks = {name for name, text in found.items() if "5up3r-canary" in text or token in text}
    assert not leaks, leaks
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_logs_that_a_job_of_ours_reads_have_none_either(cluster, tmp_path):
    leak(cluster, tmp_path)
    dump(cluster, "stack", "shell")  # what env.sh alone has no node knows: collect takes it out
    nodes = gather.logs_by_job(dashboard(cluster), [])
    assert all("nccl:all_reduce" in said["flight-recorder/policy/nccl_trace_rank_0.jsonl"] for said in nodes.values()), nodes
    assert sorted(nodes) == ["127.0.0.2", "127.0.0.3"] and all("logs/raylet.out" in said for said in nodes.values()), nodes
    leaks = {name for said in nodes.values() for name, text in said.items() if "5up3r-canary" in text}
    assert not leaks, leaks


def test_one_node_alone_and_one_that_is_none(cluster, capsys):
    said = page(cluster, capsys, node="1", everything=True)
    assert "node agent (node 1" in said and "(node 0" not in said
    with pytest.raises(debug.CommandError, match="--node 7: the cluster local has no such node; it has 0, 1"):
        page(cluster, capsys, node="7")


def test_what_the_workers_of_one_node_print_without_rays_marks(cluster, hang, capsys):
    hang("reward")
    assert node_logs.show(STACK, cluster.root.parents[1], "1") == 0
    said = capsys.readouterr().out
    assert "--- agent\n[node 1 " in said and "joining the cluster of 127.0.0.2" in said and ":job_id:" not in said
    with pytest.raises(debug.CommandError, match="--node 7: the cluster local has no such node; it has 0, 1"):
        node_logs.show(STACK, cluster.root.parents[1], "7")
