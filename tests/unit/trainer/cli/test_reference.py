"""docs/trainer-settings.md says what the entry points read."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from trainer.cli import reference
from trainer.cli.help import allowed, find, settings
from trainer.configs.sections import Config

PAGE = reference.page()


def test_the_page_is_up_to_date():
    assert reference.PAGE.read_text() == PAGE, "run python -m trainer.cli.reference"


@pytest.mark.parametrize("model", reference.ENTRY_POINTS, ids=lambda model: model.ENTRY)
def test_every_setting_has_a_row_with_its_entry_point_type_and_description(model: type[Config]):
    name = model.ENTRY.removeprefix("train_")
    for key, field in settings(model).items():
        rows = [row.split(" | ") for row in re.findall(rf"^\| (?:<a id=\"[\w.]+\"></a>)?`{re.escape(key)}` \| .*$", PAGE, re.M)]
        row = next(row for row in rows if row[3] == "all" or name in row[3].split(", "))
        assert row[1].startswith(allowed(field))
        assert row[-1].startswith((field.description or "?").replace("|", "\\|"))


def test_every_key_has_one_anchor():
    anchors = re.findall(r'<a id="([\w.]+)">', PAGE)
    assert sorted(anchors) == sorted({key for model in reference.ENTRY_POINTS for key in settings(model)})


def test_a_key_that_entry_points_read_differently_has_a_row_for_each_meaning():
    rows = re.findall(r"^\| .*`algorithm\.loss` \| (.*?) \| .*$", PAGE, re.M)
    assert rows == ["one of clip, gspo, cispo, sapo", "one of sigmoid, ipo, robust, simpo, kto"]


@pytest.mark.parametrize("key", reference.EXAMPLES)
def test_an_example_is_a_value_of_a_key_that_takes_lists_or_maps(key):
    fields = [find(model, key)[1] for model in reference.ENTRY_POINTS if key in settings(model)]
    assert fields and all("a list of" in allowed(field) or "a map of" in allowed(field) for field in fields)
    for field in fields:
        kind: Any = field.annotation
        TypeAdapter(kind).validate_python(yaml.safe_load(reference.EXAMPLES[key]))
    assert f"such as `{reference.EXAMPLES[key]}`" in PAGE
