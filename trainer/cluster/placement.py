"""Who gets which resources of which nodes: a plan as data, checked against the cluster; reservation.py has Ray reserve it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.configs.environment import EnvironmentConfig
from trainer.configs.ppo import PpoConfig
from trainer.configs.ppo_sections import RayPlacementConfig
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

Bundle = dict[str, float]
ROLE, ELASTIC = "flotilla.role", "rollout"  # label of Ray nodes that may come and go: rollout engines alone are on them
RUNNING_RAY = Path("/tmp/ray/ray_current_cluster")  # where ray.init() looks for a cluster of this machine
DOMAIN = "ray.io/gpu-domain"  # label of nodes whose GPUs reach those of other nodes by NVLink; with the same value one another
RAY_UNITS = 10_000  # Ray's kResourceUnitScaling


def own_ray_runs() -> bool:
    """Whether ray.init() would find a cluster of this user, or of root; anybody may write the file, and a run shows Ray its code."""
    try:
        return RUNNING_RAY.lstat().st_uid in (os.getuid(), 0)
    except OSError:
        return False


@dataclass(frozen=True)
class Placement:
    """Bundles of resources: one per training rank, then one per node of each rollout engine (none where these share the ranks' bundles),
    then those of roles that do not share the ranks' bundles, one per rank."""

    ranks: tuple[Bundle, ...]
    engines: tuple[Bundle, ...]
    own: Mapping[str, tuple[Bundle, ...]] = field(default_factory=dict)  # by role
    per_domain: int = 0  # bundles of an engine, whose nodes are to be in one NVLink domain; 0: they need not

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        return self.ranks + self.engines + tuple(bundle for bundles in self.own.values() for bundle in bundles)

    def together(self) -> Iterator[tuple[list[int], bool]]:
        """Positions in `bundles` of what is reserved at once, and whether in one domain: each such engine, then all others."""
        others = list(range(len(self.bundles)))
        if self.per_domain:
            first, last = len(self.ranks), len(self.ranks) + len(self.engines)
            yield from ((others[i : i + self.per_domain], True) for i in range(first, last, self.per_domain))
            del others[first:last]
        if others:
            yield others, False

    def engine_bundle(self, index: int, node: int = 0, nodes: int = 1) -> int:
        """Position in `bundles` of a rollout engine's bundle on one of its nodes."""
        return len(self.ranks) + index * nodes + node if self.engines else index

    def rank_bundle(self, role: str, index: int) -> int:
        """Position in `bundles` of the bundle of a role's rank."""
        before = len(self.ranks) + len(self.engines)
        for name, bundles in self.own.items():
            if name == role:
                return before + index
            before += len(bundles)
        return index


def plan(config: PpoConfig, domains: bool = False) -> Placement:
    """What a run asks for. `domains`: whether there are nodes in NVLink domains."""
    rank, engine, ranks = rank_share(config), engine_share(config), config.placement.ranks
    apart = {role: (bundle,) * ranks for role, bundle in own_bundles(config).items()}
    if config.placement.colocate:
        both = {name: rank.get(name, 0) + engine.get(name, 0) for name in rank | engine}
        return Placement((both,) * ranks, (), apart)
    nodes = config.rollout.nodes_per_engine
    per_domain = nodes if domains and config.rollout.one_domain and nodes > 1 else 0
    return Placement((rank,) * ranks, (engine,) * (config.rollout.engines * nodes), apart, per_domain)


def own_bundles(config: PpoConfig) -> dict[str, Bundle]:
    """What a rank takes, of each role that does not share the ranks' bundles."""
    place = config.placement
    if not place.reference_resources:
        return {}
    gpus = place.gpus_per_rank if place.gpus_per_reference is None else place.gpus_per_reference
    return {"reference": share({"CPU": place.cpus_per_rank, "GPU": gpus, **place.reference_resources})}


def rank_share(config: PpoConfig, roles: int = 1) -> Bundle:
    """What one rank of each of `roles` takes of its bundle: equal parts, so that all find room in it together."""
    place = config.placement
    gpus = place.gpus_per_rank / 2 if place.colocate else place.gpus_per_rank  # the other half is the rollout engine's, in Ray's books
    return share({"CPU": place.cpus_per_rank, "GPU": gpus, **place.rank_resources}, roles)


def engine_share(config: PpoConfig) -> Bundle:
    """What one rollout engine takes of its bundle on each of its nodes."""
    place = config.placement
    gpus = gpus_per_engine(config) / config.rollout.nodes_per_engine
    return share({"CPU": place.cpus_per_engine, "GPU": gpus, **place.engine_resources})


def gpus_per_engine(config: PpoConfig) -> float:
    """GPUs of one rollout engine, on all its nodes: as set, half of the rank's that it shares, one per process, or none as the ranks."""
    if config.placement.colocate:
        return config.placement.gpus_per_rank / 2
    if config.placement.gpus_per_engine is not None:
        return config.placement.gpus_per_engine
    return config.rollout.tensor_parallel * config.rollout.pipeline_parallel if config.placement.gpus_per_rank else 0


def device_of(gpus: float, setting: str) -> torch.device:
    """The device of this process: as its placement says, not as the machine happens to have.

    Ray shows an actor its own GPUs only; torchrun shows all of a node's and tells the process which is its own in LOCAL_RANK.
    Raises ConfigError naming `setting` where that GPU is missing.
    """
    import torch

    if not gpus:
        return torch.device("cpu")
    index, have = int(os.environ.get("LOCAL_RANK") or 0), torch.cuda.device_count()
    if index >= have:
        raise ConfigError(f"{setting}={gpus:g}: process {index} of this machine has no GPU, torch sees {have}; 0 uses CPUs")
    return torch.device("cuda", index)


def sync_backend(config: PpoConfig) -> Literal["nccl", "gloo", "ipc", "local"]:
    """What carries weights from the ranks to the rollout engines: NCCL where each process has whole GPUs of its own, which NCCL needs.

    Where each engine shares its rank's GPU it reads them there. Otherwise gloo, over buffers in CPU memory: some are on CPUs, or may share
    a GPU. In one process they are handed over.
    """
    if config.placement.processes == "one":
        return "local"
    if config.placement.colocate and config.placement.gpus_per_rank:
        return "ipc"
    whole = config.placement.gpus_per_rank >= 1 and gpus_per_engine(config) >= 1
    return "nccl" if whole else "gloo"


def fit(config: PpoConfig, listed: Sequence[Mapping[str, Any]], engines_alone: bool = False) -> Placement:
    """What a run, or its rollout engines alone, ask for of these nodes, as Ray lists them. Raises ConfigError where they have less."""
    nodes, found = fixed_nodes(listed), domains(listed)
    wanted = plan(config, bool(found))
    if engines_alone:
        wanted = replace(wanted, ranks=(), own={})
    check(wanted, nodes, config.placement)
    check_domains(wanted, found)
    check_environment(config.environment, nodes)
    return wanted


def check(placement: Placement, nodes: Sequence[Mapping[str, float]], settings: RayPlacementConfig) -> None:
    """Compare with all that the nodes have, busy or not.

    Raises ConfigError naming the resource, both numbers and the settings to change.
    """
    for name in sorted({name for bundle in placement.bundles for name in bundle}):
        wanted = sum(bundle.get(name, 0) for bundle in placement.bundles)
        have = sum(node.get(name, 0) for node in nodes)
        if wanted > have + 1e-6:
            ranks, engines = len(placement.ranks), len(placement.engines)
            apart = "".join(f"{len(bundles)} {role} ranks, " for role, bundles in placement.own.items())
            raise ConfigError(
                f"placement asks for {wanted:g} {name} ({apart}{ranks} ranks, {engines} rollout engines), the cluster has "
                f"{have:g}; lower {_setting(name, settings)} or add nodes (flotilla:fleets[].nodes)"
            )
    for bundle in placement.bundles:  # a process cannot span nodes
        if not any(all(node.get(name, 0) >= amount - 1e-6 for name, amount in bundle.items()) for node in nodes):
            have = "; ".join(dict.fromkeys(_words(node, bundle) for node in nodes))
            lower = " or ".join(dict.fromkeys(_setting(name, settings) for name in bundle))
            raise ConfigError(f"placement asks for {_words(bundle)} on one node, the nodes have {have}; lower {lower}")


def check_domains(placement: Placement, found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Whether each rollout engine over several nodes finds room in one NVLink domain. Raises ConfigError naming the domains."""
    if not placement.per_domain:
        return
    bundle, engines = placement.engines[0], len(placement.engines) // placement.per_domain
    room = {name: sum(_times(bundle, node) for node in nodes) for name, nodes in found.items()}
    have = sum(count // placement.per_domain for count in room.values())
    if have < engines:
        raise ConfigError(
            f"rollout.nodes_per_engine={placement.per_domain}: {have} of {engines} rollout engines find as many in one NVLink domain "
            f"({DOMAIN}); with {_words(bundle)} there are {', '.join(f'{count} in {name}' for name, count in room.items())}; lower "
            "rollout.engines or nodes_per_engine, or let them use slower links with rollout.one_domain=false"
        )


def check_environment(environment: EnvironmentConfig, nodes: Sequence[Mapping[str, float]]) -> None:
    """Whether the processes that play episodes find room on the nodes. Raises ConfigError naming the resource and what there is."""
    for name, amount in {"CPU": environment.cpus, **environment.resources}.items():
        have = [node.get(name, 0) for node in nodes]
        setting, wanted = "environment.cpus" if name == "CPU" else f"environment.resources.{name}", amount * environment.workers
        if amount > max(have, default=0) + 1e-6:
            raise ConfigError(
                f"{setting}={amount:g}: each process that plays episodes takes that much {name} of its node, no node has more than "
                f"{max(have, default=0):g}; lower it, or add nodes that have it (flotilla:fleets[].resources)"
            )
        if wanted > sum(have) + 1e-6:
            raise ConfigError(
                f"environment.workers={environment.workers}: {setting}={amount:g} of each makes {wanted:g} {name}, the cluster has "
                f"{sum(have):g}; lower one of both, or add nodes (flotilla:fleets[].nodes)"
            )


def fixed_nodes(nodes: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """What the nodes have, of Ray's list of them, that stay: neither dead ones nor those whose rollout engines come and go."""
    return [node["Resources"] for node in _fixed(nodes)]


def domains(nodes: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """The same of those that are in NVLink domains, by domain."""
    found: dict[str, list[dict[str, float]]] = {}
    for node in _fixed(nodes):
        if name := node["Labels"].get(DOMAIN):
            found.setdefault(name, []).append(node["Resources"])
    return found


def _fixed(nodes: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (node for node in nodes if node["Alive"] and node["Labels"].get(ROLE) != ELASTIC)


def threads(settings: RayPlacementConfig, cpus: float) -> int:
    """torch threads of a process that was given `cpus`."""
    return settings.threads or max(1, math.floor(cpus))


def _times(bundle: Bundle, node: Mapping[str, float]) -> int:
    """How often a node has that."""
    return min(math.floor(node.get(name, 0) / amount + 1e-6) for name, amount in bundle.items())


def _words(amounts: Mapping[str, float], of: Bundle | None = None) -> str:
    return ", ".join(f"{amounts.get(name, 0):g} {name}" for name in of or amounts)


def share(amounts: Bundle, parts: int = 1) -> Bundle:
    """Rounded down to what Ray counts in (1/10,000): rounded up, the last part would find too little left. Nothing of 0."""
    counted = {name: math.floor(amount * RAY_UNITS / parts + 1e-6) / RAY_UNITS for name, amount in amounts.items()}
    return {name: amount for name, amount in counted.items() if amount > 0}


def _setting(name: str, settings: RayPlacementConfig) -> str:
    if name in settings.rank_resources:
        return "placement.rank_resources"
    if name in settings.engine_resources:
        return "placement.engine_resources"
    if name in settings.reference_resources:
        return "placement.reference_resources"
    kind = name.lower()
    return f"placement.ranks, placement.{kind}s_per_rank, rollout.engines or placement.{kind}s_per_engine"
