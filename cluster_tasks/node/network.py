"""Addresses of nodes, and the network interfaces that have them."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import sys
from pathlib import Path

ALONE = "127.0.0.2"  # a node that is alone; Ray would replace 127.0.0.1 by an address of its own choice
SIOCGIFADDR = 0x8915  # netdevice(7)


class NoAnswer(ValueError):
    """The name service does not answer, which may be over in a moment: a name that it does not know is another matter."""


def resolve(name: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network | None) -> str:
    """Address by which other nodes reach a host: the one in `network` where it has several, IPv4 before IPv6. Raises ValueError.

    A host may know itself by a loopback address, 127.0.1.1 on Debian; then its interfaces are asked.
    """
    try:
        found = [ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        kind = NoAnswer if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN else ValueError
        raise kind(f"host {name} does not resolve to an address: {error}") from None
    known = [*found, *(map(ipaddress.ip_address, own_addresses()) if any(address.is_loopback for address in found) else ())]
    usable = [address for address in (known if network else found) if (address in network if network else not address.is_loopback)]
    if not usable:
        why = (
            f"no address in --network {network}" if network else "no address that other nodes reach; give --network, or correct /etc/hosts"
        )
        raise ValueError(f"host {name} has {why}: it resolves to {', '.join(map(str, found))}")
    return str(min(usable, key=lambda address: address.version))  # the first of the lower version


def own_addresses() -> dict[str, str]:
    """Addresses of this machine and the network interface that has each: the first IPv4 one of an interface, and all of IPv6."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        number, *_, name = line.split()
        found[str(ipaddress.IPv6Address(int(number, 16)))] = name
    return found


def interfaces(address: str) -> dict[str, str]:
    """What tells gloo and NCCL to talk over the interface that has this address.

    Left alone, gloo takes the address to which the host name resolves: 127.0.1.1 on Debian, where no other node finds it.
    """
    here = ipaddress.ip_address(address)
    name = own_addresses().get("127.0.0.1" if here.version == 4 and here.is_loopback else address)
    # With =, NCCL does not take eth1 for eth10 too.
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
