"""What a stack for any cloud may not say: one line each, before anything is created."""

from __future__ import annotations

from typing import Any

import pytest
from support.anywhere import KUBERNETES, VOLUME, fleet, stack

from stacks.errors import StackError
from stacks.load import parse

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
        "flotilla:backends[0].region: is not a setting of dstack's backend runpod; did you mean regions? (allowed: regions,",
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
    "sandboxes in a container": (
        {
            "backends": ["runpod"],
            "fleets": fleet(sandboxes={"number": 4}, regions=["EU-RO-1"]),
            "checkpoints": {"kind": "network", "volume": "kept", "size": "100GB"},
        },
        "flotilla:fleets[0].sandboxes: takes a privileged container, which runpod does not start; leave it out, or take other backends",
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
    with pytest.raises(StackError, match=f"flotilla:backends: belongs to flotilla:cloud aws or gcp or dstack, but that is {cloud}"):
        parse("x", {"flotilla:cloud": cloud, "flotilla:backends": ["lambda"], "flotilla:fleets": [{"name": "some", "nodes": 1}]})
