"""What the rendered scripts say, what the agent makes of Slurm's words, and dstack's backend for Slurm."""

from __future__ import annotations

import shutil
import socket
import subprocess
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_stacks import APPTAINER, BARE, DOCKER, DSTACK, PODMAN, PYXIS, SHARED_NODES, STACKS, changed_stack, stack

from cluster_tasks import slurm
from cluster_tasks.node.checks import one_list_of_gpus
from cluster_tasks.node.network import resolve
from cluster_tasks.node.ray import ray_command
from cluster_tasks.node.settings import read_settings
from infra import publish
from infra.slurm import build as site
from stacks.dstack_api import FleetConfiguration, SlurmBackendFileConfigWithCreds, TaskConfiguration, parse_apply_configuration
from stacks.site import Site

ROOT = Path(__file__).parents[2]


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
        pytest.skip("shellcheck is not installed; `make test-hosts` installs it as root")


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
    entries = [(None, None, None, "", (ip, 0)) for ip in found]
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
