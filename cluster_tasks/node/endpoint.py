"""The token of a served model: made of the cluster's own, on both sides alike, so that nobody has to send it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

NAME = r"(?!runs$)[a-z0-9][a-z0-9_-]{0,59}"  # of an endpoint: in an address, in a job's name and in that of a file; runs is the page's
ALLOWED = "lower-case letters, digits, - or _, up to 60, and not runs"
AT = "/flotilla/at"  # below which the front on the dashboard's port leads to names
JOB = "serve"  # key of the metadata of its job


def token(of_cluster: str, name: str, start: str) -> str:
    """Of the endpoint `name`, and of one start of it alone."""
    return hmac.new(of_cluster.encode(), f"flotilla serve\n{name}\n{start}".encode(), hashlib.sha256).hexdigest()


def token_of(env: Mapping[str, str], name: str, start: str) -> str:
    """As a job knows the cluster's token; nothing where it knows none."""
    path = env.get("RAY_AUTH_TOKEN_PATH")
    known = env.get("RAY_AUTH_TOKEN") or (Path(path).read_text().strip() if path and Path(path).is_file() else "")
    return token(known, name, start) if known else ""
