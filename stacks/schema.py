"""Everything that an environment may say: the types behind the `flotilla:` keys of stacks/Pulumi.<env>.yaml.

A stack file is read once, at the door, into a frozen `Stack`; nothing past this file looks at raw settings. An error names the
key, the value, what is allowed and the file that it was read from.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import Field, IPvAnyAddress, IPvAnyNetwork, model_validator
from pydantic_core import PydanticCustomError

from stacks.settings.backends import Entry
from stacks.settings.cache import Cache
from stacks.settings.checkpoints import Checkpoints
from stacks.settings.cloud import DOCKER, Access, Budget, Capacity, Ci, Network
from stacks.settings.debugging import Debug
from stacks.settings.dstack import Dstack
from stacks.settings.fabric import Fabric
from stacks.settings.fields import (
    BurnIn,
    ContainerUser,
    Count,
    Cron,
    Duration,
    Hostname,
    IdleDuration,
    Line,
    Login,
    MetricsWindow,
    Model,
    Mount,
    Name,
    NodeCount,
    OwnPath,
    Port,
    Positive,
    ProjectId,
    ProjectPath,
    Quantity,
    Region,
    Size,
    Sizes,
    Span,
    TagValue,
    Text,
    known,
    same_host,
    setting_error,
)
from stacks.settings.job_queue import Queue
from stacks.settings.monitoring import Monitoring
from stacks.settings.sandboxes import Sandboxes
from stacks.settings.service import Service
from stacks.settings.slurm import Nodes, Slurm
from stacks.settings.task import Image, variable_errors

RAY_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")  # never custom ones
DSTACK_PORTS = range(10000, 11000)  # dstack's own, on the machine of the person who attaches


class Host(Model):
    """A machine reached by SSH."""

    hostname: Hostname = Field(description="Address or name that the dstack server connects to.")
    internal_ip: IPvAnyAddress | None = Field(default=None, description="Address at which the other nodes reach it.")
    user: Login | None = Field(default=None, description="Overrides the fleet's user.")
    port: Port | None = Field(default=None, description="Overrides port 22.")
    identity_file: OwnPath | None = Field(default=None, description="Overrides the fleet's key.")
    resources: dict[str, Quantity] = Field(default_factory=dict, description="Custom Ray resources in addition to the fleet's.")

    @property
    def same(self) -> tuple[str, int]:
        """Alike for two spellings of one host. Behind one address hosts may have ports of their own."""
        return same_host(self.hostname), self.port or 22

    def own_errors(self) -> Iterator[PydanticCustomError]:
        yield from known(_rays_own(self))
        yield from known(self._reachable())
        if self.resources and self.internal_ip is None:
            yield setting_error("is missing; it is how the node knows that the resources of this host are its own", "internal_ip")

    def _reachable(self) -> Iterator[PydanticCustomError]:
        """dstack looks for it among the host's IPv4 addresses, and refuses public ones."""
        at = self.internal_ip
        if at is None:
            return
        if at.version == 6:
            yield setting_error(f"{at} is an IPv6 address, and dstack's server knows nodes only by IPv4 ones", "internal_ip")
        elif at.is_loopback or at.is_unspecified or at.is_link_local or at.is_multicast:
            yield setting_error(f"{at} is not an address by which another host reaches this one", "internal_ip")
        elif at in DOCKER:
            yield setting_error(f"{at} is in {DOCKER}, which Docker uses on every node", "internal_ip")
        elif not at.is_private:
            yield setting_error(
                f"{at} is not private, and dstack's server takes no other; leave it out, or name the private one", "internal_ip"
            )


def _rays_own(holder: Host | Fleet) -> Iterator[PydanticCustomError]:
    for name in holder.resources:
        if name in RAY_RESOURCES:
            yield setting_error("Ray counts this itself; cpus and gpu.count say how much of it a node has", "resources", name)


