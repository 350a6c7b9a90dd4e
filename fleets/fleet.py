"""Stack and Site -> a dstack fleet: the machines that runs are placed on."""

from __future__ import annotations

from typing import Any

from stacks import places
from stacks.places import place_of
from stacks.schema import Fleet, Host, JumpHost, Ssh, Stack
from stacks.site import Site, present

IDLE = "15m"  # dstack's own default is three days, which GPUs nobody uses cost


def fleet(stack: Stack, site: Site, fleet: Fleet) -> dict[str, Any]:
    """One fleet definition for `dstack apply -f`.

    `placement: cluster` for a cluster: dstack runs a task of several nodes on such fleets alone. Over SSH the hosts are listed;
    on a cloud, or where nothing is reachable (the local stack), dstack is asked for machines with these resources.
    """
    # A cluster is asked of backends alone that have a network between nodes; one node may be on any.
    alone = fleet.elastic or (bool(stack.backends) and fleet.nodes == 1)
    head = {"type": "fleet", "name": fleet.name, "placement": "any" if alone else "cluster"}
    ssh = site.ssh.get(fleet.name)
    if ssh is not None:
        others = stack.cluster_fleets()[1:] if fleet == stack.cluster_fleets()[0] else ()
        return head | {"ssh_config": _ssh_config(_together(ssh, [site.ssh[other.name] for other in others]), site)}
    if not site.backends:
        return head | {"nodes": f"{fleet.least}..{stack.most(fleet)}" if fleet.elastic else fleet.nodes, "resources": fleet.requirements()}
    return head | _offers(stack, site, site.equipped(fleet))


def _offers(stack: Stack, site: Site, fleet: Fleet) -> dict[str, Any]:
    """Which machines dstack may launch. A fleet of a cloud shrinks to nothing when idle."""
    place = place_of(stack)
    if place.cloud and stack.backends:
        fleet = places.like(places.machines(stack)[fleet.name], fleet)
    borrowed = place.batch  # nodes come with runs and go with them; dstack cannot hold one
    named, launches, most = fleet.machine is not None, bool(stack.backends), stack.most(fleet)
    if launches and not fleet.elastic:
        most *= 2  # a machine that is gone counts for twenty minutes more, in which its place would stay empty
    return present(
        nodes=f"0..{most}" if named or borrowed or launches or fleet.elastic else fleet.nodes,
        backends=[backend["type"] for backend in site.backends],
        regions=list(fleet.regions) or None,
        # Of a cloud that is one of several its network has subnets in these alone; dstack would refuse all others' offers.
        availability_zones=list(stack.network.zones) or None if named else None,
        instance_types=[fleet.machine] if named else None,
        reservation=fleet.capacity.id,
        spot_policy="spot" if fleet.capacity.kind == "spot" else "on-demand" if named or launches else None,
        max_price=fleet.max_price,
        idle_duration=fleet.idle_duration or (IDLE if place.cloud or launches else None),
        resources=fleet.requirements(),
    )


def _ssh_config(ssh: Ssh, site: Site) -> dict[str, Any]:
    # dstack's server refuses both: it looks for each host's address in the network only where none is given.
    network = None if any(host.internal_ip for host in ssh.hosts) else ssh.network or site.network
    return present(
        user=ssh.user,
        identity_file=str(ssh.identity_file),
        network=str(network) if network else None,
        proxy_jump=_jump(ssh.proxy_jump) if ssh.proxy_jump else None,
        hosts=[_host(host) for host in ssh.hosts],
    )


def _together(ssh: Ssh, others: list[Ssh]) -> Ssh:
    """One list of hosts; each of another fleet brings its user and key where they differ."""
    joined = [
        host.model_copy(update={"user": host.user or other.user, "identity_file": host.identity_file or other.identity_file})
        if (other.user, other.identity_file) != (ssh.user, ssh.identity_file)
        else host
        for other in others
        for host in other.hosts
    ]
    return ssh.model_copy(update={"hosts": (*ssh.hosts, *joined)})


def _host(host: Host) -> str | dict[str, Any]:
    """A bare name where nothing else is said of the host, as a person would write it."""
    settings = present(
        internal_ip=str(host.internal_ip) if host.internal_ip else None,
        user=host.user,
        port=host.port,
        identity_file=str(host.identity_file) if host.identity_file else None,
    )
    return {"hostname": host.hostname} | settings if settings else host.hostname


def _jump(jump: JumpHost) -> dict[str, Any]:
    return {"hostname": jump.hostname, "port": jump.port, "user": jump.user, "identity_file": str(jump.identity_file)}
