"""Hosts and people as sites name them: each host once, each person by the name that their directory has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.schema_stacks import SSH, changed

from infra.slurm.build import backend
from stacks import load, written
from stacks.load import StackError
from stacks.settings.slurm import Door

USERS = ("jane.doe", "JDoe", "1234abc", "jane@corp.example", "j_doe", "svc-ml", "machine$", "jane+ml", "u", "_ray", "1000")
NO_USERS = ("jane doe", "-jane", "jane:x", "jane@", "jane;id", "$(id)", "jané", ".jane", "jane.", "", "j/doe", "a\\b")
HOSTS = ("gpu1", "GPU1.lab", "gpu_1", "10.0.0.5", "fd00::1", "2001:db8::5", "::ffff:10.0.0.1", "1a.lab", "10-0-0-5", "gpu1.10g")
NO_HOSTS = {
    "gpu1:2222": "write gpu1, and a port as `port`",
    "[fd00::1]": "write fd00::1, and a port as `port`",
    "[fd00::1]:22": "write fd00::1, and a port as `port`",
    "10.0.0.5:22": "write 10.0.0.5, and a port",
    "10.0.0.256": "'10.0.0.256' is neither an address nor a host name",
    "10.0.0": "'10.0.0' is neither an address",
    "10.0.0.01": "'10.0.0.01' is neither an address",
    "10": "'10' is neither an address",
    "fd00::1::2": "'fd00::1::2' is neither an address",
    "fd00:1": "write fd00, and a port",
    "gpu1:": "is neither an address nor a host name",
    "gpu..lab": "is not a host name",
    "ops@gpu1": "is not a host name or address, without user and port",
    "-gpu1": "is not a host name or address",
}


def ssh(*fleets: list[dict[str, Any]], together: bool = False) -> dict[str, Any]:
    found = [{"name": f"f{number}", "ssh": {"user": "ops", "identity_file": "/k", "hosts": hosts}} for number, hosts in enumerate(fleets)]
    more = {"flotilla:task": {"fleets": [fleet["name"] for fleet in found]}} if together else {}
    return {"flotilla:cloud": "ssh", "flotilla:fleets": found, "flotilla:checkpoints": {"kind": "shared", "path": "/srv"}} | more


def hosts(*names: str, **more: object) -> list[dict[str, Any]]:
    return [{"hostname": name} | more for name in names]


def error(settings: dict[str, Any]) -> str:
    with pytest.raises(StackError) as caught:
        load.parse("test", settings)
    return str(caught.value)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("at", ["user", "hosts.0.user", "proxy_jump"])
def test_a_login_name_is_as_a_directory_has_it(user, at):
    value = {"hostname": "jump", "user": user, "identity_file": "/k"} if at == "proxy_jump" else user
    load.parse("test", changed(SSH, f"fleets.0.ssh.{at}", value))


@pytest.mark.parametrize("user", NO_USERS)
def test_what_no_ssh_takes_as_a_name_is_refused(user):
    assert "is not the name of a Unix user" in error(changed(SSH, "fleets.0.ssh.user", user))


@pytest.mark.parametrize("name", HOSTS)
def test_hosts(name):
    load.parse("test", ssh(hosts(name)))


@pytest.mark.parametrize("name", NO_HOSTS)
def test_what_is_no_host(name):
    says = error(ssh(hosts(name)))
    assert "flotilla:fleets[0].ssh.hosts[0].hostname: " in says and NO_HOSTS[name] in says and "\n" not in says


TWICE = [
    (ssh(hosts("gpu1", "GPU1")), "fleets[0].ssh.hosts[1].hostname: 'GPU1' is listed twice"),
    (ssh(hosts("gpu1.lab", "Gpu1.Lab")), "hosts[1].hostname: 'Gpu1.Lab' is listed twice"),
    (ssh(hosts("fd00::1", "fd00:0::1")), "'fd00:0::1' is listed twice"),
    (ssh([{"hostname": "gpu1"}, {"hostname": "gpu1", "port": 22}]), "'gpu1' is listed twice"),
    (ssh(hosts("gpu1"), hosts("GPU1"), together=True), "fleets[1].ssh.hosts[0].hostname: 'GPU1' is listed twice, in fleet 'f0' too"),
    (ssh(hosts("gpu1"), hosts("gpu1")), "fleets[1].ssh.hosts[0].hostname: 'gpu1' is listed twice, in fleet 'f0' too"),
    (
        ssh(hosts("a", internal_ip="10.0.0.1"), hosts("b", internal_ip="10.0.0.1"), together=True),
        "fleets[1].ssh.hosts[0].internal_ip: 10.0.0.1 is another host's too, of fleet 'f0'",
    ),
    (ssh(hosts("a", internal_ip="10.0.0.1"), hosts("b"), together=True), "fleets[1].ssh.hosts[0].internal_ip: is missing; dstack wants it"),
    (ssh(hosts("a"), hosts("b", internal_ip="10.0.0.1"), together=True), "fleets[0].ssh.hosts[0].internal_ip: is missing; dstack wants it"),
]


@pytest.mark.parametrize(("settings", "says"), TWICE, ids=[says[:50] for _, says in TWICE])
def test_a_host_is_one_node(settings, says):
    assert says in error(settings)


def test_two_hosts_behind_one_address_have_ports_of_their_own():
    load.parse("test", ssh([{"hostname": "nat", "port": 2201}, {"hostname": "nat", "port": 2202}]))
    load.parse("test", ssh(hosts("a", internal_ip="10.0.0.1"), hosts("b")))  # two clusters


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1", "not an address by which another host reaches this one"),
        ("0.0.0.0", "not an address by which another host"),
        ("169.254.1.1", "not an address by which another host"),
        ("224.0.0.1", "not an address by which another host"),
        ("172.17.0.1", "is in 172.17.0.0/16, which Docker uses"),
        ("8.8.8.8", "is not private"),
        ("100.64.0.1", "is not private"),
        ("fd00::1", "is an IPv6 address"),
        ("10.0.0.256", "is not an IP address"),
    ],
)
def test_an_internal_address_is_one_that_dstack_and_other_hosts_take(address, says):
    found = error(ssh(hosts("a", internal_ip=address)))
    assert "flotilla:fleets[0].ssh.hosts[0].internal_ip: " in found and says in found


@pytest.mark.parametrize(("network", "says"), [("fd00::/64", "is of IPv6"), ("8.8.8.0/24", "is not private")])
def test_a_network_is_one_that_dstack_takes(network, says):
    settings = copy.deepcopy(ssh(hosts("a")))
    settings["flotilla:fleets"][0]["ssh"]["network"] = network
    assert says in error(settings)


SLURM = {
    "flotilla:cloud": "slurm",
    "flotilla:fleets": [{"name": "gpus", "nodes": 1}],
    "flotilla:checkpoints": {"kind": "shared", "path": "/shared"},
}


@pytest.mark.parametrize(
    ("login", "user", "host", "port"),
    [
        ("login.example.com", None, "login.example.com", None),
        ("me@login", "me", "login", None),
        ("Jane.Doe@login_1:2222", "Jane.Doe", "login_1", 2222),
        ("1234abc@10.0.0.1", "1234abc", "10.0.0.1", None),
        ("jane@corp.example@login:22", "jane@corp.example", "login", 22),
        ("me@[fd00::1]:2222", "me", "fd00::1", 2222),
        ("[fd00::1]", None, "fd00::1", None),
    ],
)
def test_a_login_node(login, user, host, port):
    stack = load.parse("test", SLURM | {"flotilla:slurm": {"login": login}})
    assert Door.of(stack.slurm.login) == Door(user, host, port)


@pytest.mark.parametrize(
    "login", ["login:99999", "login:0", "me@login:x", "fd00::1", "me@10.0.0.256", "me@[fd00::1::2]", "me@", "a b@login"]
)
def test_what_is_no_login_node(login):
    assert "flotilla:slurm.login: '" in error(SLURM | {"flotilla:slurm": {"login": login}})


def test_dstacks_backend_has_the_login_nodes_address_without_brackets():
    named = {"login": "Jane.Doe@[fd00::1]:2222", "identity_file": "/k", "partition": "gpu"}
    stack = load.parse("test", SLURM | {"flotilla:slurm": named, "flotilla:dstack": {"server": "http://127.0.0.1:3000"}})
    [cluster] = backend(stack)["clusters"]
    assert {key: cluster[key] for key in ("hostname", "port", "user")} == {"hostname": "fd00::1", "port": 2222, "user": "Jane.Doe"}


@pytest.mark.parametrize("value", ["123", "0123", "1e3", "0x1", "12_3"])
def test_partitions_and_accounts_may_be_digits(value):
    stack = load.parse("test", SLURM | {"flotilla:slurm": written.load(f"{{partition: {value}, account: {value}}}")})
    assert (stack.slurm.partition, stack.slurm.account) == (value, value)
