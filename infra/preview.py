"""The Pulumi program in this process, without CLI, account or plugins: shows what it costs, the plan, and writes build/<stack>/."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # before imports that take seconds
    from stacks.host.interrupts import end_on_interrupt

    end_on_interrupt()
    gc.disable()  # the process ends soon, and to collect while SDKs are imported costs a fifth of its time

    from stacks.host.extras import explain_missing

    explain_missing()

import pulumi
from pulumi.runtime import mocks
from pulumi.runtime.settings import get_root_resource
from pulumi.runtime.stack import run_pulumi_func
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from cluster_tasks import build_folder
from infra.summary import remark, summary
from stacks.errors import UserError
from stacks.host import command_line
from stacks.host.project import project_root
from stacks.load import load, settings
from stacks.places import PLACES, cloud_of
from stacks.schema import Stack

if TYPE_CHECKING:
    from infra.prices import Cost

SHOWN = 60  # characters of a property's value in the tree
PIPE = 1000  # columns where nobody's terminal sets them: no line of the tree is cut
SECRET = "[secret]"
OPTIONS = ("provider", "protect", "retainOnDelete", "ignoreChanges", "dependencies", "deleteBeforeReplace")


@dataclass(frozen=True)
class Resource:
    """One resource of the plan; `parent` is a URN, which no resource of the plan has where that is the stack itself."""

    urn: str
    parent: str
    type: str
    name: str
    component: bool
    inputs: dict[str, Any]
    options: dict[str, Any]  # those of OPTIONS that are set
    id: str = ""  # taken for granted; components have none

    @property
    def kind(self) -> str:
        """The last word of the type, such as File."""
        return self.type.rpartition(":")[2]


@dataclass(frozen=True)
class Plan:
    """What `pulumi up` would create, and the stack's outputs."""

    stack: str
    resources: list[Resource]
    outputs: dict[str, Any]
    files: dict[str, str]  # by their paths in build/<stack>/
    assumed: list[str]  # what a cloud would have been asked, and the answer that was taken for granted


