"""Stacks on Slurm: the one line that a mistake gets before anything is submitted, and what the scripts say."""

from __future__ import annotations

import copy
import shutil
import socket
import subprocess
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from dstack._internal.core.backends.slurm.models import SlurmBackendFileConfigWithCreds
from dstack._internal.core.models.configurations import TaskConfiguration, parse_apply_configuration
from dstack._internal.core.models.fleets import FleetConfiguration
from edits import put

from cluster_tasks import slurm
from cluster_tasks.node.checks import one_list_of_gpus
from cluster_tasks.node.network import resolve
from cluster_tasks.node.ray import ray_command
from cluster_tasks.node.settings import read_settings
from infra import publish
from infra import slurm as site
from infra.site import Site
from stacks.load import StackError, parse
from stacks.schema import Stack
from stacks.slurm import seconds

ROOT = Path(__file__).parents[2]
BARE: dict[str, Any] = {
    "cloud": "slurm",
    "fleets": [{"name": "gpus", "nodes": 2, "cpus": 96, "gpu": {"name": "H100", "count": 8}}],
    "slurm": {"partition": "gpu", "account": "team", "time": "24:00:00", "login": "me@login.example.com"},
    "checkpoints": {"kind": "shared", "path": "/shared/me"},
}
DOCKER = BARE | {
    "fleets": [{"name": "gpus", "nodes": 2, "gpu": {"name": "MI300X", "count": 8, "vendor": "amd"}}],
    "slurm": BARE["slurm"] | {"container": "docker"},
    "task": {"image": "rocm/verl:1.0", "volumes": ["/data:/data"], "env": {"HF_TOKEN": None, "HF_HUB_OFFLINE": "1"}},
}
PODMAN = DOCKER | {"fleets": BARE["fleets"], "slurm": DOCKER["slurm"] | {"container": "podman"}}
PYXIS = DOCKER | {"fleets": BARE["fleets"], "slurm": DOCKER["slurm"] | {"container": "pyxis"}}
APPTAINER = DOCKER | {"slurm": DOCKER["slurm"] | {"container": "apptainer"}, "task": {"image": "/shared/verl.sif"}}
SHARED_NODES = BARE | {
    "fleets": [BARE["fleets"][0] | {"cpus": 4, "memory": "64GB"}],
    "slurm": {"exclusive": False, "requeue": 0, "mail": "me@example.com", "modules": ["cuda/12.8"], "sbatch": ["--constraint=ib"]},
}
DSTACK = BARE | {"slurm": BARE["slurm"] | {"identity_file": "~/.ssh/id"}, "dstack": {"server": "http://127.0.0.1:3000"}}
STACKS = {"bare": BARE, "docker": DOCKER, "podman": PODMAN, "pyxis": PYXIS, "apptainer": APPTAINER, "shared nodes": SHARED_NODES}

