"""Addresses of this machine are never asked through a proxy: it cannot reach them, and would be shown the cluster's and dstack's tokens.

Ray's and dstack's clients obey http_proxy for 127.0.0.1 too, unless no_proxy says otherwise. cluster_tasks/node/proxies.py does the
same for a node, where nothing of ours is installed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

LOCAL = ("localhost", "127.0.0.1", "127.0.0.0/8", "::1")


def direct(env: Mapping[str, str], *urls: str) -> dict[str, str]:
    """`env`, in which a proxy that it names is for neither this machine nor the hosts of `urls`. What no_proxy has stays."""
    if not any(value and name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name, value in env.items()):
        return dict(env)
    wanted = [*LOCAL, *(host for url in urls if (host := urlsplit(url).hostname))]
    found = dict(env)
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):  # some programs read the one first, some the other
        known = [host for word in (env.get(name) or env.get(other) or "").split(",") if (host := word.strip())]
        found[name] = "*" if known == ["*"] else ",".join(dict.fromkeys([*known, *wanted]))
    return found


def go_direct(*urls: str) -> None:
    """The same for this process and all that it starts."""
    os.environ.update(direct(os.environ, *urls))
