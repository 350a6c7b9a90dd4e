"""What the processes of a run do from moment to moment: spans of traced steps, for the timeline (docs/training/timeline.md).

    with span("forward", tokens=812):
        ...

A span goes to the lane of the thread that it runs in: a rank, a rollout engine, the driver. Lanes record only in traced steps; at other
times a span says only what its thread does now, which signs of life pass on (heartbeat.py), and costs less than a microsecond. A
`Recorded` object, such as a rank, has a lane of its own in whichever process it is, on which its calls are spans, and what is between
them another one.

Under Ray each process publishes what it has recorded four times a second, from a thread, in Ray's key-value store, as heartbeats are: the
driver gets it without a call, which a process at work would not answer, and a process that is killed loses a quarter of a second.
Times are seconds of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from inspect import isfunction
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

EVERY = 0.25  # seconds between two publications
MOST = 200_000  # spans of a lane that nobody has taken; older ones go
NAMESPACE = b"flotilla"
BOOT = Path("/proc/sys/kernel/random/boot_id")
CALLS = {  # calls that are named by what they do
    "sample": "sample",
    "answer": "sample",
    "work": "sample",
    "work_alone": "sample",
    "receive": "take weights",
    "send": "send weights",
    "connect": "join the weight sync",
    "optimizer_step": "learn",
    "save_shard": "save",
    "load_shard": "load",
    "advance": "play",
}
UNSEEN = {"beat", "record", "here", "where", "saved", "address", "packing"}  # calls that are no work, or run beside it

Span = tuple[str, float, float, dict[str, Any]]  # name, begin, end, numbers


class Lane:
    """What one of the run does, one thing after another; a span that lies within another one is a part of it."""

    def __init__(self, name: str, kind: str):
        self.name, self.kind = name, kind
        self.on = False
        self.spans: deque[Span] = deque(maxlen=MOST)
        self.since = 0.0  # the end of the last lap, or call

    def add(self, name: str, begin: float, end: float, numbers: dict[str, Any]) -> None:
        self.spans.append((name, begin, end, numbers))

    def lap(self, name: str) -> None:
        """What has passed since the last one went into `name`."""
        if self.on:
            now = time.perf_counter()
            self.add(name, self.since, now, {})
            self.since = now

    def switch(self, on: bool) -> None:
        if on and not self.on:
            self.since = time.perf_counter()
        self.on = on

    def take(self) -> list[Span]:
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self.spans.popleft())
        return taken


class Batch(NamedTuple):
    """Spans of a lane, as a process hands them on. `boot`: of its machine, whose clock it has."""

    lane: str
    kind: str
    node: str
    boot: str
    spans: list[Span]


class Here(NamedTuple):
    """Where a process is, and what its clock shows."""

    boot: str
    node: str
    now: float


LANES: dict[str, Lane] = {}  # of this process
_now: dict[int, str] = {}  # by thread: the innermost call or span that it is in, recorded or not
_thread = threading.local()
_OFF = nullcontext()


class _Span:
    __slots__ = ("before", "begin", "lane", "name", "numbers", "thread")

    def __init__(self, lane: Lane | None, name: str, numbers: dict[str, Any]):
        self.lane, self.name, self.numbers = lane, name, numbers

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.before = _now.get(self.thread, "")
        _now[self.thread] = self.name
        self.begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        _now[self.thread] = self.before
        if self.lane is not None:
            self.lane.add(self.name, self.begin, time.perf_counter(), self.numbers)


def span(name: str, **numbers: float) -> AbstractContextManager[None]:
    """On the lane of this thread, where it records."""
    lane: Lane | None = getattr(_thread, "lane", None)
    return _Span(lane if lane is not None and lane.on else None, name, numbers)


def doing() -> str:
    """What this process does now: the innermost call or span of its main thread, else of another; nothing between two calls."""
    return _now.get(threading.main_thread().ident or 0) or next(filter(None, [*_now.values()]), "")


def ended(name: str, begin: float, **numbers: float) -> None:
    """A span of this thread that began then (`time.perf_counter`) and ends now, where it records: for what is named once it is done."""
    if recording():
        _thread.lane.add(name, begin, time.perf_counter(), numbers)


def lap(name: str) -> None:
    """As `Lane.lap`, on the lane of this thread, where it records."""
    lane: Lane | None = getattr(_thread, "lane", None)
    if lane is not None:
        lane.lap(name)


def aside(lane: str, name: str, **numbers: float) -> AbstractContextManager[None]:
    """On a lane of this process by its name, where it records; several threads may."""
    found = LANES.get(lane)
    return _Span(found, name, numbers) if found is not None and found.on else _OFF


def aside_ended(lane: str, name: str, begin: float, **numbers: float) -> None:
    """As `ended`, on such a lane."""
    found = LANES.get(lane)
    if found is not None and found.on:
        found.add(name, begin, time.perf_counter(), numbers)


def recording() -> bool:
    """Whether spans of this thread are recorded."""
    lane: Lane | None = getattr(_thread, "lane", None)
    return lane is not None and lane.on


@contextmanager
def on_lane(lane: Lane | None) -> Iterator[None]:
    """Spans of this thread go there."""
    before = getattr(_thread, "lane", None)
    _thread.lane = lane
    try:
        yield
    finally:
        _thread.lane = before


def new_lane(name: str, kind: str) -> Lane:
    """Of this process; one that has the name is replaced."""
    LANES[name] = Lane(name, kind)
    return LANES[name]


def take(node: str = "") -> list[Batch]:
    """What the lanes of this process have recorded since they were last asked."""
    found = [(lane, lane.take()) for lane in [*LANES.values()]]
    return [Batch(lane.name, lane.kind, node, boot(), merged(spans)) for lane, spans in found if spans]


def boot() -> str:
    """What processes whose clocks are the same have in common."""
    try:
        return BOOT.read_text().strip()
    except OSError:  # not Linux: one machine, as clusters are Linux
        return "here"


GAP = 0.001  # seconds


def merged(spans: list[Span]) -> list[Span]:
    """Spans that follow on one another as one, where they have a "count" and are the same otherwise: a thousand steps of decoding."""
    out: list[Span] = []
    for name, begin, end, numbers in spans:
        if out and numbers.get("count"):
            last = out[-1]
            same = last[0] == name and {**last[3], "count": 0} == {**numbers, "count": 0}
            if same and abs(begin - last[2]) < GAP:
                out[-1] = (name, last[1], end, {**numbers, "count": last[3]["count"] + numbers["count"]})
                continue
        out.append((name, begin, end, numbers))
    return out


class Recorded:
    """A base of objects that a launcher starts: their public calls are spans of a lane, and what is between two of them as well."""

    KIND: ClassVar[str] = "process"
    WAITS: ClassVar[str] = "waiting"  # what it does between two calls
    _lane: Lane | None = None
    _profiled: list[str] = []  # noqa: RUF012  # replaced, never changed

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in [*vars(cls).items()]:
            if isfunction(method) and not name.startswith("_") and name not in UNSEEN:
                setattr(cls, name, _recorded(name, method))

    def here(self) -> Here:
        return Here(boot(), _address(), time.perf_counter())

    def record(self, on: bool, name: str, parts: list[str], prefix: str | None) -> tuple[Here, bytes | None]:
        """From now on, or no longer. `parts`: profilers that run from now on; `prefix`: of the keys that a process of Ray publishes under.

        Returns, at the end of a profile, what torch's profiler saw: a Chrome trace, compressed with gzip.
        """
        lane = self._lane = self._lane or new_lane(name, self.KIND)
        profile = None
        if lane.on and not on:
            lane.lap(self.WAITS)
        if parts != self._profiled:
            from trainer.cluster import profiles

            profile = profiles.switch(bool(parts), {*parts, *self._profiled}, lane.name)
            self._profiled = parts
        lane.switch(on)
        if prefix and on:
            _publish(prefix)
        elif prefix:
            _put(prefix)
        return self.here(), profile


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Recorded, *args: Any, **kwargs: Any) -> Any:
        lane, known = self._lane, args[0] if name == "call" else name
        word = CALLS.get(known, known.replace("_", " "))
        if lane is None or not lane.on:
            with _Span(None, word, {}):
                return method(self, *args, **kwargs)
        if getattr(_thread, "lane", None) is not lane:  # it is no part of another one
            lane.lap(self.WAITS)
        begin = time.perf_counter()
        try:
            with on_lane(lane), _Span(None, word, {}):
                return method(self, *args, **kwargs)
        finally:
            lane.since = time.perf_counter()
            lane.add(word, begin, lane.since, {})

    return call


def register(recorded: MutableMapping[str, Any], kind: type, name: str | None, actor: Any) -> None:
    """An object that a launcher started, where it has a lane. What has no name gets one of its kind."""
    if issubclass(kind, Recorded):
        free = (f"{kind.KIND}-{number}" for number in count() if f"{kind.KIND}-{number}" not in recorded)
        recorded[name or next(free)] = actor


# Under Ray


def prefix_of(job: str) -> str:
    return f"spans-{job}-"


class _Publisher:
    prefix: str | None = None
    number = 0
    lock = threading.Lock()


def _publish(prefix: str) -> None:
    """From a thread, from now on as long as a lane of this process records."""
    if _Publisher.prefix == prefix:
        return
    _Publisher.prefix = prefix

    def work() -> None:
        while any(lane.on for lane in [*LANES.values()]):
            time.sleep(EVERY)
            _put(prefix)
        _Publisher.prefix = None

    threading.Thread(target=work, name="spans", daemon=True).start()


def _put(prefix: str) -> None:
    from ray.experimental import internal_kv

    with _Publisher.lock:
        for batch in take(_address()):
            _Publisher.number += 1
            key = f"{prefix}{batch.lane}-{_Publisher.number:08}-{time.time_ns()}".encode()
            with suppress(Exception):  # of a Ray that does not answer: a timeline with a hole is better than a run that ends
                internal_kv._internal_kv_put(key, json.dumps(batch).encode(), overwrite=True, namespace=NAMESPACE)


def published(prefix: str) -> list[Batch]:
    """What processes have published since this was last asked. Raises what Ray raises where it does not answer."""
    from ray.experimental import internal_kv

    found = []
    for key in sorted(internal_kv._internal_kv_list(prefix.encode(), namespace=NAMESPACE)):
        value = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        internal_kv._internal_kv_del(key, namespace=NAMESPACE)
        if value:
            lane, kind, node, machine, spans = json.loads(value)
            found.append(Batch(lane, kind, node, machine, [(n, b, e, d) for n, b, e, d in spans]))
    return found


def _address() -> str:
    from trainer.cluster import actors

    return actors.address()
