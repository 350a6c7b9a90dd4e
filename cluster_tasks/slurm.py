"""Stack and Site -> the sbatch scripts: a Ray cluster to hold, a Ray job, a torchrun job. One body; what differs is the last command.

Every node runs the node agent, node.py, under srun: bare, or inside of a container. The head has a step of its own, so that its exit
code is the job's and Slurm's notice (SIGUSR1) reaches it alone.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from cluster_tasks import fabric, ray
from infra.site import Site
from stacks.schema import Fleet, Stack
from stacks.slurm import NOTICE, megabytes

SFT = "-m trainer.train_sft --config trainer/recipes/demo-sft.yaml"
# What the agent and torchrun read in a container, of what Slurm sets.
SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "SLURMD_NODENAME", "SLURM_GPUS_ON_NODE")


@dataclass(frozen=True)
class Script:
    name: str  # of the file, without ending, and of the job
    about: str
    runs: Literal["cluster", "job", "torchrun"]
    arguments: str = ""  # that a person gives in place of the default


SCRIPTS = (
    Script("ray-cluster", "Holds a Ray cluster until the time limit or scancel", "cluster"),
    Script("ray-ppo", "A Ray cluster, and one job on it", "job", "python -m trainer.train_ppo --config run.yaml"),
    Script("torchrun", "Any entry point under torchrun", "torchrun", "-m trainer.train_sft --config run.yaml"),
)


def scripts(stack: Stack, site: Site) -> dict[str, str]:
    """The text of each script by the name of its file."""
    return {f"{one.name}.sbatch": render(stack, site, one) for one in SCRIPTS}


def render(stack: Stack, site: Site, script: Script) -> str:
    fleet = site.equipped(stack.fleets[0])
    start = f"sbatch build/{stack.name}/{script.name}.sbatch {script.arguments}".strip()
    parts = [
        f"#!/bin/bash\n# {script.about}:  {start}\n# Made from stacks/Pulumi.{stack.name}.yaml; edit that, not this.",
        "\n".join(f"#SBATCH --{option}" for option in _options(stack, fleet, script)),
        CHECKS.format(stack=stack.name),
        _environment(stack, site, fleet),
        _launch(stack, fleet, script),
        END.format(requeue=stack.slurm.requeue),
    ]
    return "\n".join(parts)


def _options(stack: Stack, fleet: Fleet, script: Script) -> list[str]:
    slurm, gpus = stack.slurm, fleet.gpu.count if fleet.gpu else 0
    options = {
        "job-name": script.name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "nodes": fleet.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": fleet.cpus,
        "gpus-per-node": ":".join(filter(None, (slurm.gpu_type, str(gpus)))) if gpus else None,
        "mem": 0 if slurm.exclusive else f"{megabytes(fleet.memory or '')}M",
        "time": slurm.time,
        "output": f"build/{stack.name}/%x-%j.log",
        "open-mode": "append",
        "signal": f"B:USR1@{NOTICE}",
        "mail-user": slurm.mail,
        "mail-type": "FAIL" if slurm.mail else None,
    }
    flags = ["exclusive"] if slurm.exclusive else []
    flags += ["requeue" if slurm.requeue else "no-requeue", *(option.removeprefix("--") for option in slurm.sbatch)]
    return [*(f"{name}={value}" for name, value in options.items() if value is not None), *flags]


CHECKS = """
set -uo pipefail
fail() {{ echo "error: $*" >&2; exit 2; }}
build=$PWD/build/{stack}
[ -r "$build/node.py" ] || fail "$build/node.py cannot be read; submit in the project's folder, on the file system that all nodes share"
"""


def variables(stack: Stack, site: Site, fleet: Fleet) -> dict[str, str | None]:
    """The environment of every node; None is taken from the shell of the person who submits."""
    ours: dict[str, str | None] = {"FLOTILLA_RUNS": str(stack.checkpoints.path), "RAY_AUTH_MODE": "token"}
    return ours | site.env | {name: one.value for name, one in fabric.environment(stack, fleet).items()}


def _environment(stack: Stack, site: Site, fleet: Fleet) -> str:
    slurm = stack.slurm
    lines = [*(["module load " + " ".join(slurm.modules)] if slurm.modules else []), *slurm.setup]
    lines += ['export PATH="$PWD/.venv/bin:$PATH"'] if slurm.container == "none" else []
    for name, value in variables(stack, site, fleet).items():
        missing = f"{name} is not set in the shell of who submits; flotilla:task.env leaves it to that"
        lines.append(f"export {name}={shlex.quote(value)}" if value is not None else f'[ "${{{name}+set}}" ] || fail "{missing}"')
    lines.append('export RAY_AUTH_TOKEN_PATH="$build/ray.token"')
    lines += ['export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'] if fleet.cpus else []
    lines.append("FLOTILLA_NODES=$(scontrol show hostnames | paste -sd,) && export FLOTILLA_NODES")
    return "\n".join(lines) + "\n"


def _launch(stack: Stack, fleet: Fleet, script: Script) -> str:
    """The steps in the background; `$step` is the one whose exit code counts."""
    lines = ["run=(srun --overlap --cpu-bind=none --ntasks-per-node=1)", *_ports(stack)]
    if script.runs == "torchrun":
        lines += [
            _job(SFT),
            '"${run[@]}" --wait=120 python3 "$build/node.py" --port "$port" --torchrun "$job" & step=$!',
        ]
        return "\n".join(lines) + "\n"
    flags = shlex.join(ray.flags(stack, fleet))
    lines += [f'agent=(python3 "$build/node.py" {flags} --port "$port" --dashboard-port "$dashboard")', _ready(stack)]
    head = '"${run[@]}" --relative=0 --nodes=1 --ntasks=1 "${agent[@]}" --when-ready "$ready"'
    if script.runs == "job":
        lines.append(_job(ray.demo_job(bool(fleet.gpu and fleet.gpu.count))))
        head += ' --working-dir . --runtime-env "$build/runtime-env.yaml" --job "$job"'
    lines += [
        "others=$((SLURM_NNODES - 1))",
        '((others == 0)) || "${run[@]}" --relative=1 --nodes=$others --ntasks=$others "${agent[@]}" &',
    ]
    return "\n".join([*lines, f"{head} & step=$!"]) + "\n"


def _job(default: str) -> str:
    """What the script's arguments say, each quoted again."""
    return f"job=$(printf '%q ' \"$@\"); (($#)) || job={shlex.quote(default)}"


