"""A cloud account on a dstack server, by which dstack launches machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pulumi
from pulumi import dynamic
from pulumi.runtime import rpc

from fleets import credentials
from infra.dstack_resources.client import At, Client, DstackRefused, Provider, found, one_line, outputs, when_free
from stacks.dstack_api import (
    AnyBackendFileConfigWithCreds,
    BackendConfigWithCreds,
    BackendInvalidCredentialsError,
    BackendType,
    ResourceExistsError,
)

IAM_SECONDS = 60  # until what was made in IAM a moment ago is seen everywhere
FORGETS = "the server keeps a deleted backend in memory for five minutes; then `pulumi up` again, or at once after a restart of the server"


class BackendProvider(Provider):
    """`server`, `project`, `config`: what stands below `backends` in a server's configuration. A project has one of each type."""

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        self._put(props, take_over=self.settings.adopt)
        return dynamic.CreateResult(f"{props['project']}/{props['config']['type']}", _outputs(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.DiffResult:
        if _news["config"] == rpc.UNKNOWN or not isinstance(_olds["config"], dict):
            return dynamic.DiffResult(changes=True)
        moved = [key for key in ("server", "project") if _olds[key] != _news[key]]
        moved += ["config"] if _olds["config"].get("type") != _news["config"].get("type") else []
        return dynamic.DiffResult(changes=bool(moved) or _olds["config"] != _news["config"], replaces=moved, delete_before_replace=True)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.UpdateResult:
        self._put(_news, take_over=True)
        return dynamic.UpdateResult(_outputs(_news))

    def read(self, id_: str, props: dict[str, Any]) -> dynamic.ReadResult:
        name = id_.rpartition("/")[2]
        with one_line(f"backend {name}"):
            client = self.client(props)
            there = found(lambda: client.backends.config_info(props["project"], BackendType(name)))
            if there is None:
                return dynamic.ReadResult("", {})
            values = credentials.known(self.settings)
            # Who refreshes may not have the clouds' keys; then the rest is compared.
            same = bool(credentials.missing(props["config"], values)) or there == _config(props["config"], values)
        shown = props["config"] if same else there.model_dump(mode="json", exclude_none=True, exclude={"creds", "kubeconfig"})
        return dynamic.ReadResult(id_, _outputs(props) | {"config": shown})

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        """The server refuses while machines or volumes of the backend live."""
        name = _id.rpartition("/")[2]
        with one_line(f"backend {name}"):
            client, project = self.client(_props), _props["project"]
            if found(lambda: client.backends.config_info(project, BackendType(name))):
                delete = lambda: client.backends.delete(project, [BackendType(name)])  # noqa: E731
                when_free(f"backend {name}", delete, self.settings.timeout)

    def _put(self, props: dict[str, Any], take_over: bool) -> None:
        name, project = props["config"]["type"], props["project"]
        with one_line(f"backend {name}"):
            client, wanted = self.client(props), _config(props["config"], credentials.known(self.settings))
            there = found(lambda: client.backends.config_info(project, BackendType(name)))
            if there is None:
                _create(client, project, name, wanted)
            elif there != wanted:
                if not take_over:
                    take = "to let this stack change it: pulumi config set --path flotilla:dstack.adopt true"
                    raise DstackRefused(f"project {project} has one already, with other {_differing(there, wanted)}; {take}")
                client.backends.update(project, wanted)


class Backend(dynamic.Resource, module="flotilla:dstack", name="Backend"):
    """A backend of a project."""

    config: pulumi.Output[dict[str, Any]]

    def __init__(self, name: str, at: At, config: pulumi.Input[Any], opts: pulumi.ResourceOptions | None = None):
        super().__init__(BackendProvider(), name, {**at, "config": config}, opts)


def _create(client: Client, project: str, name: str, wanted: Any) -> None:
    try:
        when_free(f"backend {name}", lambda: client.backends.create(project, wanted), IAM_SECONDS, passing=("IAM instance profile",))
    except BackendInvalidCredentialsError:
        raise DstackRefused("the server finds no valid credentials; they come from the environment that it was started in") from None
    except ResourceExistsError:  # of a backend that it has just said not to have
        raise DstackRefused(FORGETS) from None


def _config(config: dict[str, Any], values: Mapping[str, str]) -> Any:
    """What the server is sent: with keys, and with what files hold that the configuration names. Neither is in Pulumi's state.

    Raises UserError where a key is missing, ValidationError where dstack refuses it.
    """
    ready = credentials.filled(config, values)
    arms = {kind: arm for arm in get_args(AnyBackendFileConfigWithCreds) for kind in get_args(arm.model_fields["type"].annotation)}
    return BackendConfigWithCreds.model_validate(arms[config["type"]].model_validate(ready).model_dump()).root


def _differing(there: Any, wanted: Any) -> str:
    """Names of the settings in which two configurations differ; their values may be secret."""
    names = sorted(set(type(there).model_fields) | set(type(wanted).model_fields))
    return ", ".join(name for name in names if getattr(there, name, None) != getattr(wanted, name, None))


def _outputs(props: dict[str, Any]) -> dict[str, Any]:
    return outputs(props, "config")
