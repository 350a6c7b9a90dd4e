"""Stacks that dstack places on any of its backends: what a stack file may not say, and what is said before anything is created."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpuhunt import AcceleratorVendor, CatalogItem
from gpuhunt._internal import storage

from cli import node
from cluster_tasks.client.render import check_shell
from cluster_tasks.ray import ray_cluster
from fleets.fleet import fleet as fleet_definition
from fleets.server import commands as server
from fleets.volume import volume
from infra import prices
from infra.backends import mounts, offers, preflight
from infra.backends.build import build
from stacks import credentials
from stacks.backends import BACKENDS
from stacks.errors import StackError, UserError
from stacks.load import parse
from stacks.rules.shared import warnings
from stacks.schema import Stack

ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = {
    "cloud": "dstack",
    "backends": ["lambda", "nebius"],
    "fleets": [{"name": "gpus", "nodes": 1, "gpu": {"name": "H100", "count": 8}}],
    "checkpoints": {"kind": "bucket", "bucket": "mine"},
}


def stack(**settings: Any) -> Stack:
    return parse("any", {f"flotilla:{key}": value for key, value in (BASE | settings).items() if value is not None})


def fleet(**settings: Any) -> list[dict[str, Any]]:
    return [BASE["fleets"][0] | settings]


KUBERNETES = {"type": "kubernetes", "contexts": ["prod"]}
VOLUME = {"kind": "network", "volume": "checkpoints", "size": "500GB"}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no backends": (
        {"backends": None},
        "flotilla:backends: is missing; with flotilla:cloud dstack it lists where nodes may be",
    ),
    "unknown": (
        {"backends": ["runpood"]},
        "flotilla:backends[0].type: 'runpood' is not one of dstack's backends; did you mean runpod?",
    ),
    "another place": (
        {"backends": ["slurm"]},
        "'slurm' has a place of its own: flotilla:cloud slurm",
    ),
    "hosts": (
        {"backends": ["remote"]},
        "'remote' is dstack's name for machines over SSH: flotilla:cloud ssh",
    ),
    "an old name": (
        {"backends": ["datacrunch"]},
        "'datacrunch' is called verda now",
    ),
    "given up": (
        {"backends": ["tensordock"]},
        "'tensordock' was given up by dstack",
    ),
    "no place to train": (
        {"backends": ["daytona"]},
        "'daytona' has sandboxes for agents; no place to train",
    ),
    "twice": (
        {"backends": ["lambda", "lambda"]},
        "flotilla:backends[1].type: 'lambda' is listed twice",
    ),
    "no type": (
        {"backends": [{"regions": ["us-east-1"]}]},
        "flotilla:backends[0].type: is missing",
    ),
    "not a list": (
        {"backends": "lambda"},
        "flotilla:backends: 'lambda' is not a list",
    ),
    "a number": (
        {"backends": [3]},
        "flotilla:backends[0]: 3 is not a map of settings",
    ),
    "a key": (
        {"backends": [{"type": "lambda", "api_key": "secret"}]},
        "flotilla:backends[0].api_key: no credentials in a stack file; the dstack server gets them from LAMBDA_API_KEY",
    ),
    "creds": (
        {"backends": [{"type": "verda", "creds": {"client_id": "a"}}]},
        "from VERDA_CLIENT_ID and VERDA_CLIENT_SECRET",
    ),
    "a kubeconfig": (
        {"backends": [{"type": "kubernetes", "kubeconfig": {"data": "x"}}]},
        "reads them from the kubeconfig ~/.kube/config",
    ),
    "a file that is not read": (
        {"backends": [{"type": "lambda", "credentials": "~/key"}]},
        "dstack reads no file for lambda",
    ),
    "a file of azure": (
        {"backends": [{"type": "azure", "tenant_id": "t", "subscription_id": "s", "credentials": "f"}]},
        "as every program of Azure does",
    ),
    "azure without tenant": (
        {"backends": [{"type": "azure", "subscription_id": "s"}]},
        "flotilla:backends[0].tenant_id: is missing; azure",
    ),
    "azure without subscription": (
        {"backends": [{"type": "azure", "tenant_id": "s"}]},
        "backends[0].subscription_id: is missing",
    ),
    "gcp without project": (
        {"backends": ["gcp"]},
        "flotilla:backends[0].project_id: is missing; gcp does not work without it",
    ),
    "crusoe without project": (
        {"backends": ["crusoe"]},
        "flotilla:backends[0].project_id: is missing",
    ),
    "hotaisle without team": (
        {"backends": ["hotaisle"]},
        "flotilla:backends[0].team_handle: is missing",
    ),
    "misspelt": (
        {"backends": [{"type": "runpod", "region": ["EU"]}], "fleets": fleet(regions=["EU"]), "checkpoints": VOLUME},
        "flotilla:backends[0].region: is no setting of dstack's backend runpod; did you mean regions? (allowed: regions,",
    ),
    "of another type": (
        {"backends": [{"type": "vultr", "regions": "ewr"}]},
        "flotilla:backends[0].regions: 'ewr', but dstack says",
    ),
    "a jump host's port": (
        {"backends": [{"type": "kubernetes", "contexts": [{"name": "a", "proxy_jump": {"port": "x"}}]}]},
        "but dstack says",
    ),
    "nodes that are not joined": (
        {"backends": ["lambda"], "fleets": fleet(nodes=2)},
        "flotilla:fleets[0].nodes: 2, but dstack joins no nodes of lambda to a cluster; take 1, or one of these",
    ),
    "spot that is not sold": (
        {"backends": ["lambda"], "fleets": fleet(capacity={"kind": "spot"})},
        "flotilla:fleets[0].capacity.kind: spot, but none is sold by lambda",
    ),
    "a reservation": (
        {"fleets": fleet(capacity={"kind": "reservation", "id": "r"})},
        "reservation is not on flotilla:cloud dstack (allowed",
    ),
    "a region of nobody": (
        {"backends": [{"type": "lambda", "regions": ["us-east-1"]}], "fleets": fleet(regions=["mars-1"])},
        "flotilla:fleets[0].regions[0]: 'mars-1' is in no region that flotilla:backends lists (us-east-1)",
    ),
    "elastic over two backends": (
        {"fleets": [*fleet(), *fleet(name="more", role="rollout", nodes="0..4")]},
        "flotilla:fleets[1].role: rollout, but its nodes have to reach the head's, and these may be apart (backends",
    ),
    "a machine type": (
        {"fleets": fleet(machine="p5.48xlarge")},
        "flotilla:fleets[0].machine: belongs to flotilla:cloud aws or gcp, but that is dstack; here a fleet says gpu,",
    ),
    "a region of the stack": (
        {"region": "us-east-1"},
        "flotilla:region: belongs to flotilla:cloud aws or gcp, but that is dstack; here each fleet has `regions`",
    ),
    "a price of nothing": (
        {"fleets": fleet(max_price=0)},
        "flotilla:fleets[0].max_price: 0 is not a number > 0",
    ),
    "a folder of a container": (
        {"backends": ["runpod"], "checkpoints": {"kind": "instance"}},
        "flotilla:checkpoints.kind: instance is a folder of a machine, and runpod lends containers alone; take network,",
    ),
    "a bucket in a container": (
        {"backends": ["runpod", "vastai"]},
        "bucket is mounted by a privileged container, which runpod, vastai does not start; take other backends",
    ),
    "a bucket without name": (
        {"checkpoints": {"kind": "bucket"}},
        "flotilla:checkpoints.bucket: is missing; no cloud makes one here",
    ),
    "an endpoint alone": (
        {"checkpoints": {"kind": "instance", "endpoint": "https://s3.example.com"}},
        "flotilla:checkpoints.endpoint: belongs to a bucket of yours (bucket)",
    ),
    "an endpoint that is no URL": (
        {"checkpoints": {"kind": "bucket", "bucket": "mine", "endpoint": "minio"}},
        "'minio' is not an http",
    ),
    "a shared folder": (
        {"checkpoints": {"kind": "shared"}},
        "shared is not on flotilla:cloud dstack (allowed here: instance, network, bucket)",
    ),
    "a volume in two places": (
        {"checkpoints": VOLUME},
        "network is a volume in one place, but there are 2 backends",
    ),
    "a volume where there is none": (
        {"backends": ["nebius"], "checkpoints": VOLUME},
        "network, but dstack makes no volumes on nebius (it does on aws, gcp, kubernetes, runpod); take bucket",
    ),
    "a volume anywhere": (
        {"backends": ["runpod"], "checkpoints": VOLUME},
        "network is a volume in one region, but fleets[0].regions gives any",
    ),
    "a volume of two nodes": (
        {"backends": [KUBERNETES], "checkpoints": VOLUME, "fleets": fleet(nodes=2)},
        "network is a volume of one node, but fleet 'gpus' has 2; name a claim with access mode ReadWriteMany (claim)",
    ),
    "a volume of no cluster": (
        {"backends": ["kubernetes"], "checkpoints": VOLUME},
        "but contexts of the backend gives any; name one",
    ),
    "a claim elsewhere": (
        {
            "backends": ["runpod"],
            "fleets": fleet(regions=["EU-SE-1"]),
            "checkpoints": {"kind": "network", "volume": "some", "claim": "mine"},
        },
        "flotilla:checkpoints.claim: belongs to the backend kubernetes, but this stack has runpod",
    ),
    "a claim and a size": (
        {"backends": [KUBERNETES], "checkpoints": VOLUME | {"claim": "mine"}},
        "flotilla:checkpoints.size: belongs to a volume that is made; mine is there already",
    ),
    "a user beside a mount": (
        {"task": {"user": "1000"}},
        "flotilla:task.user: '1000', but checkpoints.kind bucket is mounted inside",
    ),
    "a control node": (
        {"dstack": {"host": "cloud"}},
        "flotilla:dstack.host: cloud is for flotilla:cloud aws or gcp",
    ),
}


@pytest.mark.parametrize(("settings", "line"), WRONG.values(), ids=WRONG)
def test_bad_input_gets_one_line_before_anything_is_created(settings: dict[str, Any], line: str):
    with pytest.raises(StackError) as error:
        stack(**settings)
    assert line in str(error.value) and "secret" not in str(error.value)
    assert len(str(error.value).splitlines()) == 1, error.value


def test_a_cluster_of_two_fleets_is_for_machines_that_are_there():
    with pytest.raises(StackError, match="'more' makes a cluster of several fleets, for which the machines must be there"):
        stack(backends=["nebius"], fleets=[*fleet(), *fleet(name="more")], task={"fleets": ["gpus", "more"]})


@pytest.mark.parametrize("cloud", ["ssh", "slurm", "local"])
def test_backends_belong_to_their_place(cloud: str):
    with pytest.raises(StackError, match=f"flotilla:backends: belongs to flotilla:cloud dstack, but that is {cloud}"):
        parse("x", {"flotilla:cloud": cloud, "flotilla:backends": ["lambda"], "flotilla:fleets": [{"name": "some", "nodes": 1}]})


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
        assert (between, spot) == (backend.cluster or "one node alone", "yes" if backend.spot else "-")
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


# Offers


def item(
    machine: str, region: str, price: float, gpus: int = 8, gpu: str | None = "H100", spot: bool = False, cpu: int = 128
) -> CatalogItem:
    vendor = AcceleratorVendor.NVIDIA if gpu else None
    return CatalogItem("x", machine, region, price, cpu, 1000, gpus, gpu, 80 if gpu else None, spot, None, vendor)


SOLD = {
    "lambda": offers.Listed(
        "lambda", (item("big", "us-east-1", 32), item("one", "us-east-1", 4, gpus=1), item("cpu", "us-east-1", 1, 0, None))
    ),
    "nebius": offers.Listed(
        "nebius", (item("sxm", "eu-north1", 24), item("sxm", "eu-north1", 10, spot=True), item("sxm", "eu-west1", 23.5))
    ),
}


def test_offers_are_sorted_by_price_over_all_backends():
    made = stack()
    found = offers.offers(made, made.fleets[0], SOLD.__getitem__)
    assert [(offer.backend, offer.region, offer.price) for offer in found] == [
        ("nebius", "eu-west1", 23.5),
        ("nebius", "eu-north1", 24),
        ("lambda", "us-east-1", 32),
    ]
    spot = stack(fleets=fleet(capacity={"kind": "spot"}))
    assert [offer.price for offer in offers.offers(spot, spot.fleets[0], SOLD.__getitem__)] == [10]
    two = stack(fleets=fleet(nodes=2))
    assert {offer.backend for offer in offers.offers(two, two.fleets[0], SOLD.__getitem__)} == {"nebius"}
    limited = stack(backends=["lambda", {"type": "nebius", "regions": ["eu-north1"]}])
    assert [offer.price for offer in offers.offers(limited, limited.fleets[0], SOLD.__getitem__)] == [24, 32]
    cpus = stack(fleets=[{"name": "cpus", "nodes": 1, "cpus": 64}])
    assert [offer.machine for offer in offers.offers(cpus, cpus.fleets[0], SOLD.__getitem__)] == ["cpu"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"max_price": 20},
            "fleets[0].max_price: 20 USD an hour is under every offer of lambda, nebius; the cheapest is sxm of nebius in",
        ),
        (
            {"regions": ["us-west-9"]},
            "fleets[0].regions: us-west-9: none of lambda, nebius sells it there; sxm of nebius in eu-west1",
        ),
        (
            {"gpu": {"name": "B200", "count": 8}},
            "fleets[0].gpu.name: 'B200' is sold by none; sold are H100 (backends: lambda, nebius)",
        ),
        (
            {"gpu": {"name": "H100", "count": 3}},
            "fleets[0].gpu.count: 3: machines are sold with 1, 8 x H100, in one network or not",
        ),
        (
            {"cpus": 999},
            "fleets[0]: no machine with 8 x H100 has 999 CPUs and 0 GB; the nearest is sxm of nebius",
        ),
        (
            {"gpu": {"name": "H100", "count": 1}, "capacity": {"kind": "spot"}},
            "fleets[0].capacity.kind: spot: none of lambda, nebius sells it so; on-demand is one of lambda in us-east-1 for 4",
        ),
    ],
)
def test_why_there_is_no_offer(settings: dict[str, Any], line: str):
    made = stack(fleets=fleet(**settings))
    assert offers.offers(made, made.fleets[0], SOLD.__getitem__) == []
    assert line in offers.nothing(made, made.fleets[0], SOLD.__getitem__)


def test_the_lists_that_come_with_the_project_are_dated_and_read(monkeypatch, tmp_path):
    """Every backend with a list sells something, on the day that the list says."""
    reason = prices.PricesUnknown("no network")

    def none(provider: str) -> list[CatalogItem]:
        raise reason

    monkeypatch.setattr(prices, "catalogue", none)
    offers.listed.cache_clear()
    found = {file.stem: offers.listed(file.stem) for file in (Path(offers.__file__).parent / "prices").glob("*.csv")}
    offers.listed.cache_clear()
    assert set(found) == {"lambda", "nebius", "oci", "verda"}
    for backend, listed in found.items():
        assert listed.dated == "2026-11-26" and len(listed.items) > 5, backend
        assert all(item.gpu_count == 0 or (item.gpu_name and item.gpu_memory) for item in listed.items)


def test_the_command_lists_offers_by_the_catalogue(tmp_path, monkeypatch, capsys):
    project(tmp_path, monkeypatch)
    assert offers.main(["any"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("23.50") < shown.index("24.00") < shown.index("32.00") and max(map(len, shown.splitlines())) <= 100
    assert offers.main(["any", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["price"] for each in said["offers"]["gpus"]] == [23.5, 24.0, 32.0]
    assert said["sources"] == {"lambda": "today's catalogue", "nebius": "today's catalogue"}
    assert offers.main(["nobody"]) == 2
    assert "there is no stack 'nobody'" in capsys.readouterr().err


def project(folder: Path, monkeypatch, settings: dict[str, Any] = BASE) -> None:
    """A project with this stack, and catalogues of what `SOLD` has."""
    (folder / "stacks").mkdir()
    (folder / "Pulumi.yaml").write_text("name: flotilla\nruntime: python\n")
    (folder / "stacks/Pulumi.any.yaml").write_text(
        yaml.safe_dump({"config": {f"flotilla:{key}": value for key, value in settings.items()}})
    )
    for backend, name in (("lambda", "lambdalabs"), ("nebius", "nebius")):
        storage.dump(SOLD[backend].items, str(folder / f"{name}.csv"))
    monkeypatch.setattr(offers, "project_root", lambda: folder)
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(folder))
    offers.listed.cache_clear()


# Preflight


def answers(made: Stack) -> dict[str, str]:
    return {answer.check: f"{answer.verdict}: {answer.says}" for answer in preflight.ask(made, {})}


def test_preflight_names_what_is_missing_before_a_server_does(tmp_path, monkeypatch):
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    project(tmp_path, monkeypatch)
    made = stack(backends=["lambda", {"type": "nebius", "credentials": str(tmp_path / "nobody.json")}])
    said = answers(made)
    assert said["backend lambda"] == "failed: LAMBDA_API_KEY not set in this shell"
    assert said["backend nebius"] == f"failed: no such file: {tmp_path}/nobody.json"
    assert said["fleet gpus"] == "ok: 3 offers from sxm of nebius in eu-west1 for 23.5 USD an hour"
    monkeypatch.setenv("LAMBDA_API_KEY", "key")
    dear = stack(backends=["lambda"], fleets=fleet(max_price=1))
    assert answers(dear) == {
        "backend lambda": "ok: by LAMBDA_API_KEY",
        "fleet gpus": "failed: flotilla:fleets[0].max_price: 1 USD an hour is under every offer of lambda; "
        "the cheapest is big of lambda in us-east-1 for 32",
    }
    elsewhere = stack(backends=["lambda"], dstack={"host": "elsewhere", "server": "https://dstack.example.com"})
    assert answers(elsewhere)["backend lambda"].startswith("unknown: the server is elsewhere")
    unlisted = stack(backends=["vultr"])
    assert answers(unlisted)["fleet gpus"].startswith("unknown: no offer but perhaps of vultr")


CONTEXT = {
    "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:6443"}}],
    "users": [{"name": "u", "user": {}}],
    "contexts": [{"name": "prod", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "prod",
}


@pytest.mark.parametrize(
    ("edits", "contexts", "line"),
    [
        ({}, ["prod"], "ok: by "),
        ({}, [], "ok: by "),
        ({"contexts": []}, ["prod"], "has no context, so it leads to no cluster"),
        ({"current-context": ""}, [], "has no current context"),
        ({}, ["staging"], "has no context 'staging'"),
        ({"users": []}, ["prod"], "context prod names user 'u', which is not in the file"),
        ({"clusters": []}, ["prod"], "context prod names cluster 'c', which is not in the file"),
    ],
)
def test_a_kubeconfig_leads_to_its_cluster(tmp_path, edits: dict[str, Any], contexts: list[str], line: str):
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(CONTEXT | edits))
    entry = {"type": "kubernetes", "credentials": str(file)} | ({"contexts": contexts} if contexts else {})
    made = stack(backends=[entry], checkpoints={"kind": "instance"})
    assert line in answers(made)["backend kubernetes"]


@pytest.mark.parametrize(("text", "line"), [(None, "no such file or directory"), ("a: [", "is not YAML"), ("[]", "has no context")])
def test_a_kubeconfig_that_is_none(tmp_path, text: str | None, line: str):
    file = tmp_path / "config"
    if text is not None:
        file.write_text(text)
    made = stack(backends=[{"type": "kubernetes", "credentials": str(file)}], checkpoints={"kind": "instance"})
    assert line in answers(made)["backend kubernetes"]


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
    assert ray_cluster(made, build(made))["utilization_policy"] == {"min_gpu_utilization": 1, "time_window": "3h"}
    own = stack(task={"utilization": {"min_gpu": 10, "window": "30m"}})
    assert ray_cluster(own, build(own))["utilization_policy"] == {"min_gpu_utilization": 10, "time_window": "30m"}
    cpus = stack(fleets=[{"name": "cpus", "nodes": 1}])
    assert "utilization_policy" not in ray_cluster(cpus, build(cpus))