class JumpHost(Model):
    """Jump host in front of the hosts."""

    hostname: Hostname = Field(description="Address or name that the dstack server connects to.")
    user: Login = Field(description="User to log in as.")
    port: Count = Field(default=22, ge=1, le=65535, description="Port of its SSH server.")
    identity_file: OwnPath = Field(description="Private key, without passphrase, of the person who runs dstack.")


class Ssh(Model):
    """SSH access to the fleet's machines; only with `flotilla:cloud: ssh`."""

    user: Login = Field(description="User to log in as on every host.")
    identity_file: OwnPath = Field(description="Private key, without passphrase, of the person who runs dstack.")
    hosts: tuple[Host, ...] = Field(min_length=1, description="List of machines.")
    network: IPvAnyNetwork | None = Field(
        default=None,
        description="Private network that the nodes share (CIDR), which is searched for each node's address if internal_ip is missing.",
    )
    proxy_jump: JumpHost | None = None

    def own_errors(self) -> Iterator[PydanticCustomError]:
        for index, host in enumerate(self.hosts):
            yield from known(self._name(index, host))
            yield from known(self._address(index, host))

        if self.network and self.network.version == 6:
            yield setting_error(f"{self.network} is of IPv6, and dstack's server looks only for IPv4 addresses", "network")
        elif self.network and not self.network.is_private:
            yield setting_error(f"{self.network} is not private, and dstack's server takes no other", "network")

    def _name(self, index: int, host: Host) -> Iterator[PydanticCustomError]:
        if host.same in [other.same for other in self.hosts[:index]]:
            yield setting_error(f"{host.hostname!r} is listed twice; a host is one node", "hosts", index, "hostname")

    def _address(self, index: int, host: Host) -> Iterator[PydanticCustomError]:
        at = ("hosts", index, "internal_ip")
        if host.internal_ip and host.internal_ip in [other.internal_ip for other in self.hosts[:index]]:
            yield setting_error(f"{host.internal_ip} is another host's too", *at)
        if not host.internal_ip and any(other.internal_ip for other in self.hosts):
            yield setting_error("is missing; dstack needs it for all hosts or for none", *at)
        if self.network and host.internal_ip and host.internal_ip not in self.network:
            yield setting_error(f"{host.internal_ip} is not in network {self.network}", *at)


