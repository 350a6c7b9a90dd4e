"""What settings name, looked at before torch is imported: data, model, reward, GPUs.

Each check returns its errors, a line each: what is wrong, a semicolon, what fixes it.
`cli.parse` runs those of an entry point after it has read the settings, and reports all errors together.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from trainer import environments, rewards
from trainer.cli import hub_models
from trainer.cli.help import settings, show
from trainer.cli.paths import check_model, resolved_paths
from trainer.cluster import placement
from trainer.configs.base import Check
from trainer.configs.data import DataConfig, RowsConfig
from trainer.configs.offline import OfflineConfig
from trainer.configs.ppo import PpoConfig
from trainer.configs.rollout import has_experts
from trainer.configs.sections import PROCESSOR_FILES, SEEING, Config, ModelConfig
from trainer.data import files, rows
from trainer.data import positions as of_model
from trainer.environments.sandboxes.episode import check as check_sandbox
from trainer.errors import ConfigError

LIBRARIES = ("torch", "transformers", "ray")  # that both trainers import
LOOKED_AT = 1000  # rows of a set whose answers are read before anything starts
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of their number in configurations of models
FIRST_LOOK_BYTES = 100_000_000  # of local files: reading the rows of more takes a start its time too


def allowed(config: Config) -> list[str]:
    """run.allow names settings, or sections of them."""
    known = [*settings(type(config))]
    known += {key.rpartition(".")[0] for key in known}
    wrong = [key for key in config.run.allow if key not in known]
    near = {key: difflib.get_close_matches(key, known, n=1) for key in wrong}
    return [f"run.allow: {key} is no setting; " + (f"did you mean {near[key][0]}?" if near[key] else "--help lists them") for key in wrong]


def model(config: Config) -> list[str]:
    lines = check_model(config.model)
    if config.model.lora.quantize and find_spec("bitsandbytes") is None:
        why = "bitsandbytes is not installed in this environment; pip install bitsandbytes, or leave it out"
        lines = [*lines, f"model.lora.quantize={config.model.lora.quantize}: {why}"]
    return lines


def other_models(config: Config) -> list[str]:
    return [
        f"{other.setting}{error.removeprefix('model.path')}"
        for other in config.other_models()
        for error in check_model(ModelConfig(path=other.model.path))
    ]


def hub(config: Config) -> list[str]:
    return hub_models.check(config)


def split(config: PpoConfig) -> list[str]:
    """Whether the model can be cut into the parts of a rollout engine, and has experts where settings ask for them; of a hub's model it is
    said once it is there.

    Key-value heads may be fewer than parts, which then have copies: https://docs.vllm.ai/en/latest/serving/parallelism_scaling.html
    """
    rollout, model = config.rollout, shape(config)
    parts, stages, layers = rollout.tensor_parallel, rollout.pipeline_parallel, model.get("num_hidden_layers")
    heads, pairs = model.get("num_attention_heads"), model.get("num_key_value_heads")
    found = []
    if heads and heads % parts:
        found.append(f"rollout.tensor_parallel={parts}: the model's {heads} attention heads do not divide by it; {_divisors(heads)}")
    elif pairs and pairs % parts and parts % pairs:
        found.append(f"rollout.tensor_parallel={parts}: the model's {pairs} key-value heads do not divide by it; {_divisors(pairs)}")
    if layers and layers < stages:
        found.append(f"rollout.pipeline_parallel={stages}: the model has {layers} layers; {layers} or fewer")
    if rollout.expert_parallel and model and not has_experts(model):
        found.append("rollout.expert_parallel=true: the model has no experts; leave it false")
    if rollout.router_replay == "required" and model and not config.model.init and not has_experts(model):
        found.append("rollout.router_replay=required: the model has no experts; use auto or off")
    return found


def shared(config: Config) -> list[str]:
    """Whether the attention heads can be dealt to ranks that share sequences; of a hub's model `sequence_parallel.require` says it."""
    ranks, model = config.trainer.sequence_parallel, shape(config)
    heads = model.get("num_attention_heads")
    pairs = model.get("num_key_value_heads") or heads
    found = []
    if heads and heads % ranks:
        found.append(f"trainer.sequence_parallel={ranks}: the model's {heads} attention heads do not divide by it; {_divisors(heads)}")
    elif pairs and pairs % ranks and ranks % pairs:
        found.append(f"trainer.sequence_parallel={ranks}: the model's {pairs} key-value heads do not divide by it; {_divisors(pairs)}")
    return found


