"""The table of backends against dstack itself: what it says of each, its model of each one's configuration, its server's reader."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
import yaml

from cluster_tasks.ray import ray_cluster
from fleets import credentials
from fleets.backend import server_config
from fleets.fleet import fleet as fleet_definition
from infra.backends.build import build
from infra.publish import to_yaml
from stacks.dstack_api import (
    AnyBackendFileConfigWithCreds,
    BackendConfigWithCreds,
    BackendType,
    EnvSentinel,
    FleetConfiguration,
    ServerConfig,
    TaskConfiguration,
    features,
    parse_apply_configuration,
)
from stacks.load import parse
from stacks.settings.backends import BACKENDS, OTHERS, BackendEntry

NEEDED: dict[str, dict[str, Any]] = {
    "azure": {"tenant_id": "tenant", "subscription_id": "subscription"},
    "crusoe": {"project_id": "project"},
    "gcp": {"project_id": "project"},
    "hotaisle": {"team_handle": "team"},
    "kubernetes": {"contexts": ["here"]},
}


def names(backends: list[BackendType]) -> set[str]:
    return {backend.value for backend in backends} & set(BACKENDS)


def test_every_backend_that_dstack_knows_is_in_the_table_or_said_to_be_none():
    assert {backend.value for backend in BackendType} == {*BACKENDS, *OTHERS}


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        (features.BACKENDS_WITH_MULTINODE_SUPPORT, lambda backend: bool(backend.cluster)),
        (features.BACKENDS_WITH_CREATE_INSTANCE_SUPPORT, lambda backend: backend.machines),
        (features.BACKENDS_WITH_VOLUMES_SUPPORT, lambda backend: backend.volumes),
        (features.BACKENDS_WITH_PRIVILEGED_SUPPORT, lambda backend: backend.mounts),
        (features.BACKENDS_WITH_INSTANCE_VOLUMES_SUPPORT, lambda backend: backend.folders),
    ],
    ids=["clusters", "machines", "volumes", "privileged", "folders"],
)
def test_what_a_backend_can_do_is_dstacks_word(said: list[BackendType], ours: Any):
    assert names(said) == {name for name, backend in BACKENDS.items() if ours(backend)}


@pytest.mark.parametrize("name", BACKENDS)
def test_dstacks_model_takes_what_is_rendered(name: str):
    entry = BackendEntry(type=name, **NEEDED.get(name, {}))
    assert list(entry.own_errors()) == []


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if backend.wants])
def test_what_is_said_to_be_needed_is(name: str):
    """By dstack's own model, without our rule in front of it."""
    for key in BACKENDS[name].wants:
        given = {other: value for other, value in NEEDED[name].items() if other != key}
        with pytest.raises(ValueError, match=key):
            BackendConfigWithCreds.model_validate(BackendEntry(type=name, **given).config(filled=True))


def test_a_server_reads_the_configuration_of_all_of_them(tmp_path):
    """dstack's own reader of config.yml, which wants the files there."""
    variables = {variable: "key" for backend in BACKENDS.values() for variable in backend.keys.values()}
    kubeconfig, nebius, google = (tmp_path / name for name in ("kubeconfig", "nebius.json", "google.json"))
    for file in (kubeconfig, google):
        file.write_text("{}")
    nebius.write_text(_nebius())
    own = {"kubernetes": {"credentials": str(kubeconfig)}, "nebius": {"credentials": str(nebius)}, "gcp": {"credentials": str(google)}}
    backends = [{"type": name, **NEEDED.get(name, {}), **own.get(name, {})} for name in BACKENDS]
    fleets = [{"name": "gpus", "nodes": 1, "gpu": {"name": "H100", "count": 8}}]
    settings = {"cloud": "dstack", "backends": backends, "fleets": fleets, "checkpoints": {"kind": "bucket", "bucket": "mine"}}
    without = [entry for entry in backends if BACKENDS[entry["type"]].mounts]
    stack = parse("all", {f"flotilla:{key}": value for key, value in (settings | {"backends": without}).items()})
    stack = stack.model_copy(update={"backends": tuple(BackendEntry(**entry) for entry in backends)})  # containers cannot mount a bucket
    text = to_yaml(server_config(stack, build(stack)))
    assert "${LAMBDA_API_KEY}" in text
    read = ServerConfig.model_validate(credentials.filled(yaml.safe_load(text), variables))
    [project] = read.projects
    assert [backend.type for backend in project.backends or []] == list(BACKENDS)


def _nebius() -> str:
    subject = {"type": "JWT", "alg": "RS256", "private-key": "key", "kid": "key-1", "iss": "account-1", "sub": "account-1"}
    return json.dumps({"subject-credentials": subject})


def test_dstack_takes_the_fleet_and_the_task_of_a_stack_anywhere():
    fleets = [{"name": "gpus", "nodes": 2, "max_price": 40, "regions": ["eu-north1"], "gpu": {"name": "H100", "count": 8}}]
    settings = {
        "cloud": "dstack",
        "backends": ["nebius", {"type": "crusoe", "project_id": "project"}],
        "fleets": fleets,
        "checkpoints": {"kind": "bucket", "bucket": "mine", "endpoint": "https://storage.googleapis.com"},
    }
    stack = parse("any", {f"flotilla:{key}": value for key, value in settings.items()})
    site = build(stack)
    made = FleetConfiguration.model_validate(fleet_definition(stack, site, stack.fleets[0]))
    assert [backend.value for backend in made.backends or []] == ["nebius", "crusoe"]
    assert (made.max_price, made.regions, made.placement.value if made.placement else None) == (40, ["eu-north1"], "cluster")
    task = parse_apply_configuration(ray_cluster(stack, site))
    assert isinstance(task, TaskConfiguration) and task.privileged
    assert isinstance(dict(task.env.items())["AWS_SECRET_ACCESS_KEY"], EnvSentinel)  # the shell's, not the file's
    assert any("sigv2" in command for command in task.commands)


def test_the_union_of_dstack_has_an_arm_for_each():
    arms = {kind for arm in get_args(AnyBackendFileConfigWithCreds) for kind in get_args(arm.model_fields["type"].annotation)}
    assert set(BACKENDS) <= arms