class Gpu(Model):
    """GPUs of one node."""

    name: str | None = Field(default=None, description="Model as dstack names it, such as H100. Default: any.")
    count: Count = Field(ge=0, description="GPUs per node.")
    memory: Size | None = Field(default=None, description="Memory per GPU, such as 80GB.")
    vendor: Literal["nvidia", "amd"] = Field(default="nvidia", description="Vendor of the GPUs.")

    def own_errors(self) -> Iterator[PydanticCustomError]:
        if self.name is None:
            return
        import gpuhunt  # dstack's own list; only stacks that name GPUs wait for the import

        offered = {"nvidia": gpuhunt.KNOWN_NVIDIA_GPUS, "amd": gpuhunt.KNOWN_AMD_GPUS}[self.vendor]
        models = sorted({gpu.name for gpu in offered})
        if self.name.lower() not in [model.lower() for model in models]:
            near = get_close_matches(self.name.upper(), models, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            yield setting_error(f"{self.name!r} is not an {self.vendor} GPU that dstack knows{guess} (known: {', '.join(models)})", "name")


class Fleet(Model):
    """A group of homogeneous nodes."""

    name: Name = Field(description="Name of the dstack fleet.")
    role: Literal["cluster", "rollout"] = Field(
        default="cluster",
        description="cluster: nodes that start and end together. rollout: nodes for rollout engines, which join and leave.",
    )
    nodes: NodeCount = Field(
        description="Number of nodes, or with role: rollout a range such as 0..8. Default over SSH: the number of hosts."
    )
    hourly_budget: Quantity | None = Field(
        default=None, description="With role: rollout, USD per hour that its nodes may cost together; limits how many start."
    )
    cpus: Positive | None = Field(default=None, description="CPUs per node, which the Ray node offers.")
    arch: Literal["x86", "arm"] = Field(default="x86", description="Processor architecture of the image.")
    memory: Sizes | None = Field(default=None, description="Memory per node, such as 512GB or 64GB..")
    disk: Sizes | None = Field(default=None, description="Disk per node, such as 200GB..")
    gpu: Gpu | None = None
    resources: dict[str, Quantity] = Field(default_factory=dict, description='Custom Ray resources of each node, such as {"v100": 8}.')
    sandboxes: Sandboxes | None = Field(default=None, description="Pool of sandboxes on each node, for environments of jobs.")
    ssh: Ssh | None = None
    slurm: Nodes | None = Field(default=None, description="Settings that differ from flotilla:slurm for this fleet's nodes.")
    fabric: Fabric | None = Field(default=None, description="Network between the GPUs of your own machines: infiniband, roce, ...")
    machine: str | None = Field(default=None, description="Machine type of a cloud such as p5.48xlarge or a3-megagpu-8g.")
    provision: Literal["dstack", "pulumi"] = Field(
        default="dstack", description="What launches the machines: dstack when runs need them, or Pulumi once, until `pulumi destroy`."
    )
    capacity: Capacity = Capacity()
    placement: Literal["cluster", "any"] | None = Field(
        default=None, description="cluster: close together, for the fabric. Default: by the machine type."
    )
    nics: Positive | None = Field(default=None, description="Network cards of each node, with provision: pulumi. Default: all.")
    image: str | None = Field(default=None, description="Image of the nodes' disk: its id, or its path on clouds with paths.")
    max_price: Quantity | None = Field(default=None, description="Highest price of a node in USD per hour.")
    regions: tuple[Text, ...] = Field(default=(), description="Regions of the backends in which nodes may be. Default: any.")
    idle_duration: IdleDuration | None = Field(
        default=None, description="dstack terminates a machine after this long without work. Default: 15m; off for never."
    )

    @model_validator(mode="before")
    @classmethod
    def _nodes_are_hosts(cls, values: Any) -> Any:
        if isinstance(values, dict) and "nodes" not in values and isinstance(ssh := values.get("ssh"), dict) and ssh.get("hosts"):
            count = len(ssh["hosts"])
            return values | {"nodes": f"0..{count}" if values.get("role") == "rollout" else count}
        return values

    @property
    def elastic(self) -> bool:
        """Whether its nodes join and leave a running cluster."""
        return self.role == "rollout"

    @property
    def least(self) -> int:
        """The fewest nodes of it."""
        return self.nodes.least if isinstance(self.nodes, Span) else self.nodes

    def pays_for(self, price: float | None) -> int:
        """How many nodes its budget pays for, at so many USD an hour each; all where it has no budget, or nobody knows the price."""
        if self.hourly_budget is None or price is None:
            return int(self.nodes)
        return int(self.hourly_budget / price + 1e-9)

    def own_errors(self) -> Iterator[PydanticCustomError]:
        yield from known(_rays_own(self))
        yield from known(self._range())
        if self.ssh and self.nodes != len(self.ssh.hosts):
            yield setting_error(
                f"{self.nodes} nodes, but ssh.hosts lists {len(self.ssh.hosts)}; leave nodes out, or let them agree", "nodes"
            )

    def _range(self) -> Iterator[PydanticCustomError]:
        if self.elastic and not isinstance(self.nodes, Span):
            yield setting_error(
                f"{self.nodes} is one number; nodes with role: rollout come and go: a range such as 0..{self.nodes}", "nodes"
            )
        if not self.elastic and self.hourly_budget is not None:
            yield setting_error("is for role: rollout; nodes of a cluster start together, whatever they cost", "hourly_budget")
        if not self.elastic and isinstance(self.nodes, Span):
            yield setting_error(f"'{self.nodes}' is a range, for role: rollout; nodes of a cluster start together: a number", "nodes")

    def requirements(self) -> dict[str, Any]:
        """What each node must have, in dstack's words (`resources`); what is left out falls to dstack's defaults."""
        # With the architecture named, dstack's server asks no registry for the image's.
        wanted: dict[str, Any] = {"cpu": f"{self.arch}:{self.cpus or 2}..", "memory": self.memory, "disk": self.disk}
        if self.gpu is not None and self.gpu.count:
            gpu = self.gpu
            wanted["gpu"] = ":".join(str(part) for part in (gpu.vendor, gpu.name, gpu.memory, gpu.count) if part is not None)
        return {key: value for key, value in wanted.items() if value is not None}


class Job(Model):
    """One Ray job, for continuous integration and schedules: ray-job.dstack.yml runs it on a cluster of its own."""

    command: Line = Field(description="The job's command, such as python -m trainer.train_ppo --config run.yaml.")
    files: tuple[ProjectPath, ...] = Field(
        default=("trainer",), min_length=1, description="Files and folders of the project that the job needs; at most 2 MB each."
    )
    schedule: Cron | None = Field(default=None, description='Start times by dstack in UTC, such as "0 3 * * *".')
    retry: bool = Field(
        default=False,
        description="Also retry after a lost node, from the last checkpoint; dstack then also retries a failing job until stopped.",
    )


class Utilization(Model):
    """dstack ends a run whose GPUs idle."""

    min_gpu: Count = Field(ge=1, le=100, description="Percent; a GPU that stays below this throughout the window ends the run.")
    window: MetricsWindow = Field(default="30m", description="Duration from 5m to 1h, for which a dstack server keeps metrics.")


Priority = Annotated[Count, Field(le=100, json_schema_extra={"allowed": "an integer between 0 and 100"})]


class Task(Image):
    """The Ray cluster as a dstack task."""

    name: Name = Field(default="ray", description="Name of the run.")
    user: ContainerUser | None = Field(default=None, description='User for Ray and jobs, such as "1000:1000". Default: that of the image.')
    env: dict[str, Text | None] = Field(
        default_factory=dict, description="Environment of every node; a null value is taken from the shell that applies."
    )
    shm_size: Size | None = Field(default=None, description="Size of /dev/shm, such as 64GB.")
    volumes: tuple[Mount, ...] = Field(default=(), description="Further mounts on every node, such as /data:/data.")
    dashboard_port: Count = Field(default=8265, ge=1, le=65535, description="Port of dashboard and job API on this machine.")
    join_timeout: Count = Field(default=600, ge=1, description="Seconds that nodes wait for one another.")
    burn_in: BurnIn | None = Field(
        default=None,
        description="Load on a node's GPUs before it joins: memory, arithmetic, all-reduce; a node that fails ends the attempt.",
    )
    on_node_loss: Literal["fail", "wait"] = Field(default="fail", description="When a node is lost: end the run, or wait for its return.")
    retry: bool = Field(default=True, description="dstack submits the run again after an interruption or a node's failure.")
    priority: Priority | None = Field(default=None, description="dstack provisions runs of a higher priority first. Default: 0.")
    max_duration: Duration | None = Field(default=None, description="Longest duration, such as 72h. Default: no limit.")
    stop_duration: Duration | None = Field(default=None, description="dstack forces a stop after this long. Default: 5m.")
    utilization: Utilization | None = Field(
        default=None, description="Ends a run whose GPUs idle. Default with flotilla:cloud dstack: below 1 % for 1h."
    )
    fleets: tuple[Name, ...] = Field(
        default=(), description="Fleets whose nodes form the cluster, the head's first. Default: the first fleet."
    )
    services: dict[str, Service] = Field(default_factory=dict, description="Services that run next to Ray for jobs, by name.")
    sandbox_port: Port = Field(default=8266, description="Port of the pools of fleets[].sandboxes, on the nodes that have one.")
    job: Job | None = Field(default=None, description="A single job on its own cluster.")

    def own_errors(self) -> Iterator[PydanticCustomError]:
        yield from known(self._port())
        yield from known(super().own_errors())
        for name, value in self.env.items():
            yield from variable_errors(name, value)

    def _port(self) -> Iterator[PydanticCustomError]:
        if self.dashboard_port in DSTACK_PORTS:
            yield setting_error(f"{self.dashboard_port} is one of dstack's own ports, 10000 to 10999; take another", "dashboard_port")


class Stack(Model):
    """One environment."""

    name: Name
    cloud: str = Field(description="The place of the nodes.")
    region: Region | None = Field(default=None, description="Region of the cloud, such as us-east-1 or us-central1.")
    project: ProjectId | None = Field(default=None, description="Project id, on a cloud that has projects.")
    environment: Name = Field(default="dev", description="Tag of all resources, and the GitHub environment that may deploy.")
    protect: bool = Field(default=False, description="Refuse to delete the checkpoints and their keys.")
    tags: dict[str, TagValue] = Field(default_factory=dict, description="Tags of all cloud resources, such as owner or cost-center.")
    monitoring: Monitoring = Field(default=Monitoring(), description="Prometheus, Grafana and alerts on the head; price of a node.")
    account_defaults: bool = Field(
        default=False, description="In this account and region, encrypt every new disk and require IMDSv2 of every new instance."
    )
    network: Network = Network()
    backends: tuple[Entry, ...] = Field(default=(), description="dstack's backends that may launch nodes: a name such as runpod, or a map.")
    backend_order: Literal["price", "list"] = Field(
        default="price",
        description="price: dstack takes the cheapest offer of all. list: `flotilla up` and `launch` ask one backend after the other, a "
        "cloud's stack that cloud first.",
    )
    fleets: tuple[Fleet, ...] = Field(min_length=1, description="The machines, in groups of homogeneous nodes.")
    checkpoints: Checkpoints = Checkpoints()
    cache: Cache = Field(default=Cache(), description="Models and datasets of Hugging Face.")
    access: Access | None = Field(default=None, description="Access to nodes that Pulumi launches.")
    budget: Budget | None = Field(default=None, description="Monthly budget and its mail recipients.")
    ci: Ci | None = Field(default=None, description="Deployment from continuous integration.")
    slurm: Slurm = Field(default=Slurm(), description="The allocation on a Slurm cluster.")
    dstack: Dstack | None = Field(default=None, description="The dstack server of this stack. Default: dstack's own.")
    debug: Debug = Field(default=Debug(), description="Records for debugging a job that hangs.")
    queue: Queue = Queue()
    task: Task = Task()

    @property
    def control_node(self) -> bool:
        """Whether a machine of this stack's own runs its dstack server."""
        return self.dstack is not None and self.dstack.host == "cloud"

    def ordered_backends(self) -> tuple[str, ...]:
        """Those that are asked one after the other; none where the price decides."""
        own = () if self.cloud == "dstack" else (self.cloud,)
        return (*own, *(entry.type for entry in self.backends)) if self.backend_order == "list" else ()

    def cluster_fleets(self) -> tuple[Fleet, ...]:
        """Those whose nodes make up the cluster, the head's first."""
        by_name = {fleet.name: fleet for fleet in self.fleets}
        return tuple(by_name[name] for name in self.task.fleets) or self.fleets[:1]

    def elastic_fleets(self) -> tuple[Fleet, ...]:
        """Those whose nodes join and leave the running cluster."""
        return tuple(fleet for fleet in self.fleets if fleet.elastic)

    def most(self, fleet: Fleet) -> int:
        """Nodes that an elastic fleet may have: fewer than its range where monitoring.price says that its budget does not pay for more."""
        return min(int(fleet.nodes), fleet.pays_for(self.monitoring.price))

    def dstack_fleets(self) -> tuple[Fleet, ...]:
        """As dstack knows them: it places a run in one fleet, so those of a cluster are one, named after the first."""
        return tuple(fleet for fleet in self.fleets if fleet not in self.cluster_fleets()[1:])