MISTAKES = [
    # the allocation
    (BARE, "slurm.partition", "gpu nodes", "slurm.partition: 'gpu nodes' is not a partition, or several with commas"),
    (BARE, "slurm.account", "", "slurm.account: '' is not a name as Slurm knows it, without blanks"),
    (BARE, "slurm.qos", 7, "slurm.qos: 7 is not a name as Slurm knows it"),
    (BARE, "slurm.time", "1 day", "slurm.time: '1 day' is not a time limit as Slurm writes it: minutes, hours:minutes:seconds"),
    (BARE, "slurm.time", 86400, "slurm.time: 86400 is a number: YAML reads 24:00:00 as seconds; put the limit in quotes"),
    (BARE, "slurm.time", "5:00", "slurm.time: '5:00' is short: jobs are asked to save 300 s before its end; take 10:00 or more"),
    (BARE, "slurm.walltime", 4, "slurm.walltime: unknown key; did you mean time? (allowed: partition, account, qos"),
    (BARE, "slurm.partion", "gpu", "slurm.partion: unknown key; did you mean partition?"),
    (BARE, "slurm.login", "me@", "slurm.login: 'me@' is not a login node: [user@]host[:port]"),
    (BARE, "slurm.requeue", -1, "slurm.requeue: -1 is not an integer >= 0"),
    (BARE, "slurm.requeue", True, "slurm.requeue: True is not an integer >= 0"),
    (BARE, "slurm.mail", "me", "slurm.mail: 'me' is not a mail address"),
    (BARE, "slurm.modules", ["cuda; rm"], "slurm.modules[0]: 'cuda; rm' is not a module such as cuda/12.8"),
    (BARE, "slurm.setup", ["a\nb"], "slurm.setup[0]: 'a\\nb' is not one line of shell"),
    (BARE, "slurm.sbatch", ["-C ib"], "slurm.sbatch[0]: '-C ib' is not an option of sbatch such as --constraint=ib"),
    (BARE, "slurm.sbatch", ["--nodes=4"], "slurm.sbatch[0]: --nodes=4 is set for you: fleets[0].nodes"),
    (BARE, "slurm.sbatch", ["--x=1", "--signal=B:TERM@60"], "slurm.sbatch[1]: --signal=B:TERM@60 is set for you: jobs are told 300 s"),
    # the nodes
    (BARE, "fleets", BARE["fleets"] + [{"name": "b2", "nodes": 1}], "fleets: 2 fleets, but a Slurm allocation is of like nodes; leave one"),
    (BARE, "fleets.0.machine", "p5.48xlarge", "fleets[0].machine: belongs to flotilla:cloud aws or gcp, but that is slurm"),
    (BARE, "slurm.exclusive", "maybe", "slurm.exclusive: 'maybe' is not true or false"),
    (SHARED_NODES, "fleets.0.cpus", ..., "fleets[0].cpus: is missing; nodes are shared with other jobs (slurm.exclusive: false)"),
    (SHARED_NODES, "fleets.0.memory", ..., "fleets[0].memory: is missing; nodes are shared with other jobs"),
    # containers
    (BARE, "slurm.container", "pyxis", "task.image: is missing; slurm.container pyxis runs an image"),
    (BARE, "slurm.container", "singularity", "slurm.container: 'singularity' is not one of none, pyxis, apptainer, docker, podman"),
    (BARE, "task", {"image": "a:1"}, "slurm.container: none, but task.image names 'a:1'; take one of pyxis, apptainer, docker, podman"),
    (DOCKER, "task.image", "rocm/verl:latest", "task.image: 'rocm/verl:latest' is not pinned"),
    (DOCKER, "task.image", "/shared/a.sif", "task.image: '/shared/a.sif' is a file, but docker takes an image by its name and tag"),
    (APPTAINER, "task.image", "/shared/a.sqsh", "task.image: '/shared/a.sqsh' is no file that apptainer runs; those end in .sif"),
    (DOCKER, "task.volumes", ["data:/data"], "task.volumes[0]: 'data:/data' is a volume of dstack; on Slurm mount a folder"),
    (DOCKER, "task.volumes", ["./data:/data"], "task.volumes[0]: './data:/data' is not a mount such as /folder/of/host:/data"),
    (BARE, "task", {"volumes": ["/data:/data"]}, "task.volumes[0]: '/data:/data', but without a container nodes see folders as they are"),
    (BARE, "task", {"shm_size": "64GB"}, "task.shm_size: belongs to slurm.container docker or podman, but that is none"),
    (
        DOCKER | {"fleets": SHARED_NODES["fleets"]},
        "slurm.exclusive",
        False,
        "slurm.exclusive: False, but docker does not know which GPUs",
    ),
    # the shared file system
    (BARE, "checkpoints.path", ..., "checkpoints.path: is missing; it is a folder on the file system that all nodes share"),
    (BARE, "checkpoints", ..., "checkpoints.kind: instance is not on flotilla:cloud slurm (allowed here: shared)"),
    (BARE, "checkpoints.path", "runs", "checkpoints.path: 'runs' is not the absolute path of a folder"),
    # what belongs elsewhere
    (BARE, "slurm.gpu_type", "h100 80", "slurm.gpu_type: 'h100 80' is not a name as Slurm knows it"),
    (BARE, "task", {"max_duration": "72h"}, "task.max_duration: belongs to flotilla:dstack, which is not set; for sbatch slurm.time is"),
    (BARE, "task", {"retry": False}, "task.retry: belongs to flotilla:dstack, which is not set; for sbatch slurm.requeue says"),
    (BARE, "slurm.identity_file", "~/.ssh/id", "slurm.identity_file: belongs to flotilla:dstack, which is not set"),
    (DSTACK, "slurm.login", "login.example.com", "slurm.login: is missing or without its user; dstack logs in there"),
    (DSTACK, "slurm.identity_file", ..., "slurm.identity_file: is missing; dstack logs in with it"),
    (DSTACK, "slurm.partition", ..., "slurm.partition: is missing; dstack places runs by it"),
    (DSTACK, "fleets.0.gpu.name", ..., "fleets[0].gpu.name: is missing; dstack finds partitions by the GPU's name"),
    (BARE, "cloud", "local", "slurm: belongs to flotilla:cloud slurm, but that is local"),
    (
        {"cloud": "local", "fleets": [{"name": "laptop", "nodes": 1}]},
        "task",
        {"image": "/a.sif"},
        "task.image: '/a.sif' is a file; those run under flotilla:cloud slurm alone",
    ),
]


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    settings = copy.deepcopy(base)
    put(settings, path, value)
    return {f"flotilla:{key}": item for key, item in settings.items()}


