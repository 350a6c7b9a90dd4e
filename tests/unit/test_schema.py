"""Stack files -> Stack: what is read, and the one line that a mistake gets."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from edits import put

from stacks import load
from stacks.load import StackError
from stacks.schema import Stack

ROOT = Path(__file__).parents[2]
DEFAULTS = {"flotilla:checkpoints": {}, "flotilla:dstack": {}, "flotilla:task": {}}
LOCAL = {"flotilla:cloud": "local", "flotilla:fleets": [{"name": "laptop", "nodes": 2}]}
SSH = {
    "flotilla:cloud": "ssh",
    "flotilla:fleets": [
        {
            "name": "gpus",
            "gpu": {"name": "H100", "count": 8},
            "ssh": {
                "user": "ubuntu",
                "identity_file": "~/.ssh/id",
                "network": "10.0.0.0/24",
                "hosts": [{"hostname": "gpu1", "internal_ip": "10.0.0.1"}, {"hostname": "gpu2", "internal_ip": "10.0.0.2"}],
            },
        }
    ],
}


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `base` with the setting at `fleets.0.nodes` replaced; `...` removes it."""
    settings = copy.deepcopy(base)
    put(settings, f"flotilla:{path}", value)
    return settings


NAME = "a name of 2 to 41 characters: a-z first, then a-z, 0-9 and -"
FLEET_KEYS = (
    "name, nodes, cpus, arch, memory, disk, gpu, resources, ssh, slurm, fabric, machine, provision, capacity, placement, nics, image, "
    "idle_duration"
)
KEYS = (
    "cloud, region, project, environment, protect, tags, monitoring, account_defaults, network, fleets, checkpoints, cache, access, "
    "budget, ci, slurm, dstack, task"
)
MISTAKES = [
    # wrong type, out of range
    (LOCAL, "fleets.0.nodes", "x", "fleets[0].nodes: 'x' is not an integer >= 1"),
    (LOCAL, "fleets.0.nodes", 0, "fleets[0].nodes: 0 is not an integer >= 1"),
    (LOCAL, "fleets.0.nodes", "-2", "fleets[0].nodes: '-2' is not an integer >= 1"),
    (LOCAL, "fleets.0.nodes", 1.5, "fleets[0].nodes: 1.5 is not an integer >= 1"),
    (LOCAL, "fleets.0.nodes", True, "fleets[0].nodes: True is not an integer >= 1"),
    (LOCAL, "fleets.0.nodes", None, "fleets[0].nodes: None is not an integer >= 1"),
    (LOCAL, "fleets", "laptop", "fleets: 'laptop' is not a list"),
    (LOCAL, "fleets", [], "fleets: [] is not a list of at least 1"),
    (LOCAL, "fleets.0", "laptop", "fleets[0]: 'laptop' is not a map of settings"),
    (LOCAL, "task", "fast", "task: 'fast' is not a map of settings"),
    (LOCAL, "task.retry", "maybe", "task.retry: 'maybe' is not true or false"),
    (LOCAL, "task.dashboard_port", 70000, "task.dashboard_port: 70000 is not an integer between 1 and 65535"),
    (LOCAL, "task.env", ["A=1"], "task.env: ['A=1'] is not a map of settings"),
    (LOCAL, "task.env", {"A": [1]}, "task.env.A: [1] is not text"),
    (LOCAL, "fleets.0.resources", {"v100": -1}, "fleets[0].resources.v100: -1 is not a number > 0"),
    (LOCAL, "fleets.0.resources", {"v100": "many"}, "fleets[0].resources.v100: 'many' is not a number > 0"),
    # one of a few
    (LOCAL, "cloud", "azure", "cloud: 'azure' is not one of local, ssh, slurm, aws, gcp"),
    (LOCAL, "fleets.0.arch", "amd64", "fleets[0].arch: 'amd64' is not one of x86, arm"),
    (LOCAL, "task.on_node_loss", "ignore", "task.on_node_loss: 'ignore' is not one of fail, wait"),
    (LOCAL, "checkpoints.kind", "nfs", "checkpoints.kind: 'nfs' is not one of instance, network, shared, bucket, lustre"),
    # missing
    (LOCAL, "cloud", ..., "cloud: is missing; it is one of local, ssh, slurm, aws, gcp"),
    (LOCAL, "fleets", ..., "fleets: is missing; it is a list of at least 1"),
    (LOCAL, "fleets.0.nodes", ..., "fleets[0].nodes: is missing; it is an integer >= 1"),
    (SSH, "fleets.0.ssh.user", ..., "fleets[0].ssh.user: is missing; it is the name of a Unix user"),
    (SSH, "fleets.0.gpu.count", ..., "fleets[0].gpu.count: is missing; it is an integer >= 0"),
    # unknown
    (LOCAL, "fleet", [], f"fleet: unknown key; did you mean fleets? (allowed: {KEYS})"),
    (LOCAL, "name", "x", f"name: unknown key (allowed: {KEYS})"),
    (LOCAL, "fleets.0.node", 3, f"fleets[0].node: unknown key; did you mean nodes? (allowed: {FLEET_KEYS})"),
    (SSH, "fleets.0.ssh.hosts.1.host_name", "a", "fleets[0].ssh.hosts[1].host_name: unknown key; did you mean hostname?"),
    (LOCAL, "task.dashbord_port", 1, "task.dashbord_port: unknown key; did you mean dashboard_port?"),
    # forms
    (LOCAL, "fleets.0.name", "My Fleet", f"fleets[0].name: 'My Fleet' is not {NAME}"),
    (LOCAL, "fleets.0.name", "x", f"fleets[0].name: 'x' is not {NAME}"),
    (LOCAL, "task.name", "9ray", f"task.name: '9ray' is not {NAME}"),
    (LOCAL, "fleets.0.memory", "80 gigs", "fleets[0].memory: '80 gigs' is not a size such as 512GB, 64GB.. or 64GB..128GB"),
    (LOCAL, "fleets.0.disk", 500, "fleets[0].disk: 500 is not a size such as 512GB, 64GB.. or 64GB..128GB"),
    (LOCAL, "fleets.0.memory", "1TB..512GB", "fleets[0].memory: '1TB..512GB' ends below its start"),
    (LOCAL, "task.shm_size", "8GB..", "task.shm_size: '8GB..' is not a size such as 80GB"),
    (LOCAL, "task.max_duration", "3 days", "task.max_duration: '3 days' is not a duration such as 30m, 72h or 14d"),
    (LOCAL, "task.max_duration", "0m", "task.max_duration: '0m' is not a duration such as 30m, 72h or 14d"),
    (LOCAL, "task.user", "1000:99999999999", "task.user: '1000:99999999999' has 99999999999, which is no id of a user or group"),
    (LOCAL, "task.user", "4294967295", "task.user: '4294967295' has 4294967295, which is no id"),
    (LOCAL, "task.user", "me too", "task.user: 'me too' is not a user or user:group, by name or number"),
    (LOCAL, "dstack.server", "localhost:3000", "dstack.server: 'localhost:3000' is not an http or https URL"),
    (SSH, "fleets.0.ssh.hosts.0.hostname", "ada@gpu1", "fleets[0].ssh.hosts[0].hostname: 'ada@gpu1' is not a host name or address"),
    (SSH, "fleets.0.ssh.hosts.0.internal_ip", "10.0.0", "fleets[0].ssh.hosts[0].internal_ip: '10.0.0' is not an IP address"),
    (SSH, "fleets.0.ssh.network", "10.0.0.1/24", "fleets[0].ssh.network: '10.0.0.1/24' is not a network such as 10.0.0.0/24"),
    # settings against one another, and against what dstack and Ray take
    (SSH, "fleets.0.nodes", 3, "fleets[0].nodes: 3 nodes, but ssh.hosts lists 2; leave nodes out, or let them agree"),
    (SSH, "fleets.0.ssh.hosts.1.hostname", "gpu1", "fleets[0].ssh.hosts[1].hostname: 'gpu1' is listed twice"),
    (SSH, "fleets.0.ssh.hosts.0.internal_ip", "10.0.1.1", "fleets[0].ssh.hosts[0].internal_ip: 10.0.1.1 is not in network 10.0.0.0/24"),
    (SSH, "fleets.0.ssh.hosts.1.internal_ip", "10.0.0.1", "fleets[0].ssh.hosts[1].internal_ip: 10.0.0.1 is another host's too"),
    (
        SSH,
        "fleets.0.ssh.hosts.1.internal_ip",
        ...,
        "fleets[0].ssh.hosts[1].internal_ip: is missing; dstack wants it of all hosts or of none",
    ),
    (SSH, "cloud", "local", "fleets[0].ssh: belongs to flotilla:cloud ssh, but that is local"),
    (LOCAL, "cloud", "ssh", "fleets[0].ssh: is missing; with flotilla:cloud ssh a fleet lists its hosts there"),
    (SSH, "fleets.0.gpu.name", "H10", "fleets[0].gpu.name: 'H10' is not an nvidia GPU that dstack knows; did you mean H100?"),
    (SSH, "fleets.0.gpu.vendor", "amd", "fleets[0].gpu.name: 'H100' is not an amd GPU that dstack knows"),
    (LOCAL, "fleets", [LOCAL["flotilla:fleets"][0]] * 2, "fleets[1].name: 'laptop' is taken by an earlier fleet"),
    (LOCAL, "fleets.0.resources", {"GPU": 1}, "fleets[0].resources.GPU: Ray counts this itself"),
    (LOCAL, "task.dashboard_port", 10500, "task.dashboard_port: 10500 is one of dstack's own ports, 10000 to 10999"),
    (LOCAL, "task.image", "ray", "task.image: 'ray' is not pinned; end it with a tag other than latest, or with a digest"),
    (LOCAL, "task.image", "r.example:5000/ray:latest", "task.image: 'r.example:5000/ray:latest' is not pinned"),
    (LOCAL, "task.image", "r.example:5000/ray", "task.image: 'r.example:5000/ray' is not pinned"),
    (LOCAL, "task.env", {"A-B": "1"}, "task.env.A-B: is not a variable name"),
    (LOCAL, "task.env", {"DSTACK_NODES_NUM": "1"}, "task.env.DSTACK_NODES_NUM: is not a variable name"),
    (LOCAL, "task.env", {"RAY_AUTH_TOKEN": "abc"}, "task.env.RAY_AUTH_TOKEN: is set for you: the token comes from the shell"),
    (LOCAL, "task.env", {"A": "1\n2"}, "task.env.A: has more than one line, which dstack does not take"),
    (LOCAL, "task.env", {"KEY": {"secure": "v1:abc"}}, "task.env.KEY: is encrypted; rendered files are plain text"),
    (LOCAL, "checkpoints.path", "checkpoints", "checkpoints.path: 'checkpoints' is not the absolute path of a folder"),
    (LOCAL, "checkpoints.path", "/", "checkpoints.path: '/' is not the absolute path of a folder"),
    (LOCAL, "checkpoints", {"kind": "network", "size": "9GB"}, "checkpoints.volume: is missing; kind: network is a dstack volume"),
    (LOCAL, "checkpoints", {"kind": "network", "volume": "ckpt"}, "checkpoints.size: is missing; kind: network is a dstack volume"),
    (LOCAL, "checkpoints", {"volume": "ckpt"}, "checkpoints.volume: belongs to kind: network, but kind is instance"),
]


