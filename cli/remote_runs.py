"""What the head's page of runs makes of a remote run, fetched to here: `flotilla report STACK RUN`, `flotilla trace STACK RUN`."""

from __future__ import annotations

import http.client
import json
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from cli.dashboard import dashboard, unreachable
from cli.jobs import submit
from cli.project import CommandError
from cli.push import push
from cluster_tasks.node.run_page import ROUTE
from stacks.load import load, names

SECONDS = 300  # for a file of a long run


def names_a_stack(words: list[str], root: Path) -> bool:
    """Whether a command's first word is a stack, and others follow: of a run here it would be the run's name."""
    return len(words) > 1 and not words[0].startswith("-") and words[0] in names(root)


def fetch(stack_name: str, path: str, root: Path) -> bytes:
    """The answer of the page. Raises CommandError with its word where it has none."""
    stack = load(stack_name, root)
    asked = dashboard(stack, root)
    try:
        return asked.read(f"/flotilla/at/{ROUTE}/{path}", seconds=SECONDS)
    except OSError as error:
        body = ""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException):
            body = json.loads(error.read())["error"]  # type: ignore[attr-defined]
        if body:
            raise CommandError(f"{stack.name}: {body}") from None
        raise unreachable(asked, stack, error) from error


def report(words: list[str], root: Path) -> int:
    """`STACK RUN [RUN...] [--output FILE]`: the page of these runs as one file."""
    stack, runs, given = parsed("report", words)
    if given.get("--steps"):
        raise CommandError("flotilla report takes no --steps")
    save(fetch(stack, f"report/{quote(','.join(runs))}", root), Path(given.get("--output") or f"{'-'.join(runs)}.report.html"), "report")
    return 0


def trace(words: list[str], root: Path) -> int:
    """`STACK RUN [--steps STEPS] [--output FILE]`: the timeline of its traced steps, and in words where their time went."""
    stack, runs, given = parsed("trace", words)
    if len(runs) > 1:
        raise CommandError(f"flotilla trace: one run, not {', '.join(runs)}")
    name, steps = quote(runs[0]), f"steps={quote(given['--steps'])}" if given.get("--steps") else ""
    content = fetch(stack, f"trace/{name}?{steps}", root)
    print(*json.loads(fetch(stack, f"api/told?name={name}&{steps}", root)), sep="\n")
    save(content, Path(given.get("--output") or f"{runs[0]}.trace.json.gz"), "timeline")
    return 0


def sweep(words: list[str], root: Path) -> int:
    """`STACK RUN.yaml ...`: the sweep's driver as a job of the cluster, and its trials as others."""
    stack, *rest = words
    return submit([stack, "--", "python", "-m", "sweeps", *rest], root)


VERBS = {"report": report, "trace": trace, "push": push, "sweep": sweep}


def parsed(verb: str, words: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """The stack, runs, and flags with their values. Raises CommandError."""
    stack, *rest = words
    runs, given = [], dict[str, str]()
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in ("--output", "--steps"):
            runs.append(word)
        elif equals or rest:
            given[flag] = value if equals else rest.pop(0)
        else:
            raise CommandError(f"flotilla {verb} {stack}: {flag} needs a value")
    if not runs or any(run.startswith("-") for run in runs):
        raise CommandError(f"usage: flotilla {verb} STACK RUN{' [RUN...]' if verb == 'report' else ' [--steps STEPS]'} [--output FILE]")
    return stack, runs, given


def save(content: bytes, file: Path, what: str) -> None:
    """Raises CommandError."""
    if file.is_dir() or not file.parent.is_dir():
        raise CommandError(f"--output {file}: a folder, or in one that is not there; name a file")
    try:
        file.write_bytes(content)
    except OSError as error:
        raise CommandError(f"--output {file}: {error.strerror}") from None
    print(f"{what}: {file}")
