"""Stack and Site -> the dstack tasks that start a Ray cluster, to hold it or for one job, and the runtime environment of jobs.

Every node runs the node agent, which learns from dstack's environment which node it is.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster_tasks import environment, software
from cluster_tasks.environment import CHECKPOINTS
from cluster_tasks.node.identity import token_variable
from cluster_tasks.node.sandbox_pool import NAME as POOLS
from cluster_tasks.node.sandbox_pool import PORT as SANDBOX_PORT
from cluster_tasks.node.settings import DASHBOARD_PORT, STOP_SECONDS
from cluster_tasks.price import hourly
from stacks.places import place_of
from stacks.schema import Fleet, Job, Stack, Utilization
from stacks.settings.checkpoints import Checkpoints
from stacks.settings.monitoring import seconds
from stacks.settings.slurm import MARGIN
from stacks.site import Site, present

NODE_AGENT = Path(__file__).with_name("node")  # published beside the task file, which names it under `files`
APART = "trainer/page", "trainer/environments"  # of the trainer, that come by themselves
PAGE = Path(__file__).parents[1] / "trainer/page"  # which the head serves; copied, as the trainer comes with jobs alone
SANDBOXES = Path(__file__).parents[1] / "trainer/environments/sandboxes/host"  # which pools run; copied for the same reason
PAGE_FILES = ("*.py", "*.html", "*.js", "*.css", "*.txt")
RETRIED = ["no-capacity", "interruption", "error"]  # a lost node is an error first; then its place is missing until it is back
RETRY = "1h"  # after a failure; dstack waits 15 s, 30 s, 1, 2, 5, then 10 minutes between attempts
FOREVER = "3650d"  # of a node that may come and go; dstack has no word for no end
RANGE = "FLOTILLA_FLEET_NODES"  # how many nodes the fleet may have, for who scales it by the rendered file alone
ROLLOUT = ".rollout.dstack.yml"  # ends the names of their files
UNUSED = Utilization(min_gpu=1, window="1h")
RUNTIME_ENV = "runtime-env.yaml"
PROJECT = "project"  # where a job's files are on the head
SHM = "8GB"  # container engines give 64 MB, where Ray's object store and NCCL need gigabytes; a limit, nothing is reserved


def ray_cluster(stack: Stack, site: Site) -> dict[str, Any]:
    """The task for `dstack apply -f` that holds a cluster: head and workers on the nodes of the task's fleets.

    Raises ValueError where no image can run on these GPUs, or the checkpoints' volume has no name.
    """
    fleets, task = [site.equipped(fleet) for fleet in stack.cluster_fleets()], stack.task
    first, several = fleets[0], len(fleets) > 1
    groups = [{"name": fleet.name, "nodes": fleet.nodes} | _nodes(stack, site, fleets, fleet) for fleet in fleets]
    return present(
        type="task",
        name=task.name,
        nodes=None if several else first.nodes,
        fleets=[first.name],
        **software.software(stack, fleets, NODE_AGENT.name),
        user=_user(stack, fleets),
        # Docker's own filter keeps a container from making namespaces, which sandboxes are.
        privileged=bool(site.mount) or any(fleet.sandboxes for fleet in fleets) or None,
        shell="bash",
        env=_environment(stack, fleets),
        groups=groups if several else None,
        **({} if several else _nodes(stack, site, fleets, first)),
        volumes=_volumes(stack, site) or None,
        # dstack takes silence for on-demand, and then refuses the fleet's spot instances.
        spot_policy="spot" if first.capacity.kind == "spot" and first.provision == "dstack" else None,
        startup_order="any",  # workers wait for the head themselves
        stop_criteria="master-done",
        retry={"on_events": RETRIED, "duration": RETRY} if task.retry else None,
        priority=task.priority,
        max_duration=task.max_duration,
        stop_duration=task.stop_duration,
        utilization_policy=_utilization(stack, fleets),
    )


def rollout_node(stack: Stack, site: Site, fleet: Fleet) -> dict[str, Any]:
    """The task of one node of an elastic fleet, which `flotilla scale` applies once for each: it joins the cluster that runs.

    Nothing of the head's address is in it: the node reads the head's note, so that it finds a head that dstack has started elsewhere.
    Raises ValueError as `ray_cluster`.
    """
    fleet = site.equipped(fleet)
    join = ["--stack", stack.name, *node_flags(stack, fleet), "--join", stack.task.name, "--fleet", fleet.name]
    cloud = place_of(stack).cloud
    join += ["--spot", cloud.preemption] if cloud and fleet.capacity.kind == "spot" else []
    join += ["--user", user] if (user := _becomes(stack)) else []
    agent = shlex.join(["python3", NODE_AGENT.name, *join])
    return present(
        type="task",
        name=f"{stack.task.name}-{fleet.name}",
        nodes=1,
        fleets=[fleet.name],
        **software.software(stack, [fleet], NODE_AGENT.name),
        user=_user(stack, [fleet]),
        privileged=bool(site.mount) or None,
        shell="bash",
        env=[*_environment(stack, [fleet]), f"{RANGE}={fleet.least}..{stack.most(fleet)}"],
        commands=[*site.mount, *software.commands(stack, [fleet], NODE_AGENT.name), f"exec {agent}"],
        resources=fleet.requirements() | {"shm_size": stack.task.shm_size or SHM},
        volumes=_volumes(stack, site) or None,
        spot_policy="spot" if fleet.capacity.kind == "spot" else None,
        retry={"on_events": RETRIED, "duration": FOREVER},
        priority=stack.task.priority,
        max_duration=stack.task.max_duration,
        stop_duration=stack.task.stop_duration,
    )


def ray_job(stack: Stack, site: Site, job: Job) -> dict[str, Any]:
    """The same cluster for one job, which the head submits; the run ends with the job's exit code. Raises ValueError as `ray_cluster`."""
    brought = [RUNTIME_ENV, *brought_from_project(job.files)]
    task = for_job(ray_cluster(stack, site), f"{stack.task.name}-job", job.command, brought, job.retry)
    return present(**task, schedule={"cron": job.schedule} if job.schedule else None)


