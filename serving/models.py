"""What is served or pushed: `run:NAME[@STEP]`, a model's folder or a hub's name, as folders that vLLM loads. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer import metrics
from trainer.cli import hub_models
from trainer.cli.paths import MODEL_FILES, TOKENIZER_FILES, is_hub_name
from trainer.errors import ConfigError
from trainer.runs import run_of

RUN = re.compile(r"run:(?P<name>[^@]+)(@(?P<step>.*))?")
STEP = re.compile(r"step_(\d+)")
ADAPTER = "adapter"  # folder of an export with LoRA: trainer/models/lora.py
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of LoRA, that vLLM has room for


@dataclass(frozen=True)
class Model:
    """One model, as it is called in requests, and where it lies."""

    name: str
    path: str  # of a folder, or a hub's name
    step: int | None = None  # of its run
    run: Path | None = None
    base: str | None = None  # of an adapter: the model that it belongs to

    @property
    def adapter(self) -> Path | None:
        """The folder with LoRA weights alone, where it has one."""
        folder = Path(self.path)
        return next((path for path in (folder, folder / ADAPTER) if (path / "adapter_config.json").is_file()), None)


@dataclass(frozen=True)
class Load:
    """What one engine loads: a model, or a base with adapters."""

    path: str
    names: tuple[str, ...]  # under which the model is asked for
    adapters: tuple[tuple[str, str], ...] = ()  # name and folder
    rank: int = 0  # the highest of the adapters
    step: int | None = None

    @property
    def size(self) -> int:
        """Bytes of weights; 0 of a hub's model, which nobody has downloaded."""
        folders = [self.path, *(folder for _, folder in self.adapters)]
        return sum(file.stat().st_size for folder in folders for kind in ("*.safetensors", "*.bin") for file in Path(folder).glob(kind))


def model_of(text: str) -> Model:
    """Raises ConfigError where it is nothing that can be loaded, with what would be."""
    if text.startswith("run:"):
        match = RUN.fullmatch(text)
        if match is None or (match["step"] is not None and not match["step"].isdecimal()):
            raise ConfigError(f"{text}: must be run:NAME or run:NAME@STEP, e.g. run:demo@20")
        return of_run(match["name"], None if match["step"] is None else int(match["step"]))
    folder = Path(text).expanduser()
    if folder.is_dir():
        check_folder(text, folder)
        return Model(folder.resolve().name, str(folder.resolve()))
    if not is_hub_name(text) or text.startswith((".", "/")):
        raise ConfigError(f"{text}: no such folder here; must be run:NAME[@STEP], a model's folder or a hub name, e.g. Qwen/Qwen3-8B")
    if why := hub_models.missing(text):
        raise ConfigError(f"{text}: {why}")
    return Model(text.rpartition("/")[2], text)


def check_folder(text: str, folder: Path) -> None:
    """Raises ConfigError where it lacks what vLLM loads."""
    if (folder / "adapter_config.json").is_file():
        return
    wanted = {**MODEL_FILES, **TOKENIZER_FILES}
    lacking = [name for name, patterns in wanted.items() if not any(any(folder.glob(pattern)) for pattern in patterns)]
    if lacking:
        raise ConfigError(f"{text}: the folder has no {' and no '.join(lacking)}; give one that save_pretrained() wrote")


def of_run(name: str, step: int | None) -> Model:
    """The newest export of a run, or that of `step`. Raises ConfigError that lists those that are there."""
    run = run_of(name)
    found = exports(run)
    if not found:
        saved = [*run.glob("checkpoints/step_*")]
        how = f"flotilla export {name} writes one of a checkpoint" if saved else "trainer.export_every=N exports while it trains"
        raise ConfigError(f"run:{name}: {run} has exported no model yet; {how}")
    if step is None:
        return as_model(run, *found[-1])
    chosen = next((folder for number, folder in found if number == step), None)
    if chosen is None:
        there = ", ".join(str(number) for number, _ in found)
        raise ConfigError(f"run:{name}@{step}: not exported; steps that are: {there}. flotilla export {name} --step {step} writes it")
    return as_model(run, step, chosen)


def as_model(run: Path, step: int, folder: Path) -> Model:
    return Model(run.resolve().name, str(folder.resolve()), step, run.resolve())


def exports(run: Path) -> list[tuple[int, Path]]:
    """Step and folder of each complete export, the oldest first: a folder has its name only once it is complete."""
    found = [(int(match[1]), folder) for folder in run.glob("models/step_*") if (match := STEP.fullmatch(folder.name))]
    found = [(step, folder) for step, folder in found if (folder / "config.json").is_file()]
    if (run / "model/config.json").is_file():
        try:
            last = metrics.read(run)[-1]["step"]
        except (ConfigError, IndexError):
            last = max((step for step, _ in found), default=0)
        found = [(step, folder) for step, folder in found if step != last] + [(last, run / "model")]
    return sorted(found)


def load_of(models: Sequence[Model], name: str) -> Load:
    """What an engine loads for them: one model as it is, several as adapters of the base that they share. Raises ConfigError."""
    if len(models) == 1 and not (Path(models[0].path) / "adapter_config.json").is_file():
        [model] = models
        more = (f"{name}@{model.step}",) if model.step is not None else ()
        return Load(model.path, (name, *more), step=model.step)
    adapters, bases, rank = [], {}, 0
    for model in models:
        folder = model.adapter
        if folder is None:
            raise ConfigError(f"{model.name}: has no adapter/ (model.lora); one engine serves one model, or several adapters of one base")
        settings = json.loads((folder / "adapter_config.json").read_text())
        bases.setdefault(settings.get("base_model_name_or_path") or "", model.name)
        rank = max(rank, settings.get("r") or 0)
        adapters.append((f"{model.name}@{model.step}" if model.step is not None else model.name, str(folder)))
    if len(bases) > 1:
        raise ConfigError(
            f"adapters of different models: {', '.join(f'{of} of {base}' for base, of in bases.items())}; serve each by itself"
        )
    if len({called for called, _ in adapters}) < len(adapters):
        raise ConfigError(f"{', '.join(called for called, _ in adapters)}: one of them twice")
    [base] = bases
    if not base or not (Path(base).is_dir() or is_hub_name(base)):
        raise ConfigError(f"{models[0].name}: its base model {base or '(not named)'} is neither a folder here nor a hub name")
    if rank > RANKS[-1]:
        raise ConfigError(f"{models[0].name}: LoRA of rank {rank}; vLLM serves at most {RANKS[-1]}")
    return Load(base, (f"{name}-base",), tuple(adapters), next(known for known in RANKS if known >= rank), models[0].step)
