"""A network volume on a dstack server."""

from __future__ import annotations

from typing import Any

import pulumi
from pulumi import dynamic
from pulumi.runtime import rpc

from infra.dstack_resources.client import At, Client, DstackRefused, Provider, found, one_line, outputs, wait, when_free
from stacks.dstack_api import Volume as DstackVolume
from stacks.dstack_api import parse_apply_configuration

KEYS = ("backend", "region", "size", "volume_id", "availability_zone")  # by which a volume is another one


class VolumeProvider(Provider):
    """`server`, `project`, `name`, `definition`: the rendered file. dstack changes nothing of a volume: another size is another volume."""

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        name, project, definition = props["name"], props["project"], props["definition"]
        with one_line(f"volume {name}"):
            client = self.client(props)
            wanted: Any = parse_apply_configuration(definition)
            there = found(lambda: client.volumes.get(project, name))
            if there is None:
                client.volumes.create(project, wanted)
                self._wait(client, project, name)
            elif not self.settings.adopt:
                take = "to take it over: pulumi config set --path flotilla:dstack.adopt true"
                raise DstackRefused(f"project {project} has a volume of that name already, which this stack did not make; {take}")
            elif differing := _differing(there, wanted):
                raise DstackRefused(f"cannot be taken over, it has another {', '.join(differing)}")
        return dynamic.CreateResult(f"{project}/{name}", _outputs(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.DiffResult:
        if _news["definition"] == rpc.UNKNOWN:
            return dynamic.DiffResult(changes=True)
        moved = [key for key in ("server", "project", "name", "definition") if _olds[key] != _news[key]]
        return dynamic.DiffResult(changes=bool(moved), replaces=moved, delete_before_replace=True)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.UpdateResult:
        """Of a definition that was unknown when it was planned, and has turned out to be the same."""
        return dynamic.UpdateResult(_outputs(_news))

    def read(self, id_: str, props: dict[str, Any]) -> dynamic.ReadResult:
        with one_line(f"volume {props['name']}"):
            client = self.client(props)
            there = found(lambda: client.volumes.get(props["project"], props["name"]))
        return dynamic.ReadResult(id_, _outputs(props)) if there is not None else dynamic.ReadResult("", {})

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        """The server refuses while it is attached."""
        with one_line(f"volume {_props['name']}"):
            self._delete(self.client(_props), _props["project"], _props["name"])

    def _wait(self, client: Client, project: str, name: str) -> None:
        """Until it is there. What fails is taken away again, since Pulumi does not know it yet. Raises DstackRefused."""

        def missing() -> str | None:
            volume = client.volumes.get(project, name)
            if volume.status.value == "failed":
                raise DstackRefused(volume.status_message or "failed")
            return None if volume.status.value == "active" else volume.status.value

        try:
            wait(f"volume {name}", missing, self.settings.timeout)
        except DstackRefused:
            self._delete(client, project, name)
            raise

    def _delete(self, client: Client, project: str, name: str) -> None:
        if found(lambda: client.volumes.get(project, name)) is None:
            return
        when_free(f"volume {name}", lambda: client.volumes.delete(project, [name]), self.settings.timeout)

        def left() -> str | None:
            return "waiting for its end" if found(lambda: client.volumes.get(project, name)) else None

        wait(f"volume {name}", left, self.settings.timeout)


class Volume(dynamic.Resource, module="flotilla:dstack", name="Volume"):
    """A volume of a project."""

    definition: pulumi.Output[dict[str, Any]]

    def __init__(self, name: str, at: At, definition: pulumi.Input[Any], opts: pulumi.ResourceOptions | None = None):
        super().__init__(VolumeProvider(), name, {**at, "name": name, "definition": definition}, opts)


def _differing(there: DstackVolume, wanted: Any) -> list[str]:
    return [key for key in KEYS if getattr(there.configuration, key, None) != getattr(wanted, key, None)]


def _outputs(props: dict[str, Any]) -> dict[str, Any]:
    return outputs(props, "name", "definition")
