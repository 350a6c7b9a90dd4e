"""`python -m sweeps RUN.yaml key=[a,b] key=low..high ...`: every mistake is one line, before anything starts."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from sweeps import checks, here, objective, plan, population, queued, space
from sweeps.budget import Budget
from sweeps.cluster import Cluster, is_job
from sweeps.here import Here
from sweeps.plan import Plan
from trainer.cli import usage, yaml_io
from trainer.cli.paths import is_run, runs_root
from trainer.cluster.stopping import stop_signals
from trainer.configs.sections import Config
from trainer.errors import ConfigError
from trainer.metrics.cost import price

PROG = "flotilla sweep"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,89}")
STATE = "sweep.yaml"
MOST_POINTS = 10_000  # of a grid: a minute of checks


def main(arguments: list[str], prog: str = PROG) -> int:
    """The exit code: 0 over, 2 a mistake, 3 the budget is used up, 143 asked to stop. Raises ConfigError."""
    options = _options(arguments, prog)
    found, config, words = _plan(options)
    budget = _budget(options, config)
    places = here.places(options.parallel, budget.gpus) if options.here or not is_job() else None  # None: on the cluster
    folder = runs_root() / found.name
    from sweeps.loop import Driver
    from sweeps.study import Study

    with _held(folder):
        _require_same(found, folder)
        _write(found, folder)
        for word in words:
            print(word)
        study = Study(found, folder / "study.db", lambda point: _refused(found, point))
        with stop_signals() as stopping, closing(_on_cluster() if places is None else Here(places)) as jobs:
            driver = Driver(found, folder, study, jobs, budget, options.parallel, options.retries)
            code = driver.run(stopping)
            driver.conclude()
    return code


def _on_cluster() -> Cluster:
    """By its queue, where it has one."""
    address = queued.url()
    return Cluster() if address is None else queued.Queued(queued.client_of(address))


def _options(arguments: list[str], prog: str) -> argparse.Namespace:
    about = "Train a settings file with many settings, and find the best. Started again, it resumes."
    examples = (
        f"{prog} run.yaml 'optim.lr=[1e-6,3e-6]' 'algorithm.clip_high=0.2..0.3' --trials 12",
        f"{prog} run.yaml 'optim.lr=1e-6..1e-4' --trials 27 --stop asha --budget 200 --price 2.5",
        f"{prog} onprem run.yaml 'optim.lr=[1e-6,3e-6]' trainer.steps=40 --search grid",
    )
    parser = usage.parser(prog, about, *examples, usage="[STACK] RUN.yaml [RUN.yaml ...] [flags] key=VALUES [key=value ...]")
    add = parser.add_argument
    add(
        "words",
        metavar="RUN.yaml key=VALUES",
        nargs="+",
        help="settings files; lists [a,b], ranges low..high[/step] [log|linear], and settings",
    )
    add("--here", action="store_true", help="as processes of this shell, also within a job of a cluster")
    add("--name", help="sweep and prefix of its runs (default: RUN-sweep)")
    add("--train", choices=sorted(checks.MODELS), default="ppo", help="entry point (ppo)")
    add("--trials", type=int, metavar="N", help="trials (grid: all; else 16)")
    add("--search", choices=("grid", "random", "tpe"), help="how settings are chosen (grid for lists, else tpe)")
    add("--stop", choices=("none", "asha", "pbt"), default="none", help="asha: the best continue; pbt: the worst copy the best (none)")
    add("--rung", type=int, metavar="STEP", help="first step of a comparison (asha: steps / factor^2); pbt: every so many")
    add("--factor", type=int, metavar="N", help="asha: one trial of N continues (3); pbt: one of N is replaced (4)")
    add("--metric", metavar="KEY:max", help=f"what is compared: {objective.FORM} (eval_reward)")
    add("--parallel", type=int, default=1, metavar="N", help="trials at a time (1)")
    add("--budget", type=float, metavar="USD", help="start nothing beyond it; trials pause when it is reached")
    add("--gpu-hours", type=float, metavar="H", help="the same in GPU hours")
    add("--price", type=float, metavar="USD", help="an hour of one trial (flotilla:monitoring.price / parallel)")
    add("--retries", type=int, default=1, metavar="N", help="times that a failed trial is started again (1)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the search (0)")
    options = parser.parse_intermixed_args(arguments)
    for flag, least in {"trials": 1, "parallel": 1, "factor": 2, "rung": 1, "retries": 0, "seed": 0}.items():
        value = getattr(options, flag)
        if value is not None and value < least:
            raise ConfigError(f"--{flag} {value}: must be {least} or more")
    for flag in ("budget", "gpu_hours", "price"):
        value = getattr(options, flag)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{flag.replace('_', '-')} {value:g}: must be above 0")
    return options


def _plan(options: argparse.Namespace) -> tuple[Plan, Config, list[str]]:
    """The sweep, the settings of one of its trials, and what to say of it first. Raises ConfigError."""
    files = _files(options.words)
    found, fixed = space.read(checks.MODELS[options.train], [word for word in options.words if "=" in word])
    if len(files) > 1:
        found.insert(0, space.Choice(space.FILE, tuple(files)))
    if not found:
        raise ConfigError("nothing is searched; give a setting several values, such as 'optim.lr=[1e-6,3e-6]' or 'optim.lr=1e-6..1e-4'")
    if options.stop != "none" and any(each.key == "trainer.steps" for each in found):
        raise ConfigError(f"trainer.steps: is searched, and --stop {options.stop} compares trials by steps; leave one out")
    finite = all(isinstance(each, space.Choice) or each.step for each in found)
    search = options.search or ("grid" if finite and (options.trials is None or options.trials >= _size(found)) else "tpe")
    words = [f"search: {search}", *(f"  {each}" for each in found)]
    trials = options.trials or 16
    if search == "grid":
        if (count := _size(found)) > MOST_POINTS:
            raise ConfigError(
                f"--search grid: has {count:,} points, of which each is checked first; at most {MOST_POINTS:,}, or --search tpe"
            )
        every = [*space.points(found)]
        kept, left = checks.allowed(options.train, files[0], fixed, every)
        words += [f"left out: {checks.named(point)}: {why}" for point, why in left]
        if options.trials and options.trials < len(kept):
            words.append(f"--trials {options.trials}: the grid has {len(kept)} points, of which the first {options.trials} are tried")
        trials, first = min(options.trials or len(kept), len(kept)), kept[0]
    else:
        checks.require_space(options.train, files[0], fixed, found)
        first = next(space.corners(found))
    config = checks.config_of(options.train, files[0], fixed, first)
    factor = options.factor or (4 if options.stop == "pbt" else 3)
    if options.stop == "pbt":
        population.require_changeable(found)
        if trials < 2:
            raise ConfigError(f"--trials {trials}: a population has at least 2 trials")
    rungs = plan.rungs(options.stop, config.trainer.steps, options.rung, factor)
    metric = objective.parse(options.metric) if options.metric else objective.default(config)
    objective.require_known(metric, config)
    fixed, more = _evaluated(config, metric, rungs, fixed)
    name = options.name or f"{Path(files[0]).stem}-sweep"
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name {name}: must match {NAME.pattern}")
    swept = Plan(
        name,
        options.train,
        tuple(files),
        tuple(fixed),
        tuple(found),
        search,
        options.stop,
        metric,
        rungs,
        factor,
        trials,
        options.seed,
    )
    about = f"{trials} trials of {config.trainer.steps} steps by {metric}"
    compared = f", compared at steps {', '.join(map(str, rungs[:-1]))}" if len(rungs) > 1 else ""
    return swept, config, [f"sweep {name}: {about}{compared}", *words, *more]


def _files(words: list[str]) -> list[str]:
    """The settings files. Raises ConfigError."""
    files = [word for word in words if "=" not in word]
    if not files:
        raise ConfigError(f"no settings file; {PROG} RUN.yaml key=VALUES")
    if missing := next((file for file in files if not Path(file).is_file()), None):
        raise ConfigError(f"{missing}: no such file; settings files come without =, and settings as key=value")
    stems = [Path(file).name for file in files]
    if len(set(stems)) < len(stems):
        raise ConfigError(f"{' '.join(files)}: two settings files have one name; rename one")
    return files


def _size(found: list[space.Parameter]) -> int:
    return math.prod(len(each.grid()) for each in found)


def _evaluated(config: Config, metric: objective.Metric, rungs: tuple[int, ...], fixed: list[str]) -> tuple[list[str], list[str]]:
    """The settings with an evaluation at each rung, and the word about it. Raises ConfigError where there is none."""
    every = getattr(config.trainer, "eval_every", 0)
    if not metric.key.startswith("eval_") or len(rungs) == 1:
        return fixed, []
    if not every:
        every = math.gcd(*rungs[:-1])
        return [*fixed, f"trainer.eval_every={every}"], [f"trainer.eval_every={every}: {metric.key} is compared at each rung"]
    if missed := [rung for rung in rungs[:-1] if rung % every]:
        steps = ", ".join(map(str, missed))
        raise ConfigError(
            f"--metric {metric.key}: is evaluated every {every} steps (trainer.eval_every), and rungs are at {steps}; "
            f"set --rung to a multiple of {every}, or leave trainer.eval_every out"
        )
    return fixed, []


def _budget(options: argparse.Namespace, config: Config) -> Budget:
    """Raises ConfigError for a limit that cannot be counted."""
    of_all = price()
    each = options.price or (of_all / options.parallel if of_all else None)
    if options.budget is not None and each is None:
        raise ConfigError(f"--budget {options.budget:g}: nobody says what an hour costs; set flotilla:monitoring.price, or give --price")
    gpus = _gpus(config)
    if options.gpu_hours is not None and not gpus:
        raise ConfigError(f"--gpu-hours {options.gpu_hours:g}: the trials take no GPUs (placement.gpus_per_rank=0); leave it out")
    return Budget(each, gpus, options.budget, options.gpu_hours)


def _gpus(config: Config) -> float:
    """Of one trial."""
    from trainer.cluster.placement import plan as placement
    from trainer.configs.ppo import PpoConfig

    if isinstance(config, PpoConfig):
        return sum(bundle.get("GPU", 0) for bundle in placement(config).bundles)
    return config.placement.gpus_per_rank


def _refused(swept: Plan, point: space.Point) -> str | None:
    """Why the trainer does not take a point."""
    try:
        checks.config_of(swept.entry, swept.files[0], swept.fixed, point)
    except ConfigError as error:
        return str(error).splitlines()[0]
    return None


# --- the sweep's folder ---


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder for this process alone. Raises ConfigError where another has it, or it is a run's."""
    if is_run(folder):
        raise ConfigError(f"--name {folder.name}: {folder} is a run; choose another name")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        try:
            flock(lock, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"--name {folder.name}: {lock.read().strip() or 'another process'} drives this sweep; stop it first"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()}")
        lock.flush()
        yield


