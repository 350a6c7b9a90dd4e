"""The whole product on this machine, with the commands that a person would type: `make demo`, `make demo KEEP=1`, `make demo KILL=1`.

`flotilla up` starts a Ray cluster of two nodes, a small model gets a supervised warm start meanwhile, and a Ray job trains it by reward.
A job whose process dies is submitted again, and resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":  # before imports that this environment may not have
    from stacks.host.extras import explain_missing

    explain_missing()

import psutil
from rich.console import Console
from rich.table import Table

from cluster_tasks.identity import KnownDashboard, environment
from cluster_tasks.local.state import Cluster
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.ray import demo_job

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "local"
RUNS = BUILD / "runs"
RECIPES = "trainer/recipes"
ATTEMPTS = 3  # of a job whose processes die
JOB_SECONDS = 1800
WARM_START_SECONDS = 600
COMMAND_SECONDS = 300  # all others; starting and stopping a cluster have shorter limits of their own

Strike = tuple[int, str]  # after which step, and who
VICTIMS = {  # a word of the command or the beginning of its title, and what follows
    "rollout engine": ("ray::RolloutActor", "it is started again"),
    "policy": ("ray::Worker", "the same submit resumes"),
    "driver": ("trainer.train_ppo", "the same submit resumes"),
}

console = Console(emoji=False, soft_wrap=True, highlight=False)


class DemoError(RuntimeError):
    """A stage failed; its own output says why."""


class Stages:
    """Names and seconds of what was done, some of it side by side."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.rows: list[tuple[str, float]] = []
        installed = ROOT / ".venv" / "install-seconds"
        if installed.exists():
            self.rows.append(("install (make)", float(installed.read_text())))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        console.rule(f"[bold]{name}", align="left")
        begin = time.monotonic()
        yield
        self.rows.append((name, time.monotonic() - begin))
        console.print(f"[dim]{name}: {self.rows[-1][1]:.1f} s")


def run(command: list[str], *, quiet: bool = False, check: bool = True, env: dict[str, str] | None = None) -> int:
    """Print a command as one would type it, run it, return its exit code."""
    show(command)
    log = subprocess.DEVNULL if quiet else None
    try:
        code = subprocess.run(command, cwd=ROOT, stdout=log, env=os.environ | (env or {}), check=False, timeout=COMMAND_SECONDS).returncode
    except subprocess.TimeoutExpired:
        raise DemoError(f"not done within {COMMAND_SECONDS} s: {shlex.join(command)}") from None
    if check and code:
        raise DemoError(f"exit code {code}: {shlex.join(command)}")
    return code


def show(command: list[str]) -> None:
    shown = shlex.join(command).replace(f"{sys.executable} -m cli ", "flotilla ").replace(sys.executable, "python")
    console.print(f"[bold green]$[/] {shown}", markup=True)


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def flotilla(*words: str) -> list[str]:
    return python("-m", "cli", *words)


def own_names() -> tuple[str, str, str]:
    """Names of the runs of warm start, training and killed training that no run has yet: those of an earlier demo are a person's."""
    number = 1
    while True:
        end = f"-{number}" if number > 1 else ""
        names = (f"demo-sft{end}", f"demo{end}", f"demo-killed{end}")
        if not any((BUILD / "volumes/checkpoints" / name).exists() for name in names):
            return names
        number += 1


def start_cluster_and_warm_start(name: str) -> str:
    """Both at once, the warm start as run `name`; returns the dashboard's address."""
    cluster = flotilla("up", "local", "--port", "auto")
    warm_start = python("-m", "trainer.train_sft", "--config", f"{RECIPES}/demo-sft.yaml", f"run.name={name}")
    log_path = BUILD / "warm-start.log"
    show(warm_start)
    with log_path.open("w") as log:
        training = subprocess.Popen(
            warm_start, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"FLOTILLA_RUNS": str(RUNS)}
        )
        try:
            run(cluster)
            code = training.wait(WARM_START_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"not done within {WARM_START_SECONDS} s: {shlex.join(warm_start)} ({log_path})") from None
        finally:
            training.kill()
    lines = log_path.read_text().splitlines()
    if code:
        raise DemoError("\n".join([*lines[-20:], f"exit code {code}: {shlex.join(warm_start)} ({log_path})"]))
    console.print(*[line for line in lines if line.startswith("step 100/")], sep="\n", markup=False)
    return json.loads((BUILD / "cluster.json").read_text())["dashboard"]


