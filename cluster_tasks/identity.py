"""A cluster's token and whose cluster it is, as those who use it know them.

The token lies beside the stack's other files, readable by its owner alone. It is shown to a dashboard only on a connection on which
the cluster has proved that it holds the token too, and that it is the stack's own: cluster_tasks/node/identity.py answers.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_tasks.node import identity
from cluster_tasks.node.dashboard import Dashboard, ray_token
from stacks.errors import UserError

TOKEN = "ray.token"  # in build/<stack>/
ADDRESS = "address"  # in build/local/: where the dashboard is, while the cluster is up
STACK = "FLOTILLA_STACK"  # in the environment: name of the stack that a shell is set up for, by env.sh


class WrongCluster(UserError):
    """The cluster that answers is not the one that is meant; nothing was shown or sent to it. In one line."""


def make_token(file: Path, token: str | None = None) -> str:
    """Text of the file with the token, 256 random bits in hexadecimal; its owner alone may read it.

    Made where the file is missing or empty. A `token` that is given replaces another one.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    known = file.read_text().strip() if file.is_file() else ""
    if known and token in (None, known):
        file.chmod(0o600)
        return known
    file.unlink(missing_ok=True)
    token = token or secrets.token_hex(32)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(token)
    return token


def environment(folder: Path, url: str) -> dict[str, str]:
    """What `. build/<stack>/env.sh` sets for the cluster at `url`. Raises OSError where the token cannot be read."""
    file = folder / TOKEN
    token = file.read_text().strip()
    found = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(file),
        "RAY_AUTH_TOKEN": token,
        identity.token_variable(folder.name): token,
    }
    return {"RAY_ADDRESS": url, STACK: folder.name} | found


@dataclass(frozen=True)
class Identity:
    """What a cluster says of itself. `id` is None where it asks for no token."""

    stack: str
    id: str | None
    owner: str
    proof: str | None

    @classmethod
    def of(cls, text: bytes) -> Identity:
        """Raises ValueError where the text is no identity."""
        said = json.loads(text)
        if not isinstance(said, dict) or set(said) != {"stack", "id", "owner", "proof"}:
            raise ValueError("not an identity")
        texts = {name: value if value is None else printable(str(value)) for name, value in said.items()}
        return cls(texts["stack"] or "", texts["id"], texts["owner"] or "nobody", texts["proof"])

    def __str__(self) -> str:
        return f"the cluster of stack {self.stack or '(unnamed)'}, id {self.id or 'none'}, run by {self.owner}"


def printable(text: str) -> str:
    """What a stranger says, on one line and without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:100])


@dataclass(frozen=True)
class KnownDashboard(Dashboard):
    """A dashboard that has to prove whose it is before the token, or anything else, is sent to it.

    `stack` None leaves its name open; the token does not. Where neither is set a person chose the address of a cluster without a token.
    """

    stack: str | None = None
    source: str = "build/<stack>/env.sh"  # where stack and token were read

    @classmethod
    def of(cls, url: str, env: Mapping[str, str]) -> KnownDashboard:
        """As the environment has it. Raises ValueError where RAY_AUTH_MODE=token comes without a token."""
        return cls(url, ray_token(env), env.get(STACK) or None, env.get("RAY_AUTH_TOKEN_PATH") or "RAY_AUTH_TOKEN")

    def verify(self, connection: http.client.HTTPConnection) -> None:
        """Raises WrongCluster, and OSError where nothing answers. Afterwards the connection is never made anew: it would be another."""
        nonce = secrets.token_hex(16)
        self._judge(self._asked(connection, nonce), nonce)
        if self.token or self.stack:
            connection.auto_open = 0

    def _asked(self, connection: http.client.HTTPConnection, nonce: str) -> Identity | int:
        """What the cluster says, or the HTTP status of one that says nothing."""
        try:
            connection.request("GET", f"{identity.PATH}?nonce={nonce}")
            answer = connection.getresponse()
            content = answer.read()
        except http.client.HTTPException as error:
            raise OSError(f"it does not speak HTTP: {error or type(error).__name__}") from error
        if answer.status == 503:  # the cluster is starting
            raise OSError(f"HTTP 503 ({answer.reason})")
        with contextlib.suppress(ValueError, TypeError):
            if answer.status == 200:
                return Identity.of(content)
        return answer.status

    def _judge(self, found: Identity | int, nonce: str) -> None:
        mine = identity.fingerprint(self.token)
        if isinstance(found, int):
            if not self.token and not self.stack:
                return  # a Ray of somebody's own, named by its address
            raise WrongCluster(
                f"{self.url} does not say whose cluster it is (HTTP {found}), so it is not {self._meant}; nothing was sent to it; "
                f"end what listens there, or take the address of your own cluster: {HINT}"
            )
        if not self.token and not self.stack and found.id is None:
            return
        if not self.token:
            yours = f"`. build/{found.stack}/env.sh` if it is yours"
            raise WrongCluster(f"{self.url} is {found}; it asks for a token, and none is given: {yours}")
        for reason in self._reasons(found, mine, nonce):
            raise WrongCluster(f"{self.url} is {found}, not {self._meant}: {reason}; nothing was sent to it; {HINT}")

    def _reasons(self, found: Identity, mine: str | None, nonce: str) -> Iterator[str]:
        """Why this is another cluster."""
        if found.id is None:
            yield "it asks for no token"
        if self.stack and found.stack != self.stack:
            yield "it has another name"
        if found.id != mine:
            yield "it has another token"
        if not hmac.compare_digest(found.proof or "", identity.proof(self.token or "", nonce, found.stack)):
            yield "it cannot prove that it is"

    @property
    def _meant(self) -> str:
        known = f", id {identity.fingerprint(self.token)}" if self.token else ""
        return f"{self.stack or 'the cluster'}{known} (from {self.source})"


HINT = "`. build/<stack>/env.sh` sets address and token of a stack's cluster; another port: `dstack attach NAME -p 8266:8265`, --port"
