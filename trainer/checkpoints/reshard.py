"""A checkpoint for another number of ranks than wrote it, or other parts of the model for each, by way of DeepSpeed's universal format.

https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoints.folders import Checkpoint
from trainer.errors import ConfigError, RunError

TOOL = "deepspeed.checkpoint.ds_to_universal"
NAME = "tmp_universal"  # beside the checkpoints: the next one that is written removes it
SHARDS = "*_optim_states.pt"  # without ZeRO there are none, and any number of ranks loads what rank 0 wrote
CUT = ("tensor_parallel", "expert_parallel")  # settings of trainer by which ranks have parts of a model
PROCESSES = {"num_extract_workers": 4, "num_merge_workers": 2}  # each holds one rank's optimizer, or one parameter


def reshard(checkpoint: Checkpoint, ranks: int, seconds: float, mesh: Mapping[str, int]) -> Path | None:
    """A copy whose engines are loaded as `universal` by `ranks` ranks with this `mesh` (TrainerConfig.mesh), whatever wrote the checkpoint;
    None where they load the checkpoint itself.

    It has as much on the disk as the checkpoint. Raises RunError where it cannot be made, or not in `seconds` (trainer.timeout), and
    ConfigError for what DeepSpeed cannot convert.
    """
    before = {"ranks": checkpoint.state["world_size"], **mesh, **checkpoint.state.get("mesh", {})}
    now = {"ranks": ranks, **mesh}
    engines = [folder for folder in sorted(checkpoint.folder.rglob("engine")) if any(folder.glob(SHARDS))]
    if all(before[each] == now[each] for each in ("ranks", *CUT)) or not (engines or _cut(before) or _cut(now)):
        return None
    if why := _unread(before, now, bool(engines)):
        settings = f"{_words(now)}: {checkpoint.folder} was written with {_words(before)}"
        raise ConfigError(f"{settings}: {why}; go on with those, or export it and start from the model")
    print(f"{checkpoint.folder} was written with {_words(before)}: it is cut anew for {_words(now)}", flush=True)
    target = checkpoint.folder.parent / NAME
    shutil.rmtree(target, ignore_errors=True)
    for engine in engines:
        convert(engine, target / engine.relative_to(checkpoint.folder), seconds)
    return target


def _cut(mesh: Mapping[str, int]) -> bool:
    return any(mesh[each] > 1 for each in CUT)


def _unread(before: Mapping[str, int], now: Mapping[str, int], sharded: bool) -> str:
    """Why ranks that have, or had, parts of the model cannot read a checkpoint; "" where they can. `sharded`: its optimizer is."""
    if not (_cut(before) or _cut(now)):
        return ""
    if not sharded:
        return "DeepSpeed cuts no checkpoint that was written without ZeRO"
    stages = [each["zero_stage"] == 3 for each in (before, now)]
    if any(each["tensor_parallel"] > 1 for each in (before, now)) and any(stages):
        return "DeepSpeed cannot put matrices together that ZeRO 3 has sharded"
    if stages[0] != stages[1]:
        return "DeepSpeed cannot convert between zero_stage 3 and others where models are cut"
    if (before["expert_parallel"] > 1) != (now["expert_parallel"] > 1):
        return "DeepSpeed gives experts that are spread other names than those that are not"
    return ""


def _words(mesh: Mapping[str, int]) -> str:
    cut = [f"trainer.{each}={mesh[each]}" for each in CUT if mesh[each] > 1]
    return ", ".join([f"{mesh['ranks']} ranks", *cut, *([f"trainer.zero_stage={mesh['zero_stage']}"] if cut else [])])


def convert(source: Path, target: Path, seconds: float) -> None:
    """DeepSpeed's universal format of what an engine wrote. Raises RunError where it cannot be made, or not in time."""
    target.mkdir(parents=True)
    options = [f"--{name}={count}" for name, count in PROCESSES.items()]
    command = [sys.executable, "-m", TOOL, f"--input_folder={source}", f"--output_folder={target}", "--inject_missing_state", *options]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    try:
        subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RunError(f"{source}: was not cut for another number of ranks within {seconds:g} s (trainer.timeout)") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or error.stdout.strip()).splitlines()[-1:]
        raise RunError(f"{source}: cannot be cut for another number of ranks: {''.join(last)}") from None
