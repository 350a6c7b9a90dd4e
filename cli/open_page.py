"""`flotilla open` and `flotilla ui`: a cluster's dashboard, or the page of its runs, in the browser, logged in.

A token in an address would be in the browser's history, and in a command line that every user of the machine reads. So the browser is
shown a file of the person's own, whose form posts a ticket to the cluster (cluster_tasks/node/identity.py): good once, for a minute.
"""

from __future__ import annotations

import html
import os
import sys
import webbrowser
from pathlib import Path
from urllib.parse import quote

from cli.dashboard import dashboard, unreachable
from cli.project import CommandError, console, folder
from cluster_tasks.node import identity
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.run_page import ROUTE
from stacks.host import command_line
from stacks.load import load
from stacks.schema import Stack

PAGE = """\
<!doctype html><meta charset="utf-8"><title>{what}</title>
<form method="post" action="{url}"><input type="hidden" name="ticket" value="{ticket}"><input type="hidden" name="to" value="{to}">
<button>Open {what}</button></form>
<script>document.forms[0].submit()</script>
"""


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = command_line.parser(f"flotilla {verb}", "Open the cluster's dashboard in the browser, logged in.", ("flotilla open local",))
    command_line.add_stack(parser)
    stack = load(parser.parse_args(arguments).stack, root)
    asked = dashboard(stack, root)
    return show(asked, ticket_of(asked, stack), "/", f"the dashboard of {stack.name}", folder(stack.name, root))


def runs_page(run: str | None = None) -> str:
    """Where the front leads to the page of runs, or of one."""
    return f"/flotilla/at/{ROUTE}/" + (f"#/run/{quote(run, safe='')}" if run else "")


def ticket_of(asked: Dashboard, stack: Stack) -> str:
    """Raises CommandError."""
    try:
        return str(asked.ask(identity.TICKET, {})["ticket"])
    except (OSError, KeyError, TypeError) as error:
        if getattr(error, "code", None) in (404, 405):  # Ray's own answer
            raise CommandError(f"the cluster {stack.name} was started by an older Flotilla, whose page takes the token alone") from error
        raise unreachable(asked, stack, error if isinstance(error, OSError) else OSError(str(error))) from error


def show(asked: Dashboard, ticket: str, to: str, what: str, beside: Path) -> int:
    """Has the browser go there. The file that it is shown lies in `beside`, a folder of this person's own."""
    page = beside / "open.html"
    page.unlink(missing_ok=True)
    values = {"what": what, "url": f"{asked.url}{identity.OPEN}", "ticket": ticket, "to": to}
    with os.fdopen(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(PAGE.format(**{name: html.escape(value) for name, value in values.items()}))
    shown = page.resolve().as_uri()
    if has_browser() and webbrowser.open(shown):
        console.print(f"{what}  {asked.url}{to}", markup=False)
        return 0
    token = page.with_name("ray.token")
    other = f", or {asked.url}{to} with the token in {token}" if token.exists() and to == "/" else ""
    console.print(f"there is no browser here; within a minute open {shown}{other}", markup=False)
    return 0


def has_browser() -> bool:
    """On Linux without a display `webbrowser` would start one for terminals."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