def stack(base: dict[str, Any]) -> Stack:
    return Stack.model_validate({"name": "test"} | base)


@pytest.mark.parametrize(
    ("base", "path", "value", "message"),
    MISTAKES,
    ids=[message[:60] for *_, message in MISTAKES],
)
def test_a_mistake_is_one_line_that_names_file_setting_value_and_what_is_allowed(base, path, value, message):
    with pytest.raises(StackError) as refused:
        parse("test", changed(base, path, value))
    assert str(refused.value).startswith(f"stacks/Pulumi.test.yaml: flotilla:{message}"), refused.value
    assert "\n" not in str(refused.value)


# What the cluster has, as `sinfo` tells

SINFO = """\
gpu*|up|2-00:00:00|3|96|gpu:h100:8(S:0-1),nvme:1
gpu*|up|2-00:00:00|1|96|gpu:a100:4
cpu|up|infinite|10|64|(null)
old|down|infinite|2|16|gpu:2
"""
NOT_HAD = [
    ("slurm.partition", "gpus", "slurm.partition: 'gpus' is none of this cluster; did you mean gpu? (sinfo shows: cpu, gpu, old)"),
    ("slurm.partition", "gpu,x", "slurm.partition: 'x' is none of this cluster (sinfo shows: cpu, gpu, old)"),
    ("slurm.partition", "old", "slurm.partition: partition old is down"),
    ("slurm.time", "3-00:00:00", "slurm.time: '3-00:00:00' is more than partition gpu allows"),
    ("slurm.gpu_type", "b200", "slurm.gpu_type: 'b200' is no GPU of partition gpu (sinfo shows: a100, h100)"),
    ("fleets.0.gpu.count", 16, "fleets[0].gpu.count: 16, but nodes of partition gpu have 8 at most"),
    ("slurm", {"gpu_type": "a100"}, "fleets[0].gpu.count: 8, but nodes of partition gpu have 4 of type a100 at most"),
    ("slurm.partition", "cpu", "fleets[0].gpu.count: 8, but nodes of partition cpu have 0 at most"),
    ("fleets.0.cpus", 128, "fleets[0].cpus: 128, but nodes of partition gpu have 96 at most"),
    ("fleets.0.nodes", 5, "fleets[0].nodes: 5, but partition gpu has 4"),
]


@pytest.mark.parametrize(("path", "value", "message"), NOT_HAD, ids=[message[:50] for *_, message in NOT_HAD])
def test_what_the_cluster_does_not_have_is_told_with_what_it_has(path, value, message):
    wanted = parse("test", changed(BARE, path, value))
    assert next(site.faults(wanted, site.groups(SINFO))).startswith(message)


def test_what_the_cluster_has_is_no_fault():
    for base in (BARE, BARE | {"slurm": {}}, BARE | {"slurm": {"gpu_type": "h100", "time": "2-00"}}):
        assert not list(site.faults(stack(base), site.groups(SINFO)))


def test_the_cluster_is_asked_where_sinfo_is_on_path(tmp_path, monkeypatch):
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\ncat <<'END'\n{SINFO}END\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert site.build(stack(BARE)) == Site()
    with pytest.raises(StackError, match=r"^stacks/Pulumi.test.yaml: flotilla:slurm.partition: 'gpus' is none"):
        site.build(parse("test", changed(BARE, "slurm.partition", "gpus")))


@pytest.mark.parametrize(
    ("time", "expected"), [("30", 1800), ("15:30", 930), ("24:00:00", 86400), ("2-00", 172800), ("1-12:30", 131400), ("1-00:00:01", 86401)]
)
def test_time_limits_are_read_as_slurm_reads_them(time, expected):
    assert seconds(time) == expected


