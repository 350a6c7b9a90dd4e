"""A fleet on a dstack server, and the wait for its machines.

Two resources, because what fails to be created is not in Pulumi's state, and would be left over: `Fleet` is made by one request,
`Machines` waits until what the fleet asks for has come. Where they do not come, `destroy` still knows the fleet, and the next `up`
goes on waiting.
"""

from __future__ import annotations

import json
from typing import Any

import pulumi
from pulumi import dynamic
from pulumi.runtime import rpc

from infra.dstack_resources.client import At, Client, DstackRefused, Provider, found, one_line, outputs, wait, when_free
from infra.dstack_resources.spec import changed, in_place, must_have_offers, plan
from stacks.dstack_api import Fleet as DstackFleet
from stacks.dstack_api import Instance, Run

COME = ("idle", "busy")  # states of a machine that runs may be placed on


class FleetProvider(Provider):
    """`server`, `project`, `name`, `definition`: the rendered file; empty while the machines to put into it are not there."""

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        with one_line(f"fleet {props['name']}"):
            self._apply(props, new=True)
        return dynamic.CreateResult(f"{props['project']}/{props['name']}", _outputs(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.DiffResult:
        moved = [key for key in ("server", "project", "name") if _olds[key] != _news[key]]
        edited = _olds["definition"] != _news["definition"]
        if edited and not moved and _news["definition"] != rpc.UNKNOWN and not self._changes_in_place(_news):
            moved = ["definition"]
        return dynamic.DiffResult(changes=bool(moved) or edited, replaces=moved, delete_before_replace=True)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.UpdateResult:
        with one_line(f"fleet {_news['name']}"):
            self._apply(_news, new=False)
        return dynamic.UpdateResult(_outputs(_news))

    def read(self, id_: str, props: dict[str, Any]) -> dynamic.ReadResult:
        with one_line(f"fleet {props['name']}"):
            client = self.client(props)
            there = found(lambda: client.fleets.get(props["project"], props["name"]))
            if there is None:
                return dynamic.ReadResult("", {}) if props["definition"] else dynamic.ReadResult(id_, _outputs(props))
            same = bool(props["definition"]) and not changed(plan(client, props["project"], props["definition"]))
        definition = props["definition"] if same else _configuration(there)
        return dynamic.ReadResult(id_, _outputs(props) | {"definition": definition})

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        """Returns when no machine is left, so that the network may go."""
        name, project = _props["name"], _props["project"]
        with one_line(f"fleet {name}"):
            client = self.client(_props)
            if found(lambda: client.fleets.get(project, name)) is None:
                return
            self._drain(client, project, name)
            when_free(f"fleet {name}", lambda: client.fleets.delete(project, [name]), self.settings.timeout)
            wait(f"fleet {name}", lambda: _left(found(lambda: client.fleets.get(project, name))), self.settings.timeout)

    def _apply(self, props: dict[str, Any], new: bool) -> None:
        definition, project = props["definition"], props["project"]
        if not definition:
            return
        client = self.client(props)
        planned = plan(client, project, definition)
        differs = changed(planned)
        if planned.current_resource is not None:
            if new and not self.settings.adopt:
                take = "to take it over: pulumi config set --path flotilla:dstack.adopt true"
                raise DstackRefused(f"project {project} has a fleet of that name already, which this stack did not make; {take}")
            if differs and not in_place(planned):
                raise DstackRefused(f"dstack cannot change its {', '.join(differs)} in place; first: dstack fleet delete {props['name']}")
            if not differs:
                return
        must_have_offers(client, project, definition, planned)
        # A plan is for the fleet as it was looked at; while the server is at work on it, it is looked at again.
        apply = lambda: client.fleets.apply_plan(project, plan(client, project, definition))  # noqa: E731
        when_free(f"fleet {props['name']}", apply, self.settings.timeout)

    def _changes_in_place(self, props: dict[str, Any]) -> bool:
        if not props["definition"]:
            return False
        with one_line(f"fleet {props['name']}"):
            planned = plan(self.client(props), props["project"], props["definition"])
            return planned.current_resource is None or in_place(planned)

    def _drain(self, client: Client, project: str, name: str) -> None:
        """Until no run is on the fleet. Raises DstackRefused where the stack says not to wait, or they do not end."""
        policy = self.settings.on_destroy
        runs = _runs(client, project, name)
        if runs and policy == "refuse":
            ways = "stop them (dstack stop NAME), or `pulumi config set --path flotilla:dstack.on_destroy wait`, or stop"
            raise DstackRefused(f"has runs: {', '.join(runs)}; {ways}, and `pulumi destroy --run-program`")
        if runs and policy == "stop":
            print(f"fleet {name}: stopping {', '.join(runs)}", flush=True)
            client.runs.stop(project, runs, abort=False)

        def running() -> str | None:
            left = _runs(client, project, name)
            return f"waiting for the end of {', '.join(left)}" if left else None

        wait(f"fleet {name}", running, self.settings.timeout)


class MachinesProvider(Provider):
    """`server`, `project`, `name`, `definition`: of the fleet that the machines belong to."""

    def create(self, props: dict[str, Any]) -> dynamic.CreateResult:
        return dynamic.CreateResult(f"{props['project']}/{props['name']}", self._wait(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.DiffResult:
        moved = [key for key in ("server", "project", "name") if _olds[key] != _news[key]]
        awaited = _olds["definition"] != _news["definition"] or not _olds["come"]
        return dynamic.DiffResult(changes=bool(moved) or awaited, replaces=moved, delete_before_replace=True)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> dynamic.UpdateResult:
        return dynamic.UpdateResult(self._wait(_news))

    def read(self, id_: str, props: dict[str, Any]) -> dynamic.ReadResult:
        with one_line(f"fleet {props['name']}"):
            client = self.client(props)
            there = found(lambda: client.fleets.get(props["project"], props["name"]))
        come = not props["definition"] or (there is not None and not _missing(there))
        return dynamic.ReadResult(id_, _outputs(props) | {"come": come})

    def _wait(self, props: dict[str, Any]) -> dict[str, Any]:
        name, project = props["name"], props["project"]
        with one_line(f"fleet {name}"):
            if props["definition"]:
                client = self.client(props)
                self._try_again(client, props)
                wait(f"fleet {name}", lambda: _awaited(client.fleets.get(project, name)), self.settings.timeout)
        return _outputs(props) | {"come": True}

    def _try_again(self, client: Client, props: dict[str, Any]) -> None:
        """dstack gives up on a host that it could not reach. Those that failed in an earlier `up` are taken out and put in again."""
        name, project, definition = props["name"], props["project"], props["definition"]
        there = client.fleets.get(project, name)
        failed = [machine.hostname for machine in _given_up(there)]
        ssh = definition.get("ssh_config")
        if not failed or ssh is None:
            return
        print(f"fleet {name}: trying again {', '.join(map(str, failed))}", flush=True)
        kept = [host for host in ssh["hosts"] if (host if isinstance(host, str) else host["hostname"]) not in failed]
        for hosts in (kept, ssh["hosts"]):
            wanted = definition | {"ssh_config": ssh | {"hosts": hosts}}
            when_free(
                f"fleet {name}",
                lambda wanted=wanted: client.fleets.apply_plan(project, plan(client, project, wanted)),
                self.settings.timeout,
            )


class Fleet(dynamic.Resource, module="flotilla:dstack", name="Fleet"):
    """A fleet of a project."""

    definition: pulumi.Output[dict[str, Any]]

    def __init__(self, name: str, at: At, definition: pulumi.Input[Any], opts: pulumi.ResourceOptions | None = None):
        super().__init__(FleetProvider(), name, {**at, "name": name, "definition": definition}, opts)


class Machines(dynamic.Resource, module="flotilla:dstack", name="Machines"):
    """Those of a fleet: there when it is made, or changed."""

    come: pulumi.Output[bool]

    def __init__(self, name: str, at: At, definition: pulumi.Input[Any], opts: pulumi.ResourceOptions | None = None):
        super().__init__(MachinesProvider(), name, {**at, "name": name, "definition": definition, "come": None}, opts)


def _awaited(fleet: DstackFleet) -> str | None:
    """What has not come yet, in words; None when all have. Raises DstackRefused where dstack has given up on a host."""
    if lost := _given_up(fleet):
        raise DstackRefused(f"{'; '.join(map(_said, lost))}; fix that, then `pulumi up` tries again")
    return _missing(fleet)


def _given_up(fleet: DstackFleet) -> list[Instance]:
    """Hosts that dstack could not reach. Machines of a cloud it replaces itself."""
    if fleet.spec.configuration.ssh_config is None:
        return []
    return [machine for machine in fleet.instances if machine.status.value == "terminated"]


def _missing(fleet: DstackFleet) -> str | None:
    configuration = fleet.spec.configuration
    wanted = configuration.nodes.target if configuration.nodes else 0
    if configuration.ssh_config is not None:
        wanted = len(configuration.ssh_config.hosts)
    come = [machine for machine in fleet.instances if machine.status.value in COME]
    if len(come) >= wanted:
        return None
    states = ", ".join(_said(machine) for machine in fleet.instances if machine.status.value not in COME)
    return f"{len(come)} of {wanted} machines; {states or 'none is asked for yet'}"


def _said(machine: Instance) -> str:
    """A machine and how it stands."""
    why = machine.termination_reason_message or machine.termination_reason
    return (
        f"{machine.hostname or machine.name} {machine.status.value}"
        + (f" ({why})" if why else "")
        + (" unreachable" if machine.unreachable else "")
    )


def _left(fleet: DstackFleet | None) -> str | None:
    if fleet is None:
        return None
    return f"waiting for {len(fleet.instances)} machines to end" if fleet.instances else "waiting for it to end"


def _runs(client: Client, project: str, fleet: str) -> list[str]:
    """Names of the runs that are on a fleet, or wait for it by name."""
    active = client.runs.list(project, None, only_active=True, include_jobs=False)
    return sorted(run.run_spec.run_name or str(run.id) for run in active if fleet in _fleets(run))


def _fleets(run: Run) -> list[str]:
    """The fleet of a run; before the server has chosen it, those that its definition allows."""
    if run.fleet is not None:
        return [run.fleet.name]
    allowed = getattr(run.run_spec.configuration, "fleets", None) or []
    return [name if isinstance(name, str) else name.name for name in allowed]


def _configuration(fleet: DstackFleet) -> dict[str, Any]:
    """What somebody else made of a fleet, for people to read."""
    return json.loads(fleet.spec.configuration.model_dump_json(exclude_none=True, exclude_defaults=True))


def _outputs(props: dict[str, Any]) -> dict[str, Any]:
    return outputs(props, "name", "definition")
