"""dstack's own client as the resources use it: a token found, a deadline on everything, and one line for each mistake."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import requests
from dstack.api.server import APIClient
from pulumi import dynamic
from pydantic import ValidationError

from stacks.dstack_api import ClientError, ConfigManager, DstackError, ResourceNotExistsError, ServerClientError, URLNotFoundError
from stacks.errors import UserError
from stacks.host.forward import answers, opened
from stacks.host.proxies import go_direct
from stacks.schema import Dstack

ANSWER_SECONDS = 120  # for one request; a plan asks the cloud for prices and quotas
LOOK_SECONDS = 1.0  # between two looks at what is waited for
SAY_SECONDS = 30.0  # until what is waited for is printed again
LOGINS = "`flotilla server login`, `dstack project add`, or `pulumi config set --secret dstack:token`"
BUSY = "Try again later"  # the server's word while its own workers hold what is to be changed


At = Mapping[str, Any]  # of a resource: `server` and `project`; with a control node `forward`, how its port comes here, and `token`
REACHING, REACHED = threading.Lock(), contextlib.ExitStack()  # resources are made side by side


class DstackRefused(UserError):
    """What a person can fix; the text says how."""

    __module__ = "builtins"  # the engine prints an error with the full name of its class


class Client(APIClient):
    """dstack's client waits for an answer forever."""

    def _request(self, path: str, *arguments: Any, **settings: Any) -> requests.Response:
        return super()._request(path, *arguments, **{"timeout": ANSWER_SECONDS} | settings)


def connect(server: str, project: str, token: str | None) -> Client:
    """A client of a server that answers, with a token that may see the project. Raises DstackRefused.

    Without a token that of `dstack project add` (~/.dstack/config.yml) is taken, the project's before any other of the server.
    """
    go_direct()
    token = token or _configured(server, project)
    if token is None:
        raise DstackRefused(f"no token for project {project} on {server} (flotilla:dstack); one comes from {LOGINS}")
    client, at = Client(server, token), f"{server} (flotilla:dstack.server)"
    try:
        client.users.get_my_user()
    except ServerClientError as error:
        raise DstackRefused(f"{at}: {error.msg}") from None
    except URLNotFoundError:
        raise DstackRefused(f"{at} is no dstack server") from None
    except ClientError as error:
        if "denied" in str(error):
            raise DstackRefused(f"{server} does not know the token; a new one comes from {LOGINS}") from None
        if "Failed to connect" in str(error):
            raise DstackRefused(f"{at} does not answer; start it, or one here: flotilla server up") from None
        raise DstackRefused(f"{at} does not answer as a dstack server: {_flat(error)}") from None
    except (requests.RequestException, ValueError) as error:
        raise DstackRefused(f"{at} does not answer as a dstack server: {_flat(error)}") from None
    known = sorted(each.project_name for each in client.projects.list())
    if project not in known:
        raise DstackRefused(
            f"flotilla:dstack.project: {server} shows this token no project {project!r}; it shows {', '.join(known) or 'none'}"
        )
    return client


def _configured(server: str, project: str) -> str | None:
    """The token in ~/.dstack/config.yml."""
    found = [config for config in ConfigManager().list_project_configs() if _same(config.url) == _same(server)]
    found.sort(key=lambda config: config.name != project)
    return found[0].token if found else None


def _same(url: str) -> str:
    return url.rstrip("/").replace("//localhost", "//127.0.0.1")


class Provider(dynamic.ResourceProvider):
    """What the resources share: settings of the stack, for `refresh` and `destroy` those of the last `up` (now, with --run-program)."""

    serialize_as_secret_always = False  # the pickle holds a reference, nothing else
    token: str | None = None
    settings = Dstack()

    def configure(self, req: dynamic.ConfigureRequest) -> None:
        self.token = req.config.get("dstack:token")
        self.settings = Dstack.model_validate_json(req.config.get("flotilla:dstack") or "{}")

    def client(self, props: dict[str, Any]) -> Client:
        """A control node's server is reached as its resources say; `login` may never have been here."""
        if command := props.get("forward"):
            reach(props["server"], command, self.settings.timeout)
        return connect(props["server"], props["project"], self.token or props.get("token"))


def outputs(props: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Of a resource: where it is and how that is reached, and these."""
    return {key: props[key] for key in ("server", "project", "forward", "token", *keys) if key in props}


def reach(server: str, command: str, seconds: float) -> None:
    """The server's port is here from now on, until the engine ends this process. Raises NoForward."""
    with REACHING:
        if not answers(server):
            print("the way to the dstack server on the control node:", flush=True)
            REACHED.enter_context(opened(server, command, seconds, partial(print, flush=True)))


@contextlib.contextmanager
def one_line(what: str) -> Iterator[None]:
    """What a person can fix is raised as one line that begins with `what`, without the traceback that the engine would print."""
    sys.tracebacklimit = 1000
    try:
        yield
    except (DstackRefused, DstackError, UserError, ValidationError, requests.RequestException) as error:
        sys.tracebacklimit = 0
        raise DstackRefused(f"{what}: {_flat(error)}") from None


def _flat(error: Exception) -> str:
    """The words of an error on one line."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, details['loc']))}: {details['msg']}" for details in error.errors())
    return " ".join(str(error).split())


def wait(what: str, missing: Callable[[], str | None], seconds: float) -> None:
    """Until nothing is missing; prints what is, whenever that changes and every SAY_SECONDS. Raises DstackRefused at the deadline."""
    start = time.monotonic()
    said, again = None, 0.0
    while line := missing():
        now = time.monotonic()
        if now - start > seconds:
            raise DstackRefused(f"{line}: not within {seconds:.0f} s (flotilla:dstack.timeout)")
        if line != said or now > again:
            said, again = line, now + SAY_SECONDS
            print(f"{what}: {line}", flush=True)  # the engine shows it while it waits
        time.sleep(LOOK_SECONDS)


def when_free(what: str, change: Callable[[], Any], seconds: float, passing: tuple[str, ...] = (BUSY,)) -> Any:
    """What `change` returns, tried again while the server's answer is one that passes. Raises what else it says."""
    result: list[Any] = []

    def busy() -> str | None:
        try:
            result.append(change())
        except ServerClientError as error:
            if any(words in error.msg for words in passing):
                return error.msg
            raise
        return None

    wait(what, busy, seconds)
    return result[0]


def found(look: Callable[[], Any]) -> Any:
    """What `look` returns; None where the server has no such thing."""
    try:
        return look()
    except ResourceNotExistsError:
        return None
