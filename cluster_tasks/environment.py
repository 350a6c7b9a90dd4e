"""The environment of every node of a fleet, with the reason beside each variable.

    python -m cluster_tasks.environment STACK      each variable, its value, the reason, and what asks for it

flotilla:task.env wins over everything here. The interface that has a node's address is chosen on the node, by the node agent
(`cluster_tasks/node/network.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from cluster_tasks import fabric
from cluster_tasks.fabric import Setting
from cluster_tasks.price import hourly
from stacks.errors import UserError
from stacks.host import command_line
from stacks.load import load
from stacks.places import place_of
from stacks.schema import Fleet, Stack
from stacks.settings.cache import Cache

CHECKPOINTS = "/checkpoints"  # the same path inside every node, whatever is mounted there; under Slurm it is the host's own
RECORDER = "flotilla:debug.flight_recorder"

ON_THE_NODE = {
    "GLOO_SOCKET_IFNAME": "the interface that has the node's address; gloo would take the one that the host name resolves to",
    "NCCL_SOCKET_IFNAME": "the same; NCCL would take the first that is up, docker0 where there is no other",
}


def of_fleet(stack: Stack, fleet: Fleet) -> dict[str, Setting]:
    """The environment of every node of a fleet, by variable, in order: fabric, GPUs, cache, debug, then flotilla:task.env, which wins."""
    settings = fabric.variables(stack, fleet)
    settings |= {name: Setting(*known, "flotilla:cache") for name, known in _cache(stack.cache).items()}
    settings |= _debug(stack)
    for name, value in stack.task.env.items():
        instead = f"in place of {settings[name].value} ({settings[name].reason})" if name in settings else "the stack file says so"
        settings[name] = Setting(value, instead, "flotilla:task.env")
    if (price := hourly(stack)) is not None:
        why = "USD an hour of all nodes, for what a run has cost"
        settings["FLOTILLA_PRICE"] = Setting(f"{price:.12g}", why, "flotilla:monitoring.price")
    for name, why in place_of(stack).variables(stack).items():
        settings[name] = Setting(None, why, "flotilla:checkpoints.bucket")
    for name in stack.monitoring.variables:
        settings[name] = Setting(None, "where alerts are posted", "flotilla:monitoring.alerts.webhook")
    return settings


def _cache(cache: Cache) -> dict[str, tuple[str, str]]:
    """Hugging Face's variables on every node: `{variable: (value, reason)}`."""
    found: dict[str, tuple[str, str]] = {}
    if cache.path:
        found["HF_HOME"] = str(cache.path), "models and datasets are downloaded once, not by every node"
    if cache.endpoint:
        found["HF_ENDPOINT"] = cache.endpoint, "the mirror"
    if cache.offline:
        found["HF_HUB_OFFLINE"] = "1", "a file missing in the cache is an error, not a download; datasets and transformers heed it too"
    if cache.says("wait"):
        found["FLOTILLA_CACHE_WAIT"] = str(cache.wait), "seconds that cluster_tasks.cache waits for another node's download"
    return found


def _debug(stack: Stack) -> dict[str, Setting]:
    """RCCL, and PyTorch for ROCm, read the same names. Older PyTorch knows the second of a pair alone, which newer takes with a warning."""
    found: dict[str, tuple[str, str]] = {}
    if stack.debug.flight_recorder:
        place = f"{stack.checkpoints.path if place_of(stack).batch else CHECKPOINTS}/flight-recorder/nccl_trace_rank_"
        size = "2000", "the last collectives of each rank are kept"
        file = place, "where each rank writes them, its number behind; the node agent makes the folder"
        found = {
            "TORCH_FR_BUFFER_SIZE": size,
            "TORCH_NCCL_TRACE_BUFFER_SIZE": size,
            "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", "they are written where a collective does not end in time"),
            "TORCH_FR_DUMP_TEMP_FILE": file,
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": file,
        }
    settings = {name: Setting(*known, RECORDER) for name, known in found.items()}
    if stack.debug.nccl:
        settings["NCCL_DEBUG"] = Setting(stack.debug.nccl, "what NCCL and RCCL print", "flotilla:debug.nccl")
    return settings


def of_cluster(stack: Stack, fleets: Iterable[Fleet]) -> dict[str, Setting]:
    """The one environment of a cluster of several fleets; of floors the lowest.

    Raises ValueError where two fleets need different values of a variable, and flotilla:task.env does not say which.
    """
    found: dict[str, Setting] = {}
    for fleet in fleets:
        for name, setting in of_fleet(stack, fleet).items():
            before = found.get(name, setting)
            if name == fabric.FLOOR:
                found[name] = min(before, setting, key=lambda setting: float(setting.value or 0))
            elif before.value != setting.value:
                wants = f"{name}={before.value} ({before.origin}) and {name}={setting.value} ({setting.origin})"
                raise ValueError(
                    f"flotilla:task.fleets: {wants} cannot both be in one cluster's environment; say in flotilla:task.env which"
                )
            else:
                found[name] = before
    return found


def described(stack: Stack) -> Iterator[str]:
    """For people, line by line: each variable, its reason and what asks for it."""
    for fleet in stack.fleets:
        kind, settings = fabric.kind(stack, fleet), of_fleet(stack, fleet)
        yield f"fleet {fleet.name}: {fleet.nodes} nodes, fabric {kind}"
        for name, setting in settings.items():
            yield f"  {name} from your shell" if setting.value is None else f"  {name}={setting.value}"
            yield f"      {setting.reason} ({setting.origin})"
        for name, reason in ON_THE_NODE.items():
            if name not in settings:
                yield f"  {name}: chosen on each node\n      {reason} (node agent)"
        for name, reason in fabric.LEFT_ALONE.get(kind, {}).items():
            if name not in settings:
                yield f"  {name}: left alone\n      {reason}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster_tasks.environment", description="Shows the environment of a stack's nodes.")
    command_line.add_stack(parser)
    options = parser.parse_args(argv)
    try:
        lines = list(described(load(options.stack, Path(__file__).parents[1])))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
