"""Stacks that GCP is asked about before `pulumi up`, and a server on this machine that answers as Google's REST interfaces do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from support.json_server import JsonHandler, served

from infra.gcp.preflight.api import Api
from stacks import load
from stacks.places import machines
from stacks.schema import Stack

ROOT = Path(__file__).parents[2]
COMPUTE = "compute/compute/v1/projects/my-project-id"
LINK = "https://www.googleapis.com/compute/v1/projects/my-project-id"
Answers = dict[str, Any]  # by path: what Google serves, or status and message of a refusal
Ask = Callable[..., Api]


def stack(name: str = "gcp-dev", fleet: dict[str, Any] | None = None, **settings: Any) -> Stack:
    """A stack of the repository with settings replaced, those of its fleet among them; `...` removes one."""
    raw = load.settings(name, ROOT) | {f"flotilla:{key}": value for key, value in settings.items()}
    raw["flotilla:fleets"] = [{key: value for key, value in (raw["flotilla:fleets"][0] | (fleet or {})).items() if value is not ...}]
    return load.parse(name, raw)


class Google(JsonHandler):
    """Answers paths such as /compute/compute/v1/...: the service, then what Google serves; 404 in Google's words for all others."""

    answers: ClassVar[Answers] = {}
    queries: ClassVar[list[dict[str, list[str]]]] = []

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        type(self).queries.append(parse_qs(address.query))
        answer = self.answers.get(address.path[1:], (404, f"The resource '{address.path}' was not found"))
        if isinstance(answer, dict):
            self.send(200, answer)
        else:
            self.send(answer[0], {"error": {"code": answer[0], "message": answer[1]}})

    def do_POST(self) -> None:
        """Such as :getIamPolicy, which changes nothing."""
        self.body()
        self.do_GET()


@contextmanager
def google() -> Iterator[Ask]:
    """Asks a server that has these answers on behalf of a stack."""
    Google.queries = []

    def api(of: Stack, *answers: Answers) -> Api:
        Google.answers = {path: answer for some in answers for path, answer in some.items()}
        return Api(of, machines(of), AuthorizedSession(AnonymousCredentials()), f"{url}/{{service}}")

    with served(Google) as url:
        yield api
