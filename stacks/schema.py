"""Everything that an environment may say: the types behind the `flotilla:` keys of stacks/Pulumi.<env>.yaml.

A stack file is read once, at the door, into a frozen `Stack`; nothing past this file looks at raw settings. An error names the
key, the value, what is allowed and the file that it was read from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, IPvAnyAddress, IPvAnyNetwork, StringConstraints, model_validator

# dstack's rule for resource names; its server refuses others, its parser does not.
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{1,40}$")]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Host(Model):
    """A machine that is reached by SSH."""

    hostname: str = Field(description="Address or name that the dstack server connects to.")
    internal_ip: IPvAnyAddress | None = Field(default=None, description="Address by which the other nodes reach it.")
    user: str | None = Field(default=None, description="Overrides the fleet's user.")
    port: int | None = Field(default=None, ge=1, le=65535, description="Overrides port 22.")
    identity_file: Path | None = Field(default=None, description="Overrides the fleet's key.")


class JumpHost(Model):
    """A bastion in front of the hosts."""

    hostname: str
    user: str
    port: int = Field(default=22, ge=1, le=65535)
    identity_file: Path


class Ssh(Model):
    """How the machines of a fleet are reached; only with `flotilla:cloud: ssh`."""

    user: str
    identity_file: Path = Field(description="Private key, without passphrase, of the person who runs dstack.")
    hosts: tuple[Host, ...] = Field(min_length=1)
    network: IPvAnyNetwork | None = Field(default=None, description="Private network that the nodes share (CIDR).")
    proxy_jump: JumpHost | None = None


class Gpu(Model):
    """GPUs of one node."""

    name: str | None = Field(default=None, description="Model as dstack names it, such as H100; any when left out.")
    count: int = Field(ge=0, description="GPUs per node.")
    memory: str | None = Field(default=None, description="Memory per GPU, such as 80GB.")
    vendor: Literal["nvidia", "amd"] = "nvidia"


class Fleet(Model):
    """A group of like nodes."""

    name: Name
    nodes: int = Field(ge=1, description="Number of nodes; over SSH the number of hosts, when left out.")
    cpus: int | None = Field(default=None, ge=1, description="CPUs per node; the Ray node offers this many.")
    arch: Literal["x86", "arm"] = Field(default="x86", description="Processor architecture; images are built for one.")
    memory: str | None = Field(default=None, description="Memory per node, such as 512GB or 64GB..")
    disk: str | None = Field(default=None, description="Disk per node, such as 200GB..")
    gpu: Gpu | None = None
    resources: dict[str, float] = Field(default_factory=dict, description='Custom Ray resources of each node, such as {"v100": 8}.')
    ssh: Ssh | None = None

    @model_validator(mode="before")
    @classmethod
    def _nodes_are_hosts(cls, values: Any) -> Any:
        if isinstance(values, dict) and "nodes" not in values and isinstance(ssh := values.get("ssh"), dict) and ssh.get("hosts"):
            return values | {"nodes": len(ssh["hosts"])}
        return values

    def requirements(self) -> dict[str, Any]:
        """What each node must have, in dstack's words (`resources`); what is left out falls to dstack's defaults."""
        # With the architecture named, dstack's server asks no registry for the image's.
        wanted: dict[str, Any] = {"cpu": f"{self.arch}:{self.cpus or 2}..", "memory": self.memory, "disk": self.disk}
        if self.gpu is not None and self.gpu.count:
            wanted["gpu"] = self.gpu.model_dump(exclude_none=True)
        return {key: value for key, value in wanted.items() if value is not None}


class Checkpoints(Model):
    """What is mounted at /checkpoints on every node."""

    kind: Literal["instance", "network", "shared"] = Field(
        default="instance",
        description="instance: a folder of each host. network: a dstack volume. shared: a folder that all hosts have mounted at this path.",
    )
    path: Path = Field(default=Path("/var/lib/flotilla/checkpoints"), description="Folder on the host, for instance and shared.")
    volume: Name | None = Field(default=None, description="Name of the dstack volume, for network.")
    size: str | None = Field(default=None, description="Size of the dstack volume, such as 500GB, for network.")


class Dstack(Model):
    """The dstack server that this stack's files are for."""

    server: str = Field(default="http://127.0.0.1:3000", description="URL of the server.")
    project: Name = "main"


class Task(Model):
    """The Ray cluster as a dstack task."""

    name: Name = "ray"
    image: str | None = Field(default=None, description="Container image, pinned by tag or digest; dstack's own when left out.")
    user: str | None = Field(default=None, description='User in the container, such as "1000:1000".')
    env: dict[str, str | None] = Field(
        default_factory=dict, description="Environment of every node; a null value is taken from the shell of the person who applies."
    )
    shm_size: str | None = Field(default=None, description="Size of /dev/shm, such as 64GB.")
    dashboard_port: int = Field(default=8265, ge=1, le=65535, description="Port of dashboard and job API on this machine.")
    join_timeout: int = Field(default=600, ge=1, description="Seconds that nodes wait for one another.")
    on_node_loss: Literal["fail", "wait"] = Field(
        default="fail", description="What the head does when a node leaves: end the run, or wait for its return."
    )
    retry: bool = Field(default=True, description="dstack submits the run again after an interruption or a node's failure.")
    max_duration: str | None = Field(default=None, description="Such as 72h; no limit when left out.")


class Stack(Model):
    """One environment."""

    name: Name
    cloud: Literal["local", "ssh"] = Field(description="Where the nodes come from.")
    fleets: tuple[Fleet, ...] = Field(min_length=1)
    checkpoints: Checkpoints = Checkpoints()
    dstack: Dstack | None = Field(default=None, description="Set, `pulumi up` drives this server; left out, it only renders.")
    task: Task = Task()