def brought_from_project(paths: Sequence[str]) -> list[str]:
    """dstack's `files` for files and folders of the project.

    Each is an archive of its own, of at most 2 MiB unless the server allows more; what trainer/.dstackignore leaves out of the
    trainer's for that reason, and jobs need, are others.
    """
    apart = APART if {"trainer", "."} & set(paths) else ()
    return [f"../../{path}:{PROJECT}/{path}" for path in (*paths, *apart)]


def for_job(task: dict[str, Any], name: str, command: str, files: list[str], retry: bool = False) -> dict[str, Any]:
    """The task of a cluster, its nodes' last command the agent's -> the same for one job; `files` bring its folder and environment."""
    words = shlex.join(["--job", command, "--working-dir", PROJECT, "--runtime-env", RUNTIME_ENV])

    def given(nodes: dict[str, Any]) -> dict[str, Any]:
        return nodes | {"commands": [*nodes["commands"][:-1], f"{nodes['commands'][-1]} {words}"]}

    nodes = {"groups": [given(group) for group in task["groups"]]} if "groups" in task else given(task)
    # An error is also a job's own failure, and dstack counts no attempts.
    events = RETRIED if retry else [event for event in RETRIED if event != "error"]
    return task | nodes | {"name": name, "files": [*task["files"], *files], "retry": {"on_events": events, "duration": RETRY}}


def _user(stack: Stack, fleets: list[Fleet]) -> str | None:
    """Who starts the commands, and whom people log in as: root, where the agent becomes another (cluster_tasks/node/account.py).

    Where nothing is said dstack's server asks the registry whom an image is for; in dstack's own there is root alone.
    """
    own = stack.task.image is None and software.image_of(stack, fleets) is not None
    return "root" if _becomes(stack) else stack.task.user or ("root" if own else None)


def _becomes(stack: Stack) -> str | None:
    """The user that the node agent becomes; under a scheduler and on this machine it does not start as root."""
    user, place = stack.task.user, place_of(stack)
    root = user is None or user.partition(":")[0] in ("root", "0")
    return None if root or place.batch or not place.remote else user


