"""What the rendered scripts say, what the agent makes of Slurm's words, and dstack's backend for Slurm."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.slurm_stacks import APPTAINER, BARE, DOCKER, DSTACK, FLEETS, PODMAN, PYXIS, SHARED_NODES, STACKS, changed_stack, stack

from cluster_tasks import ray, slurm
from cluster_tasks.node.checks import one_list_of_gpus
from cluster_tasks.node.network import resolve
from cluster_tasks.node.ray import ray_command
from cluster_tasks.node.settings import read_settings
from infra import publish
from infra.slurm import build as site
from stacks.dstack_api import FleetConfiguration, SlurmBackendFileConfigWithCreds, TaskConfiguration, parse_apply_configuration
from stacks.load import parse
from stacks.site import Site

ROOT = Path(__file__).parents[3]


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
    assert len(text(BARE).splitlines()) <= 60
    lines = (slurm_file := ROOT / "stacks/Pulumi.slurm.yaml").read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.strip().startswith("#")]) <= 15, slurm_file


@pytest.mark.parametrize("name", ["ray-cluster.sbatch", "ray-ppo.sbatch", "torchrun.sbatch", "rollout.rollout.sbatch"])
@pytest.mark.parametrize(
    "sourced", [{}, {"RAY_AUTH_TOKEN": "x", "RAY_ADDRESS": "http://x", "FLOTILLA_STACK": "x", "FLOTILLA_TOKEN_X": "x"}]
)
def test_a_script_takes_nothing_of_the_stack_whose_env_sh_the_shell_has_sourced(name, sourced, tmp_path):
    rollout = {"name": "rollout", "role": "rollout", "nodes": "0..2", "gpu": {"name": "H100", "count": 8}, "cpus": 96}
    script = text(BARE | {"fleets": [*BARE["fleets"], rollout]}, name)
    begin = script.partition("FLOTILLA_NODES=$(")[0].replace("$PWD", str(tmp_path))
    build = tmp_path / "build/test"
    build.mkdir(parents=True)
    (build / "node").touch()
    begin = begin.replace("/shared/me", str(tmp_path / "shared"))
    env = {"PATH": "/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "1", "RAY_API_SERVER_ADDRESS": "x", **sourced}
    done = subprocess.run(["bash", "-c", f"{begin}\nenv", "x", "job"], env=env, capture_output=True, text=True, check=False)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert found.get("RAY_AUTH_TOKEN_PATH") == f"{build}/ray.token", done.stderr
    assert not {"RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "FLOTILLA_STACK", "FLOTILLA_TOKEN_X"} & found.keys()


def stubs(folder: Path, **programs: str) -> dict[str, str]:
    """The environment of a script in which these stand for Slurm's."""
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "FLOTILLA_RUNS": str(folder)}


