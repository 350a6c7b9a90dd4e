"""Stacks on Slurm: the one line that a mistake gets before anything is submitted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any

import pytest
from support.slurm_stacks import APPTAINER, BARE, DOCKER, DSTACK, FLEETS, SHARED_NODES, changed_stack, stack

from infra.slurm import build as site
from stacks.load import StackError, parse
from stacks.settings import sbatch
from stacks.settings.slurm import seconds
from stacks.site import Site

MISTAKES = [
    # the allocation
    (BARE, "task", {"image_has_ray": False}, "task.image_has_ray: false belongs to image, which is not set"),
    (DOCKER, "task.image_has_ray", False, "task.image_has_ray: false, but with slurm.container docker nodes install nothing as they start"),
    (BARE, "slurm.partition", "gpu nodes", "slurm.partition: 'gpu nodes' is not a partition, or several with commas"),
    (BARE, "slurm.account", "", "slurm.account: '' is not a name as Slurm knows it, without blanks"),
    (BARE, "slurm.qos", 7, "slurm.qos: 7 is not a name as Slurm knows it"),
    (BARE, "slurm.time", "1 day", "slurm.time: '1 day' is not a time limit as Slurm writes it: minutes, hours:minutes:seconds"),
    (BARE, "slurm.time", 86400, "slurm.time: 86400 is a number: YAML reads 24:00:00 as seconds; put the limit in quotes"),
    (BARE, "slurm.time", "5:00", "slurm.time: '5:00' is short: jobs are asked to save 300 s before its end (slurm.notice)"),
    (BARE, "slurm.walltime", 4, "slurm.walltime: unknown key; did you mean time? (allowed: partition, account, qos"),
    (BARE, "slurm.partion", "gpu", "slurm.partion: unknown key; did you mean partition?"),
    (BARE, "slurm.login", "me@", "slurm.login: 'me@' is not a login node: [user@]host[:port]"),
    (BARE, "slurm.notice", 60, "slurm.notice: 60 is not an integer between 120 and 65535"),
    (BARE, "slurm.notice", "5m", "slurm.notice: '5m' is not an integer between 120 and 65535"),
    (BARE | {"slurm": {"time": "1:00:00"}}, "slurm.notice", 2400, "slurm.time: '1:00:00' is short: jobs are asked to save 2400 s before"),
    (BARE, "slurm.requeue", -1, "slurm.requeue: -1 is not an integer >= 0"),
    (BARE, "slurm.requeue", True, "slurm.requeue: True is not an integer >= 0"),
    (BARE, "slurm.mail", "me", "slurm.mail: 'me' is not a mail address"),
    (BARE, "slurm.modules", ["cuda; rm"], "slurm.modules[0]: 'cuda; rm' is not a module such as cuda/12.8"),
    (BARE, "slurm.setup", ["a\nb"], "slurm.setup[0]: 'a\\nb' is not one line of shell"),
    (BARE, "slurm.sbatch", ["-C ib"], "slurm.sbatch[0]: '-C ib' is not an option of sbatch such as --reservation=week"),
    (BARE, "slurm.sbatch", ["--nodes=4"], "slurm.sbatch[0]: --nodes=4 is set for you: fleets[].nodes"),
    (BARE, "slurm.sbatch", ["--x=1", "--signal=B:TERM@60"], "slurm.sbatch[1]: --signal=B:TERM@60 is set for you: slurm.notice"),
    # the nodes
    (
        BARE,
        "slurm.constraint",
        "ib h100",
        "slurm.constraint: 'ib h100' is not features of nodes as Slurm writes them, such as ib or h100&ib",
    ),
    (BARE, "slurm.sbatch", ["--constraint=ib"], "slurm.sbatch[0]: --constraint=ib is set for you: slurm.constraint"),
    # several fleets
    (FLEETS, "task.fleets", ["h100", "v10"], "task.fleets[1]: 'v10' is not a fleet of this stack (allowed: h100, v100)"),
    (FLEETS, "task.fleets", ["h100", "h100"], "task.fleets[1]: 'h100' is listed twice"),
    (
        FLEETS,
        "fleets.1.slurm.time",
        "10:00:00",
        "fleets[1].slurm.time: unknown key (allowed: partition, account, qos, constraint, gpu_type",
    ),
    (FLEETS, "fleets.1.slurm.partion", "old", "fleets[1].slurm.partion: unknown key; did you mean partition?"),
    (FLEETS, "fleets.1.slurm.sbatch", ["--nodes=2"], "fleets[1].slurm.sbatch[0]: --nodes=2 is set for you: fleets[].nodes"),
    (FLEETS, "fleets.1.slurm.gpu_type", "v 100", "fleets[1].slurm.gpu_type: 'v 100' is not a name as Slurm knows it"),
    (BARE, "fleets.0", {"name": "cpus", "nodes": 2, "slurm": {"gpu_type": "v100"}}, "fleets[0].slurm.gpu_type: 'v100', but fleets[0].gpu"),
    (FLEETS, "slurm.gpu_type", "h100", "slurm.gpu_type: 'h100' would be asked of H100 and V100 alike; say it in fleets[].slurm.gpu_type"),
    (
        FLEETS | {"fleets": [fleet | {"cpus": 4, "memory": "64GB"} for fleet in FLEETS["fleets"]]},
        "slurm.exclusive",
        False,
        "slurm.exclusive: False, but a cluster of 2 fleets (task.fleets) takes whole nodes",
    ),
    (
        FLEETS | {key: DSTACK[key] for key in ("slurm", "dstack")},
        "task.fleets",
        ["h100"],
        "fleets: 2 fleets, but dstack places a run on Slurm in one; leave one",
    ),
    (
        {"cloud": "local", "fleets": [{"name": "laptop", "nodes": 1}]},
        "fleets.0.slurm",
        {"partition": "gpu"},
        "fleets[0].slurm: belongs to flotilla:cloud slurm, but that is local",
    ),
    # the machines
    (BARE, "fleets.0.machine", "p5.48xlarge", "fleets[0].machine: belongs to flotilla:cloud aws or gcp, but that is slurm"),
    (BARE, "slurm.exclusive", "maybe", "slurm.exclusive: 'maybe' is not true or false"),
    (SHARED_NODES, "fleets.0.cpus", ..., "fleets[0].cpus: is missing; nodes are shared with other jobs (slurm.exclusive: false)"),
    (SHARED_NODES, "fleets.0.memory", ..., "fleets[0].memory: is missing; nodes are shared with other jobs"),
    # containers
    (BARE, "slurm.container", "pyxis", "task.image: is missing; slurm.container pyxis runs an image"),
    (BARE, "slurm.container", "singularity", "slurm.container: 'singularity' is not one of none, pyxis, apptainer, docker, podman"),
    (BARE, "task", {"image": "a:1"}, "slurm.container: none, but task.image names 'a:1'; take one of pyxis, apptainer, docker, podman"),
    (DOCKER, "task.image", "rocm/verl:latest", "task.image: 'rocm/verl:latest' is not pinned"),
    (DOCKER, "task.image", "/shared/a.sif", "task.image: '/shared/a.sif' is a file, but docker takes an image by its name and tag"),
    (APPTAINER, "task.image", "/shared/a.sqsh", "task.image: '/shared/a.sqsh' is not a file that apptainer runs; those end in .sif"),
    (DOCKER, "task.volumes", ["data:/data"], "task.volumes[0]: 'data:/data' is a volume of dstack; on Slurm mount a folder"),
    (DOCKER, "task.volumes", ["./data:/data"], "task.volumes[0]: './data:/data' is not a mount such as /folder/of/host:/data"),
    (BARE, "task", {"volumes": ["/data:/data"]}, "task.volumes[0]: '/data:/data', but without a container nodes see folders as they are"),
    (BARE, "task", {"shm_size": "64GB"}, "task.shm_size: belongs to slurm.container docker or podman, but that is none"),
    (
        DOCKER | {"fleets": SHARED_NODES["fleets"]},
        "slurm.exclusive",
        False,
        "slurm.exclusive: False, but docker does not know which GPUs",
    ),
    # the shared file system
    (BARE, "checkpoints.path", ..., "checkpoints.path: is missing; it is a folder on the file system that all nodes share"),
    (BARE, "checkpoints", ..., "checkpoints.kind: instance is not on flotilla:cloud slurm (allowed here: shared)"),
    (BARE, "checkpoints.path", "runs", "checkpoints.path: 'runs' is not the absolute path of a folder"),
    # what belongs elsewhere
    (BARE, "slurm.gpu_type", "h100 80", "slurm.gpu_type: 'h100 80' is not a name as Slurm knows it"),
    (BARE, "task", {"priority": 5}, "task.priority: belongs to flotilla:dstack, which is not set; for sbatch slurm.qos, slurm.account and"),
    (BARE, "task", {"max_duration": "72h"}, "task.max_duration: belongs to flotilla:dstack, which is not set; for sbatch slurm.time is"),
    (BARE, "task", {"retry": False}, "task.retry: belongs to flotilla:dstack, which is not set; for sbatch slurm.requeue says"),
    (BARE, "slurm.identity_file", "~/.ssh/id", "slurm.identity_file: belongs to flotilla:dstack, which is not set"),
    (DSTACK, "slurm.login", "login.example.com", "slurm.login: is missing or without its user; dstack logs in there"),
    (DSTACK, "slurm.identity_file", ..., "slurm.identity_file: is missing; dstack logs in with it"),
    (DSTACK, "slurm.partition", ..., "slurm.partition: is missing; dstack places runs by it"),
    (DSTACK, "fleets.0.gpu.name", ..., "fleets[0].gpu.name: is missing; dstack finds partitions by the GPU's name"),
    (BARE, "cloud", "local", "slurm: belongs to flotilla:cloud slurm, but that is local"),
    (
        {"cloud": "local", "fleets": [{"name": "laptop", "nodes": 1}]},
        "task",
        {"image": "/a.sif"},
        "task.image: '/a.sif' is a file; those run under flotilla:cloud slurm alone",
    ),
]


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    return {f"flotilla:{key}": item for key, item in changed_stack(base, path, value).items()}


@pytest.mark.parametrize(
    ("base", "path", "value", "message"),
    MISTAKES,
    ids=[message[:60] for *_, message in MISTAKES],
)
def test_a_mistake_is_one_line_that_names_file_setting_value_and_what_is_allowed(base, path, value, message):
    with pytest.raises(StackError) as refused:
        parse("test", changed(base, path, value))
    assert str(refused.value).startswith(f"stacks/Pulumi.test.yaml: flotilla:{message}"), refused.value
    assert "\n" not in str(refused.value)


# What the cluster has, as `sinfo` tells

SINFO = """\
gpu*|up|2-00:00:00|3|96|gpu:h100:8(S:0-1),nvme:1|h100,ib
gpu*|up|2-00:00:00|1|96|gpu:nvidia_a100_80gb_pcie:4|a100
gpu*|up|2-00:00:00|1|96|gpu:rtx_4090:2,gpu:rtx_3090:2|rtx
cpu|up|infinite|10|64|(null)|(null)
old|down|infinite|2|16|gpu:2|(null)
plain|up|infinite|3|40|gpu:4|(null)
"""
NOT_HAD = [
    (
        "slurm.partition",
        "gpus",
        "slurm.partition: 'gpus' is not a partition of this cluster; did you mean gpu? (sinfo shows: cpu, gpu, old, plain)",
    ),
    ("slurm.partition", "gpu,x", "slurm.partition: 'x' is not a partition of this cluster (sinfo shows: cpu, gpu, old, plain)"),
    ("slurm.partition", "old", "slurm.partition: partition old is down"),
    ("slurm.time", "3-00:00:00", "slurm.time: '3-00:00:00' is more than partition gpu allows"),
    (
        "slurm.gpu_type",
        "b200",
        "slurm.gpu_type: 'b200' is no GPU of partition gpu (sinfo shows: h100, nvidia_a100_80gb_pcie, rtx_3090, rtx_4090)",
    ),
    ("fleets.0.gpu.count", 16, "fleets[0].gpu.count: 16, but nodes of partition gpu have 8 of type h100 at most"),
    ("slurm", {"gpu_type": "rtx_3090"}, "fleets[0].gpu.count: 8, but nodes of partition gpu have 2 of type rtx_3090 at most"),
    ("fleets.0.gpu.name", "A100", "fleets[0].gpu.count: 8, but nodes of partition gpu have 4 of type nvidia_a100_80gb_pcie at most"),
    (
        "fleets.0.gpu.name",
        "A10",
        "fleets[0].gpu.name: 'A10', but partition gpu has no GPU of that name (sinfo shows: h100, nvidia_a100",
    ),
    ("slurm.constraint", "ibm", "slurm.constraint: 'ibm' are features of no node of partition gpu (sinfo shows: a100, h100, ib, rtx)"),
    ("slurm.constraint", "ib&a100", "slurm.constraint: 'ib&a100' are features of no node of partition gpu"),
    ("fleets.0.slurm", {"partition": "pgu"}, "fleets[0].slurm.partition: 'pgu' is not a partition of this cluster; did you mean gpu?"),
    ("slurm.partition", "cpu", "fleets[0].gpu.count: 8, but nodes of partition cpu have 0 at most"),
    ("fleets.0.cpus", 128, "fleets[0].cpus: 128, but nodes of partition gpu have 96 at most"),
    ("fleets.0.nodes", 6, "fleets[0].nodes: 6, but partition gpu has 5"),
]


@pytest.mark.parametrize(("path", "value", "message"), NOT_HAD, ids=[message[:50] for *_, message in NOT_HAD])
def test_what_the_cluster_does_not_have_is_told_with_what_it_has(path, value, message):
    wanted = parse("test", changed(BARE, path, value))
    assert next(site.unmet(wanted, site.groups(SINFO))).startswith(message)


def test_what_the_cluster_has_is_no_fault():
    ib = {"gpu_type": "h100", "time": "2-00", "constraint": "ib&h100"}
    for base in (BARE, BARE | {"slurm": {}}, BARE | {"slurm": ib}, BARE | {"slurm": {"constraint": "[a100|h100]"}}):
        assert not list(site.unmet(stack(base), site.groups(SINFO)))


def test_a_type_for_all_fleets_leaves_those_alone_that_name_their_own():
    base = changed_stack(FLEETS, "slurm.gpu_type", "h100")
    base["fleets"][1]["slurm"]["gpu_type"] = "v100-32"
    wanted = stack(base)
    assert [wanted.slurm.of(fleet.slurm).gpu_type for fleet in wanted.fleets] == ["h100", "v100-32"]


def test_what_the_cluster_does_not_have_for_each_fleet_is_told_at_once():
    wanted = stack(
        FLEETS
        | {
            "fleets": [
                FLEETS["fleets"][0] | {"nodes": 4, "slurm": {"constraint": "ib"}},
                FLEETS["fleets"][1] | {"nodes": 2, "slurm": {"partition": "cpu"}},
                FLEETS["fleets"][0] | {"name": "more", "slurm": {"constraint": "ib"}},
                FLEETS["fleets"][1] | {"name": "plain", "nodes": 4, "slurm": {"partition": "plain"}},
            ],
            "task": {"fleets": ["v100", "more", "h100", "plain"]},
        }
    )
    assert list(site.unmet(wanted, site.groups(SINFO))) == [
        "fleets[1].gpu.count: 4, but nodes of partition cpu have 0 at most",
        "fleets[0].nodes: 4, but partition gpu with ib has 3, of which 2 are taken by 'more'",
        "fleets[3].nodes: 4, but partition plain has 3",
    ]


@pytest.mark.parametrize(
    ("name", "count", "partition", "kind"),
    [("H100", 8, "gpu", "h100"), ("A100", 4, "gpu", "nvidia_a100_80gb_pcie"), ("RTX4090", 2, "gpu", "rtx_4090"), ("V100", 4, "plain", "")],
)
def test_the_cluster_says_its_own_word_for_a_model(name, count, partition, kind):
    wanted = changed_stack(BARE, "fleets.0", {"name": "gpus", "nodes": 1, "gpu": {"name": name, "count": count}})
    known = site.groups(SINFO)
    assert site.gpu_types(stack(wanted | {"slurm": {"partition": partition}}), known) == {"gpus": kind}
    assert site.gpu_types(stack(wanted | {"slurm": {"partition": partition, "gpu_type": "any"}}), known) == {"gpus": ""}


def test_the_cluster_is_asked_where_sinfo_is_on_path(tmp_path, monkeypatch):
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\ncat <<'END'\n{SINFO}END\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert site.build(stack(BARE)) == Site(gpu_types={"gpus": "h100"})
    with pytest.raises(StackError, match=r"^stacks/Pulumi.test.yaml: flotilla:slurm.partition: 'gpus' is not a partition"):
        site.build(parse("test", changed(BARE, "slurm.partition", "gpus")))
    with pytest.raises(StackError) as refused:
        site.build(stack(BARE | {"fleets": [BARE["fleets"][0] | {"nodes": 9, "cpus": 999}]}))
    assert [line.partition(" but ")[0] for line in str(refused.value).splitlines()] == [
        "stacks/Pulumi.test.yaml: flotilla:fleets[0].cpus: 999,",
        "stacks/Pulumi.test.yaml: flotilla:fleets[0].nodes: 9,",
    ]


@pytest.mark.parametrize(
    ("time", "expected"), [("30", 1800), ("15:30", 930), ("24:00:00", 86400), ("2-00", 172800), ("1-12:30", 131400), ("1-00:00:01", 86401)]
)
def test_time_limits_are_read_as_slurm_reads_them(time, expected):
    assert seconds(time) == expected


SET_FOR_YOU = {
    "--mem-per-gpu=64G": "fleets[].memory",
    "--mem-per-cpu=4G": "fleets[].memory",
    "--gpus=4": "fleets[].gpu.count",
    "--gpus-per-task=1": "fleets[].gpu.count",
    "--tres-per-task=gres/gpu:1": "fleets[].cpus and fleets[].gpu.count",
    "--cpus-per-gpu=8": "fleets[].cpus",
    "--ntasks-per-gpu=1": "one task per node",
    "--output=/scratch/%j.out": "the log is build/STACK/",
    "--error=/scratch/%j.err": "the log is build/STACK/",
    "--open-mode=truncate": "the log is build/STACK/",
    "--array=0-3": "a job is one cluster",
    "--wrap=hostname": "the script is what runs",
    "--export=NONE": "flotilla:task.env",
    "--wait": "type it on sbatch's command line",
    "--hold": "type it on sbatch's command line",
    "--test-only": "type it on sbatch's command line",
    "--oversubscribe": "slurm.exclusive",
    "--share": "slurm.exclusive",
    "--uid=me": "submit as that user",
    "--container=/oci": "slurm.container",
    # beginnings, which sbatch takes
    "--part=x": "it begins --partition, which is slurm.partition",
    "--acc=x": "it begins --account, which is slurm.account",
    "--exclu": "it begins --exclusive, which is slurm.exclusive",
    "--out=x": "it begins --output, which is the log",
    "--mem-per-g=1G": "it begins --mem-per-gpu, which is fleets[].memory",
    "--gpus-per-n=1": "it begins --gpus-per-node, which is fleets[].gpu.count",
    "--tim=1": "it begins --time, which is slurm.time",
    "--arr=0-3": "it begins --array, which is a job is one cluster",
}


@pytest.mark.parametrize("option", SET_FOR_YOU)
def test_options_that_the_scripts_set_or_cannot_bear_are_refused_with_the_setting(option):
    with pytest.raises(StackError) as refused:
        parse("test", changed(BARE, "slurm.sbatch", [option]))
    assert f"flotilla:slurm.sbatch[0]: {option} is set for you: {SET_FOR_YOU[option]}" in str(refused.value)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("-N4", "-N4 is set for you: fleets[].nodes"),
        ("-N 4", "-N is set for you: fleets[].nodes"),
        ("-n", "-n is set for you: one task per node"),
        ("-p gpu", "-p is set for you: slurm.partition"),
        ("-o/x", "-o/x is set for you: the log"),
        ("-a0-3", "-a0-3 is set for you: a job is one cluster"),
        ("--mem 64G", "--mem is set for you: fleets[].memory"),
        ("-w n1", "write --nodelist=..."),
        ("--nodelist n1", "write --nodelist=..."),
        ("reservation=week", "is not an option of sbatch such as --reservation=week"),
        ("--", "is not an option of sbatch"),
        ("", "is not an option of sbatch"),
    ],
)
def test_short_options_are_refused_with_what_they_are_in_full(option, says):
    with pytest.raises(StackError) as refused:
        parse("test", changed(BARE, "slurm.sbatch", [option]))
    assert f"flotilla:slurm.sbatch[0]: {option!r} is not an option of sbatch such as --reservation=week" in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "option",
    ["--reservation=week", "--reserv=week", "--exclude=n7", "--nodelist=n[1-4]", "--x11", "--nice=100", "--switches=1", "--clusters=c"],
)
def test_other_options_are_sbatchs(option):
    assert parse("test", changed(BARE, "slurm.sbatch", [option])).slurm.sbatch == (option,)


@pytest.mark.skipif(not shutil.which("sbatch"), reason="no Slurm here")
def test_every_option_of_this_sbatch_is_known(tmp_path):
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    env = {"SLURM_CONF": str(tmp_path / "slurm.conf"), "PATH": os.environ["PATH"]}
    shown = subprocess.run(["sbatch", "--help"], capture_output=True, text=True, check=True, timeout=300, env=env).stdout
    assert {*re.findall(r"--([a-z][a-z0-9-]+)", shown)} - {*sbatch.OWN, *sbatch.OTHERS} == set()


@pytest.mark.parametrize("time", ["0", "UNLIMITED", "infinite", "00:00", "0-00", "2-00:00:00", "60"])
def test_a_time_limit_may_be_none(time):
    wanted = parse("test", changed(BARE, "slurm.time", time))
    assert wanted.slurm.time == time
    more = list(site.unmet(wanted, site.groups(SINFO)))
    assert bool(more) == (seconds(time) is None), more  # the partition's limit is two days


LARGE = """\
CLUSTER: one
gpu*|up|infinite|1K|1K+|gpu:8|a|b,c