def _nodes(stack: Stack, site: Site, fleets: list[Fleet], fleet: Fleet) -> dict[str, Any]:
    """What differs between the fleets of a cluster. Without a word on GPUs dstack may take a node that has some."""
    own_port = stack.task.dashboard_port == DASHBOARD_PORT
    port = DASHBOARD_PORT if own_port else f"{stack.task.dashboard_port}:{DASHBOARD_PORT}"
    ports = [port, *stack.monitoring.ports]
    none = {"gpu": 0} if len(fleets) > 1 else {}
    cloud = place_of(stack).cloud
    more = ["--spot", cloud.preemption] if cloud and fleet.capacity.kind == "spot" else []
    more += ["--per-host"] if place_of(stack).remote and stack.checkpoints.kind == "instance" else []
    more += ["--user", user] if (user := _becomes(stack)) else []
    more += node_gpus(fleets)
    return present(
        commands=[*site.mount, *site.setup, *_commands(stack, fleets, fleet, more)],
        ports=ports if fleet is fleets[0] else None,
        resources=none | fleet.requirements() | {"shm_size": stack.task.shm_size or SHM},
    )


def node_gpus(fleets: list[Fleet]) -> list[str]:
    """Where nodes are not alike, the head waits for the GPUs of each."""
    counts = [str(fleet.gpu.count if fleet.gpu else 0) for fleet in fleets for _ in range(fleet.nodes)]
    return ["--node-gpus", ",".join(counts)] if len(fleets) > 1 else []


def _utilization(stack: Stack, fleets: list[Fleet]) -> dict[str, Any] | None:
    """What the stack says; where dstack rents GPUs by the hour, a cluster that nobody uses ends by itself."""
    rents = place_of(stack).launches and any(fleet.gpu and fleet.gpu.count for fleet in fleets)
    wanted = stack.task.utilization or (UNUSED if rents else None)
    return {"min_gpu_utilization": wanted.min_gpu, "time_window": wanted.window} if wanted else None


def runtime_env(stack: Stack, site: Site) -> dict[str, Any]:
    """For `ray job submit --runtime-env`: what jobs need beyond the environment of the nodes, which they inherit."""
    return {
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_seconds(stack))},
        # Ray uploads the working directory; none of these belongs on a cluster.
        "excludes": ["/.git/", "/.venv/", "/build/", "/tests/", "__pycache__/"],
    }


def stop_seconds(stack: Stack) -> int:
    """How long a job that is asked to stop may save: under a batch scheduler nearly all of its notice."""
    return stack.slurm.notice - MARGIN if place_of(stack).batch else STOP_SECONDS


def node_agent() -> dict[str, str]:
    """The texts of the node agent's modules, of what runs before it, of the page of runs and of pools, by their paths in build/<stack>."""
    files = {str(file.relative_to(NODE_AGENT.parent)): file for kind in ("*.py", "*.sh") for file in sorted(NODE_AGENT.rglob(kind))}
    page = {f"{NODE_AGENT.name}/page/{file.relative_to(PAGE)}": file for kind in PAGE_FILES for file in sorted(PAGE.rglob(kind))}
    pools = {f"{NODE_AGENT.name}/{POOLS}/{file.name}": file for file in sorted(SANDBOXES.glob("*.py"))}
    return {path: file.read_text(encoding="utf-8") for path, file in (files | page | pools).items()}


def demo_job(on_gpus: bool) -> str:
    """What a person submits first on a new cluster: the demo start to end, which needs no download."""
    gpus = " placement.gpus_per_rank=1" if on_gpus else ""
    warm_start = f"python -m trainer.train_sft --config trainer/recipes/demo-sft.yaml{gpus}"
    return f"sh -c '{warm_start} && python -m trainer.train_ppo --config trainer/recipes/demo.yaml{gpus}'"


def _commands(stack: Stack, fleets: list[Fleet], fleet: Fleet, more: list[str]) -> list[str]:
    agent = shlex.join(["python3", NODE_AGENT.name, *flags(stack, fleet), *more])
    return [*software.commands(stack, fleets, NODE_AGENT.name), f"exec {agent}"]


