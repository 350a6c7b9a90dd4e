"""Where a step's time went and what to change, in words: of a timeline, or of a row of metrics.jsonl alone.

Each rule names one cause, when it costs the step at least `WORTH` of its seconds. docs/training/timeline.md lists them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

WORTH = 0.15  # share of a step
IDLE = 0.3  # share of a step in which engines that never stop may have nothing to do
TAIL = 0.25  # share of the most sequences at once, below which an engine is at its last ones
SLOWER = 1.4  # times as long as the others
WAITS = ("waiting", "idle")
LEARNS = ("forward", "loss", "backward")

ADVICE = {
    "reward": "raise reward.workers, make the reward faster, or use rollout.mode=async, which samples meanwhile",
    "sync": "raise rollout.bucket_mb, place ranks and rollout engines on the same nodes, or learn more per sync (trainer.prompts_per_step)",
    "checkpoint": "raise trainer.checkpoint_every, set trainer.checkpoint_async=true, or write to a faster disk",
    "turn": "raise trainer.prompts_per_step, or give ranks and rollout engines their own GPUs (placement.colocate=false)",
    "evaluate": "raise trainer.eval_every or lower trainer.eval_prompts",
    "export": "raise trainer.export_every",
    "data": "put the data on a faster disk, or prepare it before the run",
}
SAID = {
    "reward": "rewards",
    "sync": "the weight sync",
    "checkpoint": "the checkpoint",
    "turn": "moving ranks and rollout engines in and out of shared GPUs",
    "evaluate": "the evaluation",
    "export": "the export",
    "data": "reading data",
}
TAIL_ADVICE = "lower rollout.max_new_tokens or use rollout.mode=async"


def causes(row: Mapping[str, Any]) -> list[str]:
    """Of a step by its row of metrics.jsonl, the most expensive first."""
    checkpoint = row.get("seconds_checkpoint") or 0.0  # of the step before, outside its seconds
    seconds = (row.get("seconds") or 0.0) + checkpoint
    if not seconds:
        return []
    shares = {name: (row.get(f"seconds_{name}") or 0.0) / seconds for name in SAID}
    found = [(share, _took(name, share)) for name, share in shares.items() if share >= WORTH]
    idle, waits = row.get("engines_idle"), (row.get("seconds_wait") or 0.0) / seconds
    if idle is not None and idle >= IDLE:
        found.append((idle, _engines_wait(idle)))
    elif waits >= IDLE:
        found.append((waits, _driver_waits(waits)))
    return [text for _, text in sorted(found, reverse=True)]


def words(step: Mapping[str, Any]) -> list[str]:
    """Of a step by its timeline (`lanes.read`), the most expensive first."""
    found = [*_causes(Step(step))] if step["seconds"] else []
    return [text for _, text in sorted(found, reverse=True)]


class Step:
    """A timeline with what the rules ask of it."""

    def __init__(self, step: Mapping[str, Any]):
        self.seconds: float = step["seconds"]
        self.lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for lane in step["lanes"]:
            self.lanes[lane["kind"]].append(lane)
        loop = (self.lanes["driver"] or self.lanes["rank"] or [{"spans": []}])[0]  # ranks that nobody drives have it themselves
        self.loop = [*top(loop["spans"])]
        self.laps: dict[str, float] = defaultdict(float)
        for name, begin, end, _ in self.loop:
            self.laps[name] += end - begin

    def share(self, seconds: float) -> float:
        return seconds / self.seconds

    def when(self, lap: str) -> list[tuple[float, float]]:
        """When the run's loop was at it."""
        return [(span[1], span[2]) for span in self.loop if span[0] == lap]


def top(spans: list[Any]) -> Iterator[Any]:
    """Those that are in no other."""
    end = 0.0
    for span in spans:
        if span[1] >= end:
            yield span
            end = span[2]


def alone(spans: list[Any]) -> dict[str, float]:
    """Seconds by name, without those of spans inside."""
    spent: dict[str, float] = defaultdict(float)
    around: list[Any] = []
    for span in spans:
        name, begin, end, _ = span
        while around and around[-1][2] <= begin:
            around.pop()
        spent[name] += end - begin
        if around:
            spent[around[-1][0]] -= end - begin
        around.append(span)
    return spent


