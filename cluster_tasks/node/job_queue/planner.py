"""Which jobs start, which one makes room, which wait, each with its reason. Pure: the same input gives the same decisions.

A job's score is its priority, plus what its wait has earned, plus or minus what its owner is owed. Waiting jobs are placed by score,
ties by how long they have waited, each at the largest size that fits; one that does not fit takes the place of running jobs of lower score.

- Ageing: AGE points per hour of waiting, until the job counts as one of priority 100. One of priority 0 does after a day.
- Shares: an owner is owed what its weight entitles it to, less what it has had. OWED points per hour of its share, so that in the long
  run weights decide who gets how much, and priorities who goes first.
- No thrash: what has just started is left alone for MIN_RUN seconds, longer where its pauses and starts are long; and against a job
  of the same or lower priority it has to be MARGIN points behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .jobs import WAITS, Record, Size
from .shares import SAFE, Cluster, Owner, entitled

AGE, MOST = 4.0, 100.0  # points per hour, up to the highest priority: more would be a way to more than one's share
OWED = 20.0  # points per hour of entitlement
MARGIN = 20.0  # points that a job of the same or lower priority has to be ahead
MIN_RUN = 600.0  # seconds
GROW_AFTER = 1800.0  # seconds at a smaller size, after which a job takes what is free by a pause
SOON, WORTH = 10.0, 30.0  # a job runs at least this many times as long as its last pause; as that and its last start
LATE = 30.0  # points of a job that would miss its deadline
LATE_HOURS = 6.0  # before a deadline, where nobody knows how long the job takes


@dataclass(frozen=True)
class Decision:
    action: str  # start, pause, wait
    job: str
    reason: str
    size: Size | None = None  # of a start
    after: str = "paused"  # state after a pause


@dataclass
class Room:
    """Free resources while decisions are made."""

    gpus: float
    cpus: float

    def fits(self, size: Size) -> bool:
        """What a job does not need may be short."""
        return all(not needed or needed <= free + SAFE for needed, free in ((size.gpus, self.gpus), (size.cpus, self.cpus)))

    def take(self, size: Size) -> None:
        self.gpus -= size.gpus
        self.cpus -= size.cpus

    def limit(self, other: Room) -> None:
        """To what the other has."""
        self.gpus, self.cpus = min(self.gpus, other.gpus), min(self.cpus, other.cpus)

    def with_back(self, records: Sequence[Record]) -> Room:
        return Room(self.gpus + sum(each.gpus for each in records), self.cpus + sum(each.cpus for each in records))

    def __str__(self) -> str:
        return f"{max(0.0, self.gpus):g} GPUs and {max(0.0, self.cpus):g} CPUs are free"


@dataclass
class Plan:
    """The state of one planning: who has what, whose score is what."""

    cluster: Cluster
    records: Sequence[Record]
    owners: Mapping[str, Owner]
    now: float
    min_run: float = MIN_RUN
    decisions: list[Decision] = field(default_factory=list)
    known: dict[str, tuple[float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shares = entitled(self.cluster, self.records, self.owners)
        self.running = [each for each in self.records if each.state == "running"]
        self.coming = [each for each in self.records if each.state == "pausing"]  # what gives its resources back
        self.going = set[str]()
        self.used = dict[str, float]()
        self.free = Room(self.cluster.gpus - self.cluster.other_gpus, self.cluster.cpus - self.cluster.other_cpus)
        for record in (*self.running, *self.coming):
            self.free.take(record.size or record.job.floor)
            self.used[record.job.owner] = self.used.get(record.job.owner, 0.0) + record.gpus
        self.soon = self.free.with_back(self.coming)  # free once these have saved, less what is kept for waiting jobs

    def made(self) -> list[Decision]:
        for record in self.running:
            if line := record.over_budget:
                self.pause(record, line, "held")
        waiting = [each for each in self.records if each.state in WAITS]
        for record in sorted(waiting, key=lambda each: (-self.score(each), each.since, each.order)):
            self.place(record)
        if not waiting and not self.coming:
            self.grow()
        return self.decisions

    def pause(self, record: Record, reason: str, after: str = "paused") -> None:
        self.decisions.append(Decision("pause", record.name, reason, after=after))
        self.coming.append(record)
        self.going.add(record.name)
        self.soon = self.soon.with_back([record])

    def wait(self, record: Record, reason: str) -> None:
        self.decisions.append(Decision("wait", record.name, reason))

    def place(self, record: Record) -> None:
        """A start, pauses that make room for one, or why neither."""
        owner, why = record.job.owner, self.explained(record)[1]
        if line := record.over_budget:
            return self.wait(record, line)
        sizes = self.within_quota(record)
        if not sizes:
            quota, has = self.owners[owner].quota, self.used.get(owner, 0.0)
            return self.wait(record, f"the quota of {owner} is {quota:g} GPUs, and its jobs have {has:g}")
        if size := next(filter(self.free.fits, sizes), None):
            self.decisions.append(Decision("start", record.name, f"{self.free}; takes {size}; {why}", size))
            self.free.take(size)
            self.soon.take(size)
            self.used[owner] = self.used.get(owner, 0.0) + size.gpus
            return None
        least = sizes[-1]
        if not self.soon.fits(least):
            victims = self.victims(record, least)
            if not victims:
                return self.wait(record, self.unplaced(record, least))
            for victim in victims:
                self.pause(victim, f"makes room for {record.name} ({why}); its own: {self.explained(victim)[1]}")
        self.soon.take(least)
        self.free.limit(self.soon)  # what is kept for it is out of later jobs' reach
        names = ", ".join(each.name for each in self.coming)
        return self.wait(record, f"{names} {'is' if len(self.coming) == 1 else 'are'} being saved to make room")

    def within_quota(self, record: Record) -> list[Size]:
        quota = self.owners.get(record.job.owner, Owner()).quota
        left = float("inf") if quota is None else quota - self.used.get(record.job.owner, 0.0)
        return [size for size in record.job.sizes if size.gpus <= left + SAFE]

    def grow(self) -> None:
        """One job that runs at less than it wants is paused, to start at what is free; nobody waits."""
        for record in sorted(self.running, key=lambda each: (-self.score(each), each.order)):
            room = self.free.with_back([record])
            larger = next((size for size in record.job.sizes if room.fits(size)), None)
            settled = self.now - record.started > max(GROW_AFTER, 2 * WORTH * record.overhead)
            short = record.remaining is not None and record.remaining < GROW_AFTER
            if larger and record.size and larger.gpus > record.gpus and settled and not short and record.name not in self.going:
                return self.pause(record, f"grows from {record.size} to {larger}, which nobody wants")
        return None

    def score(self, record: Record) -> float:
        return self.explained(record)[0]

    def explained(self, record: Record) -> tuple[float, str]:
        """Its score, and how that comes about."""
        if record.name not in self.known:
            self.known[record.name] = self._scored(record)
        return self.known[record.name]

    def _scored(self, record: Record) -> tuple[float, str]:
        waited = max(0.0, self.now - record.since) if record.state in WAITS else 0.0
        age = min(waited / 3600 * AGE, MOST - record.priority)
        share, owner = self.shares.get(record.job.owner, 0.0), self.owners.get(record.job.owner, Owner())
        owed = owner.owed / 3600 / share * OWED if share else 0.0
        late = LATE if self.late(record) else 0.0
        words = [f"priority {record.priority}"]
        words += [f"{age:+.0f} for {waited / 3600:.1f} h of waiting"] if age >= 0.5 else []
        words += [f"{owed:+.0f} for the share of {record.job.owner}"] if abs(owed) >= 0.5 else []
        words += [f"{late:+.0f} for its deadline"] if late else []
        return record.priority + age + owed + late, ", ".join(words)

    def late(self, record: Record) -> bool:
        """Whether it would miss its deadline if it waited on."""
        if record.job.deadline is None:
            return False
        needed = record.remaining * 1.25 if record.remaining is not None else LATE_HOURS * 3600
        return record.submitted + record.job.deadline - self.now < needed

    def fresh(self, record: Record, to: Record) -> bool:
        """Whether it has run for too short a time to be paused for the other: for a dearer one that is new it gives way sooner."""
        urgent = to.state == "waiting" and to.priority > record.priority
        cost = SOON * record.pause_seconds if urgent else WORTH * record.overhead
        return self.now - record.started < max(self.min_run, cost)

    def yields(self, victim: Record, to: Record) -> bool:
        """Whether a running job makes room for a waiting one."""
        if victim.name in self.going or self.fresh(victim, to):
            return False
        dearer = to.priority > victim.priority
        # Of what does not save, a pause costs all: neither a wait nor a share is worth that, only somebody's word.
        return (dearer or victim.job.saves) and self.score(to) - self.score(victim) > (0.0 if dearer else MARGIN)

    def victims(self, to: Record, least: Size) -> list[Record]:
        """Whom to pause: jobs that save before others, then lowest score, shortest pause, last submitted; none that is not needed."""
        able = [each for each in self.running if self.yields(each, to)]
        able.sort(key=lambda each: (not each.job.saves, self.score(each), each.overhead, -each.order))
        taken: list[Record] = []
        while able and not self.soon.with_back(taken).fits(least):
            taken.append(able.pop(0))
        if not self.soon.with_back(taken).fits(least):
            return []
        for each in [*reversed(taken)]:  # a larger one that came later may make an earlier one needless
            rest = [other for other in taken if other is not each]
            taken = rest if self.soon.with_back(rest).fits(least) else taken
        return taken

    def unplaced(self, record: Record, least: Size) -> str:
        """Why nothing makes room."""
        text = f"takes {least.gpus:g} GPUs and {least.cpus:g} CPUs, {self.free}"
        young = [each.name for each in self.running if self.score(each) < self.score(record) and self.fresh(each, record)]
        if young:
            text += f"; {', '.join(young[:5])} has run for too short a time to be paused"
        if self.cluster.other_gpus or (not self.cluster.gpus and self.cluster.other_cpus):
            text += f"; jobs submitted by hand have {self.cluster.other_gpus:g} GPUs and {self.cluster.other_cpus:g} CPUs"
        ahead = [each.name for each in self.running if each.name not in young]
        return (
            f"{text}; {', '.join(ahead[:5])} goes first; {self.explained(record)[1]}" if ahead else f"{text}; {self.explained(record)[1]}"
        )


def plan(cluster: Cluster, records: Sequence[Record], owners: Mapping[str, Owner], now: float, min_run: float = MIN_RUN) -> list[Decision]:
    """What to do now: pauses and starts in order, then why each other job waits. `now` in seconds of the queue's clock."""
    return Plan(cluster, records, owners, now, min_run).made()
