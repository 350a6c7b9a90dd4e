"""The rendered scripts as Slurm, a shell and the container runtimes see them; nothing of Ray is started."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from infra.slurm import build as site

pytestmark = pytest.mark.hosts

ROOT = Path(__file__).parents[3]

# Records its arguments, and becomes the command behind the image, with the variables that were handed on.
RECORDER = """\
#!{python}
import json, os, socket, sys
from pathlib import Path

at = sys.argv.index("rocm/verl:1.0")
record = {{"arguments": sys.argv[1:at], "command": sys.argv[at + 1 :]}}
(Path(__file__).parent / f"{{socket.gethostname()}}.json").write_text(json.dumps(record))
inside = {{"PATH": os.environ["PATH"]}}
for word in sys.argv[:at]:
    if word.startswith("--env="):
        name, given, value = word.removeprefix("--env=").partition("=")
        if given or name in os.environ:
            inside[name] = value if given else os.environ[name]
os.execvpe(sys.argv[at + 1], sys.argv[at + 1 :], inside)
"""
DEVICES = "mkdir -p /dev/dri; mknod /dev/kfd c 1 3; mknod /dev/dri/renderD128 c 1 3; chgrp 44 /dev/kfd; chgrp 105 /dev/dri/r*"
SHOW = """
from os import environ as e
print("SEEN", *(e.get(name) for name in ("RANK", "WORLD_SIZE", "SECRET", "GPU_MAX_HW_QUEUES", "FLOTILLA_RUNS", "CUDA_VISIBLE_DEVICES")))
"""
GPUS = {"name": "MI300X", "count": 8, "vendor": "amd"}
WHOLE = {"fleets": [{"name": "gpus", "nodes": 3, "cpus": 8, "gpu": {"name": "H100", "count": 8}}]}
STACKS = {
    "bare": WHOLE,
    "pyxis": WHOLE | {"slurm": {"container": "pyxis"}, "task": {"image": "rocm/verl:1.0"}},
    "typed": WHOLE
    | {"slurm": {"partition": "urgent", "account": "me", "qos": "high", "gpu_type": "h100", "time": "2-00:00:00", "requeue": 0}},
    "shared": {
        "fleets": [{"name": "gpus", "nodes": 2, "cpus": 2, "memory": "4GB", "gpu": {"name": "H100", "count": 2}}],
        "slurm": {"exclusive": False, "mail": "me@example.com", "sbatch": ["--comment=x"]},
    },
}


@pytest.mark.parametrize("name", STACKS)
def test_slurm_takes_every_script(projects, slurm, name):
    project = projects(f"takes-{name}", **STACKS[name])
    for script in ("ray-cluster", "ray-ppo", "torchrun"):
        done = slurm.run(f"sbatch --test-only build/slurm/{script}.sbatch", folder=project.folder, check=False)
        assert done.returncode == 0, done.stderr


def test_what_the_cluster_does_not_have_is_refused_before_anything_is_submitted(slurm):
    """The preview as a person types it on the login node; nothing is written."""
    project = slurm.folder / "refused"
    for name in ("stacks", "infra"):
        (project / name).mkdir(parents=True)
    for name in ("Pulumi.yaml", "infra/__main__.py"):
        shutil.copy(ROOT / name, project / name)
    stack = yaml.safe_load((ROOT / "stacks/Pulumi.slurm.yaml").read_text())
    stack["config"]["flotilla:slurm"]["partition"] = "gpus"
    (project / "stacks/Pulumi.slurm.yaml").write_text(yaml.safe_dump(stack))
    done = slurm.run(f"{sys.executable} -m infra.preview slurm", folder=project, check=False)
    word = "flotilla:slurm.partition: 'gpus' is not a partition of this cluster; did you mean gpu? (sinfo shows: gpu, old, urgent)"
    assert (done.returncode, done.stderr) == (2, f"stacks/Pulumi.slurm.yaml: {word}\n")
    assert not (project / "build").exists()


def test_slurm_itself_refuses_an_unknown_partition(projects, slurm):
    """Where the files are rendered on a machine without sinfo."""
    project = projects("nowhere", slurm={"partition": "nowhere"})
    done = slurm.run("sbatch build/slurm/ray-ppo.sbatch", folder=project.folder, check=False)
    assert done.returncode == 1
    assert "invalid partition" in done.stderr


def test_the_allocation_is_compared_with_this_cluster(slurm):
    """What a real sinfo prints is read as it is meant."""
    known = site.groups(slurm.run(f"sinfo -h -e -o '{site.FORMAT}'").stdout)
    assert {(group.partition, group.default, group.up, group.nodes, group.cpus, str(group.gpus)) for group in known} == {
        ("gpu", True, True, 3, 8, "{'h100': 8}"),
        ("old", False, True, 1, 8, "{'h100': 8}"),
        ("urgent", False, True, 3, 8, "{'h100': 8}"),
    }


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_container_engine_gets_amds_devices_and_runs_the_agent_with_what_it_needs(projects, slurm, engine):
    """There is no AMD GPU here: nodes get device files, and the engine is a recorder that runs the command itself."""
    settings = {"container": engine, "gpu_type": "h100", "time": "15:00"}
    fleet = {"name": "gpus", "nodes": 2, "cpus": 8, "gpu": GPUS}
    project = projects(f"amd-{engine}", fleets=[fleet], slurm=settings, task={"image": "rocm/verl:1.0", "env": {"SECRET": None}})
    bin_ = project.folder / "bin"
    bin_.mkdir()
    (bin_ / engine).write_text(RECORDER.format(python=sys.executable))
    (bin_ / engine).chmod(0o755)
    slurm.run(f"srun -N3 bash -c '{DEVICES}'")
    try:
        path = f"{bin_}:{Path(sys.executable).parent}:/usr/bin:/bin"
        job = project.submit("torchrun", "--nproc-per-node=1", "--no-python", "python", "-c", SHOW, SECRET="hush-hush", PATH=path)
        state = slurm.ended(job)
    finally:
        slurm.run("srun -N3 rm -r /dev/kfd /dev/dri")
    log = project.log("torchrun", job)
    assert state["ExitCode"] == "0:0", log
    assert sorted(line for line in log.splitlines() if line.startswith("SEEN")) == [
        f"SEEN {rank} 2 hush-hush 2 {project.folder}/runs None" for rank in (0, 1)
    ]
    for node in ("n1", "n2"):
        arguments = json.loads((bin_ / f"{node}.json").read_text())["arguments"]
        given = {"run", "--rm", f"--name=flotilla-{job}-{node}", "--network=host", "--ipc=host", "--device=/dev/kfd", "--device=/dev/dri"}
        assert given <= set(arguments)
        assert {"--group-add=44", "--group-add=105", f"--volume={project.folder}:{project.folder}", "--env=SECRET"} <= set(arguments)
        assert ("--userns=" if engine == "podman" else "--user=0:0") in arguments  # root's own
        assert "hush-hush" not in str(arguments)


def test_a_node_without_an_amd_gpu_says_so(projects, slurm):
    fleet = {"name": "gpus", "nodes": 1, "gpu": GPUS}
    project = projects("no-amd", fleets=[fleet], slurm={"container": "docker", "gpu_type": "h100"}, task={"image": "rocm/verl:1.0"})
    job = project.submit("torchrun")
    assert slurm.ended(job)["ExitCode"] == "2:0"
    assert "error: n1 has no /dev/kfd: no AMD GPU, or its driver is not loaded\n" in project.log("torchrun", job)


def test_outside_of_the_projects_folder_a_script_says_where_to_submit(projects, slurm):
    project = projects("elsewhere")
    (project.folder / "sub/build/slurm").mkdir(parents=True)
    job = slurm.run("sbatch --parsable ../build/slurm/ray-ppo.sbatch", folder=project.folder / "sub").stdout.strip()
    assert slurm.ended(job)["ExitCode"] == "2:0"
    log = (project.folder / f"sub/build/slurm/ray-ppo-{job}.log").read_text()
    attempt, error = log.splitlines()
    assert attempt == f"attempt 1 of job {job} on n[1-2]"
    assert error.startswith(f"error: no {project.folder}/sub/build/slurm/node on n1; submit in the project's folder")


def test_a_time_limit_shorter_than_the_notice_is_one_line(projects, slurm):
    project = projects("short")
    job = project.submit("ray-ppo", options="--time=4 --nodes=1")
    assert slurm.ended(job)["ExitCode"] == "2:0"
    assert "error: the time limit leaves less than flotilla:slurm.notice, 300 s: sbatch --time" in project.log("ray-ppo", job)


OFFERS = """
import sys, yaml
from pathlib import Path
from dstack._internal.core.backends.slurm.compute import SlurmCompute
from dstack._internal.core.backends.slurm.models import SlurmBackendFileConfigWithCreds, SlurmConfig
[project] = yaml.safe_load(Path("build/slurm/server-config.yml").read_text())["projects"]
config = SlurmBackendFileConfigWithCreds.model_validate(project["backends"][0])  # reads the key's file
for offer in SlurmCompute(SlurmConfig.model_validate(config.model_dump())).get_all_offers_with_availability(True):
    gpus = offer.instance.resources.gpus
    print(offer.region, offer.instance.name, sorted(offer.availability_zones), len(gpus), gpus[0].name)
"""


def test_dstacks_own_backend_finds_the_nodes_by_what_is_rendered_for_it(projects, slurm):
    """By SSH to the login node. Its jobs need Pyxis, which Debian does not have, so none is run."""
    allocation = {"partition": "gpu", "login": "root@10.77.0.254", "identity_file": str(slurm.ssh().with_name("id"))}
    project = projects("dstack", fleets=WHOLE["fleets"], slurm=allocation, dstack={"server": "http://127.0.0.1:3000"})
    done = slurm.run(f"{sys.executable} -c {shlex.quote(OFFERS)}", folder=project.folder, check=False)
    assert done.returncode == 0, done.stderr
    partitions = {"n1": ["gpu", "urgent"], "n2": ["gpu", "urgent"], "n3": ["gpu", "old", "urgent"]}
    assert sorted(done.stdout.splitlines()) == [f"slurm {node} {names} 8 H100" for node, names in partitions.items()], done.stderr
