"""A dstack server on this machine, for places that have none, and the way to a control node's server."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from fleets import credentials
from fleets.server.process import Server, ServerError, token
from stacks.errors import UserError
from stacks.host import command_line
from stacks.host.locks import one_at_a_time
from stacks.host.proxies import go_direct
from stacks.load import load

if TYPE_CHECKING:
    from dstack.api.server import APIClient

FOLDER = Path("build/server")
PORT = 3000  # dstack's own default
# Of a server without a stack. A project that stood here would lose, at every start, the backends that do not stand here with it.
EMPTY = "projects: []\n"


# Commands


def up(folder: Path, stack: str | None, port: int | None, seconds: float) -> int:
    """Starts the server, or says that it is up; restarts it where the stack's configuration has changed. 1 where it refused a backend."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    config = wanted_config(folder, stack)
    digest = hashlib.sha256(config.encode()).hexdigest()
    with one_at_a_time(folder / "lock", ServerError(f"another `up` of {folder} is at work; wait for it")):
        server = Server.running(folder)
        if server and port not in (None, int(server.url.rpartition(":")[2])):
            raise ServerError(f"the server is up on {server.url}; to move it: flotilla server down, then up --port {port}")
        if server and server.config != digest:
            keep_backends(folder, config, server)
            print("the configuration has changed: starting the server again", flush=True)
            port = int(server.url.rpartition(":")[2])
            server.stop()
            server = None
        started = server is None
        if server is None:
            write_private(folder / "config.yml", config)
            server = Server.start(folder, port or PORT, digest)
            print(f"starting a dstack server on {server.url}; its first start makes the database, and may take a minute", flush=True)
        try:
            server.wait(seconds)
            api = client(folder, server)
        except ServerError:
            if started:
                server.stop()
            raise
    print(f"{'started' if started else 'already up'}  {server.url}, pid {server.pid}, data and log in {folder}/")
    print("next        flotilla server login")
    return say_refused(api, config, server)


def login(folder: Path, project: str) -> int:
    """Makes the server's project the default one of this user's dstack; nothing is typed, so no process list shows the token."""
    from stacks.dstack_api import ConfigManager

    server = must_run(folder)
    known = sorted(project.project_name for project in client(folder, server).projects.list())
    if project not in known:
        raise ServerError(f"--project: {server.url} has no project {project!r}; it has {', '.join(known)}")
    manager = ConfigManager()
    manager.configure_project(project, server.url, token(folder), default=True)
    manager.save()
    manager.config_filepath.chmod(0o600)
    print(f"{manager.config_filepath}: project {project} on {server.url} is the default")
    return 0


def status(folder: Path) -> int:
    server = Server.running(folder)
    if server is None or not server.answers():
        print(
            f"not up: no server of {folder}/ runs" if server is None else f"not answering: {server.url}, pid {server.pid}\n{server.tail()}"
        )
        return 1
    print(f"up          {server.url}, pid {server.pid}, data and log in {folder}/")
    api = client(folder, server)
    for project, backends in backends_there(api).items():
        print(f"project     {project}: {', '.join(backends) or 'no backend'}")
    for line in machines(api):
        print(f"machine     {line}")
    return 0


def down(folder: Path, force: bool) -> int:
    """Stops it. Without it nobody ends idle machines, so it is refused while there are some."""
    server = Server.running(folder)
    if server is None:
        print("not up")
        return 0
    if not force:
        if not server.answers():
            raise ServerError(f"{server.url} does not answer, so nobody knows whether it has machines; --force stops it anyway")
        if live := machines(client(folder, server)):
            first = f"{len(live)} machines live, and without a server nobody ends them:"
            last = "first: dstack fleet delete NAME; or --force, and the next `up` finds them again"
            raise ServerError("\n".join([first, *(f"  {line}" for line in live), last]))
    server.stop()
    print(f"down; {folder}/ keeps its data")
    return 0


# What they need


def wanted_config(folder: Path, stack: str | None) -> str:
    """Text of config.yml: the stack's with the keys of its clouds, else the one that is there, else an empty one. Raises UserError."""
    if stack is None:
        file = folder / "config.yml"
        return file.read_text() if file.exists() else EMPTY
    file = folder.parent / stack / "server-config.yml"
    if not file.exists():
        raise ServerError(f"{file} does not exist; first: pulumi up --stack {stack}, or flotilla preview {stack}")
    backends_of(text := file.read_text(), file)
    if not credentials.PLACEHOLDER.search(text):
        return text
    return yaml.safe_dump(credentials.filled(yaml.safe_load(text), credentials.known(load(stack, Path.cwd()).dstack)), sort_keys=False)


