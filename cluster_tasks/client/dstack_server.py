"""The dstack server of a stack, through dstack's own Python client."""

from __future__ import annotations

import os

from dstack.api import Client

from stacks.dstack_api import ClientError, ConfigurationError
from stacks.errors import UserError
from stacks.host.proxies import go_direct
from stacks.schema import Stack


class ConnectionFailed(UserError):
    """Why the server cannot be asked, in one line."""


def connect(stack: Stack) -> Client:
    """As the `dstack` command would: project and token of ~/.dstack/config.yml, or of DSTACK_PROJECT, DSTACK_SERVER_URL and DSTACK_TOKEN.

    Raises ConnectionFailed where the server is not known here, is another than flotilla:dstack.server, is down, or refuses.
    """
    go_direct()
    wanted = stack.dstack
    add = f"dstack project add --name {wanted.project if wanted else 'main'} --url {wanted.server if wanted else 'URL'} --token ..."
    try:
        client = Client.from_config(project_name=wanted.project if wanted else os.environ.get("DSTACK_PROJECT"))
    except ConfigurationError as error:
        start = f"flotilla server login {stack.name}" if stack.control_node else "flotilla server up, then flotilla server login"
        raise ConnectionFailed(f"no dstack server is known here: {error}; to start one: {start}; or: {add}") from None
    url = client.client.base_url
    if wanted and url != str(wanted.server).rstrip("/"):
        raise ConnectionFailed(
            f"stacks/Pulumi.{stack.name}.yaml: flotilla:dstack.server: {wanted.server}, but the project {client.project} in "
            f"~/.dstack/config.yml is at {url}; change one of them: {add}"
        )
    try:
        client.client.projects.get(client.project)
    except ClientError as error:
        raise ConnectionFailed(f"the dstack server at {url} cannot be asked about project {client.project}: {_one_line(error)}") from None
    return client


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
