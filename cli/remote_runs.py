"""What the head's page of runs makes of a remote run, fetched to here: `flotilla report STACK RUN`, `flotilla trace STACK RUN`."""

from __future__ import annotations

import http.client
import json
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from cli.dashboard import dashboard, unreachable
from cli.project import CommandError
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
    """`STACK RUN [RUN...] [--output FILE]`."""
    stack, *rest = words
    output = Path(rest[rest.index("--output") + 1]) if "--output" in rest[:-1] else None
    runs = [word for at, word in enumerate(rest) if word != "--output" and (at == 0 or rest[at - 1] != "--output")]
    if not runs or any(word.startswith("-") for word in runs):
        raise CommandError("usage: flotilla report STACK RUN [RUN...] [--output FILE]")
    file = output or Path(f"{'-'.join(runs)}.report.html")
    if file.is_dir() or not file.parent.is_dir():
        raise CommandError(f"--output {file}: a folder, or in one that is not there; name a file")
    file.write_bytes(fetch(stack, f"report/{quote(','.join(runs))}", root))
    print(f"report: {file}")
    return 0
