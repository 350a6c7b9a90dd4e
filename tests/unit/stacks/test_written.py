"""What stands in a stack file is what a setting has: text as it is written, numbers as everybody reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from support.schema_stacks import LOCAL

from stacks import load, sections, written
from stacks.load import StackError
from stacks.schema import Stack
from trainer.cli import yaml_io

ROOT = Path(load.__file__).parents[1]
HEAD = "config:\n  flotilla:cloud: local\n  flotilla:fleets:\n    - name: laptop\n      nodes: 2\n"
TEXTS = (
    *("0022", "01234567", "2.10", "1_000", "0x1F", "0o17", "12:30", "1000:50", "24:00:00", "+5", "-0", "1e3", "1.", ".5", "0b101"),
    *("yes", "Yes", "NO", "on", "Off", "y", "n", "true", "True", "FALSE", "2026-01-31", "2026-01-31 12:00:00", "2026-01-31T12:00:00Z"),
    *(
        "0.1000000000000000055",
        "123456789012345678901234567890",
        ".inf",
        "-.INF",
        ".nan",
        "nan",
        "1__0",
        "0",
        "00",
        "08",
        "=",
        "<",
        "1e999",
    ),
)


def loaded(project, more: str = "", head: str = HEAD) -> Stack:
    root = project(LOCAL)
    (root / "stacks/Pulumi.test.yaml").write_text(head + more)
    return load.load("test", root)


def error(project, more: str, head: str = HEAD) -> str:
    with pytest.raises(StackError) as caught:
        loaded(project, more, head)
    return str(caught.value)


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_the_text_as_written(project, text):
    stack = loaded(project, f"  flotilla:task:\n    env: {{A: {text}}}\n")
    assert stack.task.env == {"A": text}
    assert yaml_io.compose(f"A: {text}").value[0][1].value == text  # type: ignore[union-attr]  # a run file's


@pytest.mark.parametrize("text", ["null", "~", "Null", ""])
def test_null_is_the_shells_value(project, text):
    assert loaded(project, f"  flotilla:task:\n    env: {{A: {text}}}\n").task.env == {"A": None}


@pytest.mark.parametrize("user", ["1000:50", "1000", "1000:100", "0", "12:30"])
def test_a_user_and_group_are_no_seconds(project, user):
    assert loaded(project, f"  flotilla:task: {{user: {user}}}\n").task.user == user


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("nodes: 010", "test.yaml:5: flotilla:fleets[0].nodes: 010 is octal to some programs; write 10"),
        ("nodes: 00", "flotilla:fleets[0].nodes: 00 is octal to some programs; write 0"),
        ("nodes: -07", "flotilla:fleets[0].nodes: -07 is octal to some programs; write -7"),
        ("nodes: 12:30", "flotilla:fleets[0].nodes: '12:30' is not an integer"),
        ("nodes: 2026-01-31", "flotilla:fleets[0].nodes: '2026-01-31' is not an integer"),
        ("nodes: yes", "flotilla:fleets[0].nodes: 'yes' is not an integer"),
        ("nodes: true", "flotilla:fleets[0].nodes: True is not an integer"),
        ("nodes: 1.5", "flotilla:fleets[0].nodes: 1.5 is not an integer"),
        ("nodes: .inf", "flotilla:fleets[0].nodes: inf is not an integer"),
    ],
)
def test_a_number_is_one_number_to_everybody(project, more, says):
    assert says in error(project, "", HEAD.replace("nodes: 2", more))


@pytest.mark.parametrize(("text", "nodes"), [("10", 10), ("0x1F", 31), ("0o17", 15), ("+5", 5), ("1e1", 10), ('"4"', 4), ("1_0", 10)])
def test_numbers_that_all_read_alike(project, text, nodes):
    assert loaded(project, "", HEAD.replace("nodes: 2", f"nodes: {text}")).fleets[0].nodes == nodes


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("yes", True), ("off", False), ("no", False), ('"false"', False)]
)
def test_a_boolean_may_be_a_word(project, text, value):
    assert loaded(project, f"  flotilla:task: {{retry: {text}}}\n").task.retry is value


def test_keys_are_text(project):
    stack = loaded(project, "  flotilla:task:\n    services:\n      box: {command: sleep 9, on: every}\n")
    assert stack.task.services["box"].on == "every"
    assert "flotilla:task.0x10: unknown key" in error(project, "  flotilla:task: {0x10: 1}\n")
    assert "test.yaml:6: flotilla:task.no: unknown key" in error(project, "  flotilla:task: {no: 1}\n")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("  cloud: ssh\n", "stacks/Pulumi.test.yaml:6: cloud: is flotilla:cloud, which is in this file too; remove one"),
        ("  flotilla:cloud: ssh\n", "flotilla:cloud is set twice"),
        ("  flotilla:task: {retry: true, retry: false}\n", "retry is set twice"),
        ("  flotilla:task: &a [*a]\n", "an alias refers to itself"),
        ("  flotilla:task: {[1]: 2}\n", "is not YAML"),
    ],
)
def test_what_stands_twice_or_is_no_setting_is_refused(project, more, says):
    assert says in error(project, more)


def test_a_backends_own_settings_keep_their_types():
    read = written.simplified(written.load("{port: 22, on: true, account: 0123, ratio: 0.5, version: 2.10, list: [8], size: 0x10}"))
    assert read == {"port": 22, "on": True, "account": "0123", "ratio": 0.5, "version": "2.10", "list": [8], "size": "0x10"}


def blocks() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        (page.name, block) for page in pages for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    return [(name, block.replace("DIGEST", "0" * 64)) for name, block in found if re.search(r"^ *flotilla:\w+:", block, re.MULTILINE)]


@pytest.mark.parametrize(("page", "block"), blocks(), ids=lambda value: value if value.endswith(".md") else "block")
def test_settings_of_the_pages_are_read(page, block):
    """By their text: what PyYAML makes of them is not what a stack file would have."""
    content = written.load(block)
    values = {key.removeprefix("flotilla:"): value for key, value in content.get("config", content).items()}
    for fleet in values.get("fleets", []):
        if "ssh" not in fleet:
            fleet.setdefault("nodes", "1")
    whole = {"name": "page", "cloud": "local", "fleets": [{"name": "laptop", "nodes": 1}]} | values
    assert list(sections.section_errors(Stack.model_validate(whole))) == []


def test_idle_duration_off_is_read():
    assert yaml.safe_load("off") is False  # which is why
    assert written.load("off") == "off"


@pytest.mark.parametrize(
    "name",
    [
        "stacks/Pulumi.test.yaml",
        "./stacks/Pulumi.test.yaml",
        "Pulumi.test.yaml",
        "test.yaml",
        "me/flotilla/test",
        "organization/flotilla/test",
    ],
)
def test_a_stack_by_its_path_or_full_name_gets_the_name_that_was_meant(project, name):
    root = project(LOCAL)
    for other in ("my.stack", "Prod", "x"):
        (root / f"stacks/Pulumi.{other}.yaml").write_text("config: {}")
    with pytest.raises(StackError) as caught:
        load.load(name, root)
    assert str(caught.value) == f"there is no stack {name!r}; did you mean test; the stacks are: test"


def test_a_stack_with_a_name_that_is_none_is_told_so(project):
    root = project(LOCAL)
    (root / "stacks/Pulumi.Prod.yaml").write_text(HEAD)
    with pytest.raises(StackError, match=r"stacks/Pulumi\.Prod\.yaml: the stack's name 'Prod' is not a name of 2 to 41 characters"):
        load.load("Prod", root)
