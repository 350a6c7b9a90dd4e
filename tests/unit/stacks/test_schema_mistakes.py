"""Stacks without a cloud: the one line that a mistake gets, before anything is rendered."""

from __future__ import annotations

import pytest
from support.schema_stacks import LOCAL, SSH, as_pulumi, changed, unnumbered

from stacks import load
from stacks.load import StackError

ELASTIC = {
    "flotilla:cloud": "local",
    "flotilla:fleets": [{"name": "laptop", "nodes": 2}, {"name": "rollout", "role": "rollout", "nodes": "0..4"}],
}
NEAR = {
    "name": "rollout",
    "role": "rollout",
    "ssh": {"user": "ubuntu", "identity_file": "~/.ssh/id", "network": "10.0.0.0/24", "hosts": [{"hostname": "gpu3"}]},
}
DEFAULTS = {"flotilla:checkpoints": {}, "flotilla:dstack": {}, "flotilla:task": {}}
NAME = "a name of 2 to 41 characters: a-z first, then a-z, 0-9 and -"
FLEET_KEYS = (
    "name, role, nodes, hourly_budget, cpus, arch, memory, disk, gpu, resources, sandboxes, ssh, slurm, fabric, machine, provision, "
    "capacity, placement, nics, image, max_price, regions, idle_duration"
)
KEYS = (
    "cloud, region, project, environment, protect, tags, monitoring, account_defaults, network, backends, backend_order, "
    "fleets, checkpoints, cache, access, budget, ci, slurm, dstack, debug, queue, task"
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
    # elastic fleets
    (ELASTIC, "fleets.1.nodes", "3..1", "fleets[1].nodes: '3..1' ends below its start"),
    (ELASTIC, "fleets.1.nodes", "0..0", "fleets[1].nodes: '0..0' has room for no node; end it with 1 or more"),
    (ELASTIC, "fleets.1.nodes", 4, "fleets[1].nodes: 4 is one number; nodes with role: rollout come and go: a range such as 0..4"),
    (ELASTIC, "fleets.1.nodes", "0..", "fleets[1].nodes: '0..' is not an integer >= 1, or a range such as 0..8 for role: rollout"),
    (ELASTIC, "fleets.1.nodes", "-1..4", "fleets[1].nodes: '-1..4' is not an integer >= 1, or a range such as 0..8"),
    (ELASTIC, "fleets.1.nodes", ..., "fleets[1].nodes: is missing; it is an integer >= 1, or a range such as 0..8 for role: rollout"),
    (ELASTIC, "fleets.0.nodes", "1..2", "fleets[0].nodes: '1..2' is a range, for role: rollout; nodes of a cluster start together"),
    (ELASTIC, "fleets.0.hourly_budget", 9, "fleets[0].hourly_budget: is for role: rollout; nodes of a cluster start together, whatever"),
    (ELASTIC, "fleets.1.hourly_budget", 0, "fleets[1].hourly_budget: 0 is not a number > 0"),
    (
        ELASTIC,
        "fleets.1.hourly_budget",
        9,
        "fleets[1].hourly_budget: needs to know what a node costs, for which flotilla:cloud local has no list; say it in flotilla:",
    ),
    (
        {**ELASTIC, "flotilla:monitoring": {"price": 4}},
        "fleets.1",
        {"name": "rollout", "role": "rollout", "nodes": "3..4", "hourly_budget": 9},
        "fleets[1].hourly_budget: 9 USD an hour pays for 2 nodes at 4 (flotilla:monitoring.price), but at least 3 are wanted (nodes: 3..4)",
    ),
    (
        {**ELASTIC, "flotilla:monitoring": {"price": 4}},
        "fleets.1",
        {"name": "rollout", "role": "rollout", "nodes": "0..4", "hourly_budget": 3},
        "fleets[1].hourly_budget: 3 USD an hour pays for 0 nodes at 4 (flotilla:monitoring.price), but at least 1 are wanted (nodes: 0..4)",
    ),
    (ELASTIC, "fleets.1.role", "spot", "fleets[1].role: 'spot' is not one of cluster, rollout"),
    (ELASTIC, "fleets.0", ..., "fleets[0].role: rollout, but the head is a node of the first fleet; put one with role: cluster before it"),
    (ELASTIC, "task.fleets", ["laptop", "rollout"], "task.fleets[1]: 'rollout' has role: rollout; its nodes join the running cluster"),
    (ELASTIC, "fleets.1.name", "r" * 36, f"fleets[1].name: '{'r' * 36}' is long: the last node's run would be called ray-"),
    (
        ELASTIC,
        "task.services",
        {"search": {"command": "x", "on": "rollout"}},
        "task.services.search.on: 'rollout' is not one of every, head, laptop",
    ),
    (
        {**SSH, "flotilla:fleets": [*SSH["flotilla:fleets"], NEAR]},
        "checkpoints",
        {"kind": "instance"},
        "fleets[1].role: rollout, but its nodes find the head by a note among the checkpoints, and checkpoints.kind instance is",
    ),
    (
        {**SSH, "flotilla:fleets": [*SSH["flotilla:fleets"], NEAR], "flotilla:checkpoints": {"kind": "shared"}},
        "fleets.1.ssh.network",
        "10.9.0.0/24",
        "fleets[1].ssh.network: 10.9.0.0/24 is apart from 10.0.0.0/24, the network of fleet 'gpus'; its nodes have to reach the head's",
    ),
    # one of a few
    (LOCAL, "cloud", "azure", "cloud: 'azure' is not one of local, ssh, slurm, aws, gcp, dstack"),
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
    (SSH, "task.burn_in", "1h", "task.burn_in: '1h' is not a duration from 1s to 30m"),
    (SSH, "task.burn_in", "0s", "task.burn_in: '0s' is not a duration from 1s to 30m"),
    (LOCAL, "task.burn_in", "2m", "task.burn_in: is for machines that join, but with flotilla:cloud local all nodes are this one"),
    (LOCAL, "task.priority", 101, "task.priority: 101 is not an integer between 0 and 100"),
    (LOCAL, "queue.min_run", "ten", "queue.min_run: 'ten' is not a duration such as 30m, 72h or 14d"),
    (LOCAL, "queue.owners", {"ann": {"weight": 0}}, "queue.owners.ann.weight: 0 is not a number > 0"),
    (LOCAL, "queue.owners", {"ann": {"share": 2}}, "queue.owners.ann.share: unknown key"),
    (LOCAL, "queue.owners", {" ": {}}, "queue.owners. : ' ' is not a user name of 1 to 64 characters"),
    (LOCAL, "task.max_duration", "3 days", "task.max_duration: '3 days' is not a duration such as 30m, 72h or 14d"),
    (LOCAL, "task.max_duration", "0m", "task.max_duration: '0m' is not a duration such as 30m, 72h or 14d"),
    (LOCAL, "task.user", "1000:99999999999", "task.user: '1000:99999999999' has 99999999999, which is not the id of a user or group"),
    (LOCAL, "task.user", "4294967295", "task.user: '4294967295' has 4294967295, which is not the id"),
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
        "fleets[0].ssh.hosts[1].internal_ip: is missing; dstack needs it for all hosts or for none",
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
