"""Processes with equal stacks together, and who waits for whom: from what the probe saw to a page of text. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")
SHORT = re.compile(r".*/(?:site-packages|dist-packages|_ray_pkg_[0-9a-f]+|lib/python3\.\d+)/")
RAYS_OWN = ("ray/dashboard/", "log_monitor.py", "autoscaler/_private/monitor.py", "runtime_env/agent", "ray.util.client.server")
RAYS_OWN += ("DashboardAgent", "RuntimeEnvAgent", "JobSupervisor", "/bin/ray", "identity.py")
NO_PARENTS = ("JobSupervisor", "/bin/ray")  # what runs below these is not Ray's own
IDLE = "idle"
RAY_WAITS = ("ray.get", "ray.wait")
MOST_NAMED = 8  # processes, on one line


@dataclass(frozen=True)
class Known:
    """What Ray says of a process."""

    name: str = ""
    job: str = ""


@dataclass(frozen=True)
class Process:
    node: str
    pid: int
    parent: int
    role: str  # driver, actor, worker, scorer, vllm, agent, ray, process
    name: str  # such as policy-3, or the command
    kind: str  # of actors their class: those of one kind meet in collectives
    job: str  # Ray's id of it, where Ray says it
    method: str  # that an actor or a task is in
    stack: tuple[str, ...]  # innermost first, such as "step (trainer/ranks/engine.py:88)"
    others: tuple[tuple[str, ...], ...]  # other threads with code of the job in them
    waits_in: str  # all_reduce, ray.get, time.sleep, idle and the like; empty where it runs
    at: str  # innermost frame of the job's own code
    code: str  # its line
    error: str

    def __str__(self) -> str:
        return f"{self.name} (node {self.node}, pid {self.pid})"

    @property
    def doing(self) -> str:
        """Its line, in words."""
        if self.error:
            return self.error
        where = f" at {self.at}" if self.at else ""
        code = f": {self.code}" if self.code else ""
        return f"{self.waits_in or 'running'}{where}{code}"


def processes(nodes: Mapping[str, Mapping[str, Any]], known: Mapping[tuple[str, int], Known]) -> list[Process]:
    """`nodes`: what the probe said, by node; `known` by node and pid."""
    found = []
    for node, said in nodes.items():
        by_pid = {process["pid"]: process for process in said["processes"]}
        for pid, process in by_pid.items():
            found.append(_process(node, process, list(_ancestors(pid, by_pid)), known.get((node, pid), Known())))
    return found


def _ancestors(pid: int, by_pid: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Their commands, the parent's first."""
    for _ in by_pid:  # a process id that was taken again while /proc was read could close a circle
        pid = by_pid[pid]["parent"]
        if pid not in by_pid:
            return
        yield " ".join(by_pid[pid]["command"])


def _process(node: str, said: Mapping[str, Any], above: Sequence[str], known: Known) -> Process:
    command, threads = said["command"], said.get("threads", [])
    role, name, kind, method = _role(command, above, known.name)
    main = next((t for t in threads if t["name"] == "MainThread"), threads[0] if threads else {"frames": [], "code": ""})
    rest = [t for t in threads if t is not main and any(_own(frame[1]) for frame in t["frames"])]
    if rest and not any(_own(frame[1]) for frame in main["frames"]):  # of threaded and asyncio actors the main thread only waits
        main, rest = rest[0], rest[1:]
    frames, error = main["frames"], said.get("error", "")
    return Process(
        node=node,
        pid=said["pid"],
        parent=said["parent"],
        role=role,
        name=name,
        kind=kind,
        job=known.job,
        method=method,
        stack=_stack(frames),
        others=tuple(_stack(thread["frames"]) for thread in rest),
        waits_in="" if error else waits_in(frames, main["code"]),
        at=next((_text(frame) for frame in frames if _own(frame[1])), ""),
        code=main["code"],
        error=error,
    )


