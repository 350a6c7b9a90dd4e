"""Who can make sandboxes on this node, and which one is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from trainer.environments.sandboxes.containers import Containers
from trainer.environments.sandboxes.machine import Machine
from trainer.environments.sandboxes.namespaces import Namespaces
from trainer.environments.sandboxes.pods import Pods
from trainer.environments.sandboxes.pools import Pools, there
from trainer.environments.sandboxes.relay import Served
from trainer.environments.sandboxes.spec import SandboxError, Snapshot, Spec, Unavailable


class Provider(Protocol):
    name: str
    advice: str  # how all limits would be held

    async def check(self) -> None:
        """Starts what makes sandboxes. Raises SandboxError that says what is missing on this node, and how to get it."""
        ...

    def unheld(self) -> list[str]:
        """Limits that are not held for a sandbox as a whole."""
        ...

    async def create(self, spec: Spec, snapshot: Snapshot | None = None, connected: Mapping[int, Served] | None = None) -> Machine:
        """`connected`: who takes connections to ports of the sandbox's loopback, which are spec.ports."""
        ...

    def close(self) -> None:
        """End all sandboxes, and what makes them."""
        ...


PROVIDERS: dict[str, Callable[[], Provider]] = {
    "pool": Pools,
    "namespaces": Namespaces,
    "docker": partial(Containers, "docker"),
    "podman": partial(Containers, "podman"),
    "kubernetes": Pods,
}


BUILDERS = ("docker", "podman")  # that build images of Dockerfiles


async def chosen(name: str, *, strict: bool = False, wait: float = 600.0, building: bool = False) -> Provider:
    """The provider of this name; `auto`: the first that runs here, pools where the cluster has some, never pods. `building`: one that
    builds images. Raises Unavailable."""
    wrong: list[str] = []
    automatic = [each for each in PROVIDERS if each != "kubernetes" and (each != "pool" or there())]
    for each in ([*BUILDERS] if building else automatic) if name == "auto" else [name]:
        provider = PROVIDERS[each]()
        if isinstance(provider, Pools):
            provider.wait = wait
        try:
            await provider.check()
        except SandboxError as error:
            provider.close()
            wrong.append(f"{each}: {error}")
            continue
        unheld = provider.unheld()
        if unheld and strict:
            provider.close()
            wrong.append(f"{each}: cannot hold {', '.join(unheld)} for a whole sandbox (environment.sandbox.strict): {provider.advice}")
            continue
        passed_over = f" ({'; '.join(wrong)})" if wrong else ""
        weaker = f"; {', '.join(unheld)}: not held for the whole sandbox: {provider.advice}" if unheld else ""
        print(f"sandboxes: {each}{passed_over}{weaker}", flush=True)
        return provider
    raise Unavailable(f"environment.sandbox.provider={name}: {'; '.join(wrong)}")
