"""Stacks that dstack places on any of its backends: what is rendered, where keys come from, how nodes are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from support.anywhere import BASE, KUBERNETES, fleet, stack

from cli import node
from cluster_tasks.client.render import check_shell
from cluster_tasks.ray import ray_cluster
from fleets import credentials
from fleets.fleet import fleet as fleet_definition
from fleets.server import commands as server
from fleets.volume import volume
from infra.backends import mounts
from infra.backends.build import build
from stacks.errors import UserError
from stacks.rules import warnings
from stacks.settings.backends import BACKENDS

ROOT = Path(__file__).parents[3]


def test_what_works_but_not_everywhere_is_said():
    made = stack(fleets=fleet(nodes=2, capacity={"kind": "spot"}))
    assert warnings(made) == [
        "flotilla:fleets: gpus has 2 nodes, so it is never on lambda: dstack joins none there",
        "flotilla:fleets: gpus is spot, so it is never on lambda",
    ]
    assert any("gone with the machine" in line for line in warnings(stack(checkpoints={"kind": "instance"})))
    assert warnings(stack()) == []


def test_the_page_has_a_row_for_every_backend_as_the_table_has_it():
    rows = {row[1]: row[0] for row in re.findall(r"^(\| `(\w+)` \|.*)$", (ROOT / "docs/clouds.md").read_text(), re.MULTILINE)}
    assert list(rows) == list(BACKENDS)
    for name, backend in BACKENDS.items():
        _, _, keys, wants, between, spot, kept, _, _ = (cell.strip() for cell in rows[name].split("|"))
        assert re.findall(r"`(\w+)`", keys) == list(backend.keys.values()) or backend.default_file in keys
        assert re.findall(r"`(\w+)`", wants) == list(backend.wants)
        assert (between, spot) == (backend.cluster or "single nodes only", "yes" if backend.spot else "-")
        assert [word in kept for word in ("folder", "volume", "bucket")] == [backend.folders, backend.makes_volumes, backend.mounts]


# What is rendered


def test_one_node_may_be_anywhere_and_a_cluster_where_nodes_are_joined():
    one, two = stack(), stack(fleets=fleet(nodes=2))
    assert fleet_definition(one, build(one), one.fleets[0])["placement"] == "any"
    made = fleet_definition(two, build(two), two.fleets[0])
    assert made["placement"] == "cluster" and made["nodes"] == "0..4" and made["idle_duration"] == "15m"
    assert made["backends"] == ["lambda", "nebius"] and made["spot_policy"] == "on-demand"


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        (None, ["s3fs mine /checkpoints", "url=https://s3.amazonaws.com"]),
        ("https://s3.eu-west-1.amazonaws.com", ["endpoint=eu-west-1"]),
        ("https://x.r2.cloudflarestorage.com", ["url=https://x.r2.cloudflarestorage.com", "use_path_request_style"]),
        ("https://storage.googleapis.com", ["sigv2,nomultipart"]),
        ("https://account.blob.core.windows.net", ["AZURE_STORAGE_ACCOUNT=account blobfuse2 mount /checkpoints", "--container-name=mine"]),
    ],
)
def test_a_bucket_is_mounted_by_what_its_cloud_speaks(endpoint: str | None, words: list[str]):
    lines = "\n".join(mounts.bucket("mine", endpoint, "/checkpoints"))
    assert all(word in lines for word in words)


def test_the_buckets_keys_come_from_the_shell_of_who_applies():
    made = stack()
    with pytest.raises(UserError, match=r"flotilla:checkpoints.bucket: not set in your shell: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"):
        check_shell(made, {})
    check_shell(made, {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"})
    blobs = stack(checkpoints=BASE["checkpoints"] | {"endpoint": "https://account.blob.core.windows.net"})
    with pytest.raises(UserError, match="AZURE_STORAGE_ACCESS_KEY"):
        check_shell(blobs, {})


def test_a_claim_of_kubernetes_is_a_volume():
    made = stack(backends=[KUBERNETES], fleets=fleet(nodes=2), checkpoints={"kind": "network", "volume": "checkpoints", "claim": "shared"})
    wanted = {"type": "volume", "name": "checkpoints", "backend": "kubernetes", "region": "prod", "claim_name": "shared"}
    assert volume(made, build(made)) == wanted


# Credentials


def test_keys_are_filled_in_where_the_server_starts_and_nowhere_else(tmp_path, monkeypatch):
    text = yaml.safe_dump({"projects": [{"name": "main", "backends": [entry.config() for entry in stack(backends=["lambda"]).backends]}]})
    (tmp_path / "any").mkdir()
    (tmp_path / "any/server-config.yml").write_text(text)
    monkeypatch.setattr(server, "load", lambda name, root: stack(backends=["lambda"]))
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    with pytest.raises(UserError, match=r"LAMBDA_API_KEY: not set where the dstack server is started; first: export LAMBDA_API_KEY=..."):
        server.wanted_config(tmp_path / "server", "any")
    monkeypatch.setenv("LAMBDA_API_KEY", "a-key: with colon")
    [project] = yaml.safe_load(server.wanted_config(tmp_path / "server", "any"))["projects"]
    assert project["backends"][0]["creds"]["api_key"] == "a-key: with colon"
    assert "a-key" not in (tmp_path / "any/server-config.yml").read_text()


@pytest.mark.parametrize(
    ("text", "mode", "line"),
    [
        (None, 0o600, "cannot be read: No such file or directory"),
        ("LAMBDA_API_KEY=a\n", 0o644, "others can read it; first: chmod 600"),
        ("# mine\n\nsecret\n", 0o600, ":3: is no line NAME=value"),
    ],
)
def test_a_file_of_keys_is_for_its_owner_alone(tmp_path, text: str | None, mode: int, line: str):
    file = tmp_path / "keys.env"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(UserError) as error:
        credentials.read(file)
    assert line in str(error.value) and "secret" not in str(error.value)


def test_the_environment_wins_over_the_file(tmp_path, monkeypatch):
    file = tmp_path / "keys.env"
    file.write_text("export LAMBDA_API_KEY='of the file'\nRUNPOD_API_KEY=other\n")
    file.chmod(0o600)
    monkeypatch.setenv("LAMBDA_API_KEY", "of the shell")
    settings = stack(dstack={"credentials": str(file)}).dstack
    known = credentials.known(settings)
    assert (known["LAMBDA_API_KEY"], known["RUNPOD_API_KEY"]) == ("of the shell", "other")


@pytest.mark.parametrize("name", ["LAMBDA_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"])
def test_an_empty_variable_hides_no_key_of_the_file(name, tmp_path, monkeypatch):
    file = tmp_path / "keys.env"
    file.write_text(f"{name}=of the file\n")
    file.chmod(0o600)
    monkeypatch.setenv(name, "")
    known = credentials.known(stack(dstack={"credentials": str(file)}).dstack)
    assert credentials.filled({"key": f"${{{name}}}"}, known) == {"key": "of the file"}


# Nodes


def test_a_node_is_named_by_its_machine_or_its_host():
    found = [
        node.Node("gpus-0", "10.0.0.4", "gpus", 0, "busy", "healthy", 2.5, "ray", 0),
        node.Node("gpus-1", "10.0.0.5", "gpus", 1, "idle", "failure", None),
    ]
    assert node.chosen(found, "gpus-1") is node.chosen(found, "10.0.0.5") is found[1]
    assert [each.line() for each in found] == [
        "gpus-0  10.0.0.4  busy, healthy, 2.5 USD/h  run ray, node 0",
        "gpus-1  10.0.0.5  idle, failure  no run",
    ]
    with pytest.raises(UserError, match=r"'gpus-2' is no machine of this stack; did you mean gpus-"):
        node.chosen(found, "gpus-2")
    with pytest.raises(UserError, match=r"'some' is no machine of this stack \(there are: none\)"):
        node.chosen([], "some")


def test_a_cluster_of_rented_gpus_that_nobody_uses_ends_and_one_without_gpus_does_not():
    made = stack()
    assert ray_cluster(made, build(made))["utilization_policy"] == {"min_gpu_utilization": 1, "time_window": "1h"}
    own = stack(task={"utilization": {"min_gpu": 10, "window": "30m"}})
    assert ray_cluster(own, build(own))["utilization_policy"] == {"min_gpu_utilization": 10, "time_window": "30m"}
    cpus = stack(fleets=[{"name": "cpus", "nodes": 1}])
    assert "utilization_policy" not in ray_cluster(cpus, build(cpus))