def flags(stack: Stack, fleet: Fleet) -> list[str]:
    """The stack's name, and only what differs from the agent's defaults, so that the command stays readable."""
    flags = ["--stack", stack.name, *node_flags(stack, fleet)]
    if stack.task.on_node_loss != "fail":
        flags += ["--on-node-loss", stack.task.on_node_loss]
    if stack.task.services:
        flags += ["--services", json.dumps(services(stack))]
    if pools := sandboxes(stack):
        flags += ["--sandboxes", json.dumps(pools)]
    if stack.task.sandbox_port != SANDBOX_PORT:
        flags += ["--sandbox-port", str(stack.task.sandbox_port)]
    if stack.queue != type(stack.queue)():
        flags += ["--queue", json.dumps(stack.queue.told)]
    if stack.monitoring.enabled:
        flags += ["--monitoring", json.dumps(monitoring(stack))]
    return flags


def node_flags(stack: Stack, fleet: Fleet) -> list[str]:
    """Those of a fleet's nodes alone."""
    flags = []
    if fleet.cpus is not None:
        flags += ["--num-cpus", str(fleet.cpus)]
    if fleet.resources:
        flags += ["--resources", json.dumps(fleet.resources)]
    of_hosts = {str(host.internal_ip): host.resources for host in (fleet.ssh.hosts if fleet.ssh else ()) if host.resources}
    if of_hosts:
        flags += ["--host-resources", json.dumps(of_hosts)]
    if stack.task.burn_in:
        flags += ["--burn-in", str(seconds(stack.task.burn_in))]
    if stack.task.join_timeout != type(stack.task).model_fields["join_timeout"].default:
        flags += ["--join-timeout", str(stack.task.join_timeout)]
    return flags


def monitoring(stack: Stack) -> dict[str, Any]:
    """What the head runs beside Ray: cluster_tasks/node/monitoring/."""
    known, alerts = stack.monitoring, stack.monitoring.alerts
    made: dict[str, Any] = {name: getattr(known, name) for name in ("prometheus_port", "grafana_port", "retention", "exporters")}
    made |= {name: getattr(alerts, name) for name in ("webhook", "idle_percent", "full_disk")}
    made |= {name: seconds(getattr(alerts, name)) for name in ("idle_gpu", "silent_trainer", "repeat")}
    return made | ({} if (price := hourly(stack)) is None else {"price": price})


def services(stack: Stack) -> dict[str, Any]:
    """What the node agent starts beside Ray, by name: cluster_tasks/node/service.py."""
    fleets = [(fleet.name, fleet.nodes) for fleet in stack.cluster_fleets()]
    made = {name: service.model_dump(exclude={"on"}, exclude_none=True) for name, service in stack.task.services.items()}
    return {name: of | {"ranks": stack.task.services[name].ranks(fleets)} for name, of in made.items()}


def sandboxes(stack: Stack) -> list[dict[str, Any]]:
    """The pools that nodes keep: cluster_tasks/node/sandbox_pool.py."""
    fleets = stack.cluster_fleets()
    ranks = [fleet.name for fleet in fleets for _ in range(fleet.nodes)]
    return [
        {"ranks": [rank for rank, name in enumerate(ranks) if name == fleet.name]} | fleet.sandboxes.told
        for fleet in fleets
        if fleet.sandboxes
    ]


def _environment(stack: Stack, fleets: list[Fleet]) -> list[str]:
    """`NAME=value` lines; a bare name is taken from the shell of the person who applies."""
    env: dict[str, str | None] = {"FLOTILLA_RUNS": CHECKPOINTS, "RAY_AUTH_MODE": "token", token_variable(stack.name): None}
    env |= {name: setting.value for name, setting in environment.of_cluster(stack, fleets).items()}
    return [name if value is None else f"{name}={value}" for name, value in env.items()]


def _volumes(stack: Stack, site: Site) -> list[str]:
    """What dstack mounts; under Slurm it cannot mount anything."""
    if place_of(stack).batch:
        return []
    return [*([] if site.mount else [_mount(stack.checkpoints)]), *site.volumes, *_cache(stack), *stack.task.volumes]


def _cache(stack: Stack) -> list[str]:
    path = stack.cache.path
    return [f"{path}:{path}"] if path and not path.is_relative_to(CHECKPOINTS) else []


def _mount(checkpoints: Checkpoints) -> str:
    if checkpoints.kind != "network":
        return f"{checkpoints.path}:{CHECKPOINTS}"
    if checkpoints.volume is None:
        raise ValueError("flotilla:checkpoints.volume is missing; kind: network needs the name of the dstack volume")
    return f"{checkpoints.volume}:{CHECKPOINTS}"
