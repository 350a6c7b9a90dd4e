"""What `flotilla debug` says of processes that it has read, and of those that it has not."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cli import debug, jobs, node_logs
from cluster_tasks.debug import collect, gather, harvest, probe, stacks
from cluster_tasks.debug.gather import DebugError
from cluster_tasks.debug.stacks import Known
from cluster_tasks.node.ports import free_port
from lab.waiting import wait_for
from stacks.load import load
from stacks.schema import Stack

ROOT = Path(__file__).parents[4]
C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
RAY = "/venv/lib/python3.11/site-packages/ray/_private/worker.py"
ENGINE = "/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg_0a1b/trainer/ranks/engine.py"
MAIN = ["Worker.main_loop", RAY, 1069]


def thread(*frames: list[Any], name: str = "MainThread", code: str = "") -> dict[str, Any]:
    return {"name": name, "active": False, "frames": list(frames), "code": code}


def process(pid: int, *command: str, threads: list[Any] | None = None, parent: int = 0, **more: Any) -> dict[str, Any]:
    return {"pid": pid, "parent": parent, "command": list(command)} | ({"threads": threads} if threads else {}) | more


def rank(pid: int, *frames: list[Any], code: str = "") -> dict[str, Any]:
    return process(pid, f"ray::policy-{pid}:Rank.step", threads=[thread(*frames, MAIN, code=code)])


def said(*found: dict[str, Any], known: dict[tuple[str, int], Known] | None = None) -> list[str]:
    return list(stacks.shown(stacks.processes({"0": {"processes": found}}, known or {})))


REDUCE = (["all_reduce", C10D, 3252], ["Rank.step", ENGINE, 88])


def test_equal_stacks_are_together_the_odd_one_first():
    lines = said(*[rank(i, *REDUCE) for i in range(3)], rank(3, ["Rank.step", ENGINE, 70], code="time.sleep(9)"))
    assert lines[:4] == [
        "1 process, time.sleep",
        "  policy-3 (node 0, pid 3)",
        "      Rank.step (working_dir_files/_ray_pkg_0a1b/trainer/ranks/engine.py:70)    time.sleep(9)".replace(
            "working_dir_files/_ray_pkg_0a1b/", ""
        ),
        "",
    ]
    assert lines[4] == "3 processes, all_reduce"


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (rank(2, ["Rank.step", ENGINE, 70], code="time.sleep(9)"), "for policy-2 (node 0, pid 2): in step, time.sleep at Rank.step"),
        (rank(2), "for policy-2 (node 0, pid 2): in step, idle"),
        (rank(2, ["barrier", C10D, 9], ["Rank.step", ENGINE, 90]), "wait for each other in different places"),
        (rank(2, *REDUCE), "each has come, so the network or a GPU holds it, or a rank has died"),
    ],
)
def test_who_holds_up_a_collective(last, text):
    assert text in "\n".join(said(rank(0, *REDUCE), rank(1, *REDUCE), last))


def test_a_driver_waits_for_the_actors_of_its_own_job():
    get = thread(["Worker.get_objects", RAY, 1], ["get", RAY, 2], ["main", "/job/train.py", 5])
    known = {("0", 9): Known("driver of a", "01"), ("0", 1): Known("rollout-0", "01"), ("0", 2): Known("other", "02")}
    work = [process(i, "ray::Engine.sample", threads=[thread(["sample", ENGINE, 3])]) for i in (1, 2)]
    text = "\n".join(said(process(9, "python", "train.py", threads=[get]), *work, known=known)).partition("who waits")[2]
    assert "driver of a, train.py (node 0, pid 9) waits in ray.get" in text and "rollout-0" in text and "other" not in text


def test_one_that_cannot_be_read_says_why_and_the_rest_is_shown():
    text = "\n".join(said(process(5, "python", "-m", "vllm.entrypoints", error=probe.DENIED), rank(0, *REDUCE)))
    assert "1 process, not read" in text and "no ptrace rights (root, the capability SYS_PTRACE" in text and "all_reduce" in text


def test_rays_own_processes_and_the_agent_are_counted_alone():
    own = process(7, "/bin/python", "/site-packages/ray/dashboard/dashboard.py", threads=[thread(["run", RAY, 1])])
    child = process(8, "python", "-c", threads=[thread(["run", RAY, 1])], parent=7)
    agent = process(6, "python3", "node", threads=[thread(["pause", "/b/node/waiting.py", 1])])
    assert said(own, child, agent)[-1] == "0 processes with 0 different stacks on 1 node; 3 of Ray and the node agents not shown (--all)"


def test_arguments_of_commands_stay_on_the_node():
    assert probe.program(["python", "-u", "-m", "trainer.train_ppo", "--key=sk-1"]) == ["python", "-u", "-m", "trainer.train_ppo"]
    assert probe.program(["python", "train.py", "--key=sk-1"]) == ["python", "train.py"]
    assert probe.program(["python", "-uc", "key = 'sk-1'"]) == ["python", "-c"]
    assert probe.program(["python", "-uc", "from trainer.rewards.worker import serve"]) == ["python", "-m", "trainer.rewards.worker"]


@pytest.fixture
def sleeping(tmp_path: Path):
    """A shell, and below it a Python that sleeps."""
    file = tmp_path / "nap.py"
    file.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    command = f"{sys.executable} {file} sk-secret; true"
    with subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True) as shell:
        assert shell.stdout and shell.stdout.readline() == "up\n"
        yield shell.pid
        os.killpg(shell.pid, 9)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_probe_reads_what_is_below_a_process_with_the_line_it_is_at(sleeping):
    def read() -> dict[str, Any]:
        [found] = probe.look(sleeping)["processes"]
        return found if found.get("threads", [{}])[0].get("code") else {}

    found = wait_for("it to sleep", read, 20)
    assert found["threads"][0]["code"] == "time.sleep(600)"
    assert "sk-secret" not in str(found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_node_without_py_spy_and_one_where_it_may_not_read(sleeping, tmp_path, monkeypatch):
    monkeypatch.setattr(probe.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    [found] = probe.look(sleeping)["processes"]
    assert found["error"].startswith("py-spy is not installed on this node")
    (tmp_path / "py-spy").write_text(
        "#!/bin/sh\necho 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1\n"
    )
    (tmp_path / "py-spy").chmod(0o755)
    [found] = probe.look(sleeping)["processes"]
    assert found["error"] == probe.DENIED


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=canary-123456",
        "export WANDB_API_KEY='canary-123456'",
        "{'AWS_SECRET_ACCESS_KEY': 'canary-123456', 'other': 1}",
        '"openai_api_key": "canary-123456"',
        "python train.py --api-key canary-123456 --lr 1e-5",
        "['train.py', '--api-key', 'canary-123456']",
        "Authorization: Bearer canary-123456",
        "https://alice:canary-123456@example.com/x",
        "found hf_canary123456789 in the cache",
        "bare known-canary-value here",
    ],
)
def test_secrets_go_by_their_name_their_shape_and_their_value(text):
    gone = harvest.redact(text, {"known-canary-value"})
    assert "canary" not in gone and harvest.GONE in gone


@pytest.mark.parametrize(
    "text", ["max_tokens=2048000", "tokens per second: 123456", "RAY_AUTH_TOKEN_PATH=/b/ray.token", "step 100 reward=0.512345"]
)
def test_what_is_no_secret_stays(text):
    assert harvest.redact(text) == text


def test_a_value_that_one_log_names_goes_from_the_others_too(tmp_path):
    secrets: set[str] = set()
    texts = {"a.log": "HF_TOKEN=canary-123456", "b.log": "got canary-123456"}
    collect.write(tmp_path / "out.tar.gz", texts, secrets)
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        found = [archive.extractfile(member).read().decode() for member in archive.getmembers()]  # type: ignore[union-attr]
    assert found == ["HF_TOKEN=[secret]", "got [secret]"]


def test_long_files_and_many_are_cut_and_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(harvest, "FILE_BYTES", 100)
    monkeypatch.setattr(harvest, "NODE_BYTES", 150)
    for age, name in enumerate(("new.log", "old.log")):
        (tmp_path / name).write_text("x" * 200)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    found = harvest.harvest([tmp_path], ())
    assert found[f"{tmp_path.name}/new.log"] == "x" * 100 and f"{tmp_path.name}/old.log" not in found
    assert "new.log: its last" in found["cut.txt"] and "old.log: left out, 200 bytes" in found["cut.txt"]


def test_an_archive_that_cannot_be_written_is_refused_before_anything_is_collected(tmp_path):
    (tmp_path / "there.tar.gz").touch()
    with pytest.raises(DebugError, match=r"--output .*there.tar.gz: the file exists; name another, or remove it"):
        collect.check_output(tmp_path / "there.tar.gz")
    with pytest.raises(DebugError, match=r"there is no folder .*/none"):
        collect.check_output(tmp_path / "none/out.tar.gz")


@pytest.mark.parametrize("what", ["stacks", "collect", "post-mortem"])
def test_without_a_cluster_it_says_how_to_make_one(what):
    options = argparse.Namespace(all=False, node=None, output="/tmp/never.tar.gz")
    stack = Stack.model_validate({"name": "never", "cloud": "local", "fleets": [{"name": "laptop", "nodes": 1}]})
    with pytest.raises(debug.CommandError, match="first: flotilla up never"):
        {"stacks": debug.show_stacks, "collect": debug.collect, "post-mortem": debug.show_paused}[what](stack, ROOT, options)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-f", "--no-follow"], "-f and --no-follow exclude each other"),
        (["a", "--job", "b"], "JOB a and --job b differ; give one"),
        (["--node", "1", "-f"], "--node prints a node's output so far; it cannot be combined with JOB or -f"),
    ],
)
def test_flags_of_logs_that_do_not_go_together(flags, said, capsys):
    with pytest.raises(SystemExit):
        jobs.logs(["local", *flags], ROOT)
    assert said in capsys.readouterr().err


def test_logs_of_a_node_are_those_of_its_workers_without_rays_marks():
    texts = {
        "logs/worker-ab-01.out": ":job_id:01\n:actor_name:Rank\nstep 1\n",
        "logs/worker-cd.err": ":job_id:01\n",
        "logs/raylet.out": "x\n",
    }
    assert node_logs.lines({"agent": "ready\n"} | texts) == ["--- agent", "ready", "--- worker-ab-01.out", "step 1"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_orphan_that_the_supervisor_has_adopted_is_not_taken_for_the_agent():
    """The guard is this shell, its child the supervisor; that starts an agent, and a second process with the same rank."""
    nap = f"DSTACK_NODE_RANK=0 exec {sys.executable} -c 'import time; time.sleep(600)'"
    supervisor = f"({nap}) & echo $! ; sleep 0.2; ({nap}) & echo $!; wait"
    with subprocess.Popen(
        ["/bin/sh", "-c", f"/bin/sh -c '{supervisor.replace(chr(39), chr(39) + chr(92) + chr(39) * 2)}'; true"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as guard:
        assert guard.stdout
        agent, orphan = int(guard.stdout.readline()), int(guard.stdout.readline())
        try:
            wait_for(
                "both to have their environment",
                lambda: all(b"DSTACK" in Path(f"/proc/{pid}/environ").read_bytes() for pid in (agent, orphan)),
                20,
            )
            assert gather.agents(guard.pid) == {"0": agent}
        finally:
            os.killpg(guard.pid, 9)


def test_an_orphan_that_ends_while_it_is_looked_at_is_not_the_end_of_the_cluster():
    """The supervisor has not yet waited for a child that has ended: like one that goes between two reads, it has no environment."""
    code = "import subprocess, time; p = subprocess.Popen(['true']); print(p.pid, flush=True); time.sleep(600)"
    with subprocess.Popen(
        ["/bin/sh", "-c", f'{sys.executable} -c "{code}"; true'], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as guard:
        assert guard.stdout
        orphan = int(guard.stdout.readline())
        try:
            wait_for("the orphan to end", lambda: Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[0] == "Z", 20)
            assert gather.agents(guard.pid) == {}
        finally:
            os.killpg(guard.pid, 9)


def test_the_installed_dstack_knows_the_commands_whose_output_is_packed(tmp_path):
    commands = debug._scheduler(load("onprem", ROOT), ROOT)
    assert sorted(commands) == ["dstack-events.txt", "dstack-logs.txt", "dstack-runs.txt"]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}  # no server is known there, which comes after the parser
    for name in ("dstack-events.txt", "dstack-logs.txt"):
        done = subprocess.run(commands[name], env=env, capture_output=True, text=True, timeout=300, check=False)
        said = done.stdout + done.stderr
        assert "usage" not in said.lower() and "unrecognized" not in said and "invalid choice" not in said, said


def test_what_cannot_be_reached_is_said_in_the_archive_and_the_rest_is_in_it(tmp_path, monkeypatch, capsys):
    place = tmp_path / "build/onprem"
    place.mkdir(parents=True)
    (place / "env.sh").write_text(f"export RAY_ADDRESS=http://localhost:{free_port()} DB_PASSWORD=sup3r_canary\n")
    (place / "ray-cluster.dstack.yml").write_text("commands: [connect sup3r_canary]\n")
    monkeypatch.setenv("HOME", str(tmp_path))  # the real dstack finds no server there
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = tmp_path / "out.tar.gz"
    assert debug.collect(load("onprem", ROOT), tmp_path, argparse.Namespace(output=str(file))) == 0
    with tarfile.open(file) as archive:
        found = {m.name.partition("/")[2]: archive.extractfile(m).read().decode() for m in archive.getmembers()}  # pyright: ignore
    lines = found["missing.txt"].splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["logs of the nodes", "stacks of processes"], lines
    assert all(f"missing: {line}" in capsys_line for line, capsys_line in zip(lines, capsys.readouterr().err.splitlines(), strict=True))
    assert all("No default project" in found[f"here/dstack-{what}.txt"] for what in ("runs", "events", "logs")), found
    assert "[secret]" in found["stack/ray-cluster.dstack.yml"] and "sup3r_canary" not in str(found)


def test_a_scheduler_that_is_not_installed_here_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "build/onprem").mkdir(parents=True)
    (tmp_path / "build/onprem/env.sh").write_text(f"export RAY_ADDRESS=http://localhost:{free_port()}\n")
    monkeypatch.setattr(debug, "_scheduler", lambda stack, root: {"x.txt": [str(tmp_path / "none/sacct")]})
    assert debug.collect(load("onprem", ROOT), tmp_path, argparse.Namespace(output=str(tmp_path / "out.tar.gz"))) == 0
    assert f"missing: here/x.txt: {tmp_path}/none/sacct is not installed here" in capsys.readouterr().err


RECORDED = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.meet", rank=0, world_size=1)
def sup3r_canary():
    for _ in range(150):
        dist.all_reduce(torch.ones(2))
sup3r_canary()
open(sys.argv[1], "wb").write(torch._C._distributed_c10d._dump_fr_trace())
"""


