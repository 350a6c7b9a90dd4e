"""Estimates what a run needs and costs before anything starts: GPU memory by role, seconds by phase, money.

    python -m trainer.plan run.yaml [--gpu H100 --gpus-per-node 8 --nodes 2 --network 3200 --price 200] [key=value ...]

`flotilla plan run.yaml STACK` fills in the flags in brackets. Arithmetic only: no process starts, no weights are read.
Exit codes: 0 it fits, 1 it does not, 2 a mistake.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from trainer import cli, preflight
from trainer.cli import usage, yaml_io
from trainer.cluster import placement
from trainer.configs.ppo import PpoConfig
from trainer.configs.preferences import DpoConfig, RmConfig
from trainer.configs.sections import Config, ModelConfig
from trainer.configs.sft import SftConfig
from trainer.errors import ConfigError
from trainer.plan import memory, step_time
from trainer.plan.gpus import GPUS, Gpu, find
from trainer.plan.memory import Shape
from trainer.plan.shapes import SHAPES
from trainer.plan.step_time import Cluster, Lengths

PROG = "flotilla plan"
TRAINERS: dict[str, type[Config]] = {"ppo": PpoConfig, "sft": SftConfig, "rm": RmConfig, "dpo": DpoConfig}
PPO_SECTIONS = {"rollout", "reward", "environment", "evals", "critic", "teacher"}  # that other trainers refuse
MOST = 1024  # GPUs up to which --scale goes
ETHERNET = 100  # Gbit/s of a node whose network nobody named
Found = dict[str, Any]
ABOUT = f"""\
Estimate a run's GPU memory, step time and cost. Starts nothing. STACK sets the
GPU, nodes, network and price from a stack file, e.g. stacks/Pulumi.onprem.yaml.
GPU types: {", ".join(GPUS)}.
Exit code 0: the run fits. 1: it does not. 2: an error."""


def main(argv: list[str]) -> int:
    """Raises ConfigError."""
    args = _arguments(argv)
    config = _config(args)
    shape = shape_of(config.model)
    for other in config.other_models():
        try:
            shape = replace(shape, **{other.role: shape_of(other.model)})
        except ConfigError as error:
            raise ConfigError(f"{other.setting}{str(error).removeprefix('model.path')}") from None
    whence = f"as published for {config.model.path}; its own config.json is not here" if published(config.model) else "the model's own"
    shape = _shown(args, config, shape)
    lengths = _lengths(args, config, shape.tower.shown if shape.tower else 0)
    if args.gpu is None:
        found = everywhere(config, shape, args.ranks)
        found["shape"] = whence
        print(json.dumps(found, indent=2) if args.json else _words_everywhere(found))
        return 0 if any(gpu["fits"] for gpu in found["gpus"]) else 1
    cluster = _cluster(args)
    ranks = args.ranks or (config.placement.ranks if isinstance(config, PpoConfig) else cluster.gpus)
    for way in ("sequence_parallel", "tensor_parallel", "expert_parallel"):
        if ranks % (size := getattr(config.trainer, way)):
            raise ConfigError(f"trainer.{way}={size}: {ranks} ranks do not divide into groups of so many; see --ranks")
    found = on_cluster(config, shape, cluster, lengths, ranks, args.price)
    if args.scale:
        found["scale"] = scaled(config, shape, cluster, lengths, ranks, args.price)
    found["shape"] = whence
    print(json.dumps(found, indent=2) if args.json else _words(found))
    return 1 if found["errors"] else 0


# --- what is found -----------------------------------------------------------------------------------------------------------


def shape_of(model: ModelConfig) -> Shape:
    """Raises ConfigError where the configuration cannot be read; one line, whatever transformers said."""
    from trainer import models  # torch takes seconds to import: mistakes in the settings are found before

    if published(model):
        known = {"path": None, "init": SHAPES[str(model.path)], "tokenizer": "characters:a"}
        model = model.model_copy(update=known)
    try:
        return Shape.of(models.without_weights(model))
    except ConfigError as error:
        first = str(error).splitlines()[0]
        first = first[first.rfind("model.init.") :] if "model.init." in first else first  # the key alone, without the whole configuration
        raise ConfigError(f"{first} (a plan needs the model's config.json: a folder, a hub name in the cache, or model.init)") from None
    except AttributeError as error:
        raise ConfigError(f"model: {model.path or model.init}: not a transformer whose sizes are known here: {error}") from None


def published(model: ModelConfig) -> bool:
    """Whether its shape is taken from `shapes.SHAPES`, as its own configuration is not here."""
    from huggingface_hub import try_to_load_from_cache

    return model.path in SHAPES and not isinstance(try_to_load_from_cache(str(model.path), "config.json"), str)


def everywhere(config: Config, shape: Shape, ranks: int | None) -> Found:
    """Whether one GPU of each kind holds what the settings put on it."""
    gpus = []
    for gpu in GPUS.values():
        errors = _unfit(config, shape, gpu, ranks)
        gpus.append({"gpu": gpu.name, "fits": not errors, "memory": _memory(config, shape, gpu, ranks), "errors": errors})
    return {**_of_model(shape), "gpus": gpus}


def _of_model(shape: Shape) -> Found:
    tower = shape.tower and {"parameters": shape.tower.parameters, "image_tokens": shape.tower.shown, "trained": shape.tower.trained}
    return {"parameters": shape.parameters, "active": shape.active, "a_row_each": shape.alone, "tower": tower}


def on_cluster(config: Config, shape: Shape, cluster: Cluster, lengths: Lengths, ranks: int, price: float | None) -> Found:
    step = step_time.step(config, shape, cluster, lengths, ranks)
    errors = [*_room(config, cluster, ranks), *_unfit(config, shape, cluster.gpu, ranks)]
    return {
        **_of_model(shape),
        "gpu": cluster.gpu.name,
        "nodes": cluster.nodes,
        "gpus": cluster.gpus,
        "gpus_used": _used(config, ranks),
        "memory": _memory(config, shape, cluster.gpu, ranks),
        "loading": _loading(config, shape, cluster, ranks),
        "lengths": {"prompt": lengths.prompt, "answer": lengths.answer},
        "seconds": {**step.phases, "step": step.seconds},
        "steps": config.trainer.steps,
        "overlap": step.ahead,
        "tokens_per_second": step.tokens / step.seconds,
        "router_replay": {"token": replayed(config, shape), "step": round(step.tokens * replayed(config, shape))},
        "binds": "memory" if errors else step.binds,
        "price_per_hour": price,
        "cost_per_1000_steps": _cost(step.seconds, price),
        "errors": errors,
    }


def replayed(config: Config, shape: Shape) -> int:
    """Bytes of a token's record of experts, which travels with its answer; 0 where nothing is replayed."""
    return shape.routed if isinstance(config, PpoConfig) and config.rollout.router_replay != "off" else 0


