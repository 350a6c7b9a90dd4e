"""Another trainer's run as data: what is installed, what is prepared once, what is run, sized by the stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from stacks.errors import UserError

Vendor = Literal["nvidia", "amd", "none"]


class RecipeError(UserError):
    """A recipe that a stack or a person's overrides do not fit."""


@dataclass(frozen=True)
class Place:
    """What a stack gives to every recipe."""

    stack: str
    nodes: int
    gpus: int  # of each node
    vendor: Vendor
    shared: str  # folder that all nodes see, where checkpoints lie
    run: str  # name of the run; its folder is <shared>/<run>
    services: frozenset[str] = frozenset()
    ports: Mapping[int, str] = field(default_factory=dict)  # that the stack has given away -> which setting names them

    @property
    def world(self) -> int:
        return self.nodes * self.gpus

    @property
    def checkpoints(self) -> str:
        return f"{self.shared}/{self.run}"

    def data(self, name: str) -> str:
        return f"{self.shared}/data/{name}"

    def model(self, name: str) -> str:
        return f"{self.shared}/models/{name}"


@dataclass(frozen=True)
class Step:
    """Done once before the command: by one process, onto shared storage. Skipped where `creates` is there."""

    name: str
    command: tuple[str, ...]  # (): nothing makes it, it has to be there
    creates: str  # a path; `command` makes it under that name with {part} in its place, so that half a download never counts
    timeout: int = 1800  # seconds, for the one that works and for those who wait


@dataclass(frozen=True)
class Run:
    """What is executed on a cluster."""

    command: tuple[str, ...]
    launcher: Literal["ray", "torchrun"] = "ray"  # ray: once, on the head; torchrun: a torchrun on every node, `command` behind it
    steps: tuple[Step, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    # Appended where the run's folder already holds checkpoints, {last} is the newest's; (): the trainer looks itself; None: it cannot.
    resumes: tuple[str, ...] | None = ()
    complete: str = ""  # the file that a trainer writes last into a checkpoint, where it does not look itself
    check: tuple[str, ...] = ()  # before anything is prepared: the trainer's own look at its settings, where it has one


@dataclass(frozen=True)
class Recipe:
    """Named <trainer>/<name>, such as verl/ppo-gsm8k."""

    name: str
    title: str  # one line for lists
    guide: str  # address of the page that describes the same run by hand
    packages: tuple[str, ...]  # exact versions, for Ray's runtime environment, where the image does not bring them
    image: str | None  # the trainer's own, pinned; for flotilla:task.image
    model: str  # repository of Hugging Face; `model=...` replaces it
    build: Callable[[Place, str, Mapping[str, str]], Run]  # place, model, the person's overrides -> Run; raises RecipeError
    renamed: Mapping[str, str] = field(default_factory=dict)  # keys that the trainer no longer has -> today's, or why not
    nodes: int = 1  # at least
    gpus: int = 1  # of each node, at least
    installable: bool = True  # by Ray; not what pins a Ray of its own or has to be compiled: flotilla:task.image brings that
