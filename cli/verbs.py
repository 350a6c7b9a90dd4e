"""Every verb of `flotilla` in a line: its help, and the table of docs/flotilla.md.

python -m cli.verbs      writes the table again
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/flotilla.md"
RENTED = "AWS, GCP, other clouds"
DSTACK = f"SSH hosts, {RENTED}"


@dataclass(frozen=True)
class Verb:
    usage: str  # as typed after `flotilla`
    about: str
    where: str = "everywhere"

    @property
    def name(self) -> str:
        return self.usage.partition(" ")[0]


GROUPS = {
    "describe": (
        Verb("init STACK --place PLACE", "write a stack file", "all but other clouds"),
        Verb("bootstrap STACK", "make bucket and key for Pulumi's state", "AWS, GCP"),
    ),
    "look": (
        Verb("plan RUN.yaml [STACK]", "GPU memory, step time and cost of a run"),
        Verb("preview STACK", "what would be made, its price, its files"),
        Verb("preflight STACK", "quota, capacity, hosts: what would fail", DSTACK),
        Verb("offers STACK", "who sells its machines, cheapest first", RENTED),
        Verb("recipe list | show NAME", "what verl, OpenRLHF, TRL would run"),
        Verb("env check TASKS", "tasks for agents that teach nothing"),
        Verb("convert TRAINER SCRIPT", "run.yaml from verl, OpenRLHF or TRL"),
    ),
    "start": (
        Verb("up STACK", "start the cluster, open its dashboard"),
        Verb("launch STACK -- COMMAND", "up and submit [--recipe], over lost nodes", DSTACK),
        Verb("render STACK", "get the files of a stack that is deployed", "where `pulumi up` deployed it"),
        Verb("server up | login | down", "a dstack server on this machine", DSTACK),
    ),
    "use": (
        Verb("submit STACK -- COMMAND", "run a job, end with its exit code"),
        Verb("queue STACK", "jobs that share it, and why each waits"),
        Verb("serve STACK MODEL", "an OpenAI endpoint for a run's model"),
        Verb("logs STACK [JOB]", "follow a job; the newest by default"),
        Verb("status STACK", "machines, nodes, jobs, checkpoints, cost"),
        Verb("top STACK", "GPUs, step, reward and cost, refreshed"),
        Verb("open STACK", "its dashboard in the browser, logged in"),
        Verb("ui STACK [RUN]", "its runs: curves, answers, timelines, cost"),
        Verb("ssh STACK [NODE]", "a shell on a node, or -- COMMAND"),
        Verb("code STACK [NODE]", "VS Code on a node"),
        Verb("scale STACK FLEET=N", "start or stop nodes of an elastic fleet"),
        Verb("node list | replace STACK", "machines and health; replace a bad one", DSTACK),
        Verb("check [--here]", "test GPUs and links before a job", "on the nodes"),
        Verb("debug WHAT STACK", "why a cluster hangs; its logs in one file"),
    ),
    "stop": (
        Verb("down STACK", "leave nothing running"),
        Verb("orphans STACK", "machines that a killed `up` left", "AWS, GCP"),
    ),
    "models": (
        Verb("train ppo|sft|rm|dpo", "train in this shell", "in this shell"),
        Verb("sweep [STACK] RUN.yaml", "search settings in trials that pause"),
        Verb("eval RUN.yaml", "score a model without training", "in this shell"),
        Verb("export RUN", "Hugging Face model of a checkpoint", "in this shell"),
        Verb("report [STACK] RUN...", "the page of runs as one HTML file"),
        Verb("push MODEL TARGET", "send a model to a hub, S3 or GCS", "in this shell, or as a job"),
        Verb("trace [STACK] RUN", "timeline of traced steps, for Perfetto"),
        Verb("index WHAT", "build and serve a search index", "in this shell"),
    ),
}
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)
HEAD = """\
One stack file becomes a Ray cluster on localhost:8265; a trainer runs on it.

usage: flotilla VERB ...       (flotilla VERB --help says more)
"""


def help_text() -> str:
    lines = [
        f"{group if verb is verbs[0] else '':<8}  {verb.usage:<26}  {verb.about}".rstrip()
        for group, verbs in GROUPS.items()
        for verb in verbs
    ]
    return "\n".join([HEAD, *lines, ""])


def table() -> str:
    usages = [verb.usage.replace("|", "\\|") for verb in VERBS]
    rows = [f"| `flotilla {usage}` | {verb.about} | {verb.where} |" for usage, verb in zip(usages, VERBS, strict=True)]
    return "\n".join(["| Verb | What it does | Where |", "|---|---|---|", *rows])


if __name__ == "__main__":
    from stacks.reference import between

    PAGE.write_text(between(PAGE.read_text(), "verbs", table()))
