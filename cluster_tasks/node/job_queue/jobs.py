"""A job of the queue: what a person submits, what the queue knows of it, and what is wrong with it, in one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,78}[A-Za-z0-9])?")
WAITS, TAKES = ("waiting", "paused"), ("running", "pausing")  # states in which a job wants to run; has resources
ENDED = ("succeeded", "failed", "cancelled")
STATES = (*WAITS, *TAKES, "held", *ENDED)
TRAINER = re.compile(r"(?:^|\s)-m trainer\.train_(ppo|sft|rm|dpo)\b")
MOST_SIZES = 64
SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*=\S*")


class JobError(ValueError):
    """A mistake in what a person submits, in one line."""


@dataclass(frozen=True)
class Size:
    """What a job takes at one of its sizes, and the settings that its command then gets at its end."""

    gpus: float = 0.0
    cpus: float = 0.0
    settings: tuple[str, ...] = ()  # key=value

    def __str__(self) -> str:
        return f"{self.gpus:g} GPUs" if self.gpus else f"{self.cpus:g} CPUs"

    @classmethod
    def of(cls, known: Any) -> Size:
        """From JSON. Raises JobError."""
        if not isinstance(known, dict) or known.keys() - {"gpus", "cpus", "settings"}:
            raise JobError(f"sizes: {known!r} is not a map of gpus, cpus and settings")
        for key in ("gpus", "cpus"):
            if not number(known.get(key, 0)) or known.get(key, 0) < 0:
                raise JobError(f"sizes: {key} {known[key]!r} is not a number >= 0")
        settings = known.get("settings", ())
        if not isinstance(settings, list | tuple) or not all(isinstance(each, str) and SETTING.fullmatch(each) for each in settings):
            raise JobError(f"sizes: settings {settings!r} is not a list of key=value")
        return cls(float(known.get("gpus", 0)), float(known.get("cpus", 0)), tuple(settings))


@dataclass(frozen=True)
class Job:
    """As submitted. Seconds are of the queue's clock, which no jump of the head's clock moves."""

    name: str
    command: str
    owner: str
    sizes: tuple[Size, ...]  # at which it may run, the one that it wants most first; never at another
    priority: int = 50
    deadline: float | None = None  # seconds from its submission
    budget_usd: float | None = None
    budget_gpu_hours: float | None = None
    seconds: float | None = None  # that it takes, where its owner says so
    step_seconds: float | None = None  # of one of its steps, as estimated
    driver: bool = False  # whether its driver takes these resources, not processes that the driver starts
    stack: str = ""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)  # Ray's, its folders gcs:// packages that the queue keeps
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def saves(self) -> bool:
        """Whether it saves when asked to stop, and resumes from there: a run of our trainer."""
        return TRAINER.search(self.command) is not None

    @property
    def floor(self) -> Size:
        return self.sizes[-1]

    def command_at(self, size: Size) -> str:
        """What Ray runs in a shell."""
        return " ".join((self.command, *(f"'{each}'" for each in size.settings)))

    def packages(self) -> set[str]:
        """Names of the packages that its runtime environment is made of."""
        return {uri.removeprefix("gcs://") for uri in texts(self.runtime_env) if uri.startswith("gcs://")}

    @classmethod
    def of(cls, known: Any) -> Job:
        """From JSON. Raises JobError, which names what is wrong."""
        if not isinstance(known, dict):
            raise JobError(f"a job is a map of settings, not {type(known).__name__}")
        names = {each.name for each in fields(cls)}
        for key in known:
            if key not in names:
                raise JobError(f"{key}: is no setting of a job; there are {', '.join(sorted(names))}")
        for key in ("name", "command", "owner"):
            if not isinstance(known.get(key), str) or not known[key].strip():
                raise JobError(f"{key}: {known.get(key)!r} is not a text that says something")
        sizes = known.get("sizes")
        if not isinstance(sizes, list | tuple) or not 1 <= len(sizes) <= MOST_SIZES:
            raise JobError(f"sizes: {sizes!r} is not a list of 1 to {MOST_SIZES} sizes")
        given: dict[str, Any] = {**known, "sizes": tuple(map(Size.of, sizes))}
        job = cls(**given)
        if line := next(mistakes(job), None):
            raise JobError(line)
        return job


def texts(value: Any) -> Iterator[str]:
    """All texts in nested maps and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from texts(each)


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e15 < value < 1e15


def mistakes(job: Job) -> Iterator[str]:
    """Of the job alone, a line each."""
    if not NAME.fullmatch(job.name):
        yield f"name: {job.name!r} is not 1 to 80 letters, digits, '.', '_' and '-', a letter or digit at both ends"
    if not isinstance(job.priority, int) or isinstance(job.priority, bool) or not 0 <= job.priority <= 100:
        yield f"priority: {job.priority!r} is not a whole number from 0 to 100"
    for key in ("deadline", "budget_usd", "budget_gpu_hours", "seconds", "step_seconds"):
        value = getattr(job, key)
        if value is not None and (not number(value) or value <= 0):
            yield f"{key}: {value!r} is not a number > 0"
    for key, kind in (("runtime_env", Mapping), ("metadata", Mapping), ("driver", bool), ("stack", str)):
        if not isinstance(getattr(job, key), kind):
            yield f"{key}: {getattr(job, key)!r} is not a {'map' if kind is Mapping else kind.__name__}"
    if any(not size.gpus and not size.cpus for size in job.sizes):
        yield "sizes: neither GPUs nor CPUs; say what the job takes: --gpus N, --cpus N"
    for larger, smaller in zip(job.sizes, job.sizes[1:], strict=False):
        if smaller.gpus > larger.gpus or (smaller.gpus == larger.gpus and smaller.cpus >= larger.cpus):
            yield f"sizes: {smaller} after {larger}; each has to take less than the one before"
    if len(job.sizes) > 1 and not job.saves:
        yield f"sizes: several are for `-m trainer.train_*`, which resumes at another; {job.command[:60]!r} runs at one"
    if job.budget_gpu_hours is not None and not job.floor.gpus:
        yield f"budget_gpu_hours: {job.budget_gpu_hours:g} never ends for a job without GPUs; give --budget in USD, or none"