def cut(config: Config) -> list[str]:
    """Whether heads and experts can be dealt to the ranks; of a hub's model `ranks.parallel` says it."""
    tensor, expert, model = config.trainer.tensor_parallel, config.trainer.expert_parallel, shape(config)
    experts = next((model[key] for key in EXPERTS if (model.get(key) or 0) > 1), 0)
    found = []
    for name, heads in (("attention", model.get("num_attention_heads")), ("key-value", model.get("num_key_value_heads"))):
        if heads and heads % tensor:
            found.append(f"trainer.tensor_parallel={tensor}: the model's {heads} {name} heads do not divide by it; {_divisors(heads)}")
    if model and expert > 1 and not has_experts(model):
        found.append(f"trainer.expert_parallel={expert}: the model has no experts; use 1")
    elif experts and experts % expert:
        found.append(f"trainer.expert_parallel={expert}: the model's {experts} experts do not divide by it; {_divisors(experts)}")
    if tensor > 1 and expert == 1 and has_experts(model):
        found.append(f"trainer.tensor_parallel={tensor}: no matrix of an expert is cut; set trainer.expert_parallel too, or use 1")
    return found


def sight(config: Config) -> list[str]:
    """Whether a model that is to read pictures can, and no ranks share them; of a hub's model it is said once it is there."""
    own, setting = configuration(config), config.model.vision
    folder, kind = Path(resolved_paths(config).model.path or ""), own.get("model_type")
    prepared = bool(config.model.init) or any((folder / file).is_file() for file in PROCESSOR_FILES)
    if not own or setting == "off" or (setting == "auto" and not (kind in SEEING and prepared)):
        return []
    if "vision_config" not in own:
        return [f"model.vision=on: {kind} reads text only, its configuration has no vision_config; leave it out"]
    if not prepared:
        return [f"model.vision=on: {folder} has none of {', '.join(PROCESSOR_FILES)}; copy it from the model's own folder, or leave it out"]
    ways = ("sequence_parallel", "tensor_parallel", "expert_parallel")
    return [
        f"trainer.{way}={size}: {kind} reads pictures, whose tokens ranks cannot share; use 1, or model.vision=off for text only"
        for way in ways
        if (size := getattr(config.trainer, way)) > 1
    ]


def positions(config: PpoConfig) -> list[str]:
    """Whether the model has as many as a prompt and an answer may have tokens, where vLLM asks for that."""
    return lines(of_model.require_settings, config, shape(config))