def _stack(frames: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    """Down to the outermost frame of the job's own code: below it are Ray's and Python's ways of starting it."""
    own = [i for i, frame in enumerate(frames) if _own(frame[1])]
    return tuple(_text(frame) for frame in frames[: own[-1] + 1 if own else None])


def _role(command: Sequence[str], above: Sequence[str], known: str) -> tuple[str, str, str, str]:
    """Role, name, kind and method of a process, by its command, its ancestors', and the name that Ray knows it by."""
    text = " ".join(command)
    if text.startswith("ray::") and not _rays_own(text, above):
        return _of_title(text.removeprefix("ray::").strip(), known)
    role, name, kind = "process", _command(command), ""
    if _rays_own(text, above):
        role = "ray"
    elif "EngineCore" in text or "vllm" in text.lower():
        role, kind = "vllm", "vllm"
    elif "trainer.rewards.worker" in text:
        role, name = "scorer", "reward scorer"
    elif len(command) > 1 and command[1].rpartition("/")[2] == "node":
        role, name = "agent", "node agent"
    elif known or (above and "JobSupervisor" in above[0]):
        role, name = "driver", f"{known or 'driver'}, {name}"
    return role, name, kind, ""


def _rays_own(text: str, above: Sequence[str]) -> bool:
    parents = [line for line in above if not any(part in line for part in NO_PARENTS)]
    return any(part in line for part in RAYS_OWN for line in [text, *parents])


def _of_title(title: str, known: str) -> tuple[str, str, str, str]:
    """Of Ray's workers: policy-0:Rank.step, Rank.step, Rank, a_task, IDLE."""
    before, _, method = title.rpartition(".")
    title, method = (before, method.partition("(")[0]) if before else (method, "")
    name, _, kind = title.rpartition(":")
    if kind == "IDLE":
        return "worker", "idle worker", "", ""
    return ("actor" if method or known else "worker"), known or name or kind, kind, method


def _command(command: Sequence[str]) -> str:
    """Its program in a few letters, never its arguments, which may hold anything: `-m trainer.train_ppo`, `train.py`."""
    words = [word for word in command[1:] if word not in ("-u", "-I", "-uc", "-c", "-W", "ignore")]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    script = next((word for word in words if word.endswith(".py")), "")
    return script.rpartition("/")[2] or (command[0].rpartition("/")[2][:60] if command else "?")


def waits_in(frames: Sequence[Sequence[Any]], code: str) -> str:
    """What the innermost frames wait in; empty where they compute."""
    above = []  # library frames above the job's own code
    for name, file, _ in frames:
        if _own(file):
            break
        above.append((name.rpartition(".")[2], file))
    for name, file in above:
        if "torch/distributed/" in file and not name.startswith("_") and name not in ("wrapper", "decorate_context"):
            return name
    for name, file in above:
        if "ray/_private/worker.py" in file and name in ("get", "wait"):
            return f"ray.{name}"
    if above and above[0][0] == "main_loop" and "ray/_private/worker.py" in above[0][1]:
        return IDLE
    for name, file in reversed(above):  # what was called: a queue, not the lock in it
        for part, what in WAITS.items():
            if file.endswith(part):
                return f"{what}.{name.removeprefix('_')}"
    return next((word for word in CALLS if f"{word}(" in code), "")


CALLS = ("time.sleep", "sleep", ".acquire", ".wait", ".synchronize", ".recv", ".join")
WAITS = {
    "multiprocessing/connection.py": "multiprocessing",
    "subprocess.py": "subprocess",
    "queue.py": "queue",
    "threading.py": "threading",
    "selectors.py": "asyncio",
    "socket.py": "socket",
    "ssl.py": "ssl",
}


def _own(file: str) -> bool:
    """Whether it is code of the job, none of a library's."""
    return not any(part in file for part in LIBRARIES)


def _text(frame: Sequence[Any]) -> str:
    name, file, line = frame
    short = SHORT.sub("", file)
    return f"{name} ({'/'.join(short.rsplit('/', 3)[-3:])}:{line})"


def shown(found: Sequence[Process], everything: bool = False) -> Iterator[str]:
    """The page: equal stacks together, the rarest first and those without work last; then who waits for whom."""
    kept = [p for p in found if everything or p.role not in ("ray", "agent") or p.error]
    groups: dict[tuple[Any, ...], list[Process]] = {}
    for process in kept:
        groups.setdefault((process.error, process.stack, process.others, process.waits_in == IDLE), []).append(process)
    for group in sorted(groups.values(), key=lambda group: (group[0].waits_in == IDLE, len(group), str(group[0]))):
        yield from _group(group, everything)
        yield ""
    nodes, hidden = len({p.node for p in found}), len(found) - len(kept)
    left = f"; {hidden} of Ray and the node agents not shown (--all)" if hidden else ""
    yield f"{len(kept)} processes with {len(groups)} different stacks on {nodes} {'node' if nodes == 1 else 'nodes'}{left}"
    waiting = list(waits(kept))
    yield from ["", "who waits for whom", *(f"  {line}" for line in waiting)] if waiting else []


def _group(group: Sequence[Process], everything: bool) -> Iterator[str]:
    first = group[0]
    doing = "not read" if first.error else first.waits_in or "running"
    yield f"{len(group)} {'process' if len(group) == 1 else 'processes'}, {doing}"
    yield f"  {named(group)}"
    if first.error:
        yield f"      {first.error}"
    elif first.waits_in != IDLE or everything:
        for line in first.stack:
            yield f"      {line}{f'    {first.code}' if first.code and line == first.at else ''}"
        for other in first.others:
            yield from ("      another thread:", *(f"        {line}" for line in other))


def named(group: Sequence[Process]) -> str:
    """All of them on one line, the first by name."""
    more = f" and {len(group) - MOST_NAMED} more" if len(group) > MOST_NAMED else ""
    return ", ".join(map(str, sorted(group, key=str)[:MOST_NAMED])) + more


def each(found: Sequence[Process]) -> str:
    """Who is where, those at the same place together."""
    places: dict[str, list[Process]] = {}
    for process in found:
        method = f"in {process.method}, " if process.method else ""
        places.setdefault(f"{method}{process.doing}", []).append(process)
    return "; ".join(f"{named(group)}: {place}" for place, group in places.items())


def waits(found: Sequence[Process]) -> Iterator[str]:
    """A line for each wait whose other end can be seen."""
    yield from _collectives(found)
    for process in found:
        if process.waits_in in RAY_WAITS:
            late = _asked(process, found)
            yield f"{process} waits in {process.doing}\n    for {each(late) if late else 'a result that no process seen here works on'}"
        elif process.waits_in.startswith(("multiprocessing", "subprocess")) and process.role != "agent":
            below = [p for p in found if (p.node, p.parent) == (process.node, process.pid) and p.waits_in != IDLE]
            if stuck := [p for p in below if not p.waits_in.startswith("multiprocessing")]:
                yield f"{process} waits in {process.doing}\n    for its own {each(stuck)}"


def _asked(process: Process, found: Sequence[Process]) -> list[Process]:
    """Who may owe it a result: actors and tasks of its job that are at work; first of all those that wait for nobody."""
    busy = [p for p in found if p is not process and p.role in ("actor", "worker") and p.waits_in != IDLE and (p.method or not p.job)]
    same = [p for p in busy if not p.job or not process.job or p.job == process.job]
    return [p for p in same if p.waits_in not in RAY_WAITS and not _collective(p)] or same


def _collectives(found: Sequence[Process]) -> Iterator[str]:
    for kind, job in dict.fromkeys((p.kind, p.job) for p in found if _collective(p)):
        group = [p for p in found if ((p.kind, p.job) == (kind, job) if kind else _collective(p))]
        inside, outside = [p for p in group if _collective(p)], [p for p in group if not _collective(p)]
        where = ", ".join(sorted({f"{p.waits_in} at {p.at}" for p in inside}))
        if outside:
            yield f"{named(inside)} wait in {where}\n    for {each(outside)}"
        elif len({(p.waits_in, p.at) for p in inside}) > 1:
            yield f"{named(inside)} wait for each other in different places\n    {each(inside)}"
        else:
            missing = "each has come, so the network or a GPU holds it, or a rank has died"
            yield f"{named(inside)} are {'all ' if len(inside) > 1 else ''}in {where}\n    {missing}"


def _collective(process: Process) -> bool:
    """Whether PyTorch's collectives are between its own code and where it is."""
    own = process.stack.index(process.at) if process.at in process.stack else len(process.stack)
    return any("torch/distributed/" in line for line in process.stack[:own])
