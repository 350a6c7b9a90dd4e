"""What every Python process of this node is doing, by py-spy. Standard library alone: a Ray job takes the text of this file to each node.

python -I probe.py PID        JSON of the processes that are PID, or below it
"""

from __future__ import annotations

import json
import linecache
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

AT_ONCE = 8  # py-spy, of which each takes some 40 ms
DUMP_SECONDS = 5  # for one; a process that the kernel holds is never read
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")
SCORER = "trainer.rewards.worker"
DENIED = "py-spy may not read it: no ptrace rights (root, the capability SYS_PTRACE, or kernel.yama.ptrace_scope=0)"


def node_root(pid: int) -> int:
    """The node agent above a process of its Ray; where there is none, the highest that belongs to Ray."""
    found, agent = pid, 0
    while pid > 1:
        if _is_python(pid) and len(words := command(pid)) > 1 and Path(words[1]).name == "node":
            agent = pid
        if _is_ray(pid):
            found = pid
        pid = _parents().get(pid, 0)
    return agent or found


def below(root: int) -> dict[int, int]:
    """The process and all below it, with their parents."""
    parents = _parents()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, left = {}, [root] if root in parents else []
    while left:
        pid = left.pop()
        found[pid] = parents[pid]
        left += children.get(pid, [])
    return found


def look(root: int) -> dict[str, Any]:
    """All Python processes from `root` down, each with its threads, or why they cannot be read."""
    spy = _py_spy()
    every = below(root)
    pids = {pid: parent for pid, parent in every.items() if pid != os.getpid() and _is_python(pid)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        read = list(pool.map(lambda pid: _dump(spy, pid), pids))
    found = []
    for (pid, parent), what in zip(pids.items(), read, strict=True):
        above = parent
        while above in every and above not in pids:  # a shell between a job's supervisor and its driver
            above = every[above]
        if what is not None:
            found.append({"pid": pid, "parent": above, "command": program(command(pid))} | what)
    return {"host": socket.gethostname(), "root": root, "processes": found}


def command(pid: int) -> list[str]:
    """Its words; Ray's workers replace theirs by a title such as ray::Actor.method."""
    try:
        return [word for word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0") if word]
    except OSError:
        return []


def program(words: list[str]) -> list[str]:
    """What tells which program it is. Its arguments stay here: they may hold anything."""
    if not words or words[0].startswith(("ray::", "VLLM")):
        return words
    for i, word in enumerate(words[1:], 1):
        if word.endswith("c") and word.startswith("-") and not word.startswith("--"):
            return [words[0], *(["-m", SCORER] if SCORER in " ".join(words[i + 1 :]) else ["-c"])]
        if word == "-m" or not word.startswith("-"):
            return words[: i + 1 + (word == "-m")]
    return words[:1]


def _dump(spy: str | None, pid: int) -> dict[str, Any] | None:
    """None where the process has ended meanwhile."""
    if spy is None:
        return {"error": "py-spy is not installed on this node; Ray's images have it (pip install py-spy)"}
    try:
        done = subprocess.run([spy, "dump", "--json", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"py-spy has not read it within {DUMP_SECONDS} s; state {_state(pid)} (D: the kernel holds it)"}
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no output"])[0]
        denied = any(word in done.stderr.lower() for word in ("permission", "not permitted"))
        return None if not Path(f"/proc/{pid}").exists() else {"error": DENIED if denied else f"py-spy: {said}"}
    return {"threads": [_thread(thread) for thread in json.loads(done.stdout)]}


def _thread(thread: dict[str, Any]) -> dict[str, Any]:
    frames = [[frame["name"], frame["filename"], frame["line"]] for frame in thread["frames"]]
    own = next(((file, line) for _, file, line in frames if not any(part in file for part in LIBRARIES)), None)
    code = linecache.getline(*own).strip() if own else ""
    return {"name": thread["thread_name"], "active": thread["active"], "frames": frames, "code": code}


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:  # "pid (name) state parent ...", where a name may hold anything
                found[int(entry.name)] = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            except OSError:
                continue
    return found


def _is_python(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:
        return False


def _is_ray(pid: int) -> bool:
    return any(Path(word).name in ("raylet", "ray") or word.startswith("ray::") for word in command(pid)[:2])


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "ended"


if __name__ == "__main__":
    print(json.dumps(look(int(sys.argv[1]))))