def misfits(job: Job, gpus: float, cpus: float, quota: float | None, hourly: float | None, stack: str) -> Iterator[str]:
    """Of the job on this cluster: `gpus` and `cpus` of all nodes, the owner's `quota` in GPUs, USD an hour of all nodes."""
    for kind, least, most in (("GPUs", job.floor.gpus, gpus), ("CPUs", job.floor.cpus, cpus)):
        if least > most:
            yield f"sizes: the job takes at least {least:g} {kind}, and the cluster has {most:g}: it would never start"
    if quota is not None and job.floor.gpus > quota:
        yield f"sizes: the job takes at least {job.floor.gpus:g} GPUs, and the quota of {job.owner} is {quota:g}: it would never start"
    if job.stack and stack and job.stack != stack:
        yield f"stack: the job is for {job.stack}, this is the queue of {stack}"
    if job.budget_usd is not None and hourly is None:
        yield f"budget_usd: {job.budget_usd:g}, but nobody says what a node costs; set flotilla:monitoring.price"
    hours, size = (job.step_seconds or 0.0) / 3600, job.sizes[0]
    part = size.gpus / gpus if gpus else size.cpus / cpus if cpus else 0.0
    for key, unit, step in (("budget_usd", "USD", (hourly or 0.0) * part * hours), ("budget_gpu_hours", "GPU hours", size.gpus * hours)):
        if (budget := getattr(job, key)) is not None and step > budget:
            yield f"{key}: {budget:g} is less than one step takes, about {step:.3g} {unit}"


@dataclass(frozen=True)
class Record:
    """A job and what has become of it."""

    job: Job
    order: int  # of submission
    submitted: float  # as all times here, on the queue's clock
    state: str = "waiting"
    reason: str = "just submitted"
    priority: int = 50  # that `move` may have changed
    attempt: int = 0  # Ray's submission id is NAME.ATTEMPT
    size: Size | None = None  # while it takes resources, and the last one afterwards
    since: float = 0.0  # in this state
    started: float = 0.0  # this attempt
    after: str = "paused"  # the state that follows `pausing`: paused, held or cancelled
    crashes: int = 0  # in a row, of drivers that were killed
    pauses: int = 0
    pause_seconds: float = 0.0  # of the last one, from SIGTERM to the end
    start_seconds: float = 0.0  # of the last start, to its first step
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds by state; of one without resources up to `since`
    gpu_seconds: Mapping[str, float] = field(default_factory=dict)  # by state, running or pausing
    usd: float = 0.0
    step: int | None = None
    steps: int | None = None
    step_seconds: float | None = None

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def submission(self) -> str:
        return f"{self.name}.{self.attempt}"

    @property
    def gpus(self) -> float:
        return self.size.gpus if self.size else 0.0

    @property
    def cpus(self) -> float:
        return self.size.cpus if self.size else 0.0

    @property
    def overhead(self) -> float:
        """Seconds that another pause would cost."""
        return self.pause_seconds + self.start_seconds

    @property
    def remaining(self) -> float | None:
        """Seconds of work that are left: by its steps, else as submitted; None where nobody knows."""
        if self.steps and self.step_seconds and self.step is not None:
            return max(0.0, (self.steps - self.step) * self.step_seconds)
        return None if self.job.seconds is None else max(0.0, self.job.seconds - self.spent.get("running", 0.0))

    @property
    def over_budget(self) -> str | None:
        """Why it is held until somebody raises its budget: the next step would not be paid for."""
        job, hours = self.job, sum(self.gpu_seconds.values()) / 3600
        running = self.spent.get("running", 0.0)
        share = (self.step_seconds or 0.0) / running if running else 0.0  # of what it has cost so far, one more step
        if job.budget_usd is not None and self.usd * (1 + share) >= job.budget_usd:
            return f"its budget is used: {self.usd:.2f} of {job.budget_usd:g} USD; release it with a larger --budget"
        if job.budget_gpu_hours is not None and hours * (1 + share) >= job.budget_gpu_hours:
            return f"its budget is used: {hours:.2f} of {job.budget_gpu_hours:g} GPU hours; release it with more --gpu-hours"
        return None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, known: dict[str, Any]) -> Record:
        """As `as_json` gave it."""
        size = lambda each: Size(each["gpus"], each["cpus"], tuple(each["settings"]))  # noqa: E731
        job = Job(**known["job"] | {"sizes": tuple(map(size, known["job"]["sizes"]))})
        return cls(**known | {"job": job, "size": size(known["size"]) if known["size"] else None})