def options(config: PpoConfig) -> list[str]:
    """rollout.options, held against the arguments of the vLLM that is installed: read from its source, as importing it takes seconds."""
    found = find_spec("vllm")
    file = Path((found and found.origin) or "").parent / "engine" / "arg_utils.py"
    if not config.rollout.options or not file.is_file():
        return []
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
    known = [
        line.target.id for node in classes for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    wrong = [key for key in config.rollout.options if known and key not in known]
    near = {key: difflib.get_close_matches(key, known, n=1) for key in wrong}
    return [
        f"rollout.options.{key}={show(config.rollout.options[key])}: this vLLM has no such argument; "
        + (f"did you mean {near[key][0]}?" if near[key] else "its EngineArgs lists them")
        for key in wrong
    ]


def shape(config: Config) -> dict[str, Any]:
    """What the model's configuration says of its size; empty where it is not here to read."""
    whole = configuration(config)
    return whole.get("text_config") or whole  # of a model that sees, too


def configuration(config: Config) -> dict[str, Any]:
    """The model's; empty where it is not here to read."""
    model = resolved_paths(config).model
    file = Path(model.path or "").expanduser() / "config.json"
    try:
        return model.init or (json.loads(file.read_text()) if model.path and file.is_file() else {})
    except ValueError:  # `model` and transformers say what is wrong with it
        return {}


def _divisors(number: int) -> str:
    return f"{', '.join(str(n) for n in range(1, number + 1) if number % n == 0)} do"


def data(config: Config) -> list[str]:
    answers = not isinstance(config, PpoConfig) or needs_answer(config)
    return _sets(resolved_paths(config).data.sources(), "data.mix", config.data.mix, answers)


def needs_answer(config: PpoConfig) -> bool:
    """Whether the reward reads the answer column, or somebody named it."""
    if config.environment.function:
        return config.data.answer != "answer"
    return config.data.answer != "answer" or rewards.needs_answer(*(spec for spec, _ in config.reward.functions().values()))


def evals(config: PpoConfig) -> list[str]:
    return _sets(resolved_paths(config).eval_data(), "evals", config.evals, needs_answer(config))


def _sets(sets: Mapping[str, DataConfig], section: str, named: Mapping[str, RowsConfig], answers: bool) -> list[str]:
    """Errors in the sets of a section by their names; "" is data itself, whose rules judge what it reads in vain."""
    found = []
    for name, data in sets.items():
        setting, own = f"{section}.{name}" if name else "", named[name].model_dump(exclude_none=True) if name else {}
        in_vain = [(key, why) for why, keys in data.in_vain().items() for key in keys if key in own]
        found += [f"{setting}.{key}={show(own[key])}: {why}" for key, why in in_vain]
        found += lines(_check_set, setting, data, answers)
    return found


def _check_set(setting: str, data: DataConfig, answers: bool) -> None:
    with rows.of_set(setting):
        rows.check(data, answers=answers)


def environment(config: PpoConfig) -> list[str]:
    function, args = config.environment.function, config.environment.args
    if not function:
        return []
    try:
        row = rows.first_row(next(iter(resolved_paths(config).data.sources().values())))[1]
    except ConfigError:  # `data` reports it
        return lines(environments.resolve, function, args)
    sandbox = config.environment.sandbox
    found = lines(environments.check, function, args, row, sandboxed=bool(sandbox.provider))
    elsewhere = config.environment.resources  # nodes that this is not, perhaps
    return found if found or not sandbox.provider or elsewhere else lines(check_sandbox, sandbox, row)


def reward(config: PpoConfig) -> list[str]:
    if config.environment.function:
        return []
    try:
        each = [{*rows.first_row(source)[1]} for source in resolved_paths(config).data.sources().values()]
        columns = sorted(set.intersection(*each))  # of every row, whatever its source
    except ConfigError:  # `data` reports it
        columns = []
    wrong = lines(rewards.resolve_all, config.reward.functions(), config.reward.term_weights(), columns)
    if wrong:
        return wrong
    resolved = resolved_paths(config)
    sets = {f"data.mix.{name}" if name else "": data for name, data in resolved.data.sources().items()}
    sets |= {f"evals.{name}": data for name, data in resolved.eval_data().items() if not config.evals[name].is_of_data()}
    wrong = [line for name, data in sets.items() for line in lines(_check_answers, name, data, config)]
    return wrong or lines(_try_reward, config, next(iter(sets.values())))


def _check_answers(section: str, data: DataConfig, config: PpoConfig) -> None:
    """Whether the built-in rewards can compare with the answers of the first rows."""
    functions = config.reward.functions()
    for where, columns in _first_rows(data, LOOKED_AT) if rewards.reads_answers(functions) else ():
        try:
            rewards.check_answer(functions, columns)
        except ValueError as error:
            names = ", ".join(spec for spec, _ in functions.values())
            with rows.of_set(section):
                raise ConfigError(f"data.answer: {where}: {error}; fix the row, or choose another reward than {names}") from error


def _try_reward(config: PpoConfig, data: DataConfig) -> None:
    from trainer.rewards.trial import try_out

    for _, columns in _first_rows(data, 1):
        try_out(config.reward, columns)


def _first_rows(data: DataConfig, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """As rewards get them; none where `data` has something to say."""
    try:
        for where, columns in islice(rows.read_rows(data), count):
            if data.answer in columns:
                yield where, {**columns, "answer": columns[data.answer]}
            elif count == 1:
                yield where, columns
    except ConfigError:
        return


def sinks(config: Config) -> list[str]:
    """What make install does not bring."""
    wanted = {name: getattr(config.log, name) for name in ("wandb", "mlflow")}
    return [
        f"log.{name}={value}: {name} is not installed in this environment; pip install {name}, or leave log.{name} out"
        for name, value in wanted.items()
        if value is not None and not find_spec(name)
    ]


def cluster(config: PpoConfig) -> list[str]:
    """What the run asks for, compared with what the cluster has, or this machine where Ray is going to be started on it."""

    def compare() -> None:
        placement.fit(config, _nodes())

    if config.placement.processes == "one":
        return gpu(config)
    return not_installed() or lines(compare)


def _nodes() -> list[dict[str, Any]]:
    """As Ray lists them."""
    if not os.environ.get("RAY_ADDRESS") and not placement.own_ray_runs():
        return [{"Alive": True, "Labels": {}, "Resources": {"CPU": os.cpu_count() or 1, "GPU": math.inf if has_gpu() else 0}}]
    import ray

    from trainer.cluster.on_ray import connect

    if not ray.is_initialized():
        connect()
    return ray.nodes()


def gpu(config: OfflineConfig | PpoConfig) -> list[str]:
    """That there is a GPU at all; which rank has which one, torch says."""
    wanted = config.placement.gpus_per_rank
    missing = [f"placement.gpus_per_rank={wanted:g}: this machine has no GPU; 0 uses CPUs"] if wanted and not has_gpu() else []
    return [*missing, *not_installed()]


def not_installed() -> list[str]:
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    return [f"not installed in this environment: {', '.join(missing)}; make install brings them"] if missing else []


def has_gpu() -> bool:
    """Whether a driver is here (NVIDIA, AMD, WSL) and not hidden."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(map(os.path.exists, DRIVERS))


def lines(check: Callable[..., object], *args: Any, **kwargs: Any) -> list[str]:
    try:
        check(*args, **kwargs)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def first_look(config: Config, sources: Iterable[DataConfig], look: Callable[[], object]) -> list[str]:
    """What `look`, which reads all rows, finds wrong with them, where they are small local files and the tokenizer is at hand."""
    if not all(map(_small, sources)):
        return []
    if unread := hub_models.missing(config.model.tokenizer or config.model.path or ""):
        print(f"note: rows were not looked at: model.tokenizer: {unread}", file=sys.stderr)
        return []
    with contextlib.redirect_stdout(io.StringIO()):
        return lines(look)


def _small(data: DataConfig) -> bool:
    if data.function() or data.may_be_hub():
        return False
    return sum(file.stat().st_size for file in files.shards(data.path)) < FIRST_LOOK_BYTES


_OFFLINE = (allowed, model, sight, shared, data, sinks)
CHECKS: dict[str, tuple[Check, ...]] = {  # by entry point
    "train_ppo": (allowed, options, model, sight, other_models, split, shared, cut, positions, data, evals, reward, environment, sinks),
    "train_sft": (*_OFFLINE, cut),
    "train_rm": _OFFLINE,
    "train_dpo": (*_OFFLINE, other_models),
}
