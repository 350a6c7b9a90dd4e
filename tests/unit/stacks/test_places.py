"""One registry of places: the name of a cloud stands in its own files and there alone."""

from __future__ import annotations

import argparse
import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import toy_cloud

from cluster_tasks.node.settings import _parser
from stacks.load import StackError, parse
from stacks.places import PLACES, clouds, machine
from stacks.schema import Stack
from stacks.settings.checkpoints import Checkpoints

ROOT = Path(__file__).parents[3]
FILES = [file for package in ("stacks", "fleets", "cluster_tasks", "infra") for file in sorted((ROOT / package).rglob("*.py"))]
# `flotilla init` asks other questions for each place.
DECIDING = [file for file in [*FILES, *sorted((ROOT / "cli").glob("*.py"))] if ".venv" not in file.parts and file != ROOT / "cli/init.py"]
# Names that are not of places: a plugin for NCCL, the headers of a metadata service, modules of dstack, variables and hosts of S3.
OTHERS = re.compile(
    r"https?://\S+|aws-ofi-nccl|X-aws-ec2-metadata-token\S*|core\.backends\.\S+|AWS_[A-Z]+\S*|\.amazonaws\.com"
    r"|flotilla [a-z ]+ \w+-(?:dev|prod)"  # examples in a help
)
# Also who launches machines, and a section of the stack file: no comparison with it is one of places.
WORDS = {"dstack"}


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(PLACES, "toy", toy_cloud.PLACE)


def settings(**more: object) -> dict[str, object]:
    ours = {"cloud": "toy", "region": "toy-land-1", "fleets": [{"name": "gpus", "nodes": 2, "machine": "big"}]} | more
    return {f"flotilla:{key}": value for key, value in ours.items()}


@pytest.mark.parametrize("cloud", clouds())
def test_a_clouds_name_stands_in_its_own_files_and_the_registry_alone(cloud):
    allowed = {
        ROOT / f"stacks/places/{cloud}.py",
        ROOT / "stacks/places/__init__.py",
        ROOT / "stacks/settings/backends.py",  # the table of dstack's names
    }
    named = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in FILES
        if file not in allowed and not file.is_relative_to(ROOT / f"infra/{cloud}") and ".venv" not in file.parts
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if cloud in OTHERS.sub("", line).lower()
    ]
    assert not named, "\n".join(named)


@pytest.mark.parametrize("file", DECIDING, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_is_decided_by_a_places_name(file):
    """The registry says what a place is (`Place.remote`, `Place.batch`, `Place.cloud`)."""
    compared = [side for node in ast.walk(ast.parse(file.read_text())) for side in sides(node)]
    assert not [
        f"line {side.lineno}: {side.value}" for side in compared if isinstance(side, ast.Constant) and side.value in {*PLACES} - WORDS
    ]


def sides(node: ast.AST) -> list[ast.expr]:
    """What is compared: in ==, `in (...)`, and the cases of a match."""
    if isinstance(node, ast.Compare):
        compared = [node.left, *node.comparators]
        return compared + [part for side in compared if isinstance(side, ast.Tuple | ast.List | ast.Set) for part in side.elts]
    return [node.value] if isinstance(node, ast.MatchValue) else []


def test_a_comparison_with_a_place_is_seen():
    text = """
if stack.cloud == "local" or "aws" != cloud or name in ("slurm", "x"):
    match stack.cloud:
        case "gcp":
            pass
"""
    found = [side.value for node in ast.walk(ast.parse(text)) for side in sides(node) if isinstance(side, ast.Constant)]
    assert {*found} == {"aws", "gcp", "local", "slurm", "x"}


def test_a_place_is_known_by_its_name_and_has_a_program_of_its_own():
    assert {name: place.name for name, place in PLACES.items()} == {name: name for name in PLACES}
    assert len({place.program for place in PLACES.values()}) == len(PLACES)
    for place in PLACES.values():
        assert (ROOT / place.program.replace(".", "/") / "build.py").is_file()


@pytest.mark.parametrize("name", PLACES)
def test_what_a_place_says_of_settings_exists(name):
    place = PLACES[name]
    kinds = Checkpoints.model_json_schema()["properties"]["kind"]["enum"]
    assert set(place.checkpoints) <= set(kinds)
    for key in (*place.settings, *place.hints):
        section, last = key.partition(".")[0], key.rpartition(".")[2]
        node = Stack.model_json_schema()
        assert section in node["properties"], key
        assert last == section or any(last in model["properties"] for model in node["$defs"].values()), key
    assert not set(place.hints) & set(place.settings)


@pytest.mark.parametrize("name", clouds())
def test_what_a_cloud_says_fits_together(name):
    cloud = PLACES[name].cloud
    assert cloud
    assert re.fullmatch(cloud.region, cloud.region_example)
    assert machine(name, cloud.machine_example).gpus == 8
    assert cloud.cache in PLACES[name].checkpoints
    assert {known.cloud for known in cloud.machines} == {name}
    assert _parser().parse_args(["--spot", cloud.preemption], namespace=argparse.Namespace()).spot == cloud.preemption


def test_an_unknown_place_is_refused_with_the_nearest():
    with pytest.raises(
        StackError, match=r"flotilla:cloud: 'slrum' is not one of local, ssh, slurm, aws, gcp, dstack; did you mean slurm\?$"
    ):
        parse("test", settings(cloud="slrum"))


@pytest.mark.usefixtures("toy")
def test_a_toy_clouds_stack_is_read_by_the_rules_of_all_clouds_and_by_its_own():
    assert parse("test", settings()).cloud == "toy"
    with pytest.raises(StackError) as error:
        parse("test", settings(region="mars", network={"nat": "per-zone"}, project="my-project", checkpoints={"kind": "bucket"}))
    assert [line.split(": ", 1)[1] for line in str(error.value).splitlines()] == [
        "flotilla:project: belongs to flotilla:cloud gcp, but that is toy",
        "flotilla:checkpoints.kind: bucket is not on flotilla:cloud toy (allowed here: instance, network)",
        "flotilla:region: 'mars' is not a region of toy, such as toy-land-1",
        "flotilla:network.nat: per-zone is not on flotilla:cloud toy",
    ]


def test_a_toy_clouds_stack_is_unknown_where_nobody_registers_it():
    assert find_spec("toy_cloud")
    with pytest.raises(StackError, match="flotilla:cloud: 'toy' is not one of local, ssh, slurm, aws, gcp, dstack"):
        parse("test", settings())
