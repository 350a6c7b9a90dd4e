"""The dstack server that a stack is for: its address, or the machine that is made for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field
from pydantic_core import PydanticCustomError

from stacks.settings.fields import Count, Model, Name, OwnPath, Url, known, setting_error

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Dstack(Model):
    """The dstack server that this stack's files are for."""

    host: Literal["elsewhere", "cloud"] | None = Field(
        default=None,
        description="Place of the server. cloud: a control node that `pulumi up` creates in the nodes' network. "
        "elsewhere: your own machine, in that network or with a VPN into it. Required if dstack launches the nodes of a cloud.",
    )
    server: Url = Field(
        default="http://127.0.0.1:3000", description="URL of the server; with host: cloud, the address to which its port is forwarded."
    )
    project: Name = Field(default="main", description="Project on the server.")
    credentials: OwnPath | None = Field(
        default=None,
        description="File of NAME=value lines with cloud keys, such as RUNPOD_API_KEY, for a server here. The environment overrides it.",
    )
    drive: bool = Field(
        default=False, description="`pulumi up` creates backend, fleets and volume there; otherwise it only writes their files."
    )
    adopt: bool = Field(default=False, description="Take over existing resources of the same name instead of refusing; with drive.")
    on_destroy: Literal["refuse", "wait", "stop"] = Field(
        default="refuse",
        description="Handling of runs on a fleet that is being removed: refuse, wait for them to end, or stop them; with drive.",
    )
    timeout: Count = Field(default=1200, ge=1, description="Seconds to wait for machines, volumes and the end of runs; with drive.")

    @property
    def port(self) -> int:
        """Of the server here; with `host: cloud` the one that the control node's is forwarded to."""
        found = urlsplit(self.server)
        return found.port or (443 if found.scheme == "https" else 80)

    def own_errors(self) -> Iterator[PydanticCustomError]:
        yield from known(self._forwarded())
        for key in ("adopt", "on_destroy", "timeout"):
            if self.says(key) and not self.drive:
                yield setting_error("belongs to drive: true; without it `pulumi up` asks nothing of the server", key)

    def _forwarded(self) -> Iterator[PydanticCustomError]:
        if self.host == "cloud" and urlsplit(self.server).hostname not in LOOPBACK:
            text = "but with host: cloud the server is the control node, forwarded to this machine; leave it out, or name a port here"
            yield setting_error(f"{self.server!r}, {text}: http://127.0.0.1:3001", "server")
        elif self.host == "cloud" and (self.server.startswith("https:") or self.port < 1024):
            yield setting_error(f"{self.server!r} is not a forwarded port such as http://127.0.0.1:3001", "server")
