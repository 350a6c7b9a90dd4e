"""One command for every place. Verbs of this package start, ask and stop clusters; the others are the modules that they name."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from cli import plan, remote_runs, verbs
from cli.project import CODE, console, find_root
from stacks.errors import UserError
from stacks.host.extras import missing
from stacks.host.proxies import go_direct
from stacks.host.reader import ends_with_the_reader

# Verbs that are another module's main(arguments, prog) -> exit code.
PASSED = {
    "preview": "infra.preview",
    "preflight": "infra.preflight.command",
    "offers": "infra.backends.offers",
    "orphans": "infra.orphans",
    "bootstrap": "infra.bootstrap",
    "server": "fleets.server.commands",
    "check": "cluster_tasks.checks.command",
}
TRAINER = {
    "eval": "trainer.evaluate",
    "env": "trainer.environments.sandboxes.tasks",
    "export": "trainer.export",
    "report": "trainer.report",
    "sweep": "sweeps",
    "push": "serving.push",
    "trace": "trainer.runs.timeline",
    "convert": "trainer.cli.convert",
    "index": "retrieval.command",
}
OURS = {
    "init": "cli.init",
    "render": "cli.render",
    "up": "cli.clusters",
    "down": "cli.clusters",
    "status": "cli.clusters",
    "scale": "cli.scale",
    "node": "cli.node",
    "submit": "cli.jobs",
    "queue": "cli.job_queue",
    "serve": "cli.serve",
    "logs": "cli.jobs",
    "launch": "cli.launch",
    "recipe": "cli.recipes",
    "top": "cli.top",
    "open": "cli.open_page",
    "ui": "cli.ui",
    "ssh": "cli.shell",
    "code": "cli.shell",
    "debug": "cli.debug",
}

VERBS = (*PASSED, *OURS, *TRAINER, "train", "plan")


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 2 for a mistake, 130 after Ctrl-C, else the verb's own."""
    words = sys.argv[1:] if arguments is None else arguments
    with ends_with_the_reader():
        return answer(words)


def answer(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(verbs.help_text(), end="")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else "flotilla --help lists them"
        console.print(f"error: {verb!r} is not a verb; {hint}", markup=False)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):  # until now cli/__init__.py has had the latter
        signal.signal(number, signal.default_int_handler)
    go_direct()
    try:
        return perform(verb, rest)
    except ModuleNotFoundError as error:
        line = missing(error, f"flotilla {verb}")
        if line is None:
            raise
        console.print(f"error: {line}", markup=False)
        return 2
    except UserError as error:
        console.print(f"error: {error}", markup=False)
        return getattr(error, "code", 2)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130


def perform(verb: str, arguments: list[str]) -> int:
    """Raises UserError."""
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    root = CODE if {"-h", "--help"} & set(flags) else find_root(Path.cwd())  # help is given everywhere
    if verb == "train":
        return train(root, arguments)
    if verb == "plan":
        return run_trainer(root, plan.MODULE, plan.words(arguments, root))
    if verb in remote_runs.VERBS and remote_runs.names_a_stack(flags, root):
        return remote_runs.VERBS[verb](arguments, root)
    if verb in TRAINER:
        suites = verb == "eval" and any(word.partition("=")[0] == "--suite" for word in arguments)
        return run_trainer(root, "serving.suites" if suites else TRAINER[verb], arguments)
    if verb in OURS:
        return import_module(OURS[verb]).main(verb, arguments, root)
    os.chdir(root)  # where `python -m ...` is typed
    return import_module(PASSED[verb]).main(arguments, prog=f"flotilla {verb}")


def train(root: Path, words: list[str]) -> int:
    """`python -m trainer.train_<name> ...`."""
    names = sorted(file.stem.removeprefix("train_") for file in (root / "trainer").glob("train_*.py"))
    if not words or words[0] not in names:
        named = f"{words[0]!r} is none of them; " if words and not words[0].startswith("-") else ""
        print(f"usage: flotilla train {'|'.join(names)} [--config FILE] [section.setting=value ...]", file=sys.stderr)
        print(f"{named}flotilla train {names[0]} --help lists the settings; ppo takes --one-process, for a debugger", file=sys.stderr)
        return 0 if {"-h", "--help"} & set(words[:1]) else 2
    if words[0] == "ppo":  # the others are one process as they are
        words = ["placement.processes=one" if word == "--one-process" else word for word in words]
    return run_trainer(root, f"trainer.train_{words[0]}", words[1:])


def run_trainer(root: Path, module: str, words: list[str]) -> NoReturn:
    """In this process's place: the trainer imports nothing of ours, nor we of it."""
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, "-m", module, *words], os.environ | {"PYTHONPATH": path})
