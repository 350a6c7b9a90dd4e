"""How a network's addresses are cut: half for the nodes' subnet, a sixteenth of the rest for each network of the fabric.

All interfaces of a machine must be in ranges that do not overlap, so the fabric's networks share one plan with the main one.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network

from stacks.machines import Networks

BLOCKS = 16
RESERVED = 4  # addresses of a subnet that GCP keeps


@dataclass(frozen=True)
class Blocks:
    """`main` of the nodes' subnet, one of `vpcs` for each extra network, one of `rdma` for each subnet of the RoCE network."""

    main: IPv4Network
    vpcs: tuple[IPv4Network, ...] = ()
    rdma: tuple[IPv4Network, ...] = ()

    @property
    def fabric(self) -> tuple[IPv4Network, ...]:
        return (*self.vpcs, *self.rdma)


def cut(cidr: IPv4Network, networks: Networks) -> Blocks:
    """Ranges of all subnets within `cidr`. Raises ValueError where a network is too small to be cut."""
    if cidr.prefixlen > 22:
        raise ValueError(f"{cidr} is too small to be cut into subnets; take a /22 or larger")
    main, rest = cidr.subnets(prefixlen_diff=1)
    blocks = list(rest.subnets(new_prefix=rest.prefixlen + 4))
    assert networks.vpcs + networks.rdma_subnets <= BLOCKS == len(blocks)
    return Blocks(main, tuple(blocks[: networks.vpcs]), tuple(blocks[networks.vpcs : networks.vpcs + networks.rdma_subnets]))


def usable(subnet: IPv4Network) -> int:
    """How many addresses of a subnet nodes can have."""
    return subnet.num_addresses - RESERVED
