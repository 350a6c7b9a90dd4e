"""What the page asks, by path and query, as plain data: the server sends it, and one file holds it."""

from __future__ import annotations

import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import episodes, lanes, reasons, runs
from .causes import SLOWER
from .metrics import POINTS, Metrics

Query = Mapping[str, str]
FIRST = ("reward", "eval_reward", "loss", "kl", "response_tokens", "entropy", "grad_norm", "tokens_per_second", "seconds", "cost_usd")
MEMORY = 2**26  # bytes of metrics that are kept
MOST_POINTS = 4000
MOST_RUNS = 1000  # of the table, the newest
PHASE = "seconds_"


class Answers:
    """For runs below `roots`. Safe for several threads."""

    def __init__(self, roots: list[Path]) -> None:
        self.roots = roots
        self.kept: OrderedDict[Path, Metrics] = OrderedDict()  # the last used last
        self.lock = threading.Lock()
        self.asked: dict[str, Callable[[Query], Any]] = {
            "runs": self.runs,
            "run": self.run,
            "curves": self.curves,
            "moved": self.moved,
            "compare": self.compare,
            "episodes": lambda query: episodes.page(self.folder(query), query),
            "episode": lambda query: episodes.whole(self.folder(query), int(episodes.as_number("id", query.get("id", "")))),
            "facets": lambda query: episodes.facets(self.folder(query)),
            "prompts": lambda query: episodes.prompts(self.folder(query), query),
            "machines": self.machines,
            "lanes": self.lanes,
            "told": self.told,
        }

    def ask(self, path: str, query: Query) -> Any:
        """Raises KeyError for a path that there is not; NoRun, NoRecord and BadQuestion, whose texts are for people."""
        return self.asked[path](query)

    def folder(self, query: Query) -> Path:
        return runs.folder_of(self.roots, query.get("name", ""))

    def metrics(self, folder: Path) -> Metrics:
        with self.lock:
            found = self.kept.pop(folder, None) or Metrics(folder)
            self.kept[folder] = found.read()
            while len(self.kept) > 1 and sum(each.size for each in self.kept.values()) > MEMORY:
                self.kept.popitem(last=False)
            return found

    def runs(self, query: Query) -> dict[str, Any]:
        found = runs.found(self.roots)
        newest = sorted(found.items(), key=lambda item: runs.modified(item[1] / "metrics.jsonl") or 0.0, reverse=True)
        rows = [runs.summary(folder) for _, folder in newest[:MOST_RUNS]]
        return {"runs": rows, "more": max(0, len(found) - MOST_RUNS), "roots": [str(root) for root in self.roots], "now": time.time()}

    def run(self, query: Query) -> dict[str, Any]:
        """All that the page of a run shows at once."""
        folder = self.folder(query)
        metrics, settings = self.metrics(folder), runs.read_settings(folder)
        keys = metrics.keys()
        name = folder.resolve().name
        earlier = runs.before(self.roots, name)
        return {
            **runs.summary(folder),
            "keys": [key for key in FIRST if key in keys] + sorted(set(keys) - {*FIRST}),
            "first": metrics.steps[0] if metrics.steps else None,
            "last": metrics.steps[-1] if metrics.steps else None,
            "damaged": metrics.damaged[:10],
            "settings": runs.dotted(settings),
            "events": runs.events(folder),
            "phases": phases(metrics),
            "jumps": reasons.breaks(metrics, "reward" if "reward" in keys else "loss"),
            "words": lanes.causes(metrics.row(metrics.steps[-1])) if metrics.steps else [],
            "traced": lanes.steps(folder),
            "suites": runs.lines(folder / "suites.jsonl")[-200:],
            "before": earlier,
            "changed": runs.differences([runs.read_settings(runs.folder_of(self.roots, earlier)), settings]) if earlier else [],
        }

    def curves(self, query: Query) -> dict[str, Any]:
        """Of `keys`, with commas, each at most `points` long, within `begin` and `end`."""
        metrics = self.metrics(self.folder(query))
        points = max(2, min(MOST_POINTS, int(episodes.as_number("points", query.get("points") or str(POINTS)))))
        begin = int(episodes.as_number("begin", query.get("begin") or "0"))
        end = int(episodes.as_number("end", query["end"])) if query.get("end") else None
        wanted = [key for key in query.get("keys", "").split(",") if key in metrics.columns]
        with self.lock:
            found = {key: metrics.curve(key, points, begin, end) for key in wanted}
            return {"curves": found, "last": metrics.steps[-1] if metrics.steps else None}

    def moved(self, query: Query) -> dict[str, Any]:
        folder, step = self.folder(query), int(episodes.as_number("step", query.get("step", "")))
        metrics = self.metrics(folder)
        with self.lock:
            found, row = reasons.moved(metrics, step), metrics.row(step)
        near = [event for event in runs.events(folder) if event["step"] is not None and abs(event["step"] - step) <= reasons.WINDOW]
        return {"step": step, "moved": found, "row": row, "events": near, "words": lanes.causes(row) if row else []}

    def compare(self, query: Query) -> dict[str, Any]:
        """Settings in which the runs of `names`, with commas, differ."""
        names = [name for name in query.get("names", "").split(",") if name]
        folders = [runs.folder_of(self.roots, name) for name in names]
        return {"names": names, "settings": runs.differences([runs.read_settings(folder) for folder in folders])}

    def machines(self, query: Query) -> dict[str, Any]:
        """What the run's processes said last, and what came of each engine in the last steps."""
        folder = self.folder(query)
        try:
            engines = episodes.engines(folder)
        except episodes.NoRecord:
            engines = []
        alive = runs.read_json(folder / runs.ALIVE) or {}
        known = {actor["name"]: actor for actor in alive.get("actors", [])}
        for name, facts in alive.get("engines", {}).items():  # some came while the run trained
            known[name] = known.get(name, {"name": name}) | facts
        for name, part in (alive.get("parts") or {}).items() if not alive.get("ended") else ():
            known[name] = known.get(name, {"name": name}) | {"now": part}
        paces = {name: facts["seconds_per_step"] for name, facts in known.items() if facts.get("seconds_per_step")}
        for name, pace in paces.items():
            others = [each for other, each in paces.items() if other != name]
            if others and pace >= SLOWER * (usual := statistics.median(others)):
                known[name] |= {"slow": pace / usual}
        return {"alive": alive or None, "actors": [*known.values()], "engines": engines, "now": time.time()}

    def lanes(self, query: Query) -> dict[str, Any]:
        folder = self.folder(query)
        traced = lanes.steps(folder)
        if not traced:
            return {"steps": [], "lanes": [], "words": []}
        step = int(episodes.as_number("step", query.get("step") or str(traced[-1])))
        if step not in traced:
            raise episodes.BadQuestion(f"step={step}: not traced; {', '.join(map(str, traced[:50]))} are (log.trace.steps)")
        return {"steps": traced} | lanes.lanes(folder, step)

    def told(self, query: Query) -> list[str]:
        folder = self.folder(query)
        return lanes.told(folder, lanes.chosen(folder, query.get("steps")))


def phases(metrics: Metrics) -> list[dict[str, Any]]:
    """What the time of the steps went into: name, seconds, share; the rest is `other`. The longest first."""
    total = sum(value for _, value in metrics.pairs("seconds"))
    if not total:
        return []
    spent = {key.removeprefix(PHASE): sum(v for _, v in metrics.pairs(key)) for key in metrics.columns if key.startswith(PHASE)}
    spent["other"] = max(0.0, total - sum(spent.values()))
    return [{"name": name, "seconds": s, "share": s / total} for name, s in sorted(spent.items(), key=lambda item: -item[1]) if s > 0]
