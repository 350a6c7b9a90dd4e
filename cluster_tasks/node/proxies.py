"""Nodes of a cluster never ask one another through a proxy, which a site's image or flotilla:task.env may name for downloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LOCAL = ("localhost", "127.0.0.1", "127.0.0.0/8", "::1", "169.254.169.254")  # the last: a cloud's metadata service


def without_proxy(env: Mapping[str, str], addresses: Iterable[str]) -> dict[str, str]:
    """no_proxy and NO_PROXY of `env`, some programs read the one first and some the other, with this machine's and these addresses too."""
    found = {}
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        known = [host for word in (env.get(name) or env.get(other) or "").split(",") if (host := word.strip())]
        found[name] = "*" if known == ["*"] else ",".join(dict.fromkeys([*known, *LOCAL, *addresses]))
    return found
