"""Asks, before a dstack server does, whether a stack's backends can give what its fleets ask for: credentials, kubeconfig, offers.

Keys are looked for in this shell, as `flotilla server up` takes them from here; for a server elsewhere they are unknown. Nothing is sent
to a cloud.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from fleets import credentials
from infra.backends import offers
from infra.preflight.answers import Answer, failed, ok, unknown
from stacks import written
from stacks.errors import UserError
from stacks.places.machine_types import Machine
from stacks.schema import Stack
from stacks.settings.backends import BackendEntry, source
from stacks.settings.dstack import LOOPBACK

LIBRARIES = {"azure": "msrest", "kubernetes": "kubernetes", "nebius": "nebius", "oci": "oci", "verda": "verda"}
ENTRY = "name yours in `credentials` of the entry in flotilla:backends"
Problem = tuple[str, str]  # what is wrong, what fixes it


def ask(stack: Stack, machines: dict[str, Machine]) -> list[Answer]:
    """One answer for each backend, then one for each fleet."""
    return [*(backend(stack, entry) for entry in stack.backends), *_fleets(stack)]


def backend(stack: Stack, entry: BackendEntry) -> Answer:
    """Whether a dstack server that is started in this shell could use it."""
    check, known = f"backend {entry.type}", entry.known
    if _elsewhere(stack):
        return unknown(check, "the server is elsewhere, so its credentials are not seen from here", source(known))
    if says := _lacks(stack, entry):
        return failed(check, *says)
    if entry.type == "kubernetes":
        says = _kubeconfig(entry)
        contexts = f"contexts {', '.join(entry.regions)}" if entry.regions else "its current context"
        return failed(check, *says) if says else ok(check, f"by {entry.credentials or known.default_file}, {contexts}")
    file = str(entry.credentials or known.default_file)
    if file and not Path(file).expanduser().is_file():
        return failed(check, f"no such file: {file}", ENTRY)
    return ok(check, f"by {' and '.join(known.keys.values()) or file or 'what the cloud finds in the environment of the server'}")


def _elsewhere(stack: Stack) -> bool:
    server = stack.dstack.server if stack.dstack else ""
    return bool(stack.dstack and (stack.dstack.host == "elsewhere" or not any(name in server for name in LOOPBACK)))


def _lacks(stack: Stack, entry: BackendEntry) -> Problem | None:
    """Of library and keys."""
    library = LIBRARIES.get(entry.type)
    if library and find_spec(library) is None:
        return f"dstack needs {library} for it, which is not installed", f"make install-{entry.known.make}"
    try:
        absent = credentials.missing(entry.config(), credentials.known(stack.dstack))
    except UserError as error:
        return str(error), "one NAME=value a line, chmod 600"
    return (f"{' and '.join(absent)} not set in this shell", f"export {absent[0]}=..., or flotilla:dstack.credentials") if absent else None


def _kubeconfig(entry: BackendEntry) -> Problem | None:
    """Of the file, of the contexts in it that the stack names, and of their clusters and users."""
    file = Path(entry.credentials or entry.known.default_file).expanduser()
    try:
        content = written.load(file.read_text())
    except OSError as error:
        return f"{file}: {(error.strerror or str(error)).lower()}", ENTRY
    except (yaml.YAMLError, UnicodeDecodeError):
        return f"{file}: is not YAML", ENTRY
    contexts = content.get("contexts") if isinstance(content, dict) else None
    return _contexts(entry, file, content) if contexts else (f"{file}: has no context, so it leads to no cluster", ENTRY)


def _contexts(entry: BackendEntry, file: Path, content: dict[str, Any]) -> Problem | None:
    known = {each.get("name"): each.get("context") or {} for each in content["contexts"] if isinstance(each, dict)}
    if not entry.regions and content.get("current-context") not in known:
        return f"{file}: has no current context", f"name some in `contexts`: {', '.join(map(str, known))}"
    named = entry.regions or (content["current-context"],)
    if strange := [name for name in named if name not in known]:
        return f"{file}: has no context {strange[0]!r}", f"it has {', '.join(map(str, known))}"
    for name, kind in itertools.product(named, ("cluster", "user")):
        if known[name].get(kind) not in [each.get("name") for each in content.get(f"{kind}s") or []]:
            return f"{file}: context {name} names {kind} {known[name].get(kind)!r}, which is not in the file", ENTRY
    return None


def _fleets(stack: Stack) -> Iterator[Answer]:
    unlisted = [each.backend for each in offers.unknowns(stack)]
    for fleet in stack.fleets:
        check = f"fleet {fleet.name}"
        found = offers.offers(stack, fleet)
        if found:
            more = f"; {', '.join(unlisted)} not compared" if unlisted else ""
            yield ok(check, f"{len(found)} offers from {offers.shown(found[0])} USD an hour{more}")
        elif unlisted:
            yield unknown(check, f"no offer but perhaps of {', '.join(unlisted)}, which the server alone can ask", "dstack offer")
        elif dated := [each.backend for each in map(offers.listed, [entry.type for entry in stack.backends]) if each.dated]:
            yield unknown(
                check, f"{offers.nothing(stack, fleet)}; the lists of {', '.join(dated)} are a part of what there is", "dstack offer"
            )
        else:
            yield failed(check, offers.nothing(stack, fleet), f"flotilla offers {stack.name}")
