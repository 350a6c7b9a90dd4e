"""`flotilla open`: a cluster's dashboard in the browser, logged in.

A token in an address would be in the browser's history, and in a command line that every user of the machine reads. So the browser is
shown a file of the person's own, whose form posts a ticket to the cluster (cluster_tasks/node/identity.py): good once, for a minute.
"""

from __future__ import annotations

import html
import os
import sys
import webbrowser
from pathlib import Path

from cli.dashboard import dashboard, unreachable
from cli.project import CommandError, console, folder
from cluster_tasks.node import identity
from stacks.host import command_line
from stacks.load import load

PAGE = """\
<!doctype html><meta charset="utf-8"><title>{stack}</title>
<form method="post" action="{url}"><input type="hidden" name="ticket" value="{ticket}"><button>Open the dashboard of {stack}</button></form>
<script>document.forms[0].submit()</script>
"""


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = command_line.parser(f"flotilla {verb}", "Open the cluster's dashboard in the browser, logged in.", ("flotilla open local",))
    command_line.add_stack(parser)
    stack = load(parser.parse_args(arguments).stack, root)
    asked = dashboard(stack, root)
    try:
        ticket = asked.ask(identity.TICKET, {})["ticket"]
    except (OSError, KeyError, TypeError) as error:
        if getattr(error, "code", None) in (404, 405):  # Ray's own answer
            raise CommandError(f"the cluster {stack.name} was started by an older Flotilla, whose page takes the token alone") from error
        raise unreachable(asked, stack, error if isinstance(error, OSError) else OSError(str(error))) from error
    page = folder(stack.name, root) / "open.html"
    page.unlink(missing_ok=True)
    with os.fdopen(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(PAGE.format(stack=html.escape(stack.name), url=html.escape(f"{asked.url}{identity.OPEN}"), ticket=html.escape(ticket)))
    if _has_browser() and webbrowser.open(page.resolve().as_uri()):
        console.print(f"dashboard  {asked.url}", markup=False)
        return 0
    shown = page.resolve().as_uri()
    console.print(f"there is no browser here; within a minute open {shown}, or {asked.url} with the token in {page.with_name('ray.token')}")
    return 0


def _has_browser() -> bool:
    """On Linux without a display `webbrowser` would start one for terminals."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
