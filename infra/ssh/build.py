"""Your own machines as the site: Pulumi creates nothing on them; dstack installs its agent over SSH."""

from __future__ import annotations

from stacks.schema import Stack
from stacks.site import Site


def build(stack: Stack) -> Site:
    """The hosts of every fleet, and the private network where all fleets share one."""
    ssh = {fleet.name: fleet.ssh for fleet in stack.fleets if fleet.ssh}
    networks = {hosts.network for hosts in ssh.values()}
    return Site(ssh=ssh, network=networks.pop() if len(networks) == 1 else None)