@pytest.mark.parametrize(
    ("left", "fails"),
    [(60, True), (299, True), (3600, False), ("Unknown", False), ("N/A", False), (None, False)],
)
def test_a_time_limit_shorter_than_the_notice_is_one_line(left, fails, tmp_path):
    """`sbatch --time=4` wins over the stack's; Slurm would send its notice at once, and the cluster end without a word on the limit."""
    end = datetime.fromtimestamp(time.time() + left).isoformat(timespec="seconds") if isinstance(left, int) else left
    said = f"echo 'JobId=7 JobName=x'; echo '   StartTime=2026-11-28T13:00:00 EndTime={end} Deadline=N/A'" if end else "exit 1"
    lines = slurm.TOO_SHORT.format(notice=300)
    script = f'set -uo pipefail\nfail() {{ echo "error: $*" >&2; exit 2; }}\n{lines}echo on'
    assert lines.splitlines()[0] in text(BARE)
    done = subprocess.run(["bash", "-c", script], env=stubs(tmp_path, scontrol=said), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == ((2, "") if fails else (0, "on\n")), done.stderr
    assert len(done.stderr.splitlines()) == fails and ("flotilla:slurm.notice, 300 s" in done.stderr) == fails


@pytest.mark.parametrize(
    ("code", "note", "again"),
    [
        *((0, True, False), (75, False, True), (77, True, True), (137, True, True), (137, False, False), (1, True, False)),
        *((143, True, False), (0, None, False), (137, None, True), (1, None, False), (143, None, False)),
    ],
)
def test_what_is_put_back_into_the_queue(code, note, again, tmp_path):
    """137 is the agent's own where the head's note stays: it goes when a job has ended, by whatever signal. None: torchrun in its place."""
    env = stubs(tmp_path, scontrol='echo "$@"')
    if note:
        (tmp_path / ".head-7.json").touch()
    end = slurm.END.format(requeue=10, killed=slurm.KILLED["torchrun" if note is None else "ray"])
    script = f"set -uo pipefail\n(exit {code}) & step=$!\n{end}"
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert ("requeue 7" in done.stdout) == again
    assert done.returncode == (0 if again else code)


@pytest.mark.parametrize(("number", "again"), [(signal.SIGUSR1, True), (signal.SIGUSR2, False)])
def test_what_a_person_asks_to_end_saves_as_at_a_notice_and_does_not_come_back(number, again, tmp_path):
    end = slurm.END.format(requeue=10, killed=slurm.KILLED["ray"])
    step = "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(138)); print('up', flush=True); signal.pause()"
    script = f"set -uo pipefail\n{sys.executable} -c {shlex.quote(step)} & step=$!\n{end}"
    job = subprocess.Popen(["bash", "-c", script], env=stubs(tmp_path, scontrol='echo "$@"'), stdout=subprocess.PIPE, text=True)
    assert job.stdout and job.stdout.readline() == "up\n"
    job.send_signal(number)
    said, _ = job.communicate(timeout=20)
    assert job.returncode == 0 and ("requeue 7" in said) == again


def test_the_allocation_is_what_the_stack_says():
    options = {line.removeprefix("#SBATCH --") for line in text(BARE).splitlines() if line.startswith("#SBATCH")}
    assert {
        "partition=gpu",
        "account=team",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=96",
        "gpus-per-node=h100:8",
        "time=24:00:00",
        "mem=0",
    } <= options
    assert {"exclusive", "requeue", "signal=B:USR1@300", "open-mode=append"} <= options
    options = {line.removeprefix("#SBATCH --") for line in text(SHARED_NODES).splitlines() if line.startswith("#SBATCH")}
    assert {"mem=65536M", "no-requeue", "constraint=ib", "reservation=week", "mail-user=me@example.com", "mail-type=FAIL"} <= options
    assert not {"exclusive", "mem=0"} & options


def test_a_job_may_save_for_as_long_as_its_notice_lets_it():
    """But for a minute in which Slurm may be late. The agent and Ray wait for it as long."""
    wanted = stack(changed_stack(BARE, "slurm.notice", 1800))
    for script, flags in ((script, words(script, "agent")) for script in slurm.scripts(wanted, Site()).values()):
        assert "#SBATCH --signal=B:USR1@1800\n" in script
        assert read_settings([*flags, "--rank=0", "--addresses=10.0.0.1"], {}).stop_timeout == 1740
    assert ray.runtime_env(wanted, Site())["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "1740"}


@pytest.mark.parametrize(
    ("word", "types", "asked"),
    [
        (None, {}, "h100:8"),  # rendered on a machine without sinfo
        (None, {"gpus": "nvidia_h100_80gb_hbm3"}, "nvidia_h100_80gb_hbm3:8"),
        (None, {"gpus": ""}, "8"),  # the cluster names no types
        ("H100-SXM", {}, "H100-SXM:8"),
        ("any", {}, "8"),
    ],
)
def test_gpus_are_asked_for_by_the_clusters_word_for_their_model(word, types, asked):
    base = changed_stack(BARE, "slurm.gpu_type", word) if word else BARE
    assert f"#SBATCH --gpus-per-node={asked}\n" in slurm.scripts(stack(base), Site(gpu_types=types))["ray-ppo.sbatch"]


def test_gpus_without_a_model_are_asked_for_by_their_number():
    assert "#SBATCH --gpus-per-node=8\n" in text(changed_stack(BARE, "fleets.0.gpu", {"count": 8}))


def test_a_cluster_of_two_fleets_is_a_job_of_two_components():
    """Each with its own nodes; the agent of each node with its own CPUs and resources, and all nodes' GPUs."""
    script = text(FLEETS)
    first, second = script.partition("\n\n")[0].split("#SBATCH hetjob\n")
    assert [word for word in ("partition=gpu", "nodes=2", "cpus-per-task=96", "gpus-per-node=h100:8", "signal=") if word not in first] == []
    assert [word for word in ("partition=old", "nodes=1", "gpus-per-node=v100:4", "time=24:00:00", "exclusive") if word not in second] == []
    assert "cpus-per-task" not in second and "signal" not in second
    agents = [words(script, array) for array in ("agent", "agent1")]
    assert [read_settings([*flags, "--rank=0", "--addresses=a,b,c"], {}).node_gpus for flags in agents] == [[8, 8, 4], [8, 8, 4]]
    assert [flags[flags.index("--resources") + 1] for flags in agents] == ['{"h100": 8.0}', '{"v100": 4.0}']
    assert ["--num-cpus" in flags for flags in agents] == [True, False]


def test_a_fleets_own_words_win_over_the_allocations():
    base = changed_stack(BARE, "fleets.0.slurm", {"partition": "old", "qos": "high", "constraint": "ib&h100", "sbatch": ["--exclude=n7"]})
    options = {line.removeprefix("#SBATCH --") for line in text(base).splitlines() if line.startswith("#SBATCH")}
    assert {"partition=old", "qos=high", "constraint=ib&h100", "exclude=n7", "account=team"} <= options
    assert "partition=gpu" not in options


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
        found = subprocess.run(["bash", "-c", f"{free}\nfree {port}"], capture_output=True, text=True, check=True, timeout=120)
    assert int(found.stdout) > port


def test_a_value_left_to_the_shell_is_asked_for_and_stands_nowhere():
    script = text(DOCKER)
    assert '[ "${HF_TOKEN+set}" ] || fail "HF_TOKEN is not set where you submit"' in script
    assert "--env=HF_TOKEN\n" in script.replace(" ", "\n")  # by name
    assert "export FLOTILLA_RUNS=/shared/me RAY_AUTH_MODE=token" in script


def words(script: str, array: str) -> list[str]:
    """What bash makes of an array of the script that starts a node's agent: the agent's flags."""
    whole = re.search(rf"^{array}=\(.*?\)$", script, re.DOTALL | re.MULTILINE)
    assert whole, array
    bash = f'port=1 dashboard=2 build=build devices=()\n{whole[0]}\nprintf "%s\\n" "${{{array}[@]}}"'
    made = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    return made[made.index("build/node") + 1 :]


@pytest.mark.parametrize("name", STACKS)
def test_the_agent_takes_the_command_that_bash_makes_of_the_script(name):
    nodes = "10.0.0.1,10.0.0.2,10.0.0.3"
    settings = read_settings([*words(text(STACKS[name]), "agent"), "--rank=0", f"--addresses={nodes}"], {})
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
    assert "|| echo keep-id)" in text(PODMAN)
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
    texts = publish.rendered(wanted, Site(backends=(site.backend(wanted),)))
    [project] = yaml.safe_load(texts["server-config.yml"])["projects"]
    [cluster] = SlurmBackendFileConfigWithCreds.model_validate(without_keys(project["backends"][0])).clusters
    assert (cluster.name, cluster.user, cluster.hostname) == ("test", "me", "login.example.com")
    assert cluster.gpu_partitions and (cluster.gpu_partitions[0].gpu, cluster.gpu_partitions[0].partitions) == ("H100", ["gpu"])
    fleet = parse_apply_configuration(yaml.safe_load(texts["gpus.fleet.dstack.yml"]))
    assert isinstance(fleet, FleetConfiguration) and fleet.nodes and (fleet.nodes.min, fleet.nodes.max) == (0, 2)
    task = parse_apply_configuration(yaml.safe_load(texts["ray-cluster.dstack.yml"]))
    assert isinstance(task, TaskConfiguration) and task.nodes_num == 2
    assert not task.volumes  # dstack mounts none under Slurm


def test_dstack_places_runs_in_the_partition_that_the_fleet_itself_names():
    base = changed_stack(changed_stack(DSTACK, "slurm.partition", ...), "fleets.0.slurm", {"partition": "big"})
    backend = site.backend(parse("test", {f"flotilla:{key}": value for key, value in base.items()}))
    assert backend["clusters"][0]["gpu_partitions"] == [{"gpu": "H100", "partitions": ["big"]}]


def without_keys(backend: dict[str, Any]) -> dict[str, Any]:
    """dstack reads the private key from its file, which is nobody's here."""
    assert [cluster["private_key"] for cluster in backend["clusters"]] == [{"path": "~/.ssh/id"}]
    return backend | {"clusters": [cluster | {"private_key": {"content": "key"}} for cluster in backend["clusters"]]}


MODULE = (
    """module() { case $2 in cuda/*) loaded=$2;; *) echo "Lmod: unknown module $2" >&2; return 1;; esac; }; ml() { module load "$@"; }"""
)


# As `eval "$(modulecmd bash load nope)"` does, whose function ends with that of eval.
MODULE_3 = """module() { case $2 in cuda/*) echo "a word of cuda's ERROR: no" >&2;; *) echo "\
ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for '$2'" >&2; esac; return 0; }"""


def began(tmp_path: Path, setup: list[str], modules: list[str], before: str = MODULE) -> subprocess.CompletedProcess[str]:
    """The lines before the steps, as bash runs them with a job's arguments."""
    (tmp_path / "site").write_text('old=$PS1; PS1="($1) $PS1"; site=read; [ $# = 0 ] || echo "unrecognized argument: $*"\n')
    script = text(BARE | {"slurm": BARE["slurm"] | {"setup": setup, "modules": modules}})
    lines = script[script.index('given=("$@")') : script.index("export PATH=")]
    head = f'{before}\nset -uo pipefail\nfail() {{ echo "error: $*" >&2; exit 2; }}\n'
    command = ["bash", "-c", f'{head}{lines}\necho "$@" "${{site-}}"; : "$PS1"', "job", "python", "a b.py"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})


def test_scripts_of_a_site_run_as_in_a_persons_shell(tmp_path):
    """Without `set -u`, and without the job's arguments, which oneAPI's setvars.sh takes for its own."""
    done = began(tmp_path, [". ./site", "set -e", "unset nothing; : $nothing"], ["cuda/12.8"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "python a b.py read\n", "")
    after = began(tmp_path, ["unset PS1"], [])  # behind them -u holds again
    assert "PS1: unbound variable" in after.stderr


@pytest.mark.parametrize(
    ("setup", "modules", "before", "says"),
    [
        ([], ["nope"], MODULE, "Lmod: unknown module nope\nerror: module load nope\n"),
        ([], ["cuda/12.8"], "", "module: command not found\nerror: module load cuda/12.8\n"),
        (["module load nope"], [], MODULE, "error: module load nope\n"),
        (["ml nope"], ["cuda/12.8"], MODULE, "error: ml nope\n"),
        ([], ["nope"], MODULE_3, "ERROR:105: Unable to locate a modulefile for 'nope'\nerror: module load nope\n"),
        (["module load nope"], ["cuda/12.8"], MODULE_3, "error: module load nope\n"),
        (["PS1="], ["cuda/12.8"], MODULE_3, None),
        (["set -e", "module load cuda/12.8", "module load nope"], [], MODULE_3, "error: module load nope\n"),
        (["module use /a b; true", "module load nope # why", "PS1="], [], MODULE, None),  # a line with more in it is its writer's
    ],
)
def test_a_missing_module_ends_the_job_with_its_message(tmp_path, setup, modules, before, says):
    done = began(tmp_path, setup, modules, before)
    assert done.returncode == (2 if says else 0)
    assert done.stderr.endswith(says or "")