def train(address: str, name: str, warm: str = "demo-sft", strikes: list[Strike] | None = None) -> None:
    """Submit until it ends well; the same command resumes where a dead job stopped."""
    job = [
        "python",
        "-m",
        "trainer.train_ppo",
        "--config",
        f"{RECIPES}/demo.yaml",
        f"run.name={name}",
        *([f"model.path=run:{warm}"] if warm != "demo-sft" else []),
    ]
    env = environment(BUILD, address)
    kill = Kill(RUNS / name / "metrics.jsonl", strikes) if strikes else None
    if kill:
        kill.start()
    for attempt in range(1, ATTEMPTS + 1):
        if attempt > 1:
            console.print("[yellow]the job ended early; the same submit resumes from its last checkpoint")
        submission = f"{name}-{time.strftime('%H%M%S')}"
        submit = flotilla("submit", "local", "--name", submission, "--", *job)
        show(submit)
        code = _follow(submit, KnownDashboard.of(address, env), submission)
        if code == 0:
            break
        if code == 2:  # a setting is wrong; another try ends alike
            raise DemoError(f"the job was refused; its log, if any: flotilla logs local {submission}")
        if attempt == ATTEMPTS:
            raise DemoError(f"the job failed {ATTEMPTS} times; its log: flotilla logs local {submission}")
    for step, who in kill.end() if kill else []:
        raise DemoError(f"the {who} was not killed: {name} ended before it had written step {step}, or no such process was found")


def _follow(command: list[str], dashboard: Dashboard, submission: str) -> int:
    """Run the command that submits and watches a job, passing on what the job prints and leaving out what Ray says about uploading."""
    late = threading.Event()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:

        def give_up() -> None:
            late.set()
            process.terminate()

        timer = threading.Timer(JOB_SECONDS, give_up)
        timer.daemon = True  # after Ctrl-C the interpreter would wait for it
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if (
                line.startswith(("step ", "prompt ", "error", "model:", "plot:", "resum", "rollout-"))
                or "submitted successfully" in line
                or "Error" in line
            ):
                console.print(line.rstrip(), markup=False)
        code = process.wait()
        timer.cancel()
    if late.is_set():
        try:
            dashboard.stop(submission)
        except OSError as error:
            raise DemoError(f"{submission} did not end within {JOB_SECONDS} s and cannot be stopped: {error}") from None
        raise DemoError(f"{submission} did not end within {JOB_SECONDS} s; it was asked to stop")
    return code


class Kill(threading.Thread):
    """kill -9 of named processes of the job, one after another, each once its step is written."""

    def __init__(self, metrics: Path, strikes: list[Strike]) -> None:
        super().__init__(daemon=True)
        self.metrics, self.left = metrics, strikes
        self.over = threading.Event()

    def run(self) -> None:
        while self.left and not self.over.wait(0.05):
            step, who = self.left[0]
            if self.metrics.exists() and len(self.metrics.read_bytes().splitlines()) > step and self.strike(step, who):
                self.left = self.left[1:]

    def strike(self, step: int, who: str) -> bool:
        """False where there is no such process yet, as after the strike before."""
        word, then = VICTIMS[who]
        try:
            victim = next((process for process in cluster_processes() if _is(process, word)), None)
            if victim is None:
                return False
            victim.kill()
        except psutil.Error:  # it has just ended
            return False
        console.print(f"[bold red]kill -9 {victim.pid}[/] (the {who}) after step {step}: {then}")
        return True

    def end(self) -> list[Strike]:
        """Those that nothing was killed for."""
        self.over.set()
        self.join(10)
        return self.left