def scaled(config: Config, shape: Shape, cluster: Cluster, lengths: Lengths, ranks: int, price: float | None) -> list[Found]:
    """The same batch on twice as many nodes, ranks and rollout engines, and so on."""
    rows, factor = [], 1
    while cluster.gpus * factor <= MOST:
        wider = replace(cluster, nodes=cluster.nodes * factor)
        grown: Config = config
        if isinstance(config, PpoConfig):
            place = config.placement.model_copy(update={"ranks": ranks * factor})
            rollout = config.rollout.model_copy(update={"engines": config.rollout.engines * factor})
            grown = config.model_copy(update={"placement": place, "rollout": rollout})
        found = on_cluster(grown, shape, wider, lengths, ranks * factor, None if price is None else price * factor)
        keys = ("gpus", "tokens_per_second", "cost_per_1000_steps", "binds")
        rows.append({**{key: found[key] for key in keys}, "seconds": found["seconds"]["step"]})
        factor *= 2
    return rows


def _memory(config: Config, shape: Shape, gpu: Gpu, ranks: int | None) -> list[Found]:
    return [
        {"when": when, "parts": {name: size for name, size in parts.items() if size}, "bytes": sum(parts.values()), "of": room}
        for when, parts, room, _ in memory.plan(config, shape, gpu.memory, ranks)
    ]


