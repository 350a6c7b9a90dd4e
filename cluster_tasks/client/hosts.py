"""The hosts of an SSH fleet, as dstack's server sees them. A run is only told of no capacity where they cannot be had."""

from __future__ import annotations

from typing import Any

from stacks.dstack_api import Fleet, Instance, InstanceStatus
from stacks.settings.fields import bracketed

UNREADY = (InstanceStatus.PENDING, InstanceStatus.PROVISIONING)


def waiting(fleet: Fleet) -> str | None:
    """Hosts that are not set up yet or do not answer, and the command that shows whether they let dstack in; None where all do."""
    unready = [host for host in fleet.instances if host.unreachable or host.status in UNREADY]
    if not unready:
        return None
    states = ", ".join(f"{_name(host)} ({'does not answer' if host.unreachable else host.status.value})" for host in unready)
    return f"fleet {fleet.name}: waiting for {states}; dstack's server needs what this does: {login(fleet, unready[0])}"


def failed(fleet: Fleet) -> list[str]:
    """One line for each host that the server gave up, which it does after ten minutes."""
    given_up = [host for host in fleet.instances if host.status == InstanceStatus.TERMINATED]
    return [
        f"fleet {fleet.name}: {_name(host)}: {host.termination_reason_message or host.termination_reason}; "
        f"does this work: {login(fleet, host)}; once it does: dstack fleet delete {fleet.name}, and start again"
        for host in given_up
    ]


def login(fleet: Fleet, host: Instance) -> str:
    """The command with which a person tries what the server needs; it may have another way to the host than this machine."""
    ssh: Any = fleet.spec.configuration.ssh_config
    own: Any = next((named for named in ssh.hosts if getattr(named, "hostname", None) == host.hostname), None)
    user, port, key, jump = (getattr(own, name, None) or getattr(ssh, name) for name in ("user", "port", "identity_file", "proxy_jump"))
    words = ["ssh", *(["-i", key] if key else []), *(["-p", str(port)] if port else [])]
    words += ["-J", f"{jump.user}@{bracketed(jump.hostname)}:{jump.port or 22}"] if jump else []
    return " ".join([*words, f"{user}@{host.hostname}", "sudo -n true"])  # unquoted, for the ~ of a key


def _name(host: Instance) -> str:
    return f"host {host.hostname or host.name}"
