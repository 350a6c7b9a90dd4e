"""Imports of a cloud's SDK, one resource at a time.

An SDK of a cloud imports a module for each resource of a service, hundreds, and evaluates the annotations of all their classes: most of the
time of a preview that needs a dozen of them. Here a service's package is its modules alone, each imported when a name of it is asked
for. A name that no module is called after is looked for where it always was: in the complete package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

SETTINGS = "config"  # a package of theirs that is no service


def import_by_resource(sdk: str) -> None:
    """Of the package `sdk`, from now on, for services that were not imported yet."""
    if _Finder(sdk) not in sys.meta_path:
        sys.meta_path.insert(0, _Finder(sdk))


@dataclass(frozen=True)
class _Finder(MetaPathFinder):
    sdk: str

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        sdk, _, service = name.partition(".")
        if sdk != self.sdk or not service or "." in service or service == SETTINGS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.origin and spec.submodule_search_locations:  # a package
            spec.loader = _Service(name, spec.origin)
        return spec


class _Service(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        modules = re.findall(r"^from \.(\w+) import \*$", self.get_source(module.__name__) or "", re.MULTILINE)
        module.__dict__["__getattr__"] = partial(self._attribute, module, frozenset(modules))

    def _attribute(self, module: ModuleType, modules: frozenset[str], name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        if name == "outputs":
            return import_module(f"{module.__name__}.outputs")
        for candidate in _modules(name):
            if candidate in modules and name in (found := import_module(f"{module.__name__}.{candidate}")).__all__:
                # All of them: the import leaves get_ami, the module, where get_ami, the function, belongs.
                module.__dict__.update({each: getattr(found, each) for each in found.__all__})
                return getattr(found, name)
        del module.__dict__["__getattr__"]
        super().exec_module(module)
        return getattr(module, name)


def _modules(name: str) -> list[str]:
    """Where the SDKs' generator puts a name: `VpcArgs` in vpc, `GetAmiResult` in get_ami, what is no resource in _inputs or _enums."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().removeprefix("awaitable_")
    return [words, *(words.removesuffix(end) for end in ("_args", "_result", "_output") if words.endswith(end)), "_inputs", "_enums"]