def _loading(config: Config, shape: Shape, cluster: Cluster, ranks: int) -> Found:
    """CPU memory of a node that has as many ranks as fit on it, or all."""
    here = min(ranks, int(cluster.per_node / config.placement.gpus_per_rank))
    return {"ranks": here, "bytes": memory.loading(config, shape, here)}


def _unfit(config: Config, shape: Shape, gpu: Gpu, ranks: int | None) -> list[str]:
    errors = [line for each in memory.plan(config, shape, gpu.memory, ranks) for line in memory.too_much(config, *each)]
    if config.model.dtype == "bfloat16" and not gpu.bfloat16:
        errors.append(f"model.dtype=bfloat16: a {gpu.name} has none; use float32")
    return errors


def _room(config: Config, cluster: Cluster, ranks: int) -> list[str]:
    """What ranks and rollout engines ask of the nodes, held against them as a start does; CPUs and custom resources are not looked at."""
    if not isinstance(config, PpoConfig):
        least = f"{ranks} ranks of torchrun need {ranks} GPUs, the cluster has {cluster.gpus}; lower --ranks or add nodes"
        return [least] if ranks > cluster.gpus else []
    wanted = placement.plan(config)
    every = {name: math.inf for bundle in wanted.bundles for name in bundle}
    try:
        placement.check(wanted, [{**every, "GPU": cluster.per_node}] * cluster.nodes, config.placement)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _used(config: Config, ranks: int) -> float:
    return sum(bundle.get("GPU", 0) for bundle in placement.plan(config).bundles) if isinstance(config, PpoConfig) else ranks


def _cost(seconds: float, price: float | None) -> float | None:
    return None if price is None else round(price * seconds * 1000 / 3600, 2)


# --- what is read ------------------------------------------------------------------------------------------------------------


def _arguments(argv: list[str]) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"{message}; {self.prog} --help lists the flags")

    examples = (f"{PROG} trainer/recipes/grpo-8b.yaml onprem", f"{PROG} run.yaml --gpu H100 --nodes 2 --price 40 --scale")
    parser = Parser(prog=PROG, allow_abbrev=False, **usage.settings(ABOUT, *examples, usage="RUN.yaml [STACK] [flags] [key=value ...]"))
    add = parser.add_argument
    add("config", metavar="RUN.yaml", help="the run's settings")
    add("settings", nargs="*", metavar="key=value", help="settings that override the file's")
    add("--train", choices=sorted(TRAINERS), help="trainer that reads the file (default: by its sections)")
    add("--gpu", metavar="NAME", help="GPU type; without it, all known types are tried")
    add("--gpu-memory", type=_positive, metavar="GB", help="memory per GPU, if it is not the data sheet's")
    add("--gpus-per-node", type=_count, default=8, metavar="N", help="GPUs per node (%(default)s)")
    add("--nodes", type=_count, default=1, metavar="N", help="number of nodes (%(default)s)")
    add("--network", type=_positive, default=ETHERNET, metavar="GBIT", help="Gbit/s per node, in one direction (%(default)s)")
    add("--price", type=_positive, metavar="USD", help="price per hour of all nodes together")
    add("--ranks", type=_count, metavar="N", help="torchrun ranks for sft, rm and dpo (all GPUs)")
    add("--prompt-tokens", type=_positive, metavar="N", help="mean prompt length (data.max_prompt_tokens / 2)")
    add("--image-tokens", type=_count, metavar="N", help="tokens of a prompt's pictures (one of data.max_pixels)")
    add("--answer-tokens", type=_positive, metavar="N", help="mean answer length (rollout.max_new_tokens / 2)")
    add("--scale", action="store_true", help=f"also 2, 4, ... times the nodes, up to {MOST} GPUs")
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_intermixed_args(argv)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _config(args: argparse.Namespace) -> Config:
    kind = TRAINERS[args.train or ("ppo" if _is_ppo(args) else "sft")]
    config = cli.parse(["--config", args.config, *args.settings], prog=PROG, model=kind, checks=(preflight.allowed,))
    if not config.placement.gpus_per_rank:
        raise ConfigError("placement.gpus_per_rank=0: the run trains on CPUs, of which nothing is planned; placement.gpus_per_rank=1")
    if args.ranks and isinstance(config, PpoConfig):
        raise ConfigError(f"--ranks {args.ranks}: for train_sft; of train_ppo placement.ranks says it")
    return config


