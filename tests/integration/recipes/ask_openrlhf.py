"""Run by OpenRLHF's environment: lists of module and flags on stdin; on stdout, as JSON, null for each it takes, else its error's lines.

flash-attn is built for a GPU and imported by every entry point; parsing needs none of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules[name].__getattr__ = lambda attribute: None  # pyright: ignore

from cluster_tasks.recipes.job.openrlhf_settings import ask  # noqa: E402


def answer(module: str, flags: list[str]) -> list[str] | None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            ask(module, flags)
    except (Exception, SystemExit) as error:  # its rules are assertions, and some flags need packages of their own
        return said.getvalue().splitlines() or [str(error)]
    return None


if __name__ == "__main__":
    given, sys.stdout, out = json.load(sys.stdin), sys.stderr, sys.stdout  # its imports print
    json.dump([answer(module, flags) for module, *flags in given], out)
