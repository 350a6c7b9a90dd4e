"""What each owner should have by its weight, and what it is owed for what it has not had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .jobs import TAKES, WAITS, JobError, Record, number

SAFE = 1e-9
MOST_OWED = 24 * 3600.0  # seconds of its share that an owner may be owed, or owe
KEPT_OWNERS = 1000


@dataclass(frozen=True)
class Owner:
    weight: float = 1.0
    quota: float | None = None  # GPUs at once
    owed: float = 0.0  # GPU seconds (on a cluster without GPUs CPU seconds); negative: has had more

    @classmethod
    def changed(cls, owner: Owner, known: Mapping[str, object]) -> Owner:
        """With another weight or quota. Raises JobError."""
        if more := known.keys() - {"weight", "quota"}:
            raise JobError(f"{sorted(more)[0]}: an owner has weight and quota")
        for key, value in known.items():
            if not (value is None and key == "quota") and not (number(value) and value > 0):  # type: ignore[operator]
                raise JobError(f"{key}: {value!r} is not a number > 0")
        return replace(owner, **known)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Cluster:
    """What there is, and what jobs take of it that the queue did not start."""

    gpus: float
    cpus: float
    other_gpus: float = 0.0
    other_cpus: float = 0.0

    @property
    def kind(self) -> str:
        """What shares are counted in."""
        return "gpus" if self.gpus else "cpus"

    @property
    def whole(self) -> float:
        """To be shared among owners."""
        return max(0.0, getattr(self, self.kind) - getattr(self, f"other_{self.kind}"))


def entitled(cluster: Cluster, records: Iterable[Record], owners: Mapping[str, Owner]) -> dict[str, float]:
    """What each owner should have now: by weight, nobody more than its jobs want; what one leaves goes to the others."""
    want = dict[str, float]()
    for record in records:
        if record.state in (*WAITS, *TAKES):
            want[record.job.owner] = want.get(record.job.owner, 0.0) + getattr(record.job.sizes[0], cluster.kind)
    want = {owner: want[owner] for owner in sorted(want)}
    weights = {owner: owners.get(owner, Owner()).weight for owner in want}
    for owner in want:
        quota = owners.get(owner, Owner()).quota
        if quota is not None and cluster.gpus:
            want[owner] = min(want[owner], quota)
    found, left, asking = dict.fromkeys(want, 0.0), cluster.whole, set(want)
    while asking and left > SAFE:
        each = left / sum(weights[owner] for owner in sorted(asking))
        full = sorted(owner for owner in asking if want[owner] <= each * weights[owner] + SAFE)
        for owner in full or sorted(asking):
            found[owner] = min(want[owner], each * weights[owner])
        left -= sum(found[owner] for owner in full)
        if not full:
            break
        asking -= set(full)
    return found


def credited(cluster: Cluster, records: Sequence[Record], owners: Mapping[str, Owner], seconds: float) -> dict[str, Owner]:
    """Owners after `seconds` in which the jobs ran as they do. What an owner without jobs is owed is forgotten."""
    shares = entitled(cluster, records, owners)
    had = dict.fromkeys(shares, 0.0)
    for record in records:
        if record.state in TAKES:
            had[record.job.owner] += getattr(record, cluster.kind)
    whole, used = sum(shares.values()), sum(had.values())
    found = {name: replace(owner, owed=0.0) for name, owner in owners.items() if name not in shares}
    for name, share in shares.items():
        owner = owners.get(name, Owner())
        due = share * used / whole if whole else 0.0  # of what was given out: nobody is owed what nobody could have had
        most = share * MOST_OWED
        found[name] = replace(owner, owed=min(max(owner.owed + (due - had[name]) * seconds, -most), most))
    return {name: found[name] for name in sorted(found)}