def _is_ppo(args: argparse.Namespace) -> bool:
    """Whether the file, or the command line, has a section that train_ppo alone reads. What cannot be read, `cli.parse` explains."""
    try:
        values = yaml_io.load(Path(args.config).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml_io.yaml.YAMLError):
        return True
    named = {*(values if isinstance(values, dict) else {}), *(setting.partition(".")[0] for setting in args.settings)}
    return bool(named & PPO_SECTIONS)


def _lengths(args: argparse.Namespace, config: Config, shown: int) -> Lengths:
    """Of which `shown` tokens of a prompt are pictures' and the rest, like answers, half as long as allowed."""
    longest = config.data.max_prompt_tokens
    answer = config.max_response_tokens() if isinstance(config, PpoConfig) else longest
    for flag, mean, most in (("--prompt-tokens", args.prompt_tokens, longest), ("--answer-tokens", args.answer_tokens, answer)):
        if mean and mean > most and (isinstance(config, PpoConfig) or flag == "--prompt-tokens"):
            raise ConfigError(f"{flag} {mean:g}: the settings allow {most} at most (data.max_prompt_tokens, rollout.max_new_tokens)")
    if args.prompt_tokens and args.prompt_tokens < shown:
        raise ConfigError(f"--prompt-tokens {args.prompt_tokens:g}: its pictures have {shown}; see --image-tokens")
    return Lengths(args.prompt_tokens or (longest + shown) / 2, args.answer_tokens or answer / 2)


def _shown(args: argparse.Namespace, config: Config, shape: Shape) -> Shape:
    """With the tokens of pictures in a prompt: as said, or those of one picture."""
    if shape.tower is None:
        if args.image_tokens:
            raise ConfigError(f"--image-tokens {args.image_tokens}: the model reads text only; leave it out")
        return shape
    most = config.data.max_prompt_tokens
    if args.image_tokens and args.image_tokens > most:
        raise ConfigError(f"--image-tokens {args.image_tokens}: prompts have {most} tokens at most (data.max_prompt_tokens)")
    shown = args.image_tokens or min(most, shape.tower.picture(config.data.max_pixels))
    return replace(shape, tower=replace(shape.tower, shown=shown))


def _cluster(args: argparse.Namespace) -> Cluster:
    small = args.gpu.upper() == "A100" and args.gpu_memory and args.gpu_memory <= 40  # stacks tell the two by their memory
    gpu = find("A100-40GB" if small else args.gpu)
    if args.gpu_memory:
        gpu = replace(gpu, memory=args.gpu_memory * 1e9)
    return Cluster(gpu, args.gpus_per_node, args.nodes, args.network * 1e9 / 8)


# --- what is said ------------------------------------------------------------------------------------------------------------