def within(spans: list[Any], times: list[tuple[float, float]], *names: str) -> float:
    """Seconds of spans of these names in these times."""
    return sum(max(0.0, min(span[2], end) - max(span[1], begin)) for span in spans if span[0] in names for begin, end in times)


def _causes(step: Step) -> Iterator[tuple[float, str]]:
    yield from _laps(step)
    yield from _sampling(step)
    yield from _prefill(step)
    yield from _environments(step)
    yield from _continuous(step)
    yield from _ranks(step)


def _laps(step: Step) -> Iterator[tuple[float, str]]:
    """What the driver does while ranks and rollout engines wait for it."""
    spent = dict(step.laps)
    ranks = [alone(lane["spans"]) for lane in step.lanes["rank"]]
    held = max((rank["wait for the checkpoint"] for rank in ranks), default=0.0)
    spent["checkpoint"] = spent.get("checkpoint", 0.0) + held
    moved = max((rank["offload"] + rank["reload"] for rank in ranks), default=0.0)
    engines = max((spent_of["sleep"] + spent_of["wake"] for spent_of in _alone(step, "engine")), default=0.0)
    spent["turn"] = max(spent.get("turn", 0.0), moved + engines)
    weights = sum(span[2] - span[1] for lane in step.lanes["weights"] for span in lane["spans"])
    spent["sync"] = max(0.0, weights) if step.lanes["weights"] else 0.0
    for name in SAID:
        if (share := step.share(spent.get(name, 0.0))) >= WORTH:
            yield share, _took(name, share)


def _alone(step: Step, kind: str) -> list[dict[str, float]]:
    return [alone(lane["spans"]) for lane in step.lanes[kind]]


def _took(name: str, share: float) -> str:
    return f"{SAID[name]} took {share:.0%} of the step: {ADVICE[name]}"


def _sampling(step: Step) -> Iterator[tuple[float, str]]:
    """One engine is slow, or the last answers are long; both while the driver waits for all of them."""
    if "wait" in step.laps:  # rollout.mode=async
        return
    times = step.when("generate") + step.when("sync")  # in one process they sample as soon as they have the weights
    engines = step.lanes["engine"]
    paces = {lane["name"]: _pace(lane["spans"]) for lane in engines}
    known = [pace for pace in paces.values() if pace]
    works = {lane["name"]: within(lane["spans"], times, "prefill", "decode") for lane in engines}
    slowest = max(works, key=works.__getitem__, default="")
    if len(known) > 1 and times:
        others = median(pace for name, pace in paces.items() if pace and name != slowest)
        lost = works[slowest] - median(work for name, work in works.items() if name != slowest)
        pace = paces[slowest] or 0.0
        if pace >= SLOWER * others and step.share(lost) >= WORTH:
            times_as_long = f"{slowest} takes {pace / others:.1f} times as long per token as the other rollout engines"
            yield (
                step.share(lost),
                f"{times_as_long} and costs {step.share(lost):.0%} of the step: check its node (flotilla check), or set rollout.slow",
            )
            return
    tails = {lane["name"]: _tail(lane["spans"], times) for lane in engines}
    if not tails:
        return
    longest = max(tails, key=lambda name: tails[name][0])
    seconds, left = tails[longest]
    if step.share(seconds) >= WORTH:
        answers = "one answer" if left == 1 else f"the last {left} answers"
        yield (
            step.share(seconds),
            f"{longest} worked {step.share(seconds):.0%} of the step on {answers} while the rest had ended: {TAIL_ADVICE}",
        )


def _pace(spans: list[Any]) -> float | None:
    """Seconds of a step of decoding, while the engine had at least half of the most sequences that it had at once."""
    decodes = [span for span in spans if span[0] == "decode"]
    most = max((span[3].get("running", 1) for span in decodes), default=1)
    full = [span for span in decodes if 2 * span[3].get("running", 1) >= most]
    return sum(end - begin for _, begin, end, _ in full) / sum(span[3].get("count", 1) for span in full) if full else None


