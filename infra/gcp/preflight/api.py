"""How GCP is api: the REST interfaces that gcloud uses; a refused or broken call is an answer, too.

https://docs.cloud.google.com/compute/docs/reference/rest/v1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import requests
from google.auth.exceptions import GoogleAuthError

from infra.preflight.answers import Answer, failed, unknown
from stacks.places.machine_types import Machine
from stacks.schema import Stack

GOOGLE = "https://{service}.googleapis.com"
LOGIN = "gcloud auth application-default login"
DEADLINE = 20  # seconds for one answer
Plain = dict[str, Any]


class Refused(Exception):
    """An answer that is no result: `status` is that of HTTP, the text is Google's own."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Api:
    """The stack in question, and the way to ask for a resource."""

    stack: Stack
    machines: dict[str, Machine]
    session: requests.Session
    root: str = GOOGLE

    def get(self, service: str, path: str, **parameters: str) -> Plain:
        """The resource at a path of a service such as compute. Raises Refused."""
        return self._result(self.session.get(self._url(service, path), params=parameters, timeout=DEADLINE))

    def post(self, service: str, path: str, body: Plain, **parameters: str) -> Plain:
        """What a call that creates something answers. Raises Refused."""
        return self._result(self.session.post(self._url(service, path), params=parameters, json=body, timeout=DEADLINE))

    def _url(self, service: str, path: str) -> str:
        return f"{self.root.format(service=service)}/{path}"

    @staticmethod
    def _result(answer: requests.Response) -> Plain:
        if answer.ok:
            return answer.json()
        try:
            text = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = answer.reason
        raise Refused(answer.status_code, text)

    def compute(self, path: str, project: str = "", **parameters: str) -> Plain:
        return self.get("compute", f"compute/v1/projects/{project or self.stack.project}/{path}".rstrip("/"), **parameters)

    def there(self, path: str, project: str = "", **parameters: str) -> Plain | None:
        """The resource of Compute Engine, or None where there is none."""
        try:
            return self.compute(path, project, **parameters)
        except Refused as refused:
            if refused.status == 404:
                return None
            raise


def answers(name: str, check: Callable[[Api], Iterator[Answer]], api: Api) -> list[Answer]:
    """A call that is refused or broken is an answer, too."""
    try:
        return list(check(api))
    except Refused as refused:
        if refused.status == 403 and "has not been used" in str(refused):
            how = "switched on by the first `pulumi up`, or: gcloud services enable compute.googleapis.com"
            return [unknown(name, "the API is off, so it cannot be asked", f"{how} --project {api.stack.project}")]
        if refused.status == 403:
            return [unknown(name, f"you may not ask: {refused}", "roles/viewer on the project allows it")]
        return [failed(name, f"Google: {refused} ({refused.status})", "see the message")]
    except GoogleAuthError as error:
        return [failed(name, f"Google does not accept the credentials: {error.args[0]}", LOGIN)]
    except requests.RequestException as error:
        return [failed(name, f"Google did not answer: {type(error).__name__}", "look at network and proxy settings, then ask again")]
