"""How AWS is api: one client for each service, in the stack's region; a refused or broken call is an answer, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.preflight.answers import Answer, failed, unknown
from stacks.places.machine_types import Machine
from stacks.schema import Stack

LOGIN = "aws sso login, or aws configure; AWS_PROFILE chooses among several"
PATIENCE = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 3, "mode": "standard"})
FORBIDDEN = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
Plain = dict[str, Any]


@dataclass(frozen=True)
class Api:
    """The stack in question, and the way to ask each service in its region."""

    stack: Stack
    machines: dict[str, Machine]
    client: Callable[[str], Any]


def answers(name: str, check: Callable[[Api], Iterator[Answer]], api: Api) -> list[Answer]:
    """A call that is refused or broken is an answer, too."""
    try:
        return list(check(api))
    except ClientError as error:
        said = error.response["Error"]
        if said["Code"] in FORBIDDEN:
            return [
                unknown(name, f"you may not ask: {said.get('Message', said['Code'])}", f"allow {error.operation_name} to this identity")
            ]
        return [failed(name, f"AWS: {said.get('Message') or said['Code']}", f"the call was {error.operation_name}")]
    except BotoCoreError as error:
        return [failed(name, f"AWS did not answer: {error}", "look at the network and at region and proxy settings, then ask again")]
