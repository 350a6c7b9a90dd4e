"""Which settings are wrong, and the line that says so: what is allowed, where it was read, and the nearest name."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from trainer.cli import elsewhere
from trainer.cli.help import allowed_at, find, settings, show, within
from trainer.configs.sections import Config, Rule, unread, value_of

C = TypeVar("C", bound=Config)
Values = dict[str, Any]
Sources = dict[str, str]  # dotted key, or list item such as optim.betas[1] -> where it was read
COMMAND_LINE, DEFAULT = "command line", "default"


def validated(model: type[C], values: Values, sources: Sources, file: str | None) -> tuple[C, dict[str, list[str]]]:
    """The config, and the errors of the settings that are wrong in themselves, which have some other value in it."""
    values = {"data": {}, **values}
    wrong: dict[str, list[str]] = {}
    try:
        config = model.model_validate(values, context={"rules": False})
    except ValidationError as error:
        for details in error.errors():
            key = _setting(model, dotted(details["loc"]))
            wrong[key] = wrong.get(key, []) + _explain(model, dict(details), sources, file)
        if "data.mix" in wrong:
            wrong.setdefault("data.path", [])  # without the sources it has to have one, of which nothing is said
        config = model.model_validate(_with_defaults(model, values, wrong), context={"rules": False})
    return config, wrong


def left_aside(config: Config, sources: Sources) -> dict[str, str]:
    """Settings that nothing reads with the values that a person named, and why."""
    named = {key: only for key, only, _ in unread(config) if only.setting in sources}
    return {key: f"not read with {only.setting}={show(value_of(config, only.setting))}; {only.why}" for key, only in named.items()}


def touches(key: str, names: Iterable[str]) -> bool:
    """Whether a setting is one of these, in one of them, or around one."""
    return any(lies_in(key, name) or lies_in(name, key) for name in names)


def lies_in(key: str, around: str) -> bool:
    return key == around or key.startswith((f"{around}.", f"{around}["))


def dotted(place: Iterable[int | str]) -> str:
    """Such as optim.betas[1]."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _is_setting(model: type[Config], key: str) -> bool:
    try:
        find(model, key)
    except KeyError:
        return False
    return True


def named(line: str) -> str:
    """The setting that the line of a check begins with."""
    return re.split("[=:]", line)[0]


def placed(model: type[Config], line: str, sources: Sources) -> str:
    key = named(line)
    return f"{source(model, key, sources)}: {line}" if _is_setting(model, key) else line


def _setting(model: type[Config], key: str) -> str:
    """The setting that pydantic's place is in: optim.betas for optim.betas[1]; the place itself where there is no such setting."""
    try:
        return find(model, key.partition("[")[0])[0]
    except KeyError:
        return key


def _with_defaults(model: type[Config], values: Values, keys: Iterable[str]) -> Values:
    """The values without those at `keys`; what has no default gets some value of its type."""
    values = copy.deepcopy(values)
    for key in keys:
        *parents, last = key.split(".")
        at: Any = values
        for parent in parents:
            at = at.get(parent)
        at.pop(last, None)
        field = settings(model).get(key)
        if field is not None and field.is_required():
            at[last] = "x"
    return values if isinstance(values.get("data"), dict) else {**values, "data": {"path": "x"}}


def _explain(model: type[Config], error: dict[str, Any], sources: Sources, file: str | None) -> list[str]:
    """Lines for one of pydantic's errors."""
    key = dotted(error["loc"])
    if error["type"] == "extra_forbidden":
        below = [name for name in sources if name.startswith(f"{key}.") and "[" not in name]
        if key in sources:  # of a file: what a foreign section has in it, one by one
            below = [name for name in below if "." not in name.removeprefix(f"{key}.")] if key in model.READS_NOT else []
        return [_explain_unknown(model, name, sources, error["input"], key) for name in below or [key]]
    if error["loc"][-1] == "[key]":
        place, name = dotted(error["loc"][:-2]), str(error["loc"][-2])
        words = "a name of letters, digits, _ and -, with a letter or _ first"
        return [f"{source(model, f'{place}.{name}', sources)}: {place}: {name!r} is not {words}"]
    if error["type"] == "missing":
        setting = find(model, key)[1] if key == _setting(model, key) else None
        hint = f": {setting.description}" if setting else ""
        place = next((sources[around] for around in _around(key) if around in sources), file or COMMAND_LINE)
        return [f"{place}: {key}: is missing; it is {allowed_at(model, error['loc'])}{hint}"]
    return [f"{source(model, key, sources)}: {key}: {_shown(error['input'])} is not {allowed_at(model, error['loc'])}"]


def _around(key: str) -> Iterator[str]:
    """a.b and a, of a.b.c."""
    while "." in key:
        yield (key := key.rpartition(".")[0])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _explain_unknown(model: type[Config], key: str, sources: Sources, value: Any, around: str) -> str:
    where = source(model, key, sources)
    why = model.READS_NOT.get(key) or model.READS_NOT.get(key.partition(".")[0])
    if why is None:
        theirs = elsewhere.hint(key)
        return f"{where}: {key}: {theirs}" if theirs else f"{where}: {key}: unknown key{nearest(model, key)}"
    for part in key.removeprefix(around).split("."):
        value = value.get(part, value) if isinstance(value, dict) else value
    return f"{where}: {key}={show(value)}: not read by {model.ENTRY}; {why}"


def explain_rule(config: Config, rule: Rule, sources: Sources) -> str:
    shown = ", ".join(f"{key}={show(value_of(config, key))}" for key in rule.keys)
    places = dict.fromkeys(source(type(config), key, sources) for key in rule.keys)
    named = [place for place in places if place != DEFAULT]
    return f"{', '.join(named) or DEFAULT}: {shown}: {rule.text}"


def source(model: type[Config], key: str, sources: Sources) -> str:
    """Where a key was read, or the setting that it lies in, or something below it."""
    below = (place for name, place in sources.items() if name.startswith(f"{key}."))
    return sources.get(key) or sources.get(_setting(model, key)) or next(below, DEFAULT)


def nearest(model: type[Config], key: str) -> str:
    """Settings whose whole name, or whose last part, is like this one; else those that there are."""
    names = list(settings(model))
    if around := within(model, key):
        last = difflib.get_close_matches(key.rpartition(".")[2], around, n=1, cutoff=0.6)
        return f"; did you mean {key.rpartition('.')[0]}.{last[0]}?" if last else f" (allowed: {', '.join(around)})"
    same_last = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = difflib.get_close_matches(key, names if "." in key else [*names, *model.model_fields], n=1, cutoff=0.75)
    lasts = {name.rpartition(".")[2]: name for name in reversed(names)}
    close_last = [lasts[last] for last in difflib.get_close_matches(key.rpartition(".")[2], lasts, n=1, cutoff=0.75)]
    found = close or same_last[:2] or close_last
    section = model.model_fields.get(key.partition(".")[0])
    allowed = section.annotation.model_fields if section else model.model_fields  # type: ignore[union-attr]
    return f"; did you mean {' or '.join(found)}?" if found else f" (allowed: {', '.join(allowed)})"
