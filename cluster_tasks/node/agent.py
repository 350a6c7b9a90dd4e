"""The agent from its command line to its exit code."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import identity, lifeline
from .account import account_of, become
from .checks import claim_checkpoints, make_dump_folders, one_list_of_gpus, quick_checks
from .elastic import run_elastic
from .errors import Failure, HeadEnded, Stopped, say
from .fitness import burn_in
from .head import run_head
from .own_folder import own_folder
from .proxies import without_proxy
from .settings import Settings, read_settings
from .torchrun import run_torchrun
from .waiting import signals
from .worker import run_worker

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    if lifeline.FLAG in (sys.argv if argv is None else argv):
        lifeline.live_while_stdin_is_open()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.append(number))
    try:
        settings, warnings = settled(sys.argv[1:] if argv is None else argv)
    except Failure as failure:
        print(f"node: {failure}", file=sys.stderr, flush=True)
        return failure.code
    except Stopped:
        return 0
    prefix = f"[node {settings.fleet or settings.rank} %(asctime)s]"
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format=f"{prefix} %(message)s", datefmt="%H:%M:%S")
    for line in warnings:
        log.warning("%s", line)
    try:
        return run_node(settings)
    except Failure as failure:
        say(str(failure))
        return failure.code
    except HeadEnded:
        log.info("the head has ended: the job is done")
        return 0
    except Stopped:
        log.info("%s: stopped", signal.Signals(signals[0]).name)
        return 128 + signals[0] if settings.job else 0


def settled(arguments: list[str]) -> tuple[Settings, list[str]]:
    """The settings, in the environment that Ray and jobs are to have, and what is to be said of this node. Raises Failure, Stopped."""
    try:
        one_list_of_gpus(os.environ)
        settings = read_settings(arguments, os.environ)
        if own := os.environ.pop(identity.token_variable(settings.stack), None):
            os.environ[identity.TOKEN] = own  # where Ray and jobs look for it
        if settings.user:
            become(account_of(settings.user), brought(settings))
        if not os.access(os.environ.get("HOME") or "/", os.W_OK):  # as / is, the home of a user whom the image does not know
            os.environ["HOME"] = tempfile.gettempdir()
        if settings.torchrun and shutil.which("torchrun") is None:
            raise ValueError("`torchrun` is not on PATH; the image must contain PyTorch")
        if not settings.torchrun and shutil.which("ray") is None:
            raise ValueError("`ray` is not on PATH; the image must contain Ray")
        return settings, quick_checks(settings, os.environ) + claim_checkpoints(settings, os.environ) + make_dump_folders(os.environ)
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        raise Failure(2, str(error)) from None


def run_node(settings: Settings) -> int:
    os.environ.update(without_proxy(os.environ, settings.addresses))
    if settings.burn_in:
        burn_in(settings)
    if settings.torchrun:
        run_torchrun(settings)
    become_node = run_elastic if settings.join else run_head if settings.rank == 0 else run_worker
    with own_folder(settings):
        return become_node(settings)


def brought(settings: Settings) -> Iterator[Path]:
    """What dstack put here as root, with the modes that the files had where they came from: the agent, and the job's files."""
    agent = Path(__file__).parent
    yield from (agent, *agent.rglob("*"))
    for name in (settings.working_dir, settings.runtime_env):
        if name:
            yield from (Path(name), *Path(name).rglob("*"))