def test_what_the_flight_recorder_dumped_is_text_of_the_last_collectives_without_secrets(tmp_path):
    file = tmp_path / "policy/nccl_trace_rank_0"
    file.parent.mkdir()
    subprocess.run([sys.executable, "-c", RECORDED, str(file)], env=os.environ | {"TORCH_FR_BUFFER_SIZE": "200"}, check=True, timeout=120)
    [(name, text)] = harvest.traces(tmp_path, {"sup3r_canary"}).items()
    state, *entries = map(json.loads, text.splitlines())
    assert name == "flight-recorder/policy/nccl_trace_rank_0.jsonl" and state["file"] == str(file) and state["collectives"] == 150
    assert [entry["collective_seq_id"] for entry in entries] == list(range(51, 151)) and entries[-1]["profiling_name"] == "gloo:all_reduce"
    assert "sup3r_canary" not in text and any(frame["name"] == harvest.GONE for frame in entries[-1]["frames"])


def test_a_dump_runs_nothing_and_a_broken_one_is_said(tmp_path):
    made = tmp_path / "made"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(made),)

    for rank, content in enumerate([pickle.dumps({"entries": [Evil()]}), b"\x80\x04cut", pickle.dumps([1]), b""]):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(content)
    texts = harvest.traces(tmp_path)
    assert len(texts) == 4 and all(": cannot be read: " in text for text in texts.values()) and not made.exists()
    assert "it holds a posix.mkdir" in texts["flight-recorder/nccl_trace_rank_0.jsonl"]
    assert harvest.traces(tmp_path / "missing") == {}


def test_dumps_that_all_nodes_see_are_in_the_archive_once():
    one = {"flight-recorder/policy/nccl_trace_rank_0.jsonl": "{}", "logs/raylet.out": "same"}
    texts = collect.texts_of({"10.0.0.1": one, "10.0.0.2": one | {"flight-recorder/policy/nccl_trace_rank_1.jsonl": "own", "error": None}})
    assert sorted(texts) == [
        "node-10.0.0.1/flight-recorder/policy/nccl_trace_rank_0.jsonl",
        "node-10.0.0.1/logs/raylet.out",
        "node-10.0.0.2/flight-recorder/policy/nccl_trace_rank_1.jsonl",
        "node-10.0.0.2/logs/raylet.out",
    ]