def _require_same(swept: Plan, folder: Path) -> None:
    """Raises ConfigError where the folder holds a sweep of something else."""
    file = folder / STATE
    if not file.exists():
        return
    try:
        before: dict[str, Any] = yaml_io.load(file.read_text())["identity"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file}: is not of this version; choose another --name") from None
    for what, now in json.loads(json.dumps(swept.identity())).items():
        if before.get(what) != now:
            raise ConfigError(
                f"--name {swept.name}: that sweep has {what} {_shown(before.get(what))}, and this one {_shown(now)}; "
                "choose another --name, or repeat its command"
            )
    for name in swept.files:
        kept = folder / "settings" / Path(name).name
        if yaml_io.load(Path(name).read_text()) != yaml_io.load(kept.read_text()):
            raise ConfigError(f"{name}: was changed since the sweep {swept.name} began (with {kept}); choose another --name")


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _write(swept: Plan, folder: Path) -> None:
    for name in ("settings", "logs"):
        (folder / name).mkdir(exist_ok=True)
    for name in swept.files:
        if not (kept := folder / "settings" / Path(name).name).exists():
            shutil.copyfile(name, kept)
    draft = folder / f".{STATE}"
    draft.write_text(yaml_io.dump({"identity": json.loads(json.dumps(swept.identity())), "trials": swept.trials}))
    draft.replace(folder / STATE)
