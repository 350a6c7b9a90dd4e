"""Stack files -> Stack: what is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.schema_stacks import LOCAL, SSH, as_pulumi, changed

from stacks import load
from stacks.load import StackError
from stacks.schema import Stack

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", load.names(ROOT))
def test_every_stack_of_the_repository_reads_the_same_from_its_file_and_from_pulumi(name):
    stack = load.load(name, ROOT)
    assert stack.name == name
    assert load.parse(name, as_pulumi(load.settings(name, ROOT))) == stack


def test_numbers_may_be_text_as_pulumi_writes_them(project):
    root = project(changed(changed(LOCAL, "fleets.0.nodes", "3"), "task.retry", "false"))
    stack = load.load("test", root)
    assert (stack.fleets[0].nodes, stack.task.retry) == (3, False)


def test_nodes_follow_from_the_hosts(project):
    assert load.load("test", project(SSH)).fleets[0].nodes == 2


def test_one_address_may_lead_to_hosts_on_different_ports(project):
    hosts = [{"hostname": "gate", "port": 2201}, {"hostname": "gate", "port": "2202"}]
    assert load.load("test", project(changed(SSH, "fleets.0.ssh.hosts", hosts))).fleets[0].nodes == 2


def test_environment_values_become_text_and_null_stays(project):
    env = {"A": 1, "B": True, "C": None, "D": 0.5, "E": ""}
    assert load.load("test", project(changed(LOCAL, "task.env", env))).task.env == {"A": "1", "B": "true", "C": None, "D": "0.5", "E": ""}


def test_bare_keys_are_ours_and_other_namespaces_are_left_alone(project):
    settings = {"cloud": "local", "flotilla:fleets": LOCAL["flotilla:fleets"], "aws:region": "us-east-1"}
    assert load.load("test", project(settings)).cloud == "local"


def test_defaults_of_the_project_hold_until_a_stack_says_otherwise(project):
    root = project(LOCAL)
    declared = yaml.safe_load((root / "Pulumi.yaml").read_text())
    declared["config"]["task"]["default"] = {"dashboard_port": 9000}
    (root / "Pulumi.yaml").write_text(yaml.safe_dump(declared))
    assert load.load("test", root).task.dashboard_port == 9000
    project(changed(LOCAL, "task.dashboard_port", 9001))
    assert load.load("test", root).task.dashboard_port == 9001


def test_an_unknown_stack_is_told_which_there_are(project):
    with pytest.raises(StackError, match=r"no stack 'nope' \(stacks/Pulumi.nope.yaml does not exist\); the stacks are: test$"):
        load.load("nope", project(LOCAL))


def test_a_stack_name_that_dstack_would_refuse_is_refused(project):
    root = project(LOCAL)
    (root / "stacks/Pulumi.test.yaml").rename(root / "stacks/Pulumi.My_Stack.yaml")
    with pytest.raises(StackError, match=r"stacks/Pulumi.My_Stack.yaml: the stack's name 'My_Stack' is not a name of 2 to 41"):
        load.load("My_Stack", root)


@pytest.mark.parametrize("text", ["config: [", "- a\n- b\n", "config: text\n", "config:\n  a: 1\n  a: 2\n"])
def test_a_broken_file_is_named(project, text):
    root = project(LOCAL)
    (root / "stacks/Pulumi.test.yaml").write_text(text)
    with pytest.raises(StackError, match=r"^stacks/Pulumi.test.yaml: .+"):
        load.load("test", root)


def test_the_project_declares_each_setting_with_its_type_and_a_description():
    declared = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())["config"]
    assert list(declared) == load.SETTINGS
    for key, spec in declared.items():
        assert spec["description"]
        assert spec["type"] == load.node_at((key,)).get("type")
        # Pulumi asks for every declared key without a default.
        assert ("default" in spec) == (key not in Stack.model_json_schema()["required"])
