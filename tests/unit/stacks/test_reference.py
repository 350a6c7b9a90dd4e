"""The reference page, the published JSON schema and Pulumi.yaml say what the schema says."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.edits import put

from stacks import load, reference
from stacks.schema import Stack

ROOT = Path(__file__).parents[3]
HOW = "run python -m stacks.reference"
DECLARED = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())["config"]


def stack_file(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / f"stacks/Pulumi.{name}.yaml").read_text())


def test_the_page_and_the_published_schema_are_up_to_date():
    assert reference.PAGE.read_text() == reference.page(), HOW
    assert json.loads(reference.SCHEMA.read_text()) == reference.schema(), HOW


def test_the_page_has_a_row_for_every_setting():
    rows = set(re.findall(r"^\| `(?:flotilla:)?([a-z_]+)` \|", reference.page(), re.M))
    keys = {key for model in Stack.model_json_schema()["$defs"].values() for key in model.get("properties", {})}
    assert rows == keys | set(load.SETTINGS)


def test_the_page_says_which_places_have_a_setting_its_values_and_default():
    page = reference.page()
    assert "| `flotilla:project` | a project id: 6 to 30 characters, a-z first, then a-z, 0-9 and - | - | gcp |" in page
    assert "| `nics` | an integer >= 1 | - | aws |" in page
    assert '| `provision` | one of dstack, pulumi | `"dstack"` | aws, gcp |' in page
    assert "| `dashboard_port` | an integer between 1 and 65535 | `8265` | Port of" in page, "the same places in all of a section"
    assert "## `flotilla:slurm`\n\nThe allocation on a Slurm cluster.\n\nPlaces: slurm.\n\n| Key |" in page
    assert "| `flotilla:cloud` | one of local, ssh, slurm, aws, gcp, dstack | **required** | all |" in page


def test_every_setting_has_a_description_and_an_anchor_of_its_own():
    page = reference.page()
    assert not re.findall(r"^\| `.*\| (?:<a .*)?\|$", page, re.M)
    anchors = re.findall(r'<a id="([\w.]+)"></a> \|$', page, re.M)
    assert len(anchors) == len(set(anchors)) == len(re.findall(r"^\| `", page, re.M))
    assert {"task.retry", "fleets.ssh.hosts.port", "task.services.NAME.port"} <= set(anchors)


@pytest.mark.parametrize("name", load.names(ROOT))
def test_every_stack_file_is_valid_by_the_published_schema(name):
    jsonschema.validate(stack_file(name), json.loads(reference.SCHEMA.read_text()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("flotilla:cloud", "azure"),
        ("flotilla:clod", "aws"),
        ("flotilla:fleets.0.nodes", "x"),
        ("flotilla:fleets.0.nodes", 0),
        ("flotilla:fleets.0.machin", "big"),
        ("flotilla:task.retry", "maybe"),
        ("flotilla:fleets", ...),
    ],
)
def test_an_error_is_invalid_by_the_published_schema(path, value):
    settings = copy.deepcopy(stack_file("local"))
    put(settings["config"], path, value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(settings, json.loads(reference.SCHEMA.read_text()))


@pytest.mark.parametrize("key", load.SETTINGS)
def test_pulumis_description_of_a_section_names_every_setting_in_it(key):
    words = set(re.findall(r"[a-z_]+", DECLARED[key]["description"]))
    node = load.node_at((key, 0) if load.node_at((key,)).get("type") == "array" else (key,))
    assert set(node.get("properties", {})) <= words
