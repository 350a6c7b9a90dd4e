"""docs/trainer-settings.md, from the entry points' types of settings.

python -m trainer.cli.reference      writes it again
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.cli.help import allowed, allowed_at, default, find, is_map, marks, settings
from trainer.configs.ppo import PpoConfig
from trainer.configs.preferences import DpoConfig, RmConfig
from trainer.configs.sections import Config
from trainer.configs.sft import SftConfig

PAGE = Path(__file__).parents[2] / "docs/trainer-settings.md"
ENTRY_POINTS: tuple[type[Config], ...] = (PpoConfig, SftConfig, RmConfig, DpoConfig)
SCORED = ("model", "data", "evals", "reward", "environment", "rollout", "placement")  # what flotilla eval takes from a run's settings
HEAD = """\
# Trainer settings

Every key of a run's settings file and of `key=value` overrides, for `python -m trainer.train_ppo` and the other entry points.
Generated from `trainer/configs/` by `python -m trainer.cli.reference`; edit the types there, not this page. How files, overrides
and checks work: [training](training/README.md#settings). The stack file has [other settings](settings.md).

"Read by" lists entry points: `ppo` is `train_ppo`, `sft` `train_sft`, `rm` `train_rm`, `dpo` `train_dpo`; `all` is all four.
`flotilla eval` takes a settings file of `train_ppo` and uses its sections {scored},
and `run.seed`, `trainer.eval_*`, `trainer.timeout` and `trainer.silence`.
"Read only with" names the setting that a key depends on; without it, the key is refused.

Sections: {sections}.
"""
# Values of keys whose type does not show their form; a test validates each.
EXAMPLES = {
    "model.init": "{model_type: qwen2, hidden_size: 64, num_hidden_layers: 2}",
    "data.args": "{digits: 3}",
    "data.learn": "[assistant, tool]",
    "optim.betas": "[0.9, 0.95]",
    "critic.betas": "[0.9, 0.95]",
    "placement.engine_resources": "{h100: 1}",
    "reward.args": "{tolerance: 0.01}",
    "reward.weights": "{correct: 1, style: 0.1}",
    "reward.terms": "{right: {function: numeric}, form: {function: format_regex, weight: 0.2, args: {pattern: .*boxed.*}}}",
    "environment.args": "{reward: math_verify}",
    "rollout.options": "{enforce_eager: true}",
}


def page() -> str:
    sections = list(dict.fromkeys(name for model in ENTRY_POINTS for name in model.model_fields))
    links = ", ".join(f"[{name}](#{name})" for name in sections)
    return HEAD.format(sections=links, scored=", ".join(f"`{name}`" for name in SCORED)) + "".join(
        f"\n{_section(name)}" for name in sections
    )


def _section(name: str) -> str:
    about = next(model.model_fields[name].description for model in ENTRY_POINTS if name in model.model_fields)
    keys = dict.fromkeys(key for model in ENTRY_POINTS for key in settings(model) if key.partition(".")[0] == name)
    rows = [row for key in keys for row in _rows(key)]
    return (
        "\n".join([f"## {name}\n", f"{about}\n", "| Key | Value | Default | Read by | Description |", "|---|---|---|---|---|", *rows])
        + "\n"
    )


def _rows(key: str) -> list[str]:
    """A row for each meaning that a key has in the entry points, then those of the settings in a map by name."""
    readers: dict[tuple[str, str, str], list[type[Config]]] = {}
    for model in ENTRY_POINTS:
        if key in settings(model):
            readers.setdefault(_cells(model, key), []).append(model)
    rows = []
    for number, ((value, given, about), models) in enumerate(readers.items()):
        anchor = "" if number else f'<a id="{key}"></a>'
        rows.append(_row(f"{anchor}`{key}`", value, given, _by(models), about))
    model = next(model for model in ENTRY_POINTS if key in settings(model))
    inner = _named(find(model, key)[1])
    for name, field in inner.model_fields.items() if inner else ():
        given = "**required**" if field.is_required() else f"`{field.default}`" if isinstance(field.default, int | float) else "-"
        by = _by([model for model in ENTRY_POINTS if key in settings(model)])
        rows.append(_row(f"`{key}.NAME.{name}`", allowed_at(model, (*key.split("."), "NAME", name)), given, by, field.description or ""))
    return rows


def _by(models: list[type[Config]]) -> str:
    return "all" if len(models) == len(ENTRY_POINTS) else ", ".join(model.ENTRY.removeprefix("train_") for model in models)


def _cells(model: type[Config], key: str) -> tuple[str, str, str]:
    field = find(model, key)[1]
    given = default(model, key)
    shown = "**required**" if field.is_required() else "-" if given in ("null", "{}", "[]") else f"`{given}`"
    example = f", such as `{EXAMPLES[key]}`" if key in EXAMPLES else ""
    only = "".join(f" Read only with {_condition(str(mark))}." for mark in marks(model, key)[:1])
    return f"{allowed(field)}{example}", shown, f"{field.description}{only}"


def _condition(mark: str) -> str:
    return re.sub(r"^([a-z_.]+)=?", r"`\1` ", mark).strip()


def _named(field: FieldInfo) -> type[BaseModel] | None:
    """The type of the sections in a map by name, such as evals; None of other settings."""
    last: Any = get_args(field.annotation)[-1] if is_map(field) and get_args(field.annotation) else None
    return last if isinstance(last, type) and issubclass(last, BaseModel) else None


def _row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
