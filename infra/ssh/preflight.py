"""Asks your own machines what dstack and a Ray cluster will need of them: one answer for each host, all hosts at once.

From this machine, by the login of the stack file; dstack's server logs in the same way, from where it runs. Nothing is changed on a host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from statistics import median

from infra.preflight.answers import Answer, failed, ok
from infra.ssh.hosts import Found, Login, key_answer, login, probe, unreached
from stacks.dstack_api import convert_nvidia_gpu_name
from stacks.places.machine_types import Machine
from stacks.schema import Fleet, Host, Ssh, Stack
from stacks.settings.fields import gigabytes

AT_ONCE = 64  # hosts
CLOCKS = 5.0  # seconds that the hosts' clocks may be apart: logs, tokens and certificates are compared across hosts
DISK = {True: 60, False: 15}  # GB free for image and packages, with GPUs and without
ARCHITECTURES = {"x86": ("x86_64", "amd64"), "arm": ("aarch64", "arm64")}
TOOLKIT = "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"
Problems = Iterator[tuple[str, str]]  # what is wrong, what fixes it


@dataclass(frozen=True)
class Asked:
    """A host with its answers."""

    fleet: Fleet
    at: Login
    found: Found
    address: str | None  # by which the other hosts reach it


@dataclass(frozen=True)
class Others:
    """What a host is compared with."""

    clock: float  # median offset, in seconds
    shared: str  # folder that all have mounted, or empty
    sources: frozenset[str]  # what is mounted there
    unreached: tuple[str, ...] | None  # addresses that this host does not reach; None where it could not be asked


def ask(stack: Stack, machines: dict[str, Machine]) -> list[Answer]:
    """One answer for each key that is no use, then one for each host of each fleet."""
    fleets = [(fleet, fleet.ssh) for fleet in stack.fleets if fleet.ssh]
    keys = [key_answer(key) for key in dict.fromkeys(key for _, ssh in fleets for key in _keys(ssh))]
    if useless := [answer for answer in keys if answer.verdict != "ok"]:
        return useless
    shared = str(stack.checkpoints.path) if stack.checkpoints.kind == "shared" else ""

    def probed(entry: tuple[Fleet, Ssh, Host]) -> Asked:
        fleet, ssh, host = entry
        at = login(ssh, host)
        found = probe(at, shared)
        return Asked(fleet, at, found, _address(ssh, host, found))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        hosts = list(pool.map(probed, [(fleet, ssh, host) for fleet, ssh in fleets for host in ssh.hosts]))
        cluster = [host for host in hosts if host.found.facts and host.address and host.fleet in stack.cluster_fleets()]
        peers = [(host.address or "", host.at.port) for host in cluster]
        reached = pool.map(lambda host: unreached(host.at, [peer for peer in peers if peer[0] != host.address]), cluster)
        missed = dict(zip([host.at for host in cluster], reached, strict=True))
    clock = median([host.found.offset for host in hosts if host.found.facts] or [0.0])
    sources = frozenset(host.found.facts.get("shared_source", "") for host in hosts if host.found.facts)
    return [judge(host, Others(clock, shared, sources, missed.get(host.at, ())), len(peers)) for host in hosts]


def _keys(ssh: Ssh) -> list[Path]:
    named = [ssh.identity_file, *(host.identity_file for host in ssh.hosts), ssh.proxy_jump and ssh.proxy_jump.identity_file]
    return [key.expanduser() for key in named if key]


def _address(ssh: Ssh, host: Host, found: Found) -> str | None:
    """What the stack file says, else its own in the fleet's network, else its hostname."""
    if host.internal_ip:
        return str(host.internal_ip)
    own = found.facts.get("addresses", "").split()
    if ssh.network:
        return next((address for address in own if ip_address(address) in ssh.network), None)
    return host.hostname


