"""How a network's addresses are cut: sixteen equal blocks, a private and a public one for each zone."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network

RESERVED = 5  # addresses of a subnet that AWS keeps
LETTERS = "abcdefgh"  # of the zones that have blocks


@dataclass(frozen=True)
class Blocks:
    """The address blocks of one zone's subnets."""

    private: IPv4Network
    public: IPv4Network


def cut(cidr: IPv4Network, zones: list[str]) -> dict[str, Blocks]:
    """The subnets of each zone. A zone's blocks follow from its letter, so a zone that comes or goes moves no other.

    Raises ValueError where a zone has no letter from a to h, as local zones, or a block would be smaller than AWS's /28.
    """
    if cidr.prefixlen > 24:
        raise ValueError(f"{cidr} is too small to be cut into sixteen subnets; take a /24 or larger")
    blocks = list(cidr.subnets(prefixlen_diff=4))
    found = {}
    for zone in zones:
        if zone[-1] not in LETTERS or not zone[-2].isdigit() or zone.count("-") > 3:
            raise ValueError(f"{zone!r} is no availability zone with a letter from a to h")
        slot = LETTERS.index(zone[-1])
        found[zone] = Blocks(blocks[slot], blocks[slot + len(LETTERS)])
    return found


def usable(subnet: IPv4Network) -> int:
    """How many addresses of a subnet nodes can have."""
    return subnet.num_addresses - RESERVED
