"""Stack and Site -> the sbatch scripts: a Ray cluster to hold, a Ray job, a torchrun job. One body; what differs is the last command.

Every node runs the node agent under srun: bare, or inside of a container. Ray's head has a step of its own, so that its exit
code is the job's, and Slurm's notice (SIGUSR1) reaches it alone. A cluster of several fleets is a heterogeneous job: a component
for each, which Slurm starts and ends together. https://slurm.schedmd.com/heterogeneous_jobs.html
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Literal

from cluster_tasks import environment, ray
from cluster_tasks.sbatch_container import container
from stacks.schema import Fleet, Stack
from stacks.settings.slurm import ANY, Slurm, megabytes
from stacks.site import Site

ROLLOUT = ".rollout.sbatch"  # ends the names of the scripts of elastic fleets
WIDTH = 138  # of lines, where words can go on the next
LOADS = re.compile(r"(module (load|add|swap|use|restore)|ml) [^|&;#]+")  # also among a person's own lines
# Lmod, and Environment Modules from 4 on, end with 1 where a module is missing; 3.2 only says so: `ModuleCmd_Load.c(213):ERROR:105: ...`
LOADED = """\
messages=$(mktemp) || fail "no file can be made in ${TMPDIR:-/tmp} on $HOSTNAME"
loaded() { "$@" 2>"$messages"; set -- $?; cat "$messages" >&2; (($1 == 0)) && ! grep -q '^[^ ]*):ERROR:[0-9]*:' "$messages"; }"""
SFT = "-m trainer.train_sft --config trainer/recipes/demo-sft.yaml"


@dataclass(frozen=True)
class Script:
    """One file, and the name of its job."""

    name: str
    about: str
    runs: Literal["cluster", "job", "torchrun"]
    arguments: str = ""  # such as a person gives
    default: str | None = None  # the job where no argument is given; the demo
    working_dir: str = "."  # of the job, seen from the project's folder
    runtime_env: str = ray.RUNTIME_ENV  # below build/<stack>/


SCRIPTS = (
    Script("ray-cluster", "Holds a Ray cluster until the time limit or scancel", "cluster"),
    Script("ray-ppo", "A Ray cluster, and one job on it", "job", "python -m trainer.train_ppo --config run.yaml"),
    Script("torchrun", "Any entry point under torchrun", "torchrun", "-m trainer.train_sft --config run.yaml"),
)


def scripts(stack: Stack, site: Site) -> dict[str, str]:
    """The text of each script by the name of its file."""
    elastic = {f"{fleet.name}{ROLLOUT}": rollout_script(stack, site, fleet) for fleet in stack.elastic_fleets()}
    return {f"{script.name}.sbatch": render(stack, site, script) for script in SCRIPTS} | elastic


def rollout_script(stack: Stack, site: Site, fleet: Fleet) -> str:
    """An array job, each task of it a node of an elastic fleet by itself: it joins the cluster of the job that is its argument."""
    fleet, env = site.equipped(fleet), variables(stack)
    inside = container(stack, fleet, (*env, "RAY_AUTH_TOKEN_PATH", "FLOTILLA_NODES", "FLOTILLA_NODE_ARGS"))
    srun = ["srun", "--export=ALL", "--cpu-bind=none", "--nodes=1", "--ntasks=1", *inside.options]
    pinned = ["--pin-ports"] if stack.slurm.exclusive else []
    flags = ["--stack", stack.name, *ray.node_flags(stack, fleet), *pinned, f"--fleet={fleet.name}"]
    agent = [*inside.prefix, "python3", "-B", '"$build/node"', *map(shlex.quote, flags), '"--join=$1"', *inside.flags]
    own = ("nodes=", "ntasks-per-node=", "requeue", "no-requeue")
    options = [f"job-name={fleet.name}", f"array=0-{stack.most(fleet) - 1}", f"output=build/{stack.name}/%x-%A-%a.log", "open-mode=append"]
    options += [f"signal=B:USR1@{stack.slurm.notice}", "nodes=1", "ntasks-per-node=1", "requeue"]
    options += [option for option in _nodes(stack, site, fleet) if not option.startswith(own)]
    head = [
        "#!/bin/bash",
        f"# Nodes of fleet {fleet.name}, which join the cluster of job JOB:  flotilla scale {stack.name} {fleet.name}=N",
        f"# Made from stacks/Pulumi.{stack.name}.yaml; edit that, not this.",
        *(f"#SBATCH --{option}" for option in options),
    ]
    begin = [*_start(stack), '(($# == 1)) || fail "the job whose cluster these nodes join is missing"', *_environment(stack, [fleet], env)]
    step = f'"${{run[@]}}" "${{agent[@]}}"{inside.stdin} & step=$!'
    launch = [*inside.lines, f"run=({_wrapped(srun)})", f"agent=({_wrapped(agent)})", step]
    return "\n\n".join("\n".join(lines) for lines in (head, begin, launch, [ROLLOUT_END]))


def render(stack: Stack, site: Site, script: Script) -> str:
    env, fleets = variables(stack), [site.equipped(fleet) for fleet in stack.cluster_fleets()]
    components = [[f"#SBATCH --{option}" for option in _nodes(stack, site, fleet)] for fleet in fleets[1:]]
    start = f"sbatch build/{stack.name}/{script.name}.sbatch {script.arguments}".strip()
    return "\n\n".join(
        "\n".join(lines)
        for lines in (
            [
                "#!/bin/bash",
                f"# {script.about}:  {start}",
                f"# Made from stacks/Pulumi.{stack.name}.yaml; edit that, not this.",
                *(f"#SBATCH --{option}" for option in [*_job_options(stack, script), *_nodes(stack, site, fleets[0])]),
                *(line for component in components for line in ["#SBATCH hetjob", *component]),
            ],
            [*_start(stack), *_environment(stack, fleets, env)],
            _launch(stack, site, fleets, script, env),
            [END.format(requeue=stack.slurm.requeue, killed=KILLED["torchrun" if script.runs == "torchrun" else "ray"])],
        )
    )


def _job_options(stack: Stack, script: Script) -> list[str]:
    """For sbatch, without their dashes: of the job, whatever its nodes."""
    mail = [f"mail-user={stack.slurm.mail}", "mail-type=FAIL"] if stack.slurm.mail else []
    log = [f"output=build/{stack.name}/%x-%j.log", "open-mode=append"]
    return [f"job-name={script.name}", *log, f"signal=B:USR1@{stack.slurm.notice}", *mail]


def _nodes(stack: Stack, site: Site, fleet: Fleet) -> list[str]:
    """The same of a fleet's nodes."""
    slurm = stack.slurm.of(fleet.slurm)
    options = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "nodes": fleet.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": fleet.cpus,
        "gpus-per-node": _gpus(stack, site, fleet),
        "mem": 0 if slurm.exclusive else f"{megabytes(fleet.memory or '')}M",
        "time": slurm.time,
    }
    flags = [*(["exclusive"] if slurm.exclusive else []), "requeue" if slurm.requeue else "no-requeue"]
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    return [*given, *flags, *(option.removeprefix("--") for option in slurm.sbatch)]


