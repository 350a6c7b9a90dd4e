"""sbatch's options: which of them the scripts set, exclude, or cannot bear, and what a person says instead.

https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

TASKS = "one task per node, which is the node agent"
LOG = "the log is build/STACK/SCRIPT-JOB.log, which flotilla up reads and requeued jobs go on with"
TYPED = "type it on sbatch's command line"
SCRIPT = "the script is what runs, with the command as its arguments"
ENVIRONMENT = "flotilla:task.env"
OWN = {
    "account": "slurm.account",
    "array": "a job is one cluster; for nodes that come and go a fleet has role: rollout",
    "chdir": "submit in the project's folder",
    "constraint": "slurm.constraint",
    "container": "slurm.container",
    "container-id": "slurm.container",
    "cpus-per-gpu": "fleets[].cpus",
    "cpus-per-task": "fleets[].cpus",
    "error": LOG,
    "exclusive": "slurm.exclusive",
    "export": ENVIRONMENT,
    "export-file": ENVIRONMENT,
    "get-user-env": ENVIRONMENT,
    "gid": "submit as that user",
    "gpus": "fleets[].gpu.count",
    "gpus-per-node": "fleets[].gpu.count",
    "gpus-per-socket": "fleets[].gpu.count",
    "gpus-per-task": "fleets[].gpu.count",
    "gres": "fleets[].gpu.count",
    "help": TYPED,
    "het-group": "task.fleets",
    "hold": TYPED,
    "job-name": "sbatch --job-name=... on the command line",
    "mail-type": "slurm.mail",
    "mail-user": "slurm.mail",
    "mem": "fleets[].memory",
    "mem-per-cpu": "fleets[].memory",
    "mem-per-gpu": "fleets[].memory",
    "no-requeue": "slurm.requeue",
    "nodefile": "--nodelist=NAMES",
    "nodes": "fleets[].nodes",
    "ntasks": TASKS,
    "ntasks-per-core": TASKS,
    "ntasks-per-gpu": TASKS,
    "ntasks-per-node": TASKS,
    "ntasks-per-socket": TASKS,
    "open-mode": LOG,
    "output": LOG,
    "overcommit": "slurm.exclusive",
    "oversubscribe": "slurm.exclusive",
    "parsable": TYPED,
    "partition": "slurm.partition",
    "qos": "slurm.qos",
    "requeue": "slurm.requeue",
    "share": "slurm.exclusive",
    "signal": "slurm.notice",
    "test-only": TYPED,
    "time": "slurm.time",
    "tres-per-task": "fleets[].cpus and fleets[].gpu.count",
    "uid": "submit as that user",
    "usage": TYPED,
    "version": TYPED,
    "wait": TYPED,
    "workdir": "submit in the project's folder",
    "wrap": SCRIPT,
}
OTHERS = (
    *("acctg-freq", "autocomplete", "batch", "bb", "bbf", "begin", "cluster-constraint", "clusters", "comment", "consolidate-segments"),
    *("contiguous", "core-spec", "cores-per-socket", "cpu-freq", "deadline", "delay-boot", "dependency", "distribution", "exclude"),
    *("extra", "extra-node-info", "gpu-bind", "gpu-freq", "gres-flags", "hint", "ignore-pbs", "input", "kill-on-invalid-dep"),
    *("licenses", "mcs-label", "mem-bind", "mincpus", "network", "nice", "no-kill", "nodelist", "oom-kill-step", "power", "prefer"),
    *("priority", "profile", "propagate", "quiet", "reboot", "reservation", "resv-ports", "segment", "sockets-per-node", "spread-job"),
    *("spread-segments", "stepmgr", "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind", "use-min-nodes"),
    *("verbose", "wait-all-nodes", "wckey"),
)
SHORT = {
    **{"A": "account", "a": "array", "C": "constraint", "c": "cpus-per-task", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus"},
    **{"H": "hold", "h": "help", "J": "job-name", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition"},
    **{"q": "qos", "s": "oversubscribe", "t": "time", "V": "version", "W": "wait", "b": "begin", "B": "extra-node-info"},
    **{"d": "dependency", "i": "input", "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution", "Q": "quiet"},
    **{"S": "core-spec", "v": "verbose", "w": "nodelist", "x": "exclude"},
}


def instead(option: str) -> str | None:
    """What to say in place of an option such as --part=x, which sbatch takes for --partition; None where it may stand."""
    word = option.removeprefix("--").partition("=")[0]
    if word in OWN or word in OTHERS:
        return OWN.get(word)
    meant = [name for name in OWN if name.startswith(word)]
    return f"it begins --{meant[0]}, which is {OWN[meant[0]]}" if meant else None


def in_full(option: str) -> str:
    """Behind an error: of a short option, or one with a blank, how it is written; empty of what is no option."""
    word = (option.split() or [""])[0]
    if word.startswith("--"):
        name = word.removeprefix("--") if word != option else ""
    else:
        name = SHORT.get(word[1:2], "") if word.startswith("-") else ""
    if not name:
        return ""
    return f"; {word} is set for you: {instead(name)}" if instead(name) else f"; write --{name}=..."
