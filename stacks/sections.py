"""The sections of a stack file: what each one's own checks say, and what can be read of those that have errors.

A rule that asks such a section for a setting that could not be read meets `Unknown`, and says nothing of what depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import TypeAdapter

from stacks.settings.fields import Model, known, located
from stacks.written import Location

Section = TypeVar("Section", bound=Model)


def section_errors(section: Model, at: Location = ()) -> Iterator[tuple[Location, str]]:
    """Of the section at `at`, and of all below it, each in one line."""
    for below, text in map(located, known(section.own_errors())):
        yield (*at, *below), text
    for key, value in section.__dict__.items():
        items = enumerate(value) if isinstance(value, tuple) else value.items() if isinstance(value, dict) else ()
        for below, part in {(key,): value, **{(key, name): item for name, item in items}}.items():
            if isinstance(part, Model):
                yield from section_errors(part, (*at, *below))


def readable(kind: type[Section], values: Mapping[str, Any], wrong: Collection[Location]) -> Section:
    """A section from its raw values, without the settings at `wrong`."""
    if not wrong:
        return kind.model_validate(values)
    found: dict[str, Any] = {}
    for key, field in kind.model_fields.items():
        below = [at[1:] for at in wrong if at[:1] == (key,)]
        part, value = _section(field.annotation), values.get(key)
        if not below and key in values:
            annotated: Any = Annotated[field.annotation, field]
            found[key] = TypeAdapter(annotated).validate_python(value)
        elif not below and not field.is_required():
            found[key] = field.get_default(call_default_factory=True)
        elif part and isinstance(value, dict) and get_origin(field.annotation) is dict and all(len(at) > 1 for at in below):
            found[key] = {name: readable(part, item, [at[1:] for at in below if at[0] == name]) for name, item in value.items()}
        elif part and isinstance(value, dict) and get_origin(field.annotation) is not dict and () not in below:
            found[key] = readable(part, value, below)
        elif part and isinstance(value, list) and all(len(at) > 1 for at in below):
            found[key] = tuple(readable(part, item, [at[1:] for at in below if at[0] == index]) for index, item in enumerate(value))
    section = kind.model_construct(**found)
    for key in kind.model_fields.keys() - found.keys():
        vars(section).pop(key, None)  # else it would have its default
    return section


def _section(annotation: Any) -> type[Model] | None:
    """The settings that a field holds, or that each item of its list does."""
    parts = (annotation, *get_args(annotation))
    return next((part for part in parts if isinstance(part, type) and issubclass(part, Model)), None)
