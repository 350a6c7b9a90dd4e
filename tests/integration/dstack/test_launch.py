"""One command from the stack to the job's exit code, and one screen about it, on a real dstack server and two hosts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import pytest
from support import recipe_stand_ins

from lab.dstack.hosts import NETWORK
from lab.dstack.lab import Lab
from lab.waiting import wait_for

pytestmark = pytest.mark.hosts

STAND_INS = "standins"
LAUNCH = "python -m cluster_tasks.client.launch lab"
WEB = {"command": "exec python3 -m http.server --bind $FLOTILLA_NODE_IP 8123", "port": 8123, "health": "/"}
READ = 'import urllib.request as r; print(r.urlopen(\\"$FLOTILLA_SERVICE_WEB\\").read())'
ASK = f'echo all: $FLOTILLA_SERVICE_WEB_ALL; python3 -c "{READ}"'
STATUS = "python -m cluster_tasks.client.status lab"
COUNT = "for i in $(seq 300); do echo tick $i; sleep 1; done"


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> Iterator[Lab]:
    """The cluster is started by the first launch and used by the next ones; a service runs on both of its nodes."""
    recipe_stand_ins.trl_in(lab.shared / STAND_INS)
    recipe_stand_ins.hub_in(lab.shared / STAND_INS)
    (lab.shared / "answer").touch()
    (lab.shared / "mine").mkdir(exist_ok=True)
    lab.stack(task={"services": {"web": WEB}, "env": {"PYTHONPATH": f"/checkpoints/{STAND_INS}"}})
    done = lab.user(f"{LAUNCH} -- sh -c 'echo hello from the job; {ASK}; exit 7'", timeout=600)
    assert done.returncode == 7, done.stdout
    assert "hello from the job" in done.stdout
    assert "<title>Directory listing" in done.stdout and len(re.findall(r"http://[\d.]+:8123", done.stdout)) == 2, done.stdout
    for command in ("dstack apply -y -d -f build/lab/ray-cluster.dstack.yml", "dstack attach ray", "ray job submit"):
        assert f"$ {command}" in done.stdout, "each command that is run is shown"
    assert done.stdout.rstrip().endswith("the cluster is still up; to end it: dstack stop ray")
    yield lab
    lab.stop("ray")
    lab.wait_idle()
    lab.stack()


def text(lab: Lab, log: str) -> str:
    return (lab.folder / log).read_text()


def test_a_recipe_runs_on_every_node_and_resumes(cluster: Lab):
    recipe = "--recipe trl/sft model=/checkpoints/mine run=sft packages=image"
    done = cluster.user(f"python -m cli launch lab {recipe}")
    assert done.returncode == 0 and done.stdout.count("TRAINED\n") == 2, done.stdout
    assert "data openai/gsm8k: making /checkpoints/data/gsm8k-chat" in done.stdout and "torchrun --nnodes=2" in done.stdout
    saved = [json.loads((cluster.shared / f"sft/said-{rank}.json").read_text()) for rank in (0, 1)]
    assert len({said["node"] for said in saved}) == 2 and [said["world"] for said in saved] == ["2", "2"]
    assert all(sorted(said["data"]) == ["test.parquet", "train.parquet"] for said in saved)
    again = cluster.user(f"python -m cli launch lab {recipe}")
    assert again.returncode == 1, again.stdout  # torchrun's, of a rank that fails
    assert "data openai/gsm8k: /checkpoints/data/gsm8k-chat is there" in again.stdout
    assert "the run has saved /checkpoints/sft/checkpoint-1; it resumes" in again.stdout


def test_a_lost_connection_is_made_again_and_no_line_is_lost_or_printed_twice(cluster: Lab):
    cluster.start(f"{LAUNCH} --name counted -- sh -c '{COUNT}'; echo exit code $?", "launch.log")
    wait_for("the job's output", lambda: "tick 3\n" in text(cluster, "launch.log"), 240)
    assert cluster.user("pkill -f 'ssh.*localhost:8265'").returncode == 0
    wait_for("the connection made again", lambda: "connecting again" in text(cluster, "launch.log"), 240)
    seen = text(cluster, "launch.log").count("tick ")
    wait_for("more output", lambda: text(cluster, "launch.log").count("tick ") > seen + 3, 240)
    cluster.must("pkill -INT -f '^python.*launch lab --name counted'")
    wait_for("the end of the watching", lambda: "exit code 130\n" in text(cluster, "launch.log"), 240)
    ticks = [int(line.split()[1]) for line in text(cluster, "launch.log").splitlines() if line.startswith("tick ")]
    assert ticks == list(range(1, len(ticks) + 1))
    assert "counted goes on; to watch it again: flotilla launch lab --attach counted" in text(cluster, "launch.log")

    status = json.loads(cluster.must(f"{STATUS} --json"))
    assert (status["healthy"], status["run"], status["nodes"], status["ray_nodes"]) == (True, "running", ["running", "running"], None)
    assert [machine["status"] for machine in status["machines"]] == ["busy", "busy"]

    again = cluster.start(f"exec {LAUNCH} --attach counted", "again.log")
    wait_for("its output from the start", lambda: "tick 3\n" in text(cluster, "again.log"), 240)
    status = json.loads(cluster.must(f"{STATUS} --json"))
    assert status["ray_nodes"] == 2
    assert {job["name"]: job["status"] for job in status["jobs"]}["counted"] == "RUNNING"
    cluster.must(". build/lab/env.sh; ray job stop counted")
    assert again.wait(240) != 0, "a stopped job has not succeeded"


def test_ctrl_c_at_a_terminal_asks_and_stops_the_job(cluster: Lab):
    person = cluster.typed(f"{LAUNCH} --name asked -- sh -c '{COUNT}'", "typed.log")
    assert person.stdin
    wait_for("the job's output", lambda: "tick 3\n" in text(cluster, "typed.log"), 240)
    for keys, then in ((b"\x03", "or [s]top it?"), (b"s\n", "asked asked to save and stop")):
        person.stdin.write(keys)
        person.stdin.flush()
        wait_for(then, lambda: then in text(cluster, "typed.log"), 60)  # noqa: B023 - it is called at once
    assert person.wait(240) != 0, "a stopped job has not succeeded"
    with cluster.attached("ray"):
        assert "was stopped" in cluster.user(". build/lab/env.sh; ray job status asked").stdout


def test_a_host_that_the_server_cannot_reach_is_named_and_nothing_is_submitted(lab: Lab):
    ssh = {"user": "root", "identity_file": str(lab.folder / "key"), "hosts": [{"hostname": f"{NETWORK}.250"}]}
    lab.stack("gone", fleets=[{"name": "gone", "ssh": ssh}], task={"name": "lost"})
    try:
        done = lab.user("python -m cluster_tasks.client.launch gone --timeout 15 -- true")
        assert done.returncode == 76, done.stdout
        assert f"fleet gone: waiting for host {NETWORK}.250 (pending)" in done.stdout
        assert f"ssh -i {lab.folder}/key root@{NETWORK}.250 sudo -n true: not within 15 s" in done.stdout
        assert "ray-cluster.dstack.yml" not in done.stdout
    finally:
        lab.must("dstack fleet delete -y gone")


def test_what_is_wrong_is_one_line_before_anything_is_started(lab: Lab):
    cases = {
        "python -m cluster_tasks.client.launch nowhere -- true": "there is no stack 'nowhere'",
        "python -m cluster_tasks.client.launch local -- true": "flotilla:cloud: local needs no dstack; there it is flotilla up",
        f"{LAUNCH} --working-dir gone -- true": "project/gone: no such folder",
        f"{LAUNCH}": "give either --attach JOB or a command after --",
        f"DSTACK_PROJECT=other {LAUNCH} -- true": "no dstack server is known here",
        "python -m cluster_tasks.client.status nowhere": "there is no stack 'nowhere'",
    }
    for line, why in cases.items():
        done: subprocess.CompletedProcess[str] = lab.user(line)
        assert done.returncode == 2, f"{line}: {done.stdout}"
        assert why in done.stdout, line
        assert "Traceback" not in done.stdout