def _gpus(stack: Stack, site: Site, fleet: Fleet) -> str | None:
    """Such as h100:8. Where nobody could ask the cluster for its types, they are taken to be named as gpu.name is, in small letters."""
    if not fleet.gpu or not fleet.gpu.count:
        return None
    given = stack.slurm.of(fleet.slurm).gpu_type
    kind = site.gpu_types.get(fleet.name, given or (fleet.gpu.name or "").lower())
    return f"{kind}:{fleet.gpu.count}" if kind not in ("", ANY) else str(fleet.gpu.count)


def _start(stack: Stack) -> list[str]:
    return [
        "set -uo pipefail",
        'fail() { echo "error: $*" >&2; exit 2; }',
        'echo "attempt $((${SLURM_RESTART_COUNT:-0} + 1)) of job ${SLURM_JOB_ID-} on ${SLURM_JOB_NODELIST-}"',
        f"build=$PWD/build/{stack.name}",
        '[ -r "$build/node" ] || fail "no $build/node on $HOSTNAME; submit in the project\'s folder, on a file system of all nodes"',
        f'mkdir -p {shlex.quote(str(stack.checkpoints.path))} || fail "flotilla:checkpoints.path cannot be made on $HOSTNAME"',
        *TOO_SHORT.format(notice=stack.slurm.notice).splitlines(),
    ]


def variables(stack: Stack) -> dict[str, str | None]:
    """The environment of every node; None is taken from the shell of the person who submits."""
    ours: dict[str, str | None] = {"FLOTILLA_RUNS": str(stack.checkpoints.path), "RAY_AUTH_MODE": "token"}
    return ours | {name: setting.value for name, setting in environment.of_cluster(stack, stack.cluster_fleets()).items()}


