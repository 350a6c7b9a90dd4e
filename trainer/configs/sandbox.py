"""Settings of sandboxes: the machine that an episode has for itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.configs.base import Only, Section

WITH_SANDBOX = Only("environment.sandbox.provider", why="without a provider episodes have no sandbox")
AbsolutePath = Annotated[str, Field(pattern=r"^/[^:]*$")]
Host = Annotated[str, Field(pattern=r"^(\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*(:\d{1,5})?$")]


class SandboxConfig(Section):
    provider: Literal["auto", "pool", "namespaces", "docker", "podman", "kubernetes"] | None = Field(
        default=None,
        description="Who makes a sandbox for each episode: pool, nodes whose fleet has sandboxes in the stack file; kubernetes, a pod; the "
        "others, the node that plays it. auto takes the first of these that is there, but no pods. Default: none.",
    )
    image: Annotated[str, WITH_SANDBOX] = Field(
        default="",
        description="Its system: a folder of the nodes, for docker and podman an image that they have, for kubernetes one of a registry; "
        "{column} is the row's. Default: the node's own programs, read-only.",
    )
    build: Annotated[Literal["offline", "online"] | None, WITH_SANDBOX] = Field(
        default=None,
        description="Docker or Podman build the Dockerfile of each task as an image, once on a node, with or without network. Default: its "
        "instructions are carried out over image.",
    )
    folders: Annotated[dict[AbsolutePath, str], WITH_SANDBOX] = Field(
        default_factory=dict, description="Folders of the nodes that it sees at these paths, read-only, such as {/data: /mnt/data}."
    )
    workdir: Annotated[AbsolutePath, WITH_SANDBOX] = Field(default="/workspace", description="Where commands start.")
    env: Annotated[dict[str, str], WITH_SANDBOX] = Field(default_factory=dict, description="Variables of its commands.")
    cpu: Annotated[float, WITH_SANDBOX] = Field(default=1.0, gt=0, description="CPUs that it may use.")
    memory_mb: Annotated[int, WITH_SANDBOX] = Field(default=512, ge=16, description="Memory of its processes in MiB.")
    processes: Annotated[int, WITH_SANDBOX] = Field(default=64, ge=4, description="Most processes and threads at a time.")
    disk_mb: Annotated[int, WITH_SANDBOX] = Field(default=256, ge=1, description="What it may write in MiB, kept in memory.")
    files: Annotated[int, WITH_SANDBOX] = Field(default=256, ge=16, description="Most open files of a process.")
    network: Annotated[list[Host], WITH_SANDBOX] = Field(
        default_factory=list,
        description="Hosts that it may reach, by HTTP and HTTPS through a proxy that its variables name: www.example.net, *.example.org, "
        "10.0.0.7:8080. Default: none.",
    )
    timeout: Annotated[float, WITH_SANDBOX] = Field(default=60, gt=0, description="Seconds of a command, unless it is given others.")
    output_kb: Annotated[int, WITH_SANDBOX] = Field(default=64, ge=1, description="Output of a command that is kept, in KiB.")
    wait: Annotated[float, WITH_SANDBOX] = Field(
        default=600, gt=0, description="Seconds that an episode waits for room in a pool, of which environment.timeout counts none."
    )
    strict: Annotated[bool, WITH_SANDBOX] = Field(
        default=False,
        description="Refuse a node where the kernel cannot hold memory, processes and CPU of all of a sandbox, "
        "rather than limit each process.",
    )
