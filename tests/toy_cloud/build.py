"""As infra/<cloud>/build.py."""

from __future__ import annotations

import pulumi

from stacks.schema import Gpu, Stack
from stacks.site import Site
from toy_cloud import BIG


def build(stack: Stack) -> pulumi.Output[Site]:
    backend = {"type": "toy", "regions": [stack.region]}
    gpus = {fleet.name: Gpu(name=BIG.gpu, count=BIG.gpus, memory=f"{BIG.gpu_memory}GB") for fleet in stack.fleets}
    return pulumi.Output.from_input(Site(backends=(backend,), gpus=gpus, outputs={"hello": "toy"}))