def _ports(stack: Stack) -> list[str]:
    if stack.slurm.exclusive:
        return [f"port=6379 dashboard={ray.DASHBOARD_PORT}"]
    return [
        'free() { local port=$1; while (: <"/dev/tcp/localhost/$port") 2>/dev/null; do ((port += 2)); done; echo "$port"; }',
        "port=$(free $((20000 + SLURM_JOB_ID % 1000 * 10))) dashboard=$(free $((20001 + SLURM_JOB_ID % 1000 * 10)))",
    ]


def _ready(stack: Stack) -> str:
    """What the head prints once its dashboard answers: the tunnel of this allocation, and how to submit."""
    here, login, port = f"build/{stack.name}", stack.slurm.login, stack.task.dashboard_port
    user = f"{login.partition('@')[0]}@" if login and "@" in login else ""
    tunnel = f"ssh -N -L {port}:127.0.0.1:$dashboard {f'-J {login} ' if login else ''}{user}${{FLOTILLA_NODES%%,*}}"
    submit = f"ray job submit --runtime-env {here}/runtime-env.yaml --working-dir . -- python -m trainer.train_ppo --config run.yaml"
    return f'ready="tunnel     {tunnel}\ndashboard  http://localhost:{port}\nsubmit     . {here}/env.sh && {submit}"'


END = """\
notice=
trap 'notice=1; kill -USR1 "$step"' USR1 # before the time limit and on preemption: the job saves and ends
wait "$step"; code=$?
while [ "$notice" ] && kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
again=${{SLURM_RESTART_COUNT:-0}}
if {{ ((code)) && [ "$notice" ]; }} || [[ $code == 7[567] ]]; then # 75 to 77: the node agent lost a node, or did not find it
  ((again < {requeue})) && echo "back into the queue, time $((again + 1)) of {requeue}" && scontrol requeue "$SLURM_JOB_ID" && exit
fi
exit "$code"
"""
