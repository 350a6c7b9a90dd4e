"""`python -m trainer.export RUN [--step N | --best] [--output FOLDER]`: any checkpoint of a run as a Hugging Face model folder.

On CPUs, also while the run trains or after it failed. What comes out is what the run's own export would have written at that step.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from trainer.checkpoints.folders import Checkpoint, CheckpointError, Checkpoints
from trainer.checkpoints.reshard import convert
from trainer.cli import exits_cleanly, usage, yaml_io
from trainer.configs.sections import ModelConfig
from trainer.errors import ConfigError, RunError
from trainer.metrics import model_card
from trainer.runs import run_of

if TYPE_CHECKING:
    import torch

ENGINE = "engine"  # DeepSpeed's tag in a checkpoint (trainer/ranks/engine.py)
JOINING = 3600  # seconds within which parts of a model must be one
PREFIX = "lm."  # of the language model in what the engine trains


def export(run: Path, checkpoint: Checkpoint, output: Path) -> None:
    """Write the policy of `checkpoint` to `output`. Raises ConfigError where the run's model or the checkpoint cannot be read."""
    settings = _settings(run)
    try:
        config = ModelConfig.model_validate(settings.get("model"))
    except ValidationError as error:
        raise ConfigError(f"{run / 'run.yaml'}: not the settings of this version: {error.errors()[0]['msg']}") from None
    from trainer import models
    from trainer.models import quantize

    classifier = "center" in (settings.get("algorithm") or {})  # train_rm's alone
    lm = models.without_weights(config, classifier)  # raises what is wrong with it before a checkpoint's gigabytes are read
    step = settings.get("trainer") or {}
    cut = step.get("tensor_parallel", 1) > 1 or step.get("expert_parallel", 1) > 1
    try:
        draft = output.with_name(f"tmp_joined_{output.name}")
        whole = joined(checkpoint.folder, lm, draft) if cut else weights(checkpoint.folder)
    except FileNotFoundError as error:
        raise ConfigError(f"{checkpoint.folder}: {error.filename or error} was removed meanwhile; export a newer step") from None
    partly = config.lora.rank or config.freeze  # a checkpoint has what was trained alone
    if partly:
        lm = _base(config, settings, run, classifier)
    dtype = next(lm.parameters()).dtype
    tensors = models.saved_tensors(lm)
    named = {name: whole[PREFIX + name].to(dtype) for name, p in tensors.items() if p.requires_grad}
    files = model_card.files(run, settings, checkpoint.step)
    fixed = {name: tensor for name, tensor in tensors.items() if name not in named}
    frozen = {name: quantize.whole(t) if partly else whole[PREFIX + name].to(t.dtype) for name, t in fixed.items()}
    if not config.lora.rank:
        named |= frozen
    else:
        from trainer.models import lora

        named, more = lora.exported(frozen.items(), named, config.lora, config.path or lm.name_or_path)
        files |= more
    models.export(lm, named, models.load_tokenizer(config), output, files)


def _base(config: ModelConfig, settings: dict[str, Any], run: Path, classifier: bool) -> Any:
    """The model of which the run trains adapters, or a part: of its folder, or with the random weights that the run has begun with."""
    import torch

    from trainer import models

    initial = run / "initial"  # of train_ppo
    if initial.is_dir():
        config = config.model_copy(update={"path": str(initial.resolve()), "init": None})
    return models.load_lm(config, (settings.get("run") or {}).get("seed", 0), torch.device("cpu"), classifier=classifier)


def joined(checkpoint: Path, lm: Any, draft: Path) -> dict[str, torch.Tensor]:
    """What `weights` gives, of ranks with parts of a model such as `lm`, by way of files in `draft`, which are removed.

    Raises ConfigError where DeepSpeed cannot put them together.
    """
    import torch

    from trainer import models
    from trainer.ranks import parallel

    engine = _engine(checkpoint)
    shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
    try:
        convert(engine, draft, JOINING)
        states = min(file for file in engine.glob("*model_states.pt") if "expert" not in file.name)
        found = torch.load(states, map_location="cpu", weights_only=False)["module"]  # with buffers
        for file in (draft / "zero").glob("*/fp32.pt"):
            loaded = torch.load(file, map_location="cpu", weights_only=False)
            found[file.parent.name] = loaded["param"] if isinstance(loaded, dict) else loaded
    except RunError as error:
        raise ConfigError(f"{error}; resume the run, whose own exports are whole (trainer.export_every)") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    wanted = {PREFIX + name: tensor.shape for name, tensor in models.saved_tensors(lm).items()}
    own = {name: (name,) if name in found else parallel.places(name) for name in wanted}
    whole = {name: [found[part] for part in parts] for name, parts in own.items()}
    return {name: (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).view(wanted[name]) for name, parts in whole.items()}


def _engine(checkpoint: Path) -> Path:
    folder = checkpoint / "policy" if (checkpoint / "policy").is_dir() else checkpoint  # of one role alone
    return folder / ENGINE


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of the policy, by the engine's names, from all ranks' shards; on CPUs."""
    import torch

    engine = _engine(checkpoint)
    file = engine / "mp_rank_00_model_states.pt"
    if file.exists():  # without ZeRO-3 every rank has them whole
        return torch.load(file, map_location="cpu", mmap=True, weights_only=False)["module"]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(str(engine.parent), tag=ENGINE) or {})


def chosen(run: Path, step: int | None, best: bool) -> Checkpoint:
    """The newest complete checkpoint, that of `step`, or the best evaluated. Raises ConfigError that names those that are there."""
    found = Checkpoints(run / "checkpoints").complete()
    if not found:
        raise ConfigError(f"{run}: no complete checkpoint; the first is written after trainer.checkpoint_every steps")
    there = ", ".join(str(checkpoint.step) for checkpoint in found)
    if step is not None:
        found = [checkpoint for checkpoint in found if checkpoint.step == step]
        if not found:
            raise ConfigError(f"--step {step}: {run} has checkpoints of the steps {there} (trainer.keep_checkpoints)")
    if best:
        found = [checkpoint for checkpoint in found if checkpoint.score is not None]
        if not found:
            raise ConfigError(f"--best: no checkpoint of {run} was evaluated (steps {there}; trainer.eval_prompts, trainer.eval_every)")
        return max(found, key=lambda checkpoint: (checkpoint.score, checkpoint.step))
    return found[0]


def _settings(run: Path) -> dict[str, Any]:
    try:
        return yaml_io.load((run / "run.yaml").read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{run / 'run.yaml'}: {error}") from None


def main(arguments: list[str], prog: str = "flotilla export") -> int:
    """Exports one checkpoint. Raises ConfigError."""
    about = "Write a run's checkpoint as a Hugging Face model."
    parser = usage.parser(prog, about, f"{prog} demo", f"{prog} demo --best --output my-model")
    parser.add_argument("run", metavar="RUN", help="name or folder of the run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="checkpoint of step N (default: the newest)")
    which.add_argument("--best", action="store_true", help="checkpoint with the best evaluation")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="new folder (RUN/models/step_N)")
    options = parser.parse_args(arguments)
    run = run_of(options.run)
    checkpoint = chosen(run, options.step, options.best)
    output = options.output or run / "models" / f"step_{checkpoint.step}"
    if options.output and output.exists():
        raise ConfigError(f"--output {output} already exists; name a new folder")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        export(run, checkpoint, output)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    score = "" if checkpoint.score is None else f", evaluated {checkpoint.score:.4g}"
    print(f"model: {output} (step {checkpoint.step}{score})")
    return 0


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(sys.argv[1:]))