def _words_everywhere(found: Found) -> str:
    lines = [_model(found), "one GPU of each kind:"]
    for gpu in found["gpus"]:
        most = max(gpu["memory"], key=lambda each: each["bytes"] / each["of"])
        said = _memory_line(most) if gpu["fits"] else gpu["errors"][0]
        lines.append(f"  {gpu['gpu']:<10} {'fits' if gpu['fits'] else 'does not fit':<13} {said}")
    if not any(gpu["fits"] for gpu in found["gpus"]):
        largest = max(found["gpus"], key=lambda gpu: GPUS[gpu["gpu"]].memory)
        lines += [f"does not fit, even on {largest['gpu']}: {error}" for error in largest["errors"]]
    return "\n".join(lines)


def _words(found: Found) -> str:
    used = "wanted" if found["gpus_used"] > found["gpus"] else "used"
    lines = [_model(found), f"cluster: {found['nodes']} nodes, {found['gpus']} {found['gpu']}, of which {found['gpus_used']:g} are {used}"]
    if found["errors"]:  # what cannot start takes no time and has no price
        return "\n".join([*lines, *(f"does not fit: {error}" for error in found["errors"]), *map(_memory_line, found["memory"])])
    lines += [_memory_line(each) for each in found["memory"]]
    if size := (loading := found["loading"])["bytes"]:
        here = loading["ranks"]
        lines.append(f"loading: {size / memory.GIB:.1f} GiB of a node's CPU memory for copies of experts, {here} ranks on it")
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["seconds"].items() if name != "step")
    phases += "; generation is at the same time as the rest" * found["overlap"]
    lines.append(f"a step: {found['seconds']['step']:.1f} s ({phases}), {found['tokens_per_second']:,.0f} tokens/s")
    lines.append(f"what binds: {found['binds']}")
    if (replay := found["router_replay"])["token"]:
        each, size = replay["token"], replay["step"] / memory.GIB
        lines.append(f"router replay: the experts of a token are {each:,} bytes, {size:.2f} GiB a step from engines to ranks")
    cost = found["cost_per_1000_steps"]
    unknown = "without a price: --price, or flotilla:monitoring.price of a stack"
    known = unknown if cost is None else f"{cost:,.2f} USD at {found['price_per_hour']:,.2f} an hour"
    lines.append(f"1,000 steps: {found['seconds']['step'] * 1000 / 3600:.1f} h, {known}")
    if "scale" in found:
        lines.append("GPUs   s/step     tokens/s   USD/1,000 steps  what binds")
        for row in found["scale"]:
            price = "-" if row["cost_per_1000_steps"] is None else f"{row['cost_per_1000_steps']:,.2f}"
            lines.append(f"{row['gpus']:<6} {row['seconds']:<10.1f} {row['tokens_per_second']:<10,.0f} {price:<16} {row['binds']}")
    mean = found["lengths"]
    lines.append(f"{step_time.EFFICIENCY}; prompts of {mean['prompt']:g} and answers of {mean['answer']:g} tokens in the mean")
    return "\n".join(lines)


def _model(found: Found) -> str:
    tower = found["tower"]
    active = "" if found["active"] == found["parameters"] else f", {found['active'] / 1e9:.2f} of them for each token"
    if tower:
        learned = "" if tower["trained"] else ", not trained"
        active += (
            f"; its vision tower has {tower['parameters'] / 1e9:.2f}{learned}, and a prompt {tower['image_tokens']} tokens of pictures"
        )
    shape = f" (shape {found['shape']})" if found["shape"].startswith("as published") else ""
    rows = (
        "\nrows: each sequence has its own, as in a packed one it would see others; padding, which the metric packing shows, comes on top"
    )
    return f"model: {found['parameters'] / 1e9:.2f} billion parameters{active}{shape}{rows if found['a_row_each'] else ''}"


def _memory_line(each: Found) -> str:
    size, room = each["bytes"] / memory.GIB, each["of"] / memory.GIB
    return f"{each['when']}: {size:.1f} of {room:.1f} GiB a GPU ({memory.listed(each['parts'])})"


def run(argv: Sequence[str]) -> int:
    with cli.exits_cleanly():
        return main([*argv])