def backends_of(config: str, file: Path) -> set[tuple[str, str]]:
    """`{(project, type of backend)}` of a configuration. Raises ServerError where it is none."""
    try:
        projects = yaml.safe_load(config)["projects"]
        return {(project["name"], backend["type"]) for project in projects for backend in project.get("backends") or []}
    except (yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
        raise ServerError(f"{file}: is no configuration of a dstack server: {' '.join(str(error).split())}") from None


def keep_backends(folder: Path, config: str, server: Server) -> None:
    """Raises ServerError where a new configuration takes a backend away while machines live: dstack could no longer end them."""
    gone = backends_of((folder / "config.yml").read_text(), folder / "config.yml") - backends_of(config, folder / "config.yml")
    if gone and server.answers() and (live := machines(client(folder, server))):
        lost = ", ".join(f"{backend} of project {project}" for project, backend in sorted(gone))
        raise ServerError("\n".join([f"the new configuration has no backend {lost}, but machines live:", *(f"  {line}" for line in live)]))


def client(folder: Path, server: Server) -> APIClient:
    """dstack's client as admin. Raises ServerError where the database knows another token."""
    from dstack.api.server import APIClient

    from stacks.dstack_api import ClientError

    api = APIClient(server.url, token(folder))
    try:
        api.users.get_my_user()
    except ClientError:
        where = f"{folder}/token is not the admin's token in {folder}/data"
        raise ServerError(f"{where}; put the right one back, or remove {folder}/ where no machine is left") from None
    return api


def machines(api: APIClient) -> list[str]:
    """Every machine that a fleet of any project holds, one line each."""
    return [
        f"{instance.name}  {instance.status.value}  {instance.backend.value if instance.backend else 'no backend'}  "
        f"{instance.region or ''}  ${instance.price or 0:g}/h  (fleet {fleet.name}, project {project.project_name})"
        for project in api.projects.list()
        for fleet in api.fleets.list(project.project_name)
        for instance in fleet.instances
        if instance.status.value != "terminated"
    ]


def backends_there(api: APIClient) -> dict[str, list[str]]:
    """Names of each project's backends, which the list of projects leaves out."""
    names = [project.project_name for project in api.projects.list()]
    return {name: [backend.name for backend in api.projects.get(name).backends] for name in names}


def say_refused(api: APIClient, config: str, server: Server) -> int:
    """1 where the server did not take a backend of its configuration; the server itself only logs that."""
    there = {(name, backend) for name, backends in backends_there(api).items() for backend in backends}
    refused = sorted(backends_of(config, Path(server.folder) / "config.yml") - there)
    for project, backend in refused:
        print(f"refused     backend {backend} of project {project}: {server.said_of(f'backend {backend} ')}")
    return 1 if refused else 0


def must_run(folder: Path) -> Server:
    server = Server.running(folder)
    if server is None:
        raise ServerError(f"no server of {folder}/ runs; first: flotilla server up")
    return server


def write_private(file: Path, text: str) -> None:
    """Backends may hold credentials."""
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text(text)


def port_number(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port between 1 and 65535")


ABOUT = """\
Run a dstack server on this machine, or reach the one on a stack's control node
(flotilla:dstack.host: cloud) by a port of this machine."""
MORE = """\
The server here is the installed `dstack server`, on loopback, with this shell's
environment. Its data and its admin token are in build/server/, readable only by you."""
EXAMPLES = ("flotilla server up onprem", "flotilla server login", "flotilla server login aws-dev")


def read_arguments(arguments: list[str] | None, prog: str) -> argparse.Namespace:
    parser = command_line.parser(prog, ABOUT, EXAMPLES, more=MORE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="up|login|forward|status|down", prog=prog)

    def add(name: str, about: str, *examples: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, **command_line.settings(f"{about[0].upper()}{about[1:]}.", examples))

    starts = add("up", "start the server", "flotilla server up", "flotilla server up onprem")
    logs_in = add("login", "write ~/.dstack/config.yml", "flotilla server login", "flotilla server login aws-dev")
    leaves = add("forward", "forward a control node's server to this machine until Ctrl-C", "flotilla server forward aws-dev")
    shows = add("status", "show the server's projects and machines", "flotilla server status")
    stops = add("down", "stop the server, if it has no machines", "flotilla server down", "flotilla server down --force")
    for command in (starts, logs_in, leaves, shows, stops):
        command.add_argument("--folder", type=Path, default=FOLDER, help=f"data folder ({FOLDER})")
    command_line.add_stack(starts, ", rendered; without it the server has no backends yet", nargs="?")
    starts.add_argument("--port", type=port_number, help=f"port on 127.0.0.1 ({PORT})")
    starts.add_argument("--timeout", type=float, default=120, help="seconds to wait for an answer (120)")
    command_line.add_stack(logs_in, ", with a control node", nargs="?")
    logs_in.add_argument("--timeout", type=float, default=600, help="seconds to wait for a control node (600)")
    logs_in.add_argument("--project", default="main", help="dstack project (main)")
    command_line.add_stack(leaves, ", with a control node")
    leaves.add_argument("--timeout", type=float, default=600, help="seconds to wait for the server (600)")
    stops.add_argument("--force", action="store_true", help="stop it even if it has machines or does not answer")
    return parser.parse_args(arguments)


def perform(options: argparse.Namespace, folder: Path) -> int:
    """Raises UserError."""
    match options.command:
        case "up":
            return up(folder, options.stack, options.port, options.timeout)
        case "login" | "forward" if options.stack:
            from fleets.server import control

            return getattr(control, options.command)(options.stack, Path.cwd(), options.timeout)
        case "login":
            return login(folder, options.project)
        case "status":
            return status(folder)
        case _:
            return down(folder, options.force)


def main(arguments: list[str] | None = None, prog: str = "python -m fleets.server") -> int:
    options = read_arguments(arguments, prog)
    go_direct()
    try:
        if options.folder == FOLDER and not Path("Pulumi.yaml").is_file():
            raise ServerError(f"no Pulumi.yaml in {Path.cwd()}; run this in the project's folder")
        return perform(options, options.folder.resolve())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