def _environment(stack: Stack, fleets: list[Fleet], env: dict[str, str | None]) -> list[str]:
    slurm = stack.slurm
    given = [f"{name}={shlex.quote(value)}" for name, value in env.items() if value is not None]
    lists = ",".join(f"$SLURM_JOB_NODELIST_HET_GROUP_{index}" for index in range(len(fleets)))
    several, cpus = len(fleets) > 1, len(fleets) == 1 and fleets[0].cpus
    hosts = f'"{lists}" ' if several else ""
    return [
        *_setup(slurm),
        *(['export PATH="$PWD/.venv/bin:$PATH"'] if slurm.container == "none" else []),
        *(f'[ "${{{name}+set}}" ] || fail "{name} is not set where you submit"' for name, value in env.items() if value is None),
        f"export {' '.join(given)}",
        # Whoever submits may have sourced another stack's env.sh, and sbatch brings the shell's environment along.
        'unset RAY_AUTH_TOKEN RAY_ADDRESS RAY_API_SERVER_ADDRESS FLOTILLA_STACK "${!FLOTILLA_TOKEN_@}"',
        'export RAY_AUTH_TOKEN_PATH="$build/ray.token"' + (' SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' if cpus else ""),
        f'FLOTILLA_NODES=$(scontrol show hostnames {hosts}| paste -sd,) || fail "scontrol does not tell the nodes"; export FLOTILLA_NODES',
    ]


def _setup(slurm: Slurm) -> list[str]:
    """Sites' scripts read variables that are not set, and the arguments of who reads them. A missing module ends the job."""
    loads = ["module load " + " ".join(slurm.modules)] if slurm.modules else []
    lines = [f"if ! loaded {line}\nthen fail {shlex.quote(line)}; fi" if LOADS.fullmatch(line) else line for line in (*loads, *slurm.setup)]
    checks, end = (LOADED.splitlines(), ['rm -f "$messages"']) if any(map(LOADS.fullmatch, (*loads, *slurm.setup))) else ([], [])
    return ['given=("$@"); set --; set +u', *checks, *lines, *end, 'set -- "${given[@]}"; set +e -uo pipefail'] if lines else []


def _launch(stack: Stack, site: Site, fleets: list[Fleet], script: Script, env: dict[str, str | None]) -> list[str]:
    """The steps, in the background; the exit code of `$step` is the job's."""
    names = (*env, "RAY_AUTH_TOKEN_PATH", "FLOTILLA_NODES", "FLOTILLA_NODE_ARGS")
    lines = _ports(stack, script)
    stdin = ""
    for index, fleet in enumerate(fleets):
        inside, number = container(stack, fleet, names), str(index or "")
        # All of the environment, also where a site's SBATCH_EXPORT, or sbatch --export=NONE, keeps it from steps.
        srun = ["srun", "--overlap", "--export=ALL", "--cpu-bind=none", "--ntasks-per-node=1"]
        srun += [*(_component(stack, site, fleet, index) if len(fleets) > 1 else []), *inside.options]
        agent = [*inside.prefix, *_agent(stack, fleets, fleet, script), *inside.flags]
        stdin = inside.stdin
        lines += [*inside.lines, f"run{number}=({_wrapped(srun)})", f"agent{number}=({_wrapped(agent)})"]
    if script.runs == "torchrun":
        steps = [f'"${{run{index or ""}[@]}}" --wait=120 "${{agent{index or ""}[@]}}" --torchrun "$job"' for index in range(len(fleets))]
        steps = [steps[0], *(step.replace(f"run{index}[@]", f"run{index}[@]:1") for index, step in enumerate(steps[1:], 1))]
        return [*lines, *_job(SFT), " : \\\n  ".join(steps) + f"{stdin} & step=$!"]
    head = '"${run[@]}" --relative=0 --nodes=1 --ntasks=1 "${agent[@]}" --when-ready "$ready"'
    if script.runs == "job":
        lines += _job(script.default or ray.demo_job(any(fleet.gpu and fleet.gpu.count for fleet in fleets)))
        head += f' \\\n  --working-dir {script.working_dir} --runtime-env "$build/{script.runtime_env}" --job "$job"'
    return [
        *lines,
        _ready(stack),
        "others=$((SLURM_NNODES - 1))",
        f'((others == 0)) || "${{run[@]}}" --relative=1 --nodes=$others --ntasks=$others "${{agent[@]}}"{stdin} &',
        *(f'"${{run{index}[@]}}" "${{agent{index}[@]}}"{stdin} &' for index in range(1, len(fleets))),
        f"{head}{stdin} & step=$!",
    ]


def _component(stack: Stack, site: Site, fleet: Fleet, index: int) -> list[str]:
    """Words of srun: the number of the component, and its sizes."""
    gpus = _gpus(stack, site, fleet)
    sizes = [f"--nodes={fleet.nodes}", f"--ntasks={fleet.nodes}"]
    sizes += [f"--cpus-per-task={fleet.cpus}"] if fleet.cpus else []
    return [f"--het-group={index}", *sizes, *([f"--gpus-per-node={gpus}"] if gpus else [])]