# The scripts


def text(base: dict[str, Any], name: str = "ray-ppo.sbatch") -> str:
    return slurm.scripts(stack(base), Site())[name]


@pytest.mark.parametrize("name", STACKS)
def test_scripts_are_bash_in_which_shellcheck_finds_nothing(name, tmp_path):
    for file, script in slurm.scripts(stack(STACKS[name]), Site()).items():
        (tmp_path / file).write_text(script)
        subprocess.run(["bash", "-n", tmp_path / file], check=True)
        if shutil.which("shellcheck"):
            found = subprocess.run(["shellcheck", tmp_path / file], capture_output=True, text=True, check=False)
            assert found.returncode == 0, found.stdout
        assert "sleep" not in script
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed; .ci/setup dev installs it as root")


def test_a_job_on_two_nodes_fits_on_one_screen_and_the_stack_on_fifteen_lines():
    assert len(text(BARE).splitlines()) <= 50
    lines = (slurm_file := ROOT / "stacks/Pulumi.slurm.yaml").read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.strip().startswith("#")]) <= 15, slurm_file


def test_the_allocation_is_what_the_stack_says():
    options = {line.removeprefix("#SBATCH --") for line in text(BARE).splitlines() if line.startswith("#SBATCH")}
    assert {"partition=gpu", "account=team", "nodes=2", "cpus-per-task=96", "gpus-per-node=8", "time=24:00:00", "mem=0"} <= options
    assert {"exclusive", "requeue", "signal=B:USR1@300", "open-mode=append"} <= options
    options = {line.removeprefix("#SBATCH --") for line in text(SHARED_NODES).splitlines() if line.startswith("#SBATCH")}
    assert {"mem=65536M", "no-requeue", "constraint=ib", "mail-user=me@example.com", "mail-type=FAIL"} <= options
    assert not {"exclusive", "mem=0"} & options
    assert "#SBATCH --gpus-per-node=h100:8\n" in text(changed_stack(BARE, "slurm.gpu_type", "h100"))


def test_modules_come_before_setup_and_setup_before_the_agent():
    script = text(changed_stack(SHARED_NODES, "slurm.setup", [". ~/venv/bin/activate"]))
    assert script.index("module load cuda/12.8\n") < script.index(". ~/venv/bin/activate\n") < script.index("agent=(")


def test_ports_are_pinned_on_whole_nodes_and_searched_on_shared_ones():
    assert "port=6379 dashboard=8265\n" in text(BARE)
    assert "--pin-ports" in text(BARE)
    assert "--pin-ports" not in text(SHARED_NODES)
    assert "port=$(free " in text(SHARED_NODES)