CLUSTER: two
far|up|n/a|1.50K|128|(null)|(null)
"""


def test_large_clusters_and_odd_features_are_read():
    one, two = site.groups(LARGE)
    assert (one.nodes, one.cpus, one.limit, one.features) == (1024, 1024, None, {"a|b", "c"})
    assert (two.partition, two.nodes, two.cpus) == ("far", 1536, 128)


def test_hidden_partitions_and_those_of_other_clusters_are_asked_for(tmp_path, monkeypatch):
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(
        f"#!/bin/sh\necho \"$SINFO_PARTITION $*\" >{tmp_path}/said\ncat <<'END'\n{SINFO}h100|up|infinite|1|96|gpu:h100:8|ib\nEND\n"
    )
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SINFO_PARTITION", "cpu")
    base = BARE | {"fleets": [BARE["fleets"][0] | {"nodes": 1}]}
    site.build(parse("test", changed(base, "slurm", {"partition": "h100", "sbatch": ["--clusters=far"]})))
    words = (tmp_path / "said").read_text().split()
    assert "-a" in words and words[-1] == "--clusters=far" and "cpu" not in words


@pytest.mark.parametrize("script", ["echo 'a|b'", "echo 'gpu|up|x y|1|1|(null)|(null)'", "echo sinfo: error: down >&2; exit 1", ":"])
def test_a_sinfo_that_is_not_understood_is_a_warning(tmp_path, monkeypatch, script):
    warned: list[str] = []
    monkeypatch.setattr(site.pulumi, "warn", warned.append)
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    site.build(stack(BARE))
    assert warned[0].startswith("the allocation is not compared with the cluster: ")
