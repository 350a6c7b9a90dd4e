"""fleets/ and cluster_tasks/ray.py: what is rendered, and what is refused."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from pydantic import TypeAdapter

from cluster_tasks.node.identity import token_variable
from cluster_tasks.ray import demo_job, ray_cluster, runtime_env
from fleets.backend import server_config
from fleets.fleet import fleet
from fleets.volume import volume
from stacks.dstack_api import AnyBackendFileConfigWithCreds, TaskConfiguration, parse_apply_configuration
from stacks.schema import Ssh, Stack
from stacks.site import Site
from trainer import cli
from trainer.configs.ppo import PpoConfig
from trainer.configs.sft import SftConfig

AWS = Site(backends=({"type": "aws", "regions": ["us-east-1"], "creds": {"type": "default"}},))
GPUS = {"name": "gpus", "nodes": 4, "cpus": 192, "memory": "2TB..", "gpu": {"name": "H100", "count": 8, "memory": "80GB"}}
HOSTS = {"user": "ubuntu", "identity_file": "~/.ssh/key", "network": "10.0.0.0/24"}


def stack(**settings: Any) -> Stack:
    return Stack.model_validate({"name": "test", "cloud": "ssh", "fleets": [GPUS]} | settings)


def task(site: Site = AWS, **settings: Any) -> TaskConfiguration:
    """The rendered task as dstack reads it."""
    parsed = parse_apply_configuration(ray_cluster(stack(**settings), site))
    assert isinstance(parsed, TaskConfiguration)
    return parsed


def test_the_server_gets_the_backend_of_the_site_under_the_project_of_the_stack() -> None:
    config = server_config(stack(dstack={"server": "http://127.0.0.1:3000", "project": "research"}), AWS)
    [project] = config["projects"]
    assert project["name"] == "research"
    TypeAdapter(AnyBackendFileConfigWithCreds).validate_python(project["backends"][0])  # type: ignore[arg-type]
    assert server_config(stack(), Site()) == {"projects": [{"name": "main", "backends": []}]}


def test_a_cloud_fleet_asks_its_backend_for_these_machines() -> None:
    given = stack()
    definition = fleet(given, AWS, given.fleets[0])
    parse_apply_configuration(definition)
    assert definition["nodes"] == 4
    assert definition["backends"] == ["aws"]
    assert definition["resources"] == {"cpu": "x86:192..", "memory": "2TB..", "gpu": "nvidia:H100:80GB:8"}


def test_hosts_of_another_fleet_of_the_cluster_bring_their_user_and_key() -> None:
    given = stack(fleets=[GPUS | {"nodes": 1}, GPUS | {"name": "more", "nodes": 2}], task={"fleets": ["gpus", "more"]})
    own = Ssh.model_validate(HOSTS | {"hosts": [{"hostname": "a"}]})
    theirs = {"user": "me", "identity_file": "/keys/more", "hosts": [{"hostname": "b"}, {"hostname": "c", "identity_file": "/keys/c"}]}
    definition = fleet(given, Site(ssh={"gpus": own, "more": Ssh.model_validate(HOSTS | theirs)}), given.fleets[0])
    assert definition["ssh_config"]["hosts"] == [
        "a",
        {"hostname": "b", "user": "me", "identity_file": "/keys/more"},
        {"hostname": "c", "user": "me", "identity_file": "/keys/c"},
    ]


def test_a_host_is_a_bare_name_until_something_is_said_of_it() -> None:
    given = stack()
    hosts = [{"hostname": "a"}, {"hostname": "b", "port": 2222}]
    definition = fleet(given, Site(ssh={"gpus": Ssh.model_validate(HOSTS | {"hosts": hosts})}), given.fleets[0])
    parse_apply_configuration(definition)
    assert definition["ssh_config"]["hosts"] == ["a", {"hostname": "b", "port": 2222}]
    assert definition["ssh_config"]["network"] == "10.0.0.0/24"
    assert "nodes" not in definition  # dstack refuses it beside ssh_config


def test_addresses_of_the_hosts_stand_in_place_of_the_network_as_the_server_wants_it() -> None:
    given = stack()
    hosts = [{"hostname": "a", "internal_ip": "10.0.0.1"}, {"hostname": "b", "internal_ip": "10.0.0.2"}]
    definition = fleet(given, Site(ssh={"gpus": Ssh.model_validate(HOSTS | {"hosts": hosts})}), given.fleets[0])
    assert [host["internal_ip"] for host in definition["ssh_config"]["hosts"]] == ["10.0.0.1", "10.0.0.2"]
    assert "network" not in definition["ssh_config"]  # "internal_ip is mutually exclusive with network"


def test_a_network_volume_lives_in_the_region_of_the_backend() -> None:
    given = stack(checkpoints={"kind": "network", "volume": "checkpoints", "size": "500GB"})
    definition = volume(given, AWS)
    assert definition is not None
    parse_apply_configuration(definition)
    assert (definition["backend"], definition["region"], definition["size"]) == ("aws", "us-east-1", "500GB")
    assert task(checkpoints=given.checkpoints.model_dump()).volumes[0].name == "checkpoints"  # type: ignore[union-attr]
    assert volume(stack(), AWS) is None


def test_a_network_volume_without_a_cloud_is_refused() -> None:
    with pytest.raises(ValueError, match=r"checkpoints\.kind.*ssh has no volumes"):
        volume(stack(checkpoints={"kind": "network", "volume": "v-1", "size": "1GB"}), Site())


def test_every_cluster_asks_for_a_token_that_is_in_no_file() -> None:
    env = ray_cluster(stack(), AWS)["env"]
    assert "RAY_AUTH_MODE=token" in env
    own = token_variable(stack().name)
    assert own in env  # bare: from the shell of the person who applies, which may have another stack's RAY_AUTH_TOKEN
    assert {"RAY_AUTH_MODE=token", own} <= set(ray_cluster(stack(), Site())["env"])
    assert "RAY_AUTH_TOKEN" not in env


def test_the_environment_of_the_stack_reaches_every_node() -> None:
    env = ray_cluster(stack(task={"env": {"A": "stack", "HF_TOKEN": None}}), AWS)["env"]
    assert {"A=stack", "HF_TOKEN", "FLOTILLA_RUNS=/checkpoints"} <= set(env)


def test_an_image_brings_its_own_software_and_none_gets_the_locked_requirements() -> None:
    own, stock = ray_cluster(stack(task={"image": "me/ray:1"}), AWS), ray_cluster(stack(), AWS)
    assert own["image"] == "me/ray:1"
    assert "python" not in own
    assert own["files"] == ["node"]
    assert stock["files"] == ["node", "../../requirements/gpu.txt:requirements.txt"]
    assert any("uv pip install" in command for command in stock["commands"])
    assert not any("install" in command for command in own["commands"])
    parse_apply_configuration(own)


def test_amd_gpus_without_an_image_are_refused() -> None:
    amd = GPUS | {"gpu": {"name": "MI300X", "count": 8, "vendor": "amd"}}
    with pytest.raises(ValueError, match=r"task\.image is missing"):
        ray_cluster(stack(fleets=[amd]), AWS)
    assert task(fleets=[amd], task={"image": "me/rocm:1"}).resources.gpu.vendor.value == "amd"  # type: ignore[union-attr]


def test_the_agent_is_told_only_what_differs_from_its_defaults() -> None:
    plain = ray_cluster(stack(fleets=[{"name": "gpus", "nodes": 2}]), AWS)
    assert plain["commands"][-1] == "exec python3 node --stack test --per-host", "checkpoints of kind instance"
    special = stack(fleets=[GPUS | {"resources": {"v100": 8}}], task={"on_node_loss": "wait", "join_timeout": 1200})
    assert ray_cluster(special, AWS)["commands"][-1] == (
        """exec python3 node --stack test --num-cpus 192 --resources '{"v100": 8.0}' --join-timeout 1200 --on-node-loss wait --per-host"""
    )


def test_another_dashboard_port_is_forwarded_to_the_same_port_of_the_head() -> None:
    [port] = task(task={"dashboard_port": 8300}).ports
    assert (port.local_port, port.container_port) == (8300, 8265)


def test_no_retry_and_a_limit_are_the_stacks_to_choose() -> None:
    parsed = task(task={"retry": False, "max_duration": "72h"})
    assert parsed.retry is None
    assert parsed.max_duration == 72 * 3600


def test_a_stopped_job_gets_time_to_save() -> None:
    assert int(runtime_env(stack(), AWS)["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60


@pytest.mark.parametrize("on_gpus", [False, True])
def test_the_first_job_of_a_person_is_one_that_the_trainer_takes(on_gpus: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    (tmp_path / "demo-sft/model").mkdir(parents=True)  # as the warm start leaves it
    (tmp_path / "demo-sft/model/config.json").touch()
    _, _, script = shlex.split(demo_job(on_gpus))
    warm_start, reinforce = (shlex.split(command)[3:] for command in script.split(" && "))
    for arguments, model in ((warm_start, SftConfig), (reinforce, PpoConfig)):
        assert cli.parse(arguments, prog="demo", model=model).placement.gpus_per_rank == on_gpus


@pytest.mark.parametrize(("kind", "policy"), [("spot", "spot"), ("on-demand", "on-demand"), (None, "on-demand")])
def test_dstack_buys_machines_in_the_way_that_the_fleet_says(kind: str | None, policy: str) -> None:
    capacity = {"capacity": {"kind": kind}} if kind else {}
    of = stack(cloud="aws", fleets=[{"name": "gpus", "nodes": 2, "machine": "g6.8xlarge"} | capacity])
    assert fleet(of, AWS, of.fleets[0])["spot_policy"] == policy


def test_a_host_of_another_fleet_keeps_its_own_user_before_its_fleets() -> None:
    of = stack(fleets=[GPUS, GPUS | {"name": "more"}], task={"fleets": ["gpus", "more"]})
    first = Ssh.model_validate(HOSTS | {"hosts": [{"hostname": "a"}]})
    second = Ssh.model_validate(HOSTS | {"user": "ada", "hosts": [{"hostname": "b"}, {"hostname": "c", "user": "eve"}]})
    hosts = fleet(of, Site(ssh={"gpus": first, "more": second}), of.fleets[0])["ssh_config"]["hosts"]
    assert [host if isinstance(host, str) else (host["hostname"], host["user"]) for host in hosts] == ["a", ("b", "ada"), ("c", "eve")]


@pytest.mark.parametrize("regions", [[], ["us-east-1", "us-east-2"]])
def test_a_network_volume_in_no_single_region_is_refused(regions: list[str]) -> None:
    of = stack(checkpoints={"kind": "network", "volume": "ckpt", "size": "500GB"})
    with pytest.raises(ValueError, match="a volume lives in one region; the backend has"):
        volume(of, Site(backends=({"type": "aws", "regions": regions},)))


@pytest.mark.parametrize(("said", "rendered"), [(None, "15m"), ("2h", "2h"), ("off", "off")])
def test_a_clouds_machines_end_soon_after_their_last_run(said: str | None, rendered: str) -> None:
    rented = stack(cloud="aws", fleets=[{"name": "gpus", "nodes": 2, "machine": "g6.8xlarge", "idle_duration": said}])
    definition = fleet(rented, AWS, rented.fleets[0])
    assert definition["idle_duration"] == rendered
    assert parse_apply_configuration(definition)