class Recorder(mocks.MockMonitor, mocks.Mocks):
    """Stands in for the engine: notes each resource with its parent, and answers by preview_answers.py of its cloud."""

    def __init__(self) -> None:
        super().__init__(self)
        self.plan: list[Resource] = []
        self.assumed: dict[str, str] = {}

    def RegisterResource(self, request: Any) -> Any:
        answer = super().RegisterResource(request)
        if request.type != "pulumi:pulumi:Stack":
            inputs = _hidden(mocks.rpc.deserialize_properties(request.object))
            inputs.pop("__provider", None)
            options = {key: value for key in OPTIONS if (value := _plain(getattr(request, key)))}
            id_ = answer.id if request.custom else ""
            self.plan.append(Resource(answer.urn, request.parent, request.type, request.name, not request.custom, inputs, options, id_))
        return answer

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        cloud = _assumptions(args.typ)
        if cloud and args.resource_id:
            outputs, said = cloud.existing(args.typ, args.resource_id)
            self.assumed[f"{args.typ.rpartition(':')[2]} {args.resource_id}"] = said
            return args.resource_id, outputs
        return cloud.created(args.typ, args.name, args.inputs) if cloud else (f"{args.name}-id", args.inputs)

    def call(self, args: mocks.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        cloud = _assumptions(args.token)
        if cloud is None:
            raise LookupError(f"the preview has no answer to {args.token}")
        answer, said = cloud.answer(args.token, args.args)
        self.assumed[f"{args.token.rpartition('/')[2].partition(':')[0]} {json.dumps(args.args, sort_keys=True, default=str)}"] = said
        return answer, []


def _hidden(value: Any) -> Any:
    """Inputs as a plan shows them: what is secret is not known here, and is none of its business."""
    if mocks.rpc.is_rpc_secret(value):
        return SECRET
    if isinstance(value, dict):
        return {key: _hidden(each) for key, each in value.items()}
    return [_hidden(each) for each in value] if isinstance(value, list) else value


def _plain(option: Any) -> Any:
    return option if isinstance(option, bool | str) else sorted(option)


def _assumptions(token: str) -> ModuleType | None:
    """preview_answers.py of the cloud that a token begins with; None for our own components and files.

    It has `created(type, name, inputs) -> (id, outputs)` and `answer(token, arguments) -> (result, what to say of it)`; where a program
    reads a resource that is there already, also `existing(type, id) -> (outputs, what to say of it)`.
    """
    place = PLACES.get(token.partition(":")[0])
    return import_module(f"{place.program}.preview_answers") if place and place.cloud else None


def plan(stack: str, root: Path) -> Plan:
    """Runs the program as the engine would. Raises StackError, or pulumi.RunError with the program's own word."""
    load(stack, root)  # an error is raised here, before pulumi wraps it
    config = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings(stack, root).items()}
    pulumi.runtime.set_all_config(config, [])
    loop, recorder, roots = asyncio.new_event_loop(), Recorder(), []
    asyncio.set_event_loop(loop)  # before set_mocks, which registers a root stack on the current loop and else hangs
    mocks.set_mocks(recorder, project="flotilla", stack=stack, preview=False, monitor=recorder)

    def program() -> None:
        roots.append(get_root_resource())
        roots[0].outputs.clear()  # a second plan in a process has the root of the first, and its outputs
        runpy.run_path(str(root / "infra"), run_name="preview")

    with contextlib.chdir(root / "infra"), _uncollected():  # the folder in which the engine runs it
        try:
            loop.run_until_complete(run_pulumi_func(program))
            values = dict(roots[0].outputs)
            files = loop.run_until_complete(values.pop("files").future())
            outputs = loop.run_until_complete(_settled(values))
        finally:
            loop.close()
            asyncio.set_event_loop(None)
    return Plan(
        stack, sorted(recorder.plan, key=_order), outputs, files, [f"{asked}: {said}" for asked, said in sorted(recorder.assumed.items())]
    )


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: thousands of Outputs live until the plan is made, and looking through them is half of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _order(resource: Resource) -> tuple[Any, ...]:
    """By type and number; the order of their creation is any that the engine likes."""
    numbered = [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", resource.name)]
    return resource.component, resource.type, numbered


async def _settled(values: dict[str, Any]) -> dict[str, Any]:
    """The exported values, the secret ones hidden."""
    outputs = {name: pulumi.Output.from_input(value) for name, value in values.items()}
    return {name: SECRET if await output.is_secret() else await output.future() for name, output in outputs.items()}


def tree(plan: Plan) -> Tree:
    """Components with what is in them: type, name, the properties that say what it is."""
    top = Tree(f"[bold]{plan.stack}[/]  {len(plan.resources)} resources")
    urns = {resource.urn for resource in plan.resources}
    children: dict[str, list[Resource]] = {}
    for resource in plan.resources:
        children.setdefault(resource.parent if resource.parent in urns else "", []).append(resource)
    dull = {resource.id for resource in plan.resources if resource.id} | {plan.stack}
    _grow(top, "", children, dull)
    return top


def _grow(branch: Tree, parent: str, children: dict[str, list[Resource]], dull: set[str]) -> None:
    for child in children.get(parent, []):
        kept = "  [yellow]protected[/]" if child.options.get("protect") else ""
        label = f"[green]+[/] [cyan]{child.kind}[/] {escape(child.name)}{escape(_properties(child.inputs, dull))}{kept}"
        _grow(branch.add(label), child.urn, children, dull)


def _properties(inputs: dict[str, Any], dull: set[str]) -> str:
    """Scalars but not ids of other resources, ARNs, documents, and what is off."""
    shown = {key: _short(value) for key, value in sorted(inputs.items()) if not isinstance(value, dict | list) and value not in dull}
    return "".join(f"  {key}={value}" for key, value in shown.items() if value not in ("false", "") and not value.startswith(("{", "arn:")))


def _short(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # the engine's numbers are all floating
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    lines = text.count("\n")
    if lines > 1:
        return f"({lines} lines)"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _cost(stack: Stack, wanted: bool) -> tuple[Cost | None, str]:
    """What the machines of a cloud cost; None where that is not known, and the reason."""
    if cloud_of(stack) is None or not wanted:
        return None, "--no-prices"
    from infra import prices  # with what downloads a catalogue; only who asks waits for it

    try:
        return prices.cost(stack), ""
    except prices.PricesUnknown as reason:
        return None, str(reason)


def _in_detail(stack: Stack, cost: Cost, resources: list[Resource]) -> tuple[dict[str, Any], list[str]]:
    """For machines and for people: each fleet, and what is paid for beside machines."""
    from infra import prices

    fleets = [asdict(fleet) | {"hourly": fleet.hourly} for fleet in cost.fleets]
    billed = import_module(f"{PLACES[stack.cloud].program}.preview_answers").BILLED
    more = prices.left_out(billed, ((resource.type, resource.inputs) for resource in resources))
    known = {"hourly": cost.hourly, "monthly": cost.monthly, "currency": "USD", "fleets": fleets, "dated": cost.dated, "left_out": more}
    return known, [*cost.lines(), f"not counted: {more}"]


ABOUT = """\
List what a stack would create and its price, and write its files to build/STACK/.
Runs the Pulumi program in this process, without an account or the Pulumi CLI."""


def main(arguments: list[str] | None = None, prog: str = "python -m infra.preview") -> int:
    parser = command_line.parser(prog, ABOUT, ("flotilla preview local", "flotilla preview onprem --json"))
    command_line.add_stack(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    parser.add_argument("--no-prices", action="store_true", help="do not look up prices, which needs a network")
    options = parser.parse_args(arguments)
    gc.disable()  # as above, where another command calls this
    try:
        root = project_root()
        planned = plan(options.stack, root)
        build_folder.write(root / "build" / options.stack, planned.files)
    except (UserError, pulumi.RunError) as error:
        print(error, file=sys.stderr)
        return 2
    stack = load(options.stack, root)
    cost, why = _cost(stack, not options.no_prices)
    found = summary(stack, cost, why)
    known, lines = _in_detail(stack, cost, planned.resources) if cost else (None, [])
    if options.json:
        print(json.dumps(asdict(planned) | {"cost": known, "summary": asdict(found)}, indent=2, sort_keys=True, default=str))
        return 0
    console = Console(emoji=False, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = PIPE
    for line in found.lines():
        console.print(line, markup=False)
    console.print()
    console.print(tree(planned), soft_wrap=False, no_wrap=True, overflow="ellipsis")
    kinds = Counter(resource.kind for resource in planned.resources)
    console.print("  " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    for assumption in planned.assumed:
        console.print(f"  assumed, not asked: {assumption}", markup=False)
    for line in lines:
        console.print(f"  cost: {line}", markup=False)
    for warning in [*planned.outputs.get("warnings", []), *filter(None, [remark(stack, found)])]:
        console.print(f"  warning: {warning}", style="yellow", markup=False)
    console.print(f"\nwrote {planned.outputs['folder']}/: {', '.join(planned.outputs['rendered'])}\nnext:\n")
    for command in _following(planned, stack):
        console.print(f"  {command}", markup=False)
    return 0


def _following(planned: Plan, stack: Stack) -> list[str]:
    """What to type next; of a cloud's commands those that need no more than this plan: the others are the outputs of its `pulumi up`."""
    if cloud_of(stack) is None:
        return planned.outputs["next"]
    name = stack.name
    return [f"flotilla preflight {name}", f"pulumi stack select --create {name}", f"pulumi up --stack {name}"]


if __name__ == "__main__":
    raise SystemExit(main())