def judge(host: Asked, others: Others, hosts: int) -> Answer:
    """One line on a host; all that is wrong with it, and in the same order what fixes it. `hosts`: of the cluster that answered."""
    check, facts = f"host {host.at.name}", host.found.facts
    if host.found.problem:
        return failed(check, host.found.problem, host.found.fix)
    problems = [
        *_system(host.fleet, host.at, facts),
        *_docker(host.fleet, facts),
        *_gpus(host.fleet, facts),
        *_storage(facts, others),
        *_network(host, others),
    ]
    if problems:
        return failed(check, "; ".join(says for says, _ in problems), "; ".join(dict.fromkeys(fix for _, fix in problems)))
    return ok(check, summary(facts, hosts))


def summary(facts: Mapping[str, str], hosts: int) -> str:
    gpus = facts.get("nvidia", "").rstrip(";").split(";") if facts.get("nvidia") else []
    kind = f"{len(gpus)} x {gpus[0].split(',')[0]}, driver {gpus[0].split(',')[-1].strip()}" if gpus else ""
    kind = kind or (f"{facts['amd']} AMD GPUs" if facts.get("amd", "0") != "0" else "no GPU")
    memory, disk = int(facts["memory_kb"]) >> 20, int(facts["disk_kb"]) >> 20
    others = f", reaches {hosts - 1} others" if hosts > 1 else ""
    return f"{facts['cpus']} CPUs, {memory} GB, {kind}, Docker {facts['docker_version']}, {disk} GB free{others}"


def _system(fleet: Fleet, at: Login, facts: Mapping[str, str]) -> Problems:
    if facts["banner"]:
        first = facts["banner"].splitlines()[0]
        yield (
            f"its login prints {first!r}, which dstack takes for an error",
            f"silence it without a terminal, in .bashrc of {at.user}",
        )
    if facts.get("sudo") != "yes":
        said = f" ({facts['sudo_says'].strip()})" if facts.get("sudo_says", "").strip() else ""
        rule = f"{at.user.replace('@', chr(92) + '@')} ALL=(ALL) NOPASSWD:ALL"
        file = re.sub(r"[^A-Za-z0-9_-]", "_", at.user)  # sudo reads none with a dot in its name
        yield f"no sudo without password for {at.user}{said}", f"echo '{rule}' | sudo tee /etc/sudoers.d/{file}"
    elif facts.get("sudo_says", "").strip():
        yield f"sudo prints {facts['sudo_says'].strip()!r}, which dstack takes for an error", "its hostname in /etc/hosts, mostly"
    for program, why in (("systemctl", "dstack's agent is a systemd service"), ("curl", "dstack's agent is fetched with it")):
        if not facts.get(program):
            yield f"no {program}; {why}", f"install {'systemd' if program == 'systemctl' else program} on the host"
    if facts["arch"] not in ARCHITECTURES[fleet.arch]:
        yield f"is {facts['arch']}, but arch is {fleet.arch}", f"arch of fleet {fleet.name}, or another host"
    if fleet.cpus and int(facts["cpus"]) < fleet.cpus:
        yield f"has {facts['cpus']} CPUs, but cpus is {fleet.cpus}", f"lower cpus of fleet {fleet.name}"
    if fleet.memory and int(facts["memory_kb"]) / 1024**2 < gigabytes(fleet.memory.partition("..")[0]):
        has = int(facts["memory_kb"]) / 1024**2
        yield f"has {has:.0f} GB of memory, but memory is {fleet.memory}", f"lower memory of fleet {fleet.name}"


