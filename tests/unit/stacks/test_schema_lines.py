"""Stack files with several mistakes, or none that is read: all are reported, each with the line that it stands on."""

from __future__ import annotations

import pytest
from support.schema_stacks import LOCAL, unnumbered

from stacks import load
from stacks.load import StackError

SIX_TYPES = """\
config:
  flotilla:cloud: sssh
  flotilla:fleets:
    - name: gpus
      nodes: x
      cpus: 0
      machin: big
  flotilla:task:
    retry: maybe
    env:
      A: [1]
"""
SIX_RULES = """\
config:
  flotilla:cloud: slurm
  flotilla:region: us-east-1
  flotilla:fleets:
    - {name: gpus, nodes: 2, machine: p5.48xlarge}
    - {name: gpus, nodes: 2}
  flotilla:task: {fleets: [gpus, cpus], job: {command: python x.py}}
  flotilla:checkpoints:
    kind: instance
"""


def test_every_error_of_a_file_is_a_line_with_its_line_number(project):
    root = project(LOCAL)
    (root / "stacks/Pulumi.test.yaml").write_text(SIX_TYPES)
    with pytest.raises(StackError) as error:
        load.load("test", root)
    assert [line.split(": ")[:2] for line in str(error.value).splitlines()] == [
        ["stacks/Pulumi.test.yaml:2", "flotilla:cloud"],
        ["stacks/Pulumi.test.yaml:5", "flotilla:fleets[0].nodes"],
        ["stacks/Pulumi.test.yaml:6", "flotilla:fleets[0].cpus"],
        ["stacks/Pulumi.test.yaml:7", "flotilla:fleets[0].machin"],
        ["stacks/Pulumi.test.yaml:9", "flotilla:task.retry"],
        ["stacks/Pulumi.test.yaml:11", "flotilla:task.env.A"],
    ]


def test_every_error_of_settings_against_one_another_is_a_line(project):
    root = project(LOCAL)
    (root / "stacks/Pulumi.test.yaml").write_text(SIX_RULES)
    with pytest.raises(StackError) as error:
        load.load("test", root)
    assert [line.split(": ")[:2] for line in str(error.value).splitlines()] == [
        ["stacks/Pulumi.test.yaml:3", "flotilla:region"],
        ["stacks/Pulumi.test.yaml:5", "flotilla:fleets[0].machine"],
        ["stacks/Pulumi.test.yaml:6", "flotilla:fleets[1].name"],
        ["stacks/Pulumi.test.yaml:7", "flotilla:task.fleets[1]"],
        ["stacks/Pulumi.test.yaml:7", "flotilla:task.job"],
        ["stacks/Pulumi.test.yaml:9", "flotilla:checkpoints.kind"],
    ]


SIX_KINDS = """\
config:
  flotilla:cloud: aws
  flotilla:region: us-east-1
  flotilla:fleets:
    - name: gpus
      nodes: x
      machine: p5.48xlage
      image: ubuntu
    - {name: more, nodes: 2, machine: g6.8xlarge, cpus: 64}
  flotilla:task:
    dashboard_port: high
    image: ray
  flotilla:checkpoints: {kind: filestore, size: 1TB}
  flotilla:dstack: {host: cloud}
"""


def test_errors_of_types_rules_and_machine_types_come_in_one_round(project):
    root = project(LOCAL)
    (root / "stacks/Pulumi.test.yaml").write_text(SIX_KINDS)
    with pytest.raises(StackError) as error:
        load.load("test", root)
    assert [line.removeprefix("stacks/Pulumi.test.yaml:").split("; ")[0].split(" (")[0] for line in str(error.value).splitlines()] == [
        "6: flotilla:fleets[0].nodes: 'x' is not an integer >= 1, or a range such as 0..8 for role: rollout",
        "7: flotilla:fleets[0].machine: 'p5.48xlage' is not a machine type of aws in stacks/places/aws.py",
        "8: flotilla:fleets[0].image: belongs to provision: pulumi",
        "8: flotilla:fleets[0].image: 'ubuntu' is not a valid AMI id, such as ami-0123456789abcdef0",
        "9: flotilla:fleets[1].cpus: 64 is more than the 32 of g6.8xlarge",
        "11: flotilla:task.dashboard_port: 'high' is not an integer between 1 and 65535",
        "12: flotilla:task.image: 'ray' is not pinned",
        "13: flotilla:checkpoints.kind: filestore is not on flotilla:cloud aws",
    ]


APART = """\
config:
  flotilla:cloud: local
  flotilla:fleets:
    - name:
        laptop
      nodes: 1
  flotilla:cache:

    [nothing]
"""


def test_the_line_is_that_of_the_key_where_its_value_stands_further_below(project):
    root = project(LOCAL)
    (root / "stacks/Pulumi.test.yaml").write_text(APART)
    with pytest.raises(StackError, match=r"^stacks/Pulumi\.test\.yaml:7: flotilla:cache: "):
        load.load("test", root)


YOURS = """\
config:
  flotilla:cloud: gcp
  flotilla:project: my-project
  flotilla:region: us-central1
  flotilla:fleets:
    - {name: gpus, nodes: 2, machine: g2-standard-8}
  flotilla:network:
    vpc: projects/host-project/global/networks/shared
    subnets:
      - projects/other-project/regions/us-central1/subnetworks/nodes
  flotilla:checkpoints:
    kind: filestore
    file_system: runs
  flotilla:dstack: {host: cloud}
"""


def test_a_network_or_store_of_yours_that_is_misspelt_has_its_line(project):
    root = project(LOCAL)
    (root / "stacks/Pulumi.test.yaml").write_text(YOURS)
    with pytest.raises(StackError) as error:
        load.load("test", root)
    assert [line.split(": ")[:2] for line in str(error.value).splitlines()] == [
        ["stacks/Pulumi.test.yaml:10", "flotilla:network.subnets[0]"],
        ["stacks/Pulumi.test.yaml:13", "flotilla:checkpoints.file_system"],
    ]


def test_nothing_is_said_of_what_depends_on_a_setting_that_could_not_be_read(project):
    """Not that lustre wants machines of Pulumi's, nor that dstack takes silence for a region: kind and region may be meant otherwise."""
    settings = {"cloud": "aws", "regoin": "us-east-1", "checkpoints": {"kind": "nfs", "throughput": 250}, "dstack": {"host": "cloud"}}
    settings["fleets"] = [{"name": "gpus", "nodes": 2, "machin": "g6.8xlarge", "cpus": 64}]
    with pytest.raises(StackError) as error:
        load.load("test", project({f"flotilla:{key}": value for key, value in settings.items()}))
    assert sorted(unnumbered(line).split(" ")[1] for line in str(error.value).splitlines()) == [
        "flotilla:checkpoints.kind:",
        "flotilla:fleets[0].machin:",
        "flotilla:regoin:",
    ]


def test_what_is_missing_has_the_line_of_what_it_is_missing_from(project):
    with pytest.raises(StackError, match=r"^stacks/Pulumi.test.yaml:4: flotilla:fleets\[0\].nodes: is missing"):
        load.load("test", project({"flotilla:cloud": "local", "flotilla:fleets": [{"name": "laptop"}]}))


@pytest.mark.parametrize("text", ["", "config:\n", "config: {}\n"])
def test_an_empty_file_is_one_line(project, text):
    root = project(LOCAL)
    (root / "stacks/Pulumi.test.yaml").write_text(text)
    with pytest.raises(StackError, match=r"^stacks/Pulumi.test.yaml: has no settings; flotilla:cloud \(one of local, .*are needed$"):
        load.load("test", root)