@pytest.fixture
def project(tmp_path: Path):
    """A project in a temporary folder; write(settings) makes its one stack file."""
    (tmp_path / "Pulumi.yaml").write_text((ROOT / "Pulumi.yaml").read_text())
    (tmp_path / "stacks").mkdir()

    def write(settings: Any) -> Path:
        (tmp_path / "stacks/Pulumi.test.yaml").write_text(yaml.safe_dump({"config": settings}))
        return tmp_path

    return write


@pytest.mark.parametrize(("base", "path", "value", "message"), MISTAKES, ids=[message[:60] for *_, message in MISTAKES])
def test_a_mistake_is_one_line_that_names_file_setting_value_and_what_is_allowed(project, base, path, value, message):
    settings = changed(base, path, value)
    with pytest.raises(StackError) as from_file:
        load.load("test", project(settings))
    assert unnumbered(str(from_file.value)).startswith(f"stacks/Pulumi.test.yaml: flotilla:{message}")
    assert "\n" not in str(from_file.value)
    with pytest.raises(StackError) as from_pulumi:
        load.parse("test", as_pulumi(DEFAULTS | settings))
    assert str(from_pulumi.value) == unnumbered(str(from_file.value))


def unnumbered(line: str) -> str:
    return re.sub(r"^(\S+\.yaml):\d+: ", r"\1: ", line)


