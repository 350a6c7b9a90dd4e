"""A checkpoint for another number of ranks than wrote it, by way of DeepSpeed's universal format.

https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from trainer.checkpoints.folders import Checkpoint
from trainer.errors import ConfigError, RunError

TOOL = "deepspeed.checkpoint.ds_to_universal"
NAME = "tmp_universal"  # beside the checkpoints: the next one that is written removes it
SHARDS = "*_optim_states.pt"  # without ZeRO there are none, and any number of ranks loads what rank 0 wrote
PROCESSES = {"num_extract_workers": 4, "num_merge_workers": 2}  # each holds one rank's optimizer, or one parameter


def reshard(checkpoint: Checkpoint, ranks: int, seconds: float, cut: str = "") -> Path | None:
    """A copy whose engines any number of ranks loads with `universal`; None where `ranks` ranks load the checkpoint itself.

    It has as much on the disk as the checkpoint. Raises RunError where it cannot be made, or not in `seconds` (trainer.timeout); for ranks
    that have parts of the model, by the settings in `cut`, ConfigError.
    """
    before = checkpoint.state["world_size"]
    engines = [folder for folder in sorted(checkpoint.folder.rglob("engine")) if any(folder.glob(SHARDS))]
    if before == ranks or not engines:
        return None
    if cut:
        whose = f"{checkpoint.folder} was written by {before} ranks, each with its part of the model"
        raise ConfigError(f"{cut}: {whose}, and {ranks} cannot read it; go on with {before}, or export it and start from the model")
    print(f"{checkpoint.folder} was written by {before} ranks: it is cut anew for {ranks} (placement.ranks)", flush=True)
    target = checkpoint.folder.parent / NAME
    shutil.rmtree(target, ignore_errors=True)
    for engine in engines:
        convert(engine, target / engine.relative_to(checkpoint.folder), seconds)
    return target


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
