"""A cloud's notice that it takes a spot machine back."""

from __future__ import annotations

import http.client
import logging
import os
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from .settings import Settings

NOTICE_SECONDS = 5  # between two requests for a spot machine's notice, which comes half a minute ahead, or two

log = logging.getLogger(__name__)


@dataclass
class Preemption:
    """A cloud's notice that it takes a spot machine back, handed to the head by a file among the checkpoints, which all nodes see."""

    service: str | None  # --spot
    file: Path
    own: str
    asked: float = 0

    @classmethod
    def of(cls, settings: Settings) -> Preemption:
        place, run = os.environ.get("FLOTILLA_RUNS"), os.environ.get("DSTACK_RUN_NAME", "ray")
        return cls(settings.spot if place else None, Path(place or "/") / f".leaving-{run}", settings.addresses[settings.rank])

    def clear(self) -> None:
        """Forgets the notice of an earlier attempt."""
        if self.service:
            self.file.unlink(missing_ok=True)

    def poll(self) -> str | None:
        """Address of the node that is taken back."""
        if self.service is None:
            return None
        if self.file.exists():
            return self.file.read_text()
        if time.monotonic() - self.asked > NOTICE_SECONDS:
            self.asked = time.monotonic()
            if reclaimed(self.service):
                log.warning("the cloud takes this machine back: jobs are to save")
                self.file.write_text(self.own)
        return None


def reclaimed(service: str) -> bool:
    """What the machine's metadata service says of a kind.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
    https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
    """
    if service == "compute-metadata":
        return metadata("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}) == "TRUE"
    token = metadata("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    return bool(token and metadata("GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))


def metadata(method: str, path: str, headers: dict[str, str]) -> str | None:
    """What the machine's metadata service answers, at the same address on all clouds; None where it has nothing to say."""
    request = urllib.request.Request(f"http://169.254.169.254{path}", headers=headers, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2) as answer:
            return answer.read().decode().strip()
    except (OSError, http.client.HTTPException):
        return None