def as_pulumi(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as the engine hands them to a program: lists and maps as JSON; null and encrypted values apart."""
    return {key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in settings.items()}


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
"""


def test_errors_of_types_rules_and_machine_types_come_in_one_round(project):
    root = project(LOCAL)
    (root / "stacks/Pulumi.test.yaml").write_text(SIX_KINDS)
    with pytest.raises(StackError) as error:
        load.load("test", root)
    assert [line.removeprefix("stacks/Pulumi.test.yaml:").split("; ")[0].split(" (")[0] for line in str(error.value).splitlines()] == [
        "6: flotilla:fleets[0].nodes: 'x' is not an integer >= 1",
        "7: flotilla:fleets[0].machine: 'p5.48xlage' is not a machine type of aws in stacks/rules/aws.py",
        "8: flotilla:fleets[0].image: belongs to provision: pulumi",
        "8: flotilla:fleets[0].image: 'ubuntu' is not a valid AMI id, such as ami-0123456789abcdef0",
        "9: flotilla:fleets[1].cpus: 64 is more than the 32 of g6.8xlarge",
        "11: flotilla:task.dashboard_port: 'high' is not an integer between 1 and 65535",
        "12: flotilla:task.image: 'ray' is not pinned",
        "13: flotilla:checkpoints.kind: filestore is not on flotilla:cloud aws",
    ]


def test_nothing_is_said_of_what_depends_on_a_setting_that_could_not_be_read(project):
    """Not that lustre wants machines of Pulumi's, nor that dstack takes silence for a region: kind and region may be meant otherwise."""
    settings = {"cloud": "aws", "regoin": "us-east-1", "checkpoints": {"kind": "nfs", "throughput": 250}}
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