def _docker(fleet: Fleet, facts: Mapping[str, str]) -> Problems:
    if not facts.get("docker"):
        yield "no Docker", "https://docs.docker.com/engine/install/"
    elif facts.get("sudo") != "yes":
        return  # it was asked by sudo, as was the disk
    elif not facts.get("docker_version"):
        yield f"Docker does not answer: {facts.get('docker_says', '')}", "sudo systemctl enable --now docker"
    elif facts.get("nvidia") and fleet.gpu and fleet.gpu.vendor == "nvidia" and "nvidia" not in facts["runtimes"].split():
        yield "Docker has no runtime `nvidia`: the container toolkit is missing", TOOLKIT
    wanted = gigabytes(fleet.disk.partition("..")[0]) if fleet.disk else DISK[bool(fleet.gpu and fleet.gpu.count)]
    free = int(facts["disk_kb"] or 0) / 1024**2
    if facts["disk_kb"] and free < wanted:
        yield f"{free:.0f} GB free where Docker keeps images, at least {wanted:g} GB are needed", "docker system prune, or a larger disk"


def _gpus(fleet: Fleet, facts: Mapping[str, str]) -> Problems:
    gpu = fleet.gpu
    if gpu is None or not gpu.count:
        return
    if gpu.vendor == "amd":
        if int(facts.get("amd") or 0) != gpu.count:
            yield f"has {facts.get('amd') or 0} AMD GPUs, but gpu.count is {gpu.count}", "the amdgpu driver: ls /dev/kfd; or gpu.count"
        return
    if not facts.get("nvidia"):
        said = facts.get("nvidia_says") or "no nvidia-smi"
        yield f"no NVIDIA driver that works: {said}", "install the driver, and reboot where it was updated: nvidia-smi"
        return
    names = [entry.split(",")[0].strip() for entry in facts["nvidia"].rstrip(";").split(";")]
    if len(names) != gpu.count:
        yield f"has {len(names)} GPUs, but gpu.count is {gpu.count}", "dmesg names those that fell off the bus; or gpu.count"
    others = sorted({name for name in names if gpu.name and convert_nvidia_gpu_name(name).lower() != gpu.name.lower()})
    if others:
        yield (
            f"has {', '.join(others)}, but gpu.name is {gpu.name}",
            f"gpu.name: {convert_nvidia_gpu_name(others[0])}, or a fleet of its own",
        )


def _storage(facts: Mapping[str, str], others: Others) -> Problems:
    folder = others.shared
    if not folder:
        return
    if not facts.get("shared"):
        yield f"no folder {folder} (flotilla:checkpoints.path)", "mount the shared file system there, on every host"
    elif facts.get("sudo") == "yes" and facts.get("shared_writable") != "yes":
        yield f"root cannot write to {folder}", "mount it rw, and without root_squash"
    elif len(others.sources) > 1:
        yield f"{folder} is {facts.get('shared_source') or 'unknown'} here, and another on other hosts", "mount the same everywhere"


def _network(host: Asked, others: Others) -> Problems:
    facts, address, own, ssh = host.found.facts, host.address, host.found.facts["addresses"].split(), host.fleet.ssh
    if abs(ahead := host.found.offset - others.clock) > CLOCKS:
        yield f"its clock is {ahead:+.0f} s off the other hosts'", "sudo timedatectl set-ntp true"
    if address is None and ssh:
        yield f"has no address in network {ssh.network} (has {', '.join(own) or 'none'})", "correct ssh.network"
    elif ssh and own and address not in own and any(each.internal_ip for each in ssh.hosts):
        yield f"has no address {address} (has {', '.join(own)})", "correct internal_ip"
    if others.unreached is None:
        yield "its second login failed, so which hosts it reaches is not known", "MaxStartups and MaxSessions of its sshd; then ask again"
    elif others.unreached:
        yield f"does not reach SSH of {', '.join(others.unreached)}; Ray needs all ports between nodes", "open the firewall between them"
    fabric, active = host.fleet.fabric, facts["hcas"].split()
    if fabric and fabric.kind in ("infiniband", "roce"):
        gone = [name for name in fabric.hcas if name.partition(":")[0] not in active]
        if not active:
            yield f"no active port of {fabric.kind}", "ibstat; is the cable in, and for InfiniBand a subnet manager up"
        elif gone:
            yield f"{', '.join(gone)} of fabric.hcas not active (active: {', '.join(active)})", "ibstat, or correct fabric.hcas"
