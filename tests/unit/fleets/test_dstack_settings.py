"""Mistakes in what a stack says of its dstack server, and at the command that starts one: each is one line, and nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleets.server import commands as server
from stacks.load import StackError, parse, settings

ROOT = Path(__file__).parents[3]
DRIVEN = {"drive": True}
CONTROL, MINE = {"host": "cloud"}, {"host": "elsewhere"}
NO_CONTROL = "cloud is for flotilla:cloud aws or gcp, where `pulumi up` makes the server's machine; here it is"
ELSEWHERE = "but with host: cloud the server is the control node, forwarded to this machine; leave it out, or name a port here"


def told(stack: str, dstack: Any) -> str:
    with pytest.raises(StackError) as error:
        parse(stack, settings(stack, ROOT) | {"flotilla:dstack": dstack})
    return str(error.value)


@pytest.mark.parametrize(
    ("stack", "dstack", "message"),
    [
        ("onprem", {"server": "127.0.0.1:3000"}, "flotilla:dstack.server: '127.0.0.1:3000' is not an http or https URL"),
        (
            "onprem",
            {"project": "My Team"},
            "flotilla:dstack.project: 'My Team' is not a name of 2 to 41 characters: a-z first, then a-z, 0-9 and -",
        ),
        ("onprem", {"drive": "maybe"}, "flotilla:dstack.drive: 'maybe' is not true or false"),
        ("onprem", {"on_destroy": "kill"} | DRIVEN, "flotilla:dstack.on_destroy: 'kill' is not one of refuse, wait, stop"),
        ("onprem", {"timeout": "20m"} | DRIVEN, "flotilla:dstack.timeout: '20m' is not an integer >= 1"),
        ("onprem", {"timeout": 0} | DRIVEN, "flotilla:dstack.timeout: 0 is not an integer >= 1"),
        ("onprem", "http://127.0.0.1:3000", "flotilla:dstack: 'http://127.0.0.1:3000' is not a map of settings"),
        (
            "aws-dev",
            CONTROL | {"adopt": True},
            "flotilla:dstack.adopt: belongs to drive: true; without it `pulumi up` asks nothing of the server",
        ),
        (
            "aws-dev",
            CONTROL | {"on_destroy": "stop"},
            "flotilla:dstack.on_destroy: belongs to drive: true; without it `pulumi up` asks nothing of the server",
        ),
        ("local", DRIVEN, "flotilla:dstack.drive: no node of flotilla:cloud local is dstack's; leave it out"),
        ("aws-dev", {"host": "laptop"}, "flotilla:dstack.host: 'laptop' is not one of elsewhere, cloud"),
        ("local", CONTROL, f"flotilla:dstack.host: {NO_CONTROL} local; leave it out"),
        ("onprem", CONTROL, f"flotilla:dstack.host: {NO_CONTROL} ssh; leave it out"),
        (
            "aws-dev",
            CONTROL | {"server": "https://dstack.example.com"},
            f"flotilla:dstack.server: 'https://dstack.example.com', {ELSEWHERE}: http://127.0.0.1:3001",
        ),
        (
            "aws-dev",
            CONTROL | {"server": "http://10.65.0.4:3000"},
            f"flotilla:dstack.server: 'http://10.65.0.4:3000', {ELSEWHERE}: http://127.0.0.1:3001",
        ),
        (
            "aws-dev",
            CONTROL | {"server": "https://localhost:3000"},
            "flotilla:dstack.server: 'https://localhost:3000' is not a forwarded port such as http://127.0.0.1:3001",
        ),
        (
            "aws-dev",
            CONTROL | {"server": "http://127.0.0.1"},
            "flotilla:dstack.server: 'http://127.0.0.1' is not a forwarded port such as http://127.0.0.1:3001",
        ),
        ("gcp-prod", CONTROL, "flotilla:access.via: tunnel, but with dstack.host cloud the server stands beside the nodes; take direct"),
        (
            "aws-prod",
            CONTROL,
            "flotilla:access.via: tunnel, but with dstack.host cloud the server stands beside the nodes; take direct",
        ),
    ],
    ids=str,
)
def test_a_mistake_in_the_settings_is_one_line(stack, dstack, message):
    assert told(stack, dstack) == f"stacks/Pulumi.{stack}.yaml: {message}"


@pytest.mark.parametrize("stack", ["aws-dev", "gcp-dev"])
@pytest.mark.parametrize("dstack", [None, {}, {"project": "team"}, {"server": "http://127.0.0.1:3000"}, {"drive": True}], ids=str)
def test_private_nodes_without_a_way_for_their_server_are_refused_before_anything_is_made(stack, dstack):
    given = {key: value for key, value in settings(stack, ROOT).items() if key != "flotilla:dstack"}
    with pytest.raises(StackError) as error:
        parse(stack, given | ({"flotilla:dstack": dstack} if dstack is not None else {}))
    assert str(error.value) == (
        f"stacks/Pulumi.{stack}.yaml: flotilla:dstack.host: is missing; nodes of fleet 'gpus' have private addresses alone, "
        "so say where the dstack server is: cloud makes a control node beside them, "
        "elsewhere is a machine of yours in their network or with a VPN into it"
    )


@pytest.mark.parametrize("dstack", [CONTROL, MINE, {"server": "https://dstack.example.com"}], ids=str)
def test_a_way_in_is_a_control_node_or_a_server_of_yours(dstack):
    assert parse("aws-dev", settings("aws-dev", ROOT) | {"flotilla:dstack": dstack})


def test_nodes_that_pulumi_launches_are_reached_as_access_says():
    given = {key: value for key, value in settings("aws-prod", ROOT).items() if key != "flotilla:dstack"}
    assert parse("aws-prod", given)


def test_a_bastion_is_no_way_in_where_the_server_is_beside_the_nodes():
    given = settings("aws-prod", ROOT)
    bastion = {"via": "bastion", "allow": ["203.0.113.7/32"]}
    given |= {"flotilla:dstack": CONTROL, "flotilla:access": given["flotilla:access"] | bastion}
    with pytest.raises(StackError, match=r"flotilla:access\.via: bastion, but with dstack\.host cloud"):
        parse("aws-prod", given)


def test_slurm_has_no_control_node():
    with pytest.raises(StackError, match=rf"flotilla:dstack\.host: {NO_CONTROL} slurm; leave it out"):
        parse("slurm", settings("slurm", ROOT) | {"flotilla:dstack": CONTROL})


def test_a_network_holds_the_control_node_beside_the_nodes():
    given = settings("aws-dev", ROOT)
    [fleet] = given["flotilla:fleets"]
    given |= {"flotilla:network": {"cidr": "10.65.0.0/24"}, "flotilla:fleets": [fleet | {"nodes": 11}]}
    assert parse("aws-dev", given | {"flotilla:dstack": MINE})
    with pytest.raises(StackError, match=r"leaves 11 addresses in a zone, but the fleets have 11 nodes, and there is the control node"):
        parse("aws-dev", given | {"flotilla:dstack": CONTROL})


def test_a_network_of_gcp_holds_the_control_node_beside_the_nodes():
    given = settings("gcp-dev", ROOT)
    [fleet] = given["flotilla:fleets"]
    given |= {"flotilla:network": {"cidr": "10.65.0.0/22"}, "flotilla:fleets": [fleet | {"nodes": 508}]}
    assert parse("gcp-dev", given | {"flotilla:dstack": MINE})
    with pytest.raises(StackError, match=r"the fleets have 508 nodes, and there is the control node; widen it"):
        parse("gcp-dev", given | {"flotilla:dstack": CONTROL})


def test_a_port_here_may_be_another_than_the_servers_own():
    dstack = parse("aws-dev", settings("aws-dev", ROOT) | {"flotilla:dstack": CONTROL | {"server": "http://127.0.0.1:3001"}}).dstack
    assert dstack and dstack.port == 3001


def test_an_unknown_key_names_the_nearest():
    assert told("onprem", {"servr": "http://x"}).startswith(
        "stacks/Pulumi.onprem.yaml: flotilla:dstack.servr: unknown key; did you mean server?"
    )


def test_a_driven_stack_is_not_told_to_do_what_up_has_done():
    from infra.publish import next_commands
    from infra.ssh.build import build

    plain, driven = (parse("onprem", settings("onprem", ROOT) | {"flotilla:dstack": dstack}) for dstack in ({}, DRIVEN))
    spared = set(next_commands(plain, build(plain))) - set(next_commands(driven, build(driven)))
    assert spared == {"dstack apply -y -f build/onprem/gpus.fleet.dstack.yml"}


CONFIG = "build/any/server-config.yml"


@pytest.mark.parametrize(
    ("arguments", "config", "message"),
    [
        (
            ["up", "any"],
            None,
            "{0}/build/any/server-config.yml does not exist; first: pulumi up --stack any, or flotilla preview any",
        ),
        (["up", "any"], "projects: [", "{0}/build/any/server-config.yml: is no configuration of a dstack server: while parsing"),
        (["up", "any"], "- main", "{0}/build/any/server-config.yml: is no configuration of a dstack server: list indices"),
        (
            ["up", "any"],
            "projects: [{backends: [{type: aws}]}]",
            "{0}/build/any/server-config.yml: is no configuration of a dstack server: 'name'",
        ),
        (["login"], None, "no server of {0}/build/server/ runs; first: flotilla server up"),
        (["down", "--folder", "nowhere"], None, ""),
    ],
    ids=str,
)
def test_a_mistake_at_the_servers_command_is_one_line_and_starts_nothing(arguments, config, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Pulumi.yaml").touch()
    if config is not None:
        (tmp_path / CONFIG).parent.mkdir(parents=True)
        (tmp_path / CONFIG).write_text(config)
    code, output = server.main(arguments), capsys.readouterr()
    if not message:
        assert (code, output.out) == (0, "not up\n")
        return
    assert code == 2
    assert output.err.startswith("error: " + message.format(tmp_path)), output.err
    assert output.err.count("\n") == 1 and not (tmp_path / "build/server/server.json").exists()


@pytest.mark.parametrize("port", ["http", "0", "70000"])
def test_a_port_is_a_number_that_there_is(port, capsys):
    with pytest.raises(SystemExit) as end:
        server.main(["up", "--port", port])
    assert end.value.code == 2
    assert f"argument --port: {port!r} is not a port between 1 and 65535" in capsys.readouterr().err


def test_the_command_wants_the_projects_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert server.main(["up"]) == 2
    assert capsys.readouterr().err == f"error: no Pulumi.yaml in {tmp_path}; run this in the project's folder\n"
    assert not (tmp_path / "build").exists()
