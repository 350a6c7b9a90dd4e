"""What is looked at before Ray starts on this node; `python -m cluster_tasks.checks` is thorough."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from .settings import Settings

DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # PyTorch's name, and the one that it had before


def quick_checks(settings: Settings, env: Mapping[str, str]) -> list[str]:
    """Warnings before Ray starts here. Raises ValueError for what cannot work."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        devices = env.get(name, "")
        if error := device_error(devices):
            raise ValueError(f"{name}={devices} {error}; list each GPU of this node once, or unset it")
        if devices and settings.gpus and (shown := len(devices.split(","))) < settings.gpus:
            raise ValueError(f"{name}={devices} shows {shown} GPUs, but this node is to have {settings.gpus}")
    shared = shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").exists() else 0
    return [] if shared >= 1 else [f"/dev/shm has {shared:.2g} GB, where Ray and NCCL need gigabytes: flotilla:task.shm_size"]


def device_error(devices: str) -> str | None:
    """What is wrong with a list of visible devices. CUDA sees those before the first that it does not know, and says nothing."""
    names = [name.strip() for name in devices.split(",")]
    if len(names) == 1:  # nothing, -1 and NoDevFiles mean no GPU
        return None
    hole = next((name for name in names if not name or name.startswith("-")), None)
    twice = next((name for name in names if names.count(name) > 1), None)
    if hole is not None:
        return "has a hole, after which no GPU is seen"
    return f"names {twice} twice" if twice else None


def one_list_of_gpus(env: MutableMapping[str, str], kfd: Path = Path("/dev/kfd")) -> None:
    """Names the node's AMD GPUs in HIP_VISIBLE_DEVICES alone, which Ray and vLLM read; ROCm's driver is recognized by `kfd`.

    Slurm names them in ROCR_, CUDA_ and GPU_DEVICE_ORDINAL as well. The others count within what ROCR_VISIBLE_DEVICES leaves, so that
    the same numbers in both show none, or others, and Ray refuses ROCR_VISIBLE_DEVICES without HIP_VISIBLE_DEVICES.
    """
    if kfd.exists() and (devices := env.pop("ROCR_VISIBLE_DEVICES", None)) is not None:
        env["HIP_VISIBLE_DEVICES"] = devices
        for name in ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"):
            env.pop(name, None)


def claim_checkpoints(settings: Settings, env: Mapping[str, str]) -> list[str]:
    """Records in FLOTILLA_RUNS which head it serves; warns by the record of the run before. Raises ValueError where it may not write."""
    if not (place := env.get("FLOTILLA_RUNS")):
        return []
    record = Path(place) / f".node-{env.get('DSTACK_RUN_NAME', 'ray')}.json"
    own, head = settings.addresses[settings.rank], settings.addresses[0]
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=record.parent):
            pass
        if not settings.per_host:
            return []
        before = json.loads(record.read_text())["head"] if record.exists() else None
        record.write_text(json.dumps({"head": head}))
    except OSError as error:
        who = f"{os.getuid()}:{os.getgid()}"
        fix = f"on the host `chown {who}` the folder that is mounted there, or leave flotilla:task.user out"
        raise ValueError(f"user {who} cannot write checkpoints to {place}: {error.strerror}; {fix}") from None
    return where_checkpoints_are(own, head, before)


def make_dump_folders(env: Mapping[str, str]) -> list[str]:
    """PyTorch's flight recorder does not make the folder of its files. A node without it trains all the same: a warning."""
    warnings = []
    for folder in dict.fromkeys(Path(env[name]).parent for name in DUMP_FILES if env.get(name)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            warnings.append(f"the flight recorder's folder {folder} cannot be made, so a hang leaves no dump there: {error.strerror}")
    return warnings


def where_checkpoints_are(own: str, head: str, before: str | None) -> list[str]:
    """For folders of each host, where jobs write on the head: whether a new run finds what the run before left with its head."""
    shared = "with flotilla:checkpoints.kind shared, network or bucket any host finds them"
    if before is None and own == head:
        return [f"checkpoints stay on this host, {own}; a run whose head is another host does not find them; {shared}"]
    if before in (None, head) or own not in (before, head):
        return []
    return [f"the checkpoints of the run before are on {before}, but now the head is {head}, which does not find them; {shared}"]
