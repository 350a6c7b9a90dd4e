"""The cluster's token as a Pulumi resource: made once, kept in the stack's state as a secret, the same for everyone of a team.

The rendered files are no resources: they are an output of the stack, so that a clone without build/ shows no change in a plan.

The engine pickles a provider by reference to this module, so that editing a comment here changes no state. It runs it in
another process, whose current folder is infra/: paths are relative to the folder of Pulumi.yaml, which also keeps state the
same on every machine.
"""

from __future__ import annotations

import secrets
from typing import Any

import pulumi
from pulumi import dynamic

from cluster_tasks import build_folder
from cluster_tasks.identity import make_token
from stacks.host.project import project_root


class TokenProvider(dynamic.ResourceProvider):
    """A random token: `path` of its file below the project, and its text as the secret output `token`."""

    serialize_as_secret_always = False  # the pickle holds a reference, nothing else

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        # One that the preview has made on this machine is taken over: a cluster may run with it.
        return dynamic.CreateResult(props["path"], {"path": props["path"], "token": make_token(project_root() / props["path"])})

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.DiffResult:
        moved = _olds["path"] != _news["path"]
        # States of former versions hold no token.
        return dynamic.DiffResult(changes=moved or not _olds.get("token"), replaces=["path"] if moved else [], delete_before_replace=True)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.UpdateResult:
        return dynamic.UpdateResult(self.create(_news).outs)

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        build_folder.remove((project_root() / _props["path"]).parent)


class Token(dynamic.Resource, module="flotilla", name="Token"):
    """256 random bits in hexadecimal, also in the file at `path` where the stack was brought up, readable by its owner alone."""

    path: pulumi.Output[str]
    token: pulumi.Output[str]

    def __init__(self, name: str, path: str, opts: pulumi.ResourceOptions | None = None):
        secret = pulumi.ResourceOptions(additional_secret_outputs=["token"])
        super().__init__(TokenProvider(), name, {"path": path, "token": None}, pulumi.ResourceOptions.merge(opts, secret))


class SecretProvider(dynamic.ResourceProvider):
    """A random secret, the same as long as the resource lives."""

    serialize_as_secret_always = False  # the pickle holds a reference, nothing else

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        return dynamic.CreateResult("secret", {"token": secrets.token_hex(32)})

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.DiffResult:
        return dynamic.DiffResult(changes=False)


class Secret(dynamic.Resource, module="flotilla", name="Secret"):
    """256 random bits in hexadecimal, in the stack's state alone."""

    token: pulumi.Output[str]

    def __init__(self, name: str, opts: pulumi.ResourceOptions | None = None):
        secret = pulumi.ResourceOptions(additional_secret_outputs=["token"])
        super().__init__(SecretProvider(), name, {"token": None}, pulumi.ResourceOptions.merge(opts, secret))
