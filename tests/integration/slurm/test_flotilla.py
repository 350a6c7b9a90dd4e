"""`flotilla up`, `status`, `submit`, `launch --recipe` and `down` on a real Slurm, through a real SSH tunnel."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import recipe_stand_ins

from lab.copied import copy_project
from lab.slurm.cluster import SYSTEM_PATH, Cluster
from lab.waiting import wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1500)]  # its clusters start in fixtures, which count

Flotilla = Callable[[str], tuple[int, str, str]]
GPUS = 2  # of each node, which Slurm hands out and Ray is told to have
ROOT = Path(__file__).parents[3]
RECIPE = "verl/ppo-gsm8k"


@pytest.fixture(scope="module")
def clone(slurm: Cluster) -> Path:
    """A clone on the shared file system with stacks of its own, and `ssh` with the configuration of a person who has a key."""
    folder = copy_project(slurm.folder / "verbs")
    stand_ins = folder / "standins"
    recipe_stand_ins.verl_in(stand_ins)
    recipe_stand_ins.hub_in(stand_ins)
    fleet = {"cpus": 1, "gpu": {"name": "H100", "count": GPUS}}
    for name, nodes in (("slurm", 2), ("one", 1)):
        setup = [f". {sys.prefix}/bin/activate", f"export PYTHONPATH={stand_ins}"]
        settings: dict[str, Any] = {
            "cloud": "slurm",
            "fleets": [fleet | {"name": "gpus", "nodes": nodes}, fleet | {"name": "spot", "role": "rollout", "nodes": "0..1"}],
            "slurm": {"partition": "gpu", "time": "15:00", "login": "root@ctl", "setup": setup},
            "checkpoints": {"kind": "shared", "path": str(folder / "runs")},
            "monitoring": {"enabled": True},
        }
        text = yaml.safe_dump({"config": {f"flotilla:{key}": value for key, value in settings.items()}})
        (folder / f"stacks/Pulumi.{name}.yaml").write_text(text)
    config = slurm.ssh()
    (folder / "bin").mkdir()
    (folder / "bin/ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {config} "$@"\n')
    (folder / "bin/ssh").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def environment(clone: Path) -> dict[str, str]:
    return {
        "PATH": f"{clone}/bin:{Path(sys.executable).parent}:{SYSTEM_PATH}",
        "PYTHONPATH": str(clone),
        "FLOTILLA_NODE_ARGS": f"--object-store-mb 80 --num-gpus {GPUS}",  # nodes have 1 GB of /dev/shm here, and no GPU
    }


@pytest.fixture(scope="module")
def flotilla(slurm: Cluster, clone: Path, environment: dict[str, str]) -> Iterator[Flotilla]:
    """With the cluster up."""

    def run(arguments: str) -> tuple[int, str, str]:
        line = f"python -m cli {arguments} 2>{clone}/error </dev/null"
        done = slurm.run(line, folder=clone / "trainer/recipes", env=environment, check=False, seconds=1200)
        return done.returncode, done.stdout, (clone / "error").read_text()

    try:
        code, output, error = run("up slurm")
        assert code == 0, output + error
        assert "$ sbatch --parsable build/slurm/ray-cluster.sbatch" in error and "dashboard  http://localhost:8265" in error
        yield run
    finally:
        run("down slurm")


def ended(flotilla: Flotilla, stack: str, name: str) -> bool:
    """Whether a job of the queue ends well within two minutes."""

    def state() -> str:
        return next(job["state"] for job in json.loads(flotilla(f"queue {stack} --json")[1])["jobs"] if job["name"] == name)

    return wait_for(f"the end of {name}", lambda: state() in ("succeeded", "failed") and state(), 120, every=2) == "succeeded"


def test_up_waits_for_ray_opens_the_tunnel_takes_a_job_and_watches_the_nodes(
    slurm: Cluster, clone: Path, flotilla: Flotilla, environment: dict[str, str]
) -> None:
    job = json.loads((clone / "build/slurm/allocation.json").read_text())["job"]
    code, output, _ = flotilla("status slurm")
    assert code == 0 and f"job {job}  RUNNING" in output and "Ray: 2 of 2 nodes" in output
    assert "is used as it is" in flotilla("up slurm")[2]
    code, output, error = flotilla("submit slurm -- python -c 'print(6 * 7); raise SystemExit(3)'")
    assert (code, output) == (3, "42\n"), error
    seen = slurm.run(f"python {ROOT}/lab/targets.py 2", env=environment, seconds=120).stdout.split()
    code, output, error = flotilla("top slurm --once")
    assert code == 0 and all(node in output for node in seen), output + error


def test_the_allocation_has_a_queue(flotilla: Flotilla) -> None:
    code, output, error = flotilla("submit slurm --queue --name queued --cpus 1 -- python -c 'print(6 * 7)'")
    assert (code, output) == (0, ""), error
    code, output, error = flotilla("logs slurm queued") if ended(flotilla, "slurm", "queued") else (1, "", "it has not ended")
    assert (code, output) == (0, "42\n"), error


def test_a_shell_is_a_step_of_the_clusters_job_on_the_node_that_is_named(clone: Path, flotilla: Flotilla) -> None:
    code, output, error = flotilla("ssh slurm -- sh -c 'hostname; echo $SLURM_JOB_ID $FLOTILLA_STACK; exit 7'")
    job = json.loads((clone / "build/slurm/allocation.json").read_text())["job"]
    head, said = output.split("\n")[:2]
    assert (code, said) == (7, f"{job} slurm"), output + error
    assert f"$ srun --jobid={job} --overlap --export=ALL --nodes=1 --ntasks=1 --nodelist={head} " in error
    code, other, error = flotilla("ssh slurm 1 -- hostname")
    assert code == 0 and other.strip() != head, error
    assert flotilla(f"ssh slurm {other.strip()} -- hostname")[1] == other
    code, output, error = flotilla("ssh slurm n9")
    assert code == 2 and f"NODE n9: the cluster slurm has no such node; it has 0 ({head}), 1 ({other.strip()})" in error
    assert flotilla("code slurm")[1] == f"vscode://vscode-remote/ssh-remote+{head}{clone}\n"


def test_a_model_is_served_by_a_job_of_its_own_and_beside_a_run(
    slurm: Cluster, clone: Path, flotilla: Flotilla, wide_model: Path, environment: dict[str, str]
) -> None:
    shutil.copytree(wide_model, clone / "runs/demo/models/step_2")
    (clone / "runs/demo/run.yaml").write_text("{}\n")
    assert "--gpus 9: the largest node has 2; an engine is on one node" in flotilla("serve slurm run:demo --gpus 9")[2]
    code, output, error = flotilla("serve slurm run:demo --gpus 0")
    assert code == 0 and output == "http://localhost:8265/flotilla/at/demo/v1\n", error
    ask = 'curl -sS -H "Authorization: Bearer $(cat build/slurm/serve-demo.token)" http://localhost:8265/flotilla/at/demo/v1/models'
    assert "demo@2" in slurm.run(ask, folder=clone).stdout
    assert flotilla("serve slurm --stop demo")[0] == 0
    code, _, error = flotilla("serve slurm run:demo --name alone --gpus 0 --sbatch")
    assert code == 0, error
    try:
        [job] = re.findall(r"serve-alone-(\d+)\.log", error)
        log = clone / f"build/slurm/serve-alone-{job}.log"
        wait_for("the engine", lambda: log.exists() and "serve: ready" in log.read_text(), 400)
        assert f"alone  job {job} RUNNING" in flotilla("serve slurm --list")[1]
        assert "serves it already" in flotilla("serve slurm run:demo --name alone --sbatch")[2]
    finally:
        assert flotilla("serve slurm --stop alone")[0] == 0
    wait_for("its end", lambda: not slurm.run(f"squeue -h -j {job}", check=False).stdout.strip(), 240)
    assert f"asking job-{job} to save and stop" in log.read_text()  # Ray, which passes its output on, may leave out the last lines


def test_a_node_of_an_elastic_fleet_joins_comes_again_after_a_notice_and_leaves(slurm: Cluster, clone: Path, flotilla: Flotilla) -> None:
    def nodes(count: int) -> Callable[[], bool]:
        return lambda: f"Ray: {count} of 2 nodes" in flotilla("status slurm")[1]

    job = json.loads((clone / "build/slurm/allocation.json").read_text())["job"]
    code, output, error = flotilla("scale slurm spot=1")
    submitted = f"$ sbatch --parsable --job-name=spot-{job} --array=0 build/slurm/spot.rollout.sbatch {job}"
    assert code == 0 and submitted in error, output + error
    wait_for("a third node", nodes(3), 240)
    [line] = [line for line in flotilla("status slurm")[1].splitlines() if line.startswith("elastic spot")]
    array = line.split()[2]
    assert line.split()[3:] == ["RUNNING", "n3"]
    slurm.run(f"scancel --batch --signal=USR1 {array}")  # the notice before the time limit, or before preemption
    wait_for("its end", nodes(2), 240)
    log = clone / f"build/slurm/spot-{job}-{array.replace('_', '-')}.log"
    wait_for("its return", nodes(3), 240)
    said = log.read_text()
    assert "draining this node" in said and "back into the queue" in said
    code, _, error = flotilla("scale slurm spot=0")
    assert code == 0 and f"$ scancel {array}" in error
    wait_for("its end", nodes(2), 240)
    wait_for("Slurm to have seen it", lambda: "elastic" not in flotilla("status slurm")[1], 240)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("spot=2", "spot=2: stacks/Pulumi.slurm.yaml gives fleet spot 0 to 1 nodes (flotilla:fleets[].nodes)"),
        (
            "gpus=1",
            "gpus=1: gpus has role: cluster, whose nodes start and end together; in stacks/Pulumi.slurm.yaml it needs role: rollout",
        ),
    ],
)
def test_scale_takes_what_the_stack_allows_alone(flotilla: Flotilla, change: str, said: str) -> None:
    code, output, error = flotilla(f"scale slurm {change}")
    assert (code, output) == (2, "") and said in " ".join(error.split())


def test_two_clusters_run_a_recipe_of_which_one_prepares_and_both_resume(
    slurm: Cluster, clone: Path, flotilla: Flotilla, environment: dict[str, str]
) -> None:
    """One by `launch`, on the cluster that is up; one by the script that `recipe show` writes, on the third node."""
    runs = clone / "runs"
    model = runs / "mine"
    settings = f"model={model} packages=image"
    for folder in (model, runs / "second/global_step_1"):
        folder.mkdir(parents=True)

    def person(line: str) -> str:
        return slurm.run(line, folder=clone, env=environment, seconds=200).stdout

    def fetching() -> list[str]:
        return (runs / "fetched").read_text().split() if (runs / "fetched").exists() else []

    person("python -m infra.preview one")
    written = person(f"python -m cli recipe show {RECIPE} one {settings} run=second --as sbatch")
    assert f"#SBATCH --gpus-per-node=h100:{GPUS}\n" in written
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(flotilla, f"launch slurm --recipe {RECIPE} {settings} run=first")
        wait_for("who prepares", fetching, 300)
        job = person("sbatch --parsable build/one/recipe-second.sbatch").strip()
        log = clone / f"build/one/recipe-second-{job}.log"
        try:
            wait_for("who waits", lambda: log.exists() and "data openai/gsm8k: waiting for job first-" in log.read_text(), 500)
        finally:
            (runs / "answer").touch()
        code, output, error = first.result()
    assert code == 0 and "TRAINED\n" in output, output + error
    state = slurm.ended(job, 300)
    assert state["ExitCode"] == "7:0" and "TRAINED" in log.read_text(), log.read_text()
    assert fetching() == ["n1"] and (runs / "data/gsm8k-verl/train.parquet").is_file()
    for run, nodes, node in (("first", 2, "n1"), ("second", 1, "n3")):
        said = json.loads((runs / run / "said.json").read_text())
        sizes = {f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={GPUS}"}
        assert sizes <= set(said["argv"]) and f"actor_rollout_ref.model.path={model}" in said["argv"]
        assert (said["node"], said["resumed"]) == (node, run == "second")
    assert flotilla(f"submit slurm --recipe {RECIPE} {settings} run=first")[0] == 7  # its own; it found what it had saved


def test_down_frees_the_nodes_and_closes_the_tunnel(slurm: Cluster, flotilla: Flotilla) -> None:
    code, _, error = flotilla("down slurm")
    assert code == 0, error
    assert slurm.idle() == slurm.nodes
    assert "up" not in slurm.run("pgrep -f '[s]sh -F.* -N -L' && echo up", check=False).stdout
    assert flotilla("status slurm")[0] == 1
