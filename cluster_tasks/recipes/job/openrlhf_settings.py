"""`python -m cluster_tasks.recipes.job.openrlhf_settings MODULE FLAGS...`: what OpenRLHF's own parser and rules say of the flags.

Its entry points have no dry run: they parse, check, and train. Here training ends where it would start.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any


def ask(module: str, flags: list[str]) -> None:
    """Raises what the entry point raises: SystemExit from its parser, AssertionError from its rules; returns where it would train."""
    import openrlhf.utils  # pyright: ignore
    import ray

    class Accepted(BaseException):
        pass

    def train(*_: Any) -> None:
        raise Accepted

    ray.is_initialized = lambda: True  # the entry point would connect
    openrlhf.utils.get_strategy = train  # its first step of training
    sys.argv = [module, *flags]
    try:
        runpy.run_module(f"openrlhf.cli.{module}", run_name="__main__")
    except Accepted:
        return


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a look at flags takes no GPU memory
    ask(sys.argv[1], sys.argv[2:])