def _tail(spans: list[Any], times: list[tuple[float, float]]) -> tuple[float, int]:
    """Seconds of these times in which an engine decoded few of the sequences that it had, with no more to come; and how many at most."""
    decodes = [span for span in spans if span[0] == "decode"]
    most = max((span[3].get("running", 0) for span in decodes), default=0)
    few = [span for span in decodes if 0 < span[3].get("running", 0) <= TAIL * most and not span[3].get("waiting")]
    return within(few, times, "decode"), max((span[3]["running"] for span in few), default=0)


def _prefill(step: Step) -> Iterator[tuple[float, str]]:
    spent = _alone(step, "engine")
    prefill, decode = (sum(each[name] for each in spent) / max(1, len(spent)) for name in ("prefill", "decode"))
    if step.share(prefill) >= WORTH and prefill > decode:
        share = f"rollout engines read prompts for {step.share(prefill):.0%} of the step, longer than they write answers"
        yield step.share(prefill), f"{share}: shorten prompts (data.max_prompt_tokens), or take more samples of each (algorithm.group_size)"


def _environments(step: Step) -> Iterator[tuple[float, str]]:
    """Engines wait for what environments and their tools do."""
    times = step.when("generate")
    plays = max((within(lane["spans"], times, "play") for lane in step.lanes["environment"]), default=0.0)
    idle = min((within(lane["spans"], times, "idle") for lane in step.lanes["engine"]), default=0.0)
    lost = min(plays, idle)
    if step.share(lost) >= WORTH:
        share = f"environments played for {step.share(lost):.0%} of the step while all rollout engines waited"
        yield step.share(lost), f"{share}: raise environment.workers, make tools faster, or use rollout.mode=async"


def _continuous(step: Step) -> Iterator[tuple[float, str]]:
    """rollout.mode=async."""
    if "wait" not in step.laps:
        return
    waits = step.share(step.laps["wait"])
    idle = sum(spent["idle"] for spent in _alone(step, "engine")) / max(1, len(step.lanes["engine"])) / step.seconds
    scores = sum(within(lane["spans"], step.when("wait"), "score") for lane in step.lanes["reward"])
    if waits >= WORTH and scores >= 0.8 * step.laps["wait"]:
        yield waits, _took("reward", step.share(scores))
    elif idle >= IDLE:
        yield idle, _engines_wait(idle)
    elif waits >= IDLE:
        yield waits, _driver_waits(waits)


def _engines_wait(idle: float) -> str:
    return f"rollout engines were idle {idle:.0%} of the step: raise rollout.in_flight, or give some of their GPUs to ranks"


def _driver_waits(waits: float) -> str:
    return f"ranks waited {waits:.0%} of the step for rollout engines that were busy: add rollout.engines, or lower rollout.max_new_tokens"


def _ranks(step: Step) -> Iterator[tuple[float, str]]:
    """One of the ranks that learn together has more to do, or is slower: the others wait for it in a collective."""
    roles: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for lane in step.lanes["rank"]:
        roles[lane["name"].rpartition("-")[0]].append(lane)
    for ranks in roles.values():
        forward = {lane["name"]: alone(lane["spans"])["forward"] for lane in ranks}
        if len(ranks) < 2 or not min(forward.values()):
            continue
        slowest = max(forward, key=forward.__getitem__)
        others = median(seconds for name, seconds in forward.items() if name != slowest)
        learns = sum(alone(next(lane for lane in ranks if lane["name"] == slowest)["spans"])[name] for name in LEARNS)
        lost = learns * (1 - others / forward[slowest])  # backward as forward
        if forward[slowest] < SLOWER * others or step.share(lost) < WORTH:
            continue
        tokens = {lane["name"]: sum(span[3].get("tokens", 0) for span in lane["spans"] if span[0] == "forward") for lane in ranks}
        usual = median(count for name, count in tokens.items() if name != slowest)
        costs = f"and costs {step.share(lost):.0%} of the step"
        if tokens[slowest] >= SLOWER * usual > 0:
            more = f"{slowest} learned {tokens[slowest] / usual:.1f} times as many tokens as the other ranks {costs}"
            yield step.share(lost), f"{more}: raise trainer.prompts_per_step, so that shares even out, or lower rollout.max_new_tokens"
        else:
            slower = f"{slowest} takes {forward[slowest] / others:.1f} times as long as the other ranks for as many tokens {costs}"
            yield step.share(lost), f"{slower}: check its node (flotilla check)"