def test_on_shared_nodes_a_port_that_somebody_listens_on_is_passed_over():
    [free] = [line for line in text(SHARED_NODES).splitlines() if line.startswith("free()")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = subprocess.run(["bash", "-c", f"{free}\nfree {port}"], capture_output=True, text=True, check=True, timeout=30)
    assert int(found.stdout) > port


def test_a_value_left_to_the_shell_is_asked_for_and_stands_nowhere():
    script = text(DOCKER)
    assert '[ "${HF_TOKEN+set}" ] || fail "HF_TOKEN is not set where you submit"' in script
    assert "--env=HF_TOKEN\n" in script.replace(" ", "\n")  # by name
    assert "export FLOTILLA_RUNS=/shared/me RAY_AUTH_MODE=token" in script


@pytest.mark.parametrize("name", STACKS)
def test_the_agent_takes_the_command_that_bash_makes_of_the_script(name):
    array = "agent=(" + text(STACKS[name]).partition("\nagent=(")[2].partition("\n(($#))")[0]
    bash = f'port=1 dashboard=2 build=build devices=()\n{array}\nprintf "%s\\n" "${{agent[@]}}"'
    words = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    settings = read_settings([*words[words.index("build/node") + 1 :], "--rank=0", "--addresses=127.0.0.1"], {})
    assert (settings.port, settings.dashboard_port, settings.num_cpus) == (1, 2, STACKS[name]["fleets"][0].get("cpus"))


AMD_WORDS = [
    "--device=/dev/kfd",
    "--device=/dev/dri",
    "--cap-add=SYS_PTRACE",
    "--security-opt=seccomp=unconfined",
    "--network=host",
    "--ipc=host",
    "--ulimit=memlock=-1",
    '"--volume=/data:/data"',
    '"--volume=/shared/me:/shared/me"',
    '"--volume=$PWD:$PWD"',
    "rocm/verl:1.0",
]


def test_docker_gets_amds_devices_and_no_privileges():
    script = text(DOCKER)
    assert [word for word in AMD_WORDS if word not in script] == []
    assert "--privileged" not in script
    assert "--gpus=" not in script
    assert "GPU_MAX_HW_QUEUES=2" in script


def test_each_runtime_gets_its_own_words():
    assert "--device=nvidia.com/gpu=all" in text(PODMAN)
    assert "--userns=keep-id" in text(PODMAN)
    assert "--gpus=all" in text(PODMAN | {"slurm": {"container": "docker"}})
    assert "--container-image=rocm/verl:1.0" in text(PYXIS)
    assert '"--container-mounts=$PWD:$PWD,/shared/me:/shared/me,/data:/data"' in text(PYXIS)
    assert "apptainer exec --rocm " in text(APPTAINER)
    assert " --nv " in text(APPTAINER | {"fleets": BARE["fleets"]})
    assert "--shm-size=64g" in text(DOCKER | {"task": DOCKER["task"] | {"shm_size": "64GB"}})


def changed_stack(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    settings = copy.deepcopy(base)
    put(settings, path, value)
    return settings


# The agent


@pytest.mark.parametrize(
    ("found", "network", "address"),
    [
        (["fd00::1", "10.0.0.1"], None, "10.0.0.1"),
        (["fd00::1"], None, "fd00::1"),
        (["10.0.0.1", "fd00::1"], "fd00::/8", "fd00::1"),
        (["10.0.0.1", "192.168.0.1"], "192.168.0.0/16", "192.168.0.1"),
    ],
)
def test_a_node_is_known_by_its_ipv4_address_unless_it_has_none_or_a_network_is_named(found, network, address, monkeypatch):
    entries = [(None, None, None, "", (one, 0)) for one in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    assert resolve("n1", ip_network(network) if network else None) == address


def test_an_ipv6_head_stands_in_brackets_before_its_port():
    worker = read_settings(["--rank", "1", "--addresses", "fd00::1,fd00::2"], {})
    assert "--address=[fd00::1]:6379" in ray_command(worker)


# The agent on AMD's nodes

AMD_ENV = {"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5", "GPU_DEVICE_ORDINAL": "4,5"}


def test_amds_gpus_are_named_once_and_nvidias_are_left_alone(tmp_path):
    amd, nvidia = dict(AMD_ENV), dict(AMD_ENV)
    one_list_of_gpus(amd, kfd=tmp_path)
    one_list_of_gpus(nvidia, kfd=tmp_path / "absent")
    assert amd == {"HIP_VISIBLE_DEVICES": "4,5"}
    assert nvidia == AMD_ENV


# dstack's backend


def test_dstack_reads_its_definitions_of_a_slurm_cluster_as_they_are_meant():
    wanted = stack(DSTACK)
    texts = publish.rendered(wanted, Site(backend=site.backend(wanted)))
    assert sorted(texts) == sorted(publish.file_names(wanted))
    [project] = yaml.safe_load(texts["server-config.yml"])["projects"]
    [cluster] = SlurmBackendFileConfigWithCreds.model_validate(without_keys(project["backends"][0])).clusters
    assert (cluster.name, cluster.user, cluster.hostname) == ("test", "me", "login.example.com")
    assert cluster.gpu_partitions and (cluster.gpu_partitions[0].gpu, cluster.gpu_partitions[0].partitions) == ("H100", ["gpu"])
    fleet = parse_apply_configuration(yaml.safe_load(texts["gpus.fleet.dstack.yml"]))
    assert isinstance(fleet, FleetConfiguration) and fleet.nodes and (fleet.nodes.min, fleet.nodes.max) == (0, 2)
    task = parse_apply_configuration(yaml.safe_load(texts["ray-cluster.dstack.yml"]))
    assert isinstance(task, TaskConfiguration) and task.nodes_num == 2
    assert not task.volumes  # dstack mounts none under Slurm


def without_keys(backend: dict[str, Any]) -> dict[str, Any]:
    """dstack reads the private key from its file, which is nobody's here."""
    assert [cluster["private_key"] for cluster in backend["clusters"]] == [{"path": "~/.ssh/id"}]
    return backend | {"clusters": [cluster | {"private_key": {"content": "key"}} for cluster in backend["clusters"]]}