def _is(process: psutil.Process, word: str) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:  # it has ended
        return False
    # A word of its own: not the shell that Ray starts a job with.
    return word in words or " ".join(words).startswith(word)


def cluster_processes() -> list[psutil.Process]:
    """Every process of the cluster: all are below its guard. Empty where it is not up."""
    cluster = Cluster.running(BUILD)
    guard = cluster.supervisor if cluster else None
    try:
        return [guard, *guard.children(recursive=True)] if guard else []
    except psutil.Error:
        return []


class Memory(threading.Thread):
    """The largest sum of proportional set sizes of the cluster and of this program's children, looked at every two seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(2.0):
            total = 0
            for process in {*cluster_processes(), *psutil.Process().children(recursive=True)}:
                try:
                    memory = process.memory_full_info()
                    total += getattr(memory, "pss", memory.rss)
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)


def report(stages: Stages, memory: Memory, trained: str) -> None:
    rows = [json.loads(line) for line in (RUNS / trained / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row["eval_reward"] for row in rows if "eval_reward" in row]
    console.rule("[bold]result", align="left")
    table = Table("stage", "seconds", box=None)
    for stage, seconds in stages.rows:
        table.add_row(stage, f"{seconds:.1f}")
    table.add_row("[bold]all", f"[bold]{sum(seconds for _, seconds in stages.rows):.1f}")
    console.print(table)
    console.print(f"peak memory  {memory.peak / 2**30:.1f} GiB")
    console.print(
        f"reward       [bold]{evaluations[0]:.2f} before, {evaluations[-1]:.2f} after[/] {rows[-1]['step']} steps (greedy, unseen prompts)"
    )
    console.print(f"checkpoint   {max((RUNS / trained / 'checkpoints').glob('step_*'), key=lambda p: p.stat().st_mtime).relative_to(ROOT)}")
    console.print(f"model        {(RUNS / trained / 'model').relative_to(ROOT)}")
    console.print(f"plot         {(RUNS / trained / 'plot.png').relative_to(ROOT)}")
    console.print(f"""
Next, here (. .venv/bin/activate first):
  the report     flotilla report {(RUNS / trained).relative_to(ROOT)}: curves, answers and settings of this run as one page
  the dashboard  make demo KEEP=1 keeps the cluster up, with Ray's dashboard on http://localhost:8265
  own data       docs/local.md, "Your own data and reward": two small files, flotilla submit local
On your own machines, once stacks/Pulumi.onprem.yaml names them (docs/onprem.md):
  flotilla up onprem
  flotilla submit onprem -- {demo_job(on_gpus=True)}""")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.demo", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--keep", action="store_true", help="leave the cluster up afterwards")
    parser.add_argument("--kill", action="store_true", help="train twice, the second time with two kill -9, and compare")
    options = parser.parse_args(argv)
    stages, memory = Stages(), Memory()
    memory.start()
    try:
        if Cluster.running(BUILD):
            raise DemoError("a cluster of build/local is up, and the demo would stop it; first: flotilla down local")
        down = flotilla("down", "local")
        (BUILD / "volumes" / "checkpoints").mkdir(parents=True, exist_ok=True)
        if not RUNS.exists():
            RUNS.symlink_to("volumes/checkpoints")
        warm, trained, killed = own_names()
        try:
            with stages.stage("cluster and warm start"):
                address = start_cluster_and_warm_start(warm)
            with stages.stage("train by reward"):
                train(address, trained, warm)
            if options.kill:
                with stages.stage("the same, killed and resumed"):
                    train(
                        address,
                        killed,
                        warm,
                        [(random.randint(8, 20), "rollout engine"), (random.randint(25, 48), random.choice(["policy", "driver"]))],
                    )
                run(python("-m", "trainer.compare", str(RUNS / trained), str(RUNS / killed)))
            memory.ended.set()
        finally:
            if not options.keep:
                run(down, quiet=True, check=False)
            elif Cluster.running(BUILD):
                console.print("the cluster stays up; to look at it, and to stop it:")
                show(flotilla("top", "local"))
                show(down)
        report(stages, memory, trained)
    except DemoError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
