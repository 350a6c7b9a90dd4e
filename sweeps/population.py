"""Population-based training: at each rung the worst trials end, and copies of the best take their place with perturbed settings.

https://arxiv.org/abs/1711.09846. Optuna has no such search, and Ray Tune's is part of its own runner; what is ours here is who follows
whom, and by how much settings move. A copy has the checkpoint, with the place in the data, and goes on from it as a resumed run with
run.allow, so only what a resumed run may change is searched.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.decisions import Leg, Trial
from sweeps.plan import Plan
from sweeps.space import Choice, Parameter, Point
from trainer import metrics
from trainer.cli import yaml_io
from trainer.cli.changes import HARMLESS, refusal
from trainer.errors import ConfigError

FACTORS = (0.8, 1.25)  # of a number
TRIES = 20
COPIED = ("run.yaml", "starts.jsonl", metrics.FILE)  # beside the checkpoint


@dataclass(frozen=True)
class Exploit:
    """`loser` ends; a new trial begins with the checkpoint of `parent` at step `rung`."""

    loser: int
    parent: int
    rung: int


def require_changeable(space: Sequence[Parameter]) -> None:
    """Raises ConfigError for what no resumed run may change."""
    for each in space:
        ends = each.ends()
        why = next((why for other in ends[1:] if (why := refusal(each.key, (ends[0], other), [each.key]))), None)
        if why and not each.key.startswith(HARMLESS):
            raise ConfigError(f"--stop pbt: {each.key} cannot change between rungs: {why}; search it with --stop asha")


def next_of(plan: Plan, trials: Sequence[Trial]) -> Leg | Exploit | str | None:
    """As decisions.next_leg. Nobody goes on from a rung before all are there, and the worst are replaced."""
    if sum(trial.parent is None for trial in trials) < plan.trials:
        return "new"
    members = [trial for trial in trials if trial.state == "open"]
    rung = min((trial.reached for trial in members), default=plan.steps)
    waiting = [trial for trial in members if trial.reached == rung and trial.target is None]
    if not waiting or rung >= plan.steps:
        return None
    if len(waiting) == len(members) and rung and (found := _exploit(plan, trials, rung)):
        return found
    after = next(step for step in plan.rungs if step > rung)
    return Leg(waiting[0].number, after, f"{len(members)} trials at step {rung}")


def _exploit(plan: Plan, trials: Sequence[Trial], rung: int) -> Exploit | None:
    """The next pair that is not made yet. Failed trials are the first to be replaced."""
    trained = [t for t in trials if t.since != rung and (rung in t.values or (t.state == "failed" and t.target == rung))]
    ranked = sorted(trained, key=lambda t: (t.state == "failed", plan.metric.order(t.values.get(rung, plan.metric.worst)), t.number))
    failed = sum(trial.state == "failed" for trial in ranked)
    count = min(max(failed, len(ranked) // plan.factor), len(ranked) // 2, len(ranked) - failed)
    replaced = {trial.replaces for trial in trials if trial.since == rung}
    for winner, loser in zip(ranked[:count], reversed(ranked), strict=False):
        if loser.number not in replaced:
            return Exploit(loser.number, winner.number, rung)
    return None


def perturbed(plan: Plan, point: Point, exploit: Exploit, refused: Callable[[Point], str | None]) -> Point:
    """Other settings near these, the same ones for the same seed; these themselves where the trainer takes none near them."""
    draw = random.Random(f"{plan.seed} {exploit.rung} {exploit.loser}")
    for _ in range(TRIES):
        found = point | {each.key: _moved(each, point[each.key], draw) for each in plan.space}
        if found != point and not refused(found):
            return found
    return point


def _moved(parameter: Parameter, text: str, draw: random.Random) -> str:
    if isinstance(parameter, Choice) or parameter.step:
        texts = parameter.grid()
        place = texts.index(text) + draw.choice((-1, 0, 1))
        return texts[min(max(place, 0), len(texts) - 1)]
    factor, value = draw.choice(FACTORS), float(text)
    moved = value * factor if value else (parameter.high - parameter.low) * (factor - 1)
    if parameter.whole and round(moved) == round(value):
        moved = value + (1 if factor > 1 else -1)
    return parameter.text(min(max(moved, parameter.low), parameter.high))


def copy(parent: Path, child: Path, rung: int) -> None:
    """The parent's run up to a rung under the child's name; whole, or not there."""
    if child.exists():
        return
    draft = child.with_name(f".{child.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    (draft / "checkpoints").mkdir(parents=True)
    shutil.copytree(parent / "checkpoints" / f"step_{rung}", draft / "checkpoints" / f"step_{rung}")
    if (parent / "initial").is_dir():
        shutil.copytree(parent / "initial", draft / "initial")
    for name in COPIED:
        if (parent / name).exists():
            shutil.copyfile(parent / name, draft / name)
    metrics.keep_until(draft / metrics.FILE, rung)
    settings = yaml_io.load((draft / "run.yaml").read_text())
    settings["run"] = {**settings["run"], "name": child.name}
    (draft / "run.yaml").write_text(yaml_io.dump(settings))
    (draft / "copied.json").write_text(json.dumps({"from": parent.name, "step": rung}))
    draft.rename(child)