def _agent(stack: Stack, fleets: list[Fleet], fleet: Fleet, script: Script) -> list[str]:
    # -B: no __pycache__ in the project, which a container's root would own.
    agent = ["python3", "-B", '"$build/node"', '"--port=$port"']
    agent += [f"--stop-timeout={ray.stop_seconds(stack)}"]
    if script.runs == "torchrun":
        return agent
    agent += ['"--dashboard-port=$dashboard"', *(["--pin-ports"] if stack.slurm.exclusive else [])]
    return [*agent, *map(shlex.quote, ray.flags(stack, fleet)), *(f'"{word}"' for word in ray.node_gpus(fleets))]


def _wrapped(words: list[str]) -> str:
    """Words of an array, on as many lines as they need."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n  ".join(lines)


def _job(default: str) -> list[str]:
    """The script's arguments in one word, each quoted as Python's shlex reads it; %q would write a line's end in bash's own way."""
    return [f"(($#)) || set -- {default}", """quote="'\\\\''" && job=$(printf "'%s' " "${@//\\'/$quote}")"""]


def _ports(stack: Stack, script: Script) -> list[str]:
    """Nodes of one's own have every port free. On shared ones the search starts where no other job's does."""
    if stack.slurm.exclusive:
        return ["port=29500"] if script.runs == "torchrun" else [f"port=6379 dashboard={ray.DASHBOARD_PORT}"]
    free = 'free() { local port=$1; while (: <"/dev/tcp/localhost/$port") 2>/dev/null; do ((port += 2)); done; echo "$port"; }'
    base = "20000 + SLURM_JOB_ID % 1000 * 10"
    dashboard = [f"dashboard=$(free $(({base} + 1)))"] if script.runs != "torchrun" else []
    return [free, " ".join([f"port=$(free $(({base})))", *dashboard])]


def _ready(stack: Stack) -> str:
    """What the head prints once its dashboard answers: the tunnel of this allocation, and how to submit."""
    here, login, port = f"build/{stack.name}", stack.slurm.login, stack.task.dashboard_port
    user = f"{login.rpartition('@')[0]}@" if login and "@" in login else ""
    more = "".join(f"-L {each}:127.0.0.1:{each} " for each in stack.monitoring.ports)
    tunnel = f"ssh -N -L {port}:127.0.0.1:$dashboard {more}{f'-J {login} ' if login else ''}{user}${{FLOTILLA_NODES%%,*}}"
    submit = f"ray job submit --runtime-env {here}/runtime-env.yaml --working-dir . -- python -m trainer.train_ppo ..."
    return f'ready="tunnel     {tunnel}\ndashboard  http://localhost:{port}\nsubmit     . {here}/env.sh && {submit}"'


# With sbatch --time=...; Slurm would send its notice at once.
TOO_SHORT = """\
ends=$(scontrol show job "${{SLURM_JOB_ID-}}" 2>/dev/null | grep -oPm1 ' EndTime=\\K\\d\\S+') && ends=$(date -d "$ends" +%s) &&
  ((ends - $(date +%s) <= {notice})) && fail "the time limit leaves less than flotilla:slurm.notice, {notice} s: sbatch --time"
"""
ROLLOUT_END = """\
notice=
trap 'notice=1; kill -USR1 "$step"' USR1 # before the time limit: the node gives its work back
wait "$step"; code=$?
while [ "$notice" ] && kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
# 75 and 77: the node is wanted again; 76: there is no head to join. After preemption Slurm itself puts it back into the queue.
[[ $code == 7[57] ]] && echo "back into the queue" && scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" && exit
exit "$code"
"""
KILLED = {
    "ray": """\
137 where the head's note stays: the agent was killed, not its job.
[ "$code" != 137 ] || [ ! -e "$FLOTILLA_RUNS/.head-$SLURM_JOB_ID.json" ] || code=75""",
    "torchrun": """\
137: torchrun was killed; of a rank that was it says 1.
[ "$code" != 137 ] || code=75""",
}
END = """\
notice="" asked=""
trap 'notice=1; kill -USR1 "$step"' USR1 # before the time limit and on preemption: the job saves and ends
trap 'asked=1; kill -USR1 "$step"' USR2 # scancel --batch --signal=USR2: the same, and it does not come back
wait "$step"; code=$?
while [ "$notice$asked" ] && kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
[ ! "$asked" ] || exit 0
# 75 to 77: the node agent lost a node, or did not find it. {killed}
if {{ ((code)) && [ "$notice" ]; }} || [[ $code == 7[567] ]]; then
  again=$((${{SLURM_RESTART_COUNT:-0}} + 1))
  ((again <= {requeue})) && echo "back into the queue, time $again of {requeue}" && scontrol requeue "$SLURM_JOB_ID" && exit
fi
exit "$code"
"""
