"""The head's dashboard, as a client of it: nodes, jobs, and the token that it wants to see."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import signal
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .identity import token_variable

ASK_SECONDS = 10
FLEET = "flotilla.fleet"  # label of an elastic node


@dataclass(frozen=True)
class Dashboard:
    """What the head's dashboard, which is also the job API, answers to who shows the token. It is never asked through a proxy."""

    url: str
    token: str | None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """JSON; POST where there is a body. Raises OSError where nothing answers, or not with JSON."""
        content = self.read(path, body)
        try:
            return json.loads(content)
        except ValueError as error:  # another service
            raise OSError(f"{path}: {error}") from error

    def read(self, path: str, body: dict[str, Any] | None = None, seconds: float = ASK_SECONDS) -> bytes:
        """The answer as it is, waited for so long. Raises OSError where there is none."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        parts = urlsplit(self.url)
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with contextlib.closing(connect(parts.hostname or "", parts.port, timeout=seconds)) as connection:
            self.verify(connection)
            text = None if body is None else json.dumps(body)
            try:
                connection.request("GET" if body is None else "POST", f"{parts.path}{path}", text, headers)
                answer = connection.getresponse()
                content = answer.read()
                if answer.status >= 300:
                    raise urllib.error.HTTPError(f"{self.url}{path}", answer.status, answer.reason, answer.headers, io.BytesIO(content))
                return content
            except (http.client.HTTPException, ValueError) as error:  # cut off, or another service
                raise OSError(f"{path}: {error}") from error

    def verify(self, connection: http.client.HTTPConnection) -> None:
        """Before the token is shown on a connection. On the head itself there is nothing to doubt; cluster_tasks/identity.py does."""

    def alive_nodes(self) -> dict[str, dict[str, float]] | None:
        """Resources of the nodes that are ALIVE, by address; None where it does not answer (yet)."""
        try:
            nodes = self.ask("/api/v0/nodes?limit=10000")["data"]["result"]["result"]
        except (OSError, KeyError, TypeError):  # while it starts it answers with errors
            return None
        return {node["node_ip"]: node["resources_total"] for node in nodes if node["state"] == "ALIVE"}

    def elastic_nodes(self) -> dict[str, str]:
        """Of the ALIVE nodes that joined the running cluster: their fleet by address. Empty where it does not answer."""
        try:
            nodes = self.ask("/api/v0/nodes?limit=10000&detail=1")["data"]["result"]["result"]
        except (OSError, KeyError, TypeError):
            return {}
        fleets = {node["node_ip"]: (node.get("labels") or {}).get(FLEET) for node in nodes if node["state"] == "ALIVE"}
        return {address: fleet for address, fleet in fleets.items() if fleet}

    def started(self) -> dict[str, float]:
        """When each ALIVE node started, by its own clock, in seconds since the epoch. Raises OSError."""
        nodes = self.ask("/api/v0/nodes?limit=10000&detail=1")["data"]["result"]["result"]
        return {node["node_ip"]: node["start_time_ms"] / 1000 for node in nodes if node["state"] == "ALIVE" and node.get("start_time_ms")}

    def exit_code(self, job: str) -> int | None:
        """Of a job that has ended, 128 + N where signal N ended it or it was stopped; None while it runs. Raises OSError."""
        info = self.ask(f"/api/jobs/{job}")
        if info["status"] not in ("SUCCEEDED", "FAILED", "STOPPED"):
            return None
        code = info.get("driver_exit_code")
        if info["status"] == "STOPPED" and not code:  # it has saved and ended by itself: it is not done all the same
            return 128 + signal.SIGTERM
        if code is None:
            return 0 if info["status"] == "SUCCEEDED" else 1
        return code if code >= 0 else 128 - code

    def stop(self, job: str) -> None:
        """Sends SIGTERM to a job. Raises OSError."""
        self.ask(f"/api/jobs/{job}/stop", {})


def written(dashboard: Dashboard, job: dict[str, Any], kind: str) -> Any:
    """What a job has written into KIND-JOB.json among Ray's logs on its driver's node; None where there is none (yet)."""
    node = (job.get("driver_info") or {}).get("node_ip_address")
    where = f"node_id={job['driver_node_id']}" if job.get("driver_node_id") else f"node_ip={node}"
    try:
        return json.loads(dashboard.read(f"/api/v0/logs/file?{where}&filename={kind}-{job['submission_id']}.json&lines=1"))
    except (OSError, ValueError):  # ValueError: Ray read it while it was replaced
        return None


def ray_token(env: Mapping[str, str], stack: str = "") -> str | None:
    """The stack's token, else where Ray itself looks for one and in its order; None where authentication is off. Raises ValueError."""
    if env.get("RAY_AUTH_MODE") != "token":
        return None
    path = Path(env.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
    token = env.get(token_variable(stack)) or env.get("RAY_AUTH_TOKEN") or (path.read_text().strip() if path.is_file() else "")
    if not token:
        raise ValueError("RAY_AUTH_MODE is token, but neither RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH nor ~/.ray/auth_token holds one")
    return token


def missing(addresses: list[str], gpus: int | list[int] | None, alive: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What the cluster still misses, in words; empty when it is complete. `gpus` of every node, or of each in order."""
    if gone := [address for address in addresses if address not in alive]:
        return gone
    wanted = gpus if isinstance(gpus, list) else [gpus or 0] * len(addresses)
    have = [alive[address].get("GPU", 0) for address in addresses]
    return [f"{a} with {h:.0f} of {w} GPUs" for a, h, w in zip(addresses, have, wanted, strict=True) if h < w]
