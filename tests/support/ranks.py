"""Ranks of the policy as processes of their own, without Ray: what they compute together is held against what one computes alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from support.configs import settings
from support.families import TEXTS

from trainer.cluster.actors import free_port
from trainer.data.packing import Sequence, select
from trainer.errors import ConfigError
from trainer.models import heads
from trainer.objectives.aggregation import denominators, part
from trainer.online.roles import roles_of
from trainer.ranks import worker as ranks_worker
from trainer.ranks.worker import Worker

SEQUENCES = [Sequence([3, 4], [5, 6]), Sequence([3, 4, 5], [6, 7, 8, 9, 10, 11, 4, 4, 4, 4, 4, 1])]


def together(function: Callable[..., Any], world: int, *args: Any, seconds: float = 120) -> list[Any]:
    """What each of `world` processes returns of function(rank, world, port, *args); they wait for each other, so each has one."""
    port, context = free_port(), get_context("forkserver")
    context.set_forkserver_preload(
        ["deepspeed", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.modeling_auto", "peft"]
    )
    with ProcessPoolExecutor(world, mp_context=context) as pool:
        calls = [pool.submit(function, rank, world, port, *args) for rank in range(world)]
        return [call.result(seconds) for call in calls]


def learn(
    rank: int, world: int, port: int, path: str, shares: list[list[int]], changes: dict[str, Any], chunk: int | None = None, times: int = 1
) -> list[dict[str, float]]:
    """What three steps on this rank's share of SEQUENCES say, and `kept`: bytes that the first keeps for its backward pass.

    `chunk` bounds the elements of a chunk of logits; answers are repeated so many `times`.
    """
    sequences = [Sequence(s.prompt_ids, [*s.response_ids] * times) for s in SEQUENCES]
    heads.CHUNK_ELEMENTS = chunk or heads.CHUNK_ELEMENTS
    config = settings(Path(path), **changes)
    role = roles_of(config)[0]
    worker = Worker(config, role, rank, world, path, 1)
    worker.start("127.0.0.1", port)
    given = shares_of(sequences, shares[rank])
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        first = worker.optimizer_step(*given)
    own = sum(parameter.numel() * parameter.element_size() for parameter in worker.lm.parameters())
    rest = [worker.optimizer_step(*given) for _ in range(2)]
    return [{**step, "kept": sum(kept.values()) - own} for step in (first, *rest)]


def walk(rank: int, world: int, port: int, path: str, given: dict[str, Any], mine: list[list[int]], folder: str, again: bool) -> Any:
    """The weights after three steps, a checkpoint after the first; `again`: from that checkpoint on. And those that it began with."""
    config = settings(Path(path), **given)
    ranks_worker.EXPORT_BYTES = 100_000  # less than a layer's experts
    worker = Worker(config, roles_of(config)[0], rank, world, path, 1)
    worker.start("127.0.0.1", port)
    begun = {name: tensor.clone() for name, tensor in worker._whole(None)}
    share = shares_of(SEQUENCES, mine[rank])
    if again:
        worker.load_shard(Path(folder))
    else:
        worker.optimizer_step(*share)
        worker.save_shard(Path(folder))
        assert worker.saved(60)
    worker.offload()
    worker.reload()
    for _ in range(2):
        worker.optimizer_step(*share)
    worker.export(Path(folder) / f"exported-{again}")
    return begun, {name: tensor.clone() for name, tensor in worker._whole(None)}, worker.fingerprint()


def go_on(
    rank: int,
    world: int,
    port: int,
    path: str,
    shares: list[list[int]],
    changes: dict[str, Any],
    load: str | None,
    resharded: str | None,
    save: str | None,
) -> Any:
    """The weights before and after two steps, and what these say; from a checkpoint on, to one."""
    config = settings(Path(path), **changes)
    worker = Worker(config, roles_of(config)[0], rank, world, path, 1)
    worker.start("127.0.0.1", port)
    if load:
        worker.load_shard(Path(load), Path(resharded) if resharded else None)
    begun = {name: tensor.clone() for name, tensor in worker._whole(None)}
    said = [worker.optimizer_step(*shares_of(SEQUENCES, shares[rank])) for _ in range(2)]
    if save:
        worker.save_shard(Path(save))
        assert worker.saved(60)
    return begun, {name: tensor.clone() for name, tensor in worker._whole(None)}, said


def shares_of(sequences: list[Sequence], mine: list[int]) -> Any:
    """What `optimizer_step` is given of a step in which a rank has these sequences."""
    lengths_E = torch.tensor([len(s.response_ids) for s in sequences])
    episode_N = torch.arange(len(sequences)).repeat_interleave(lengths_E)
    mask_N = torch.ones(len(episode_N))
    counts = part(denominators(mask_N, episode_N, len(sequences)), mine)
    tokens_N = {"mask": mask_N, "rollout": torch.zeros(len(mask_N)), "advantages": torch.linspace(-1, 2, len(mask_N))}
    where = select(lengths_E, mine)
    return [sequences[i] for i in mine], {name: values[where] for name, values in tokens_N.items()}, counts, 1


def scores(
    rank: int, world: int, port: int, paths: dict[str, str], ports: list[int], ways: dict[str, int] | None = None
) -> dict[str, torch.Tensor | str]:
    """What ranks that share sequences, or what `ways` says, say of TEXTS, by family, or why they refuse it."""
    found: dict[str, torch.Tensor | str] = {}
    for (kind, path), at in zip(paths.items(), ports, strict=True):
        model = {"path": path, "dtype": "float32"}
        trainer = {"zero_stage": 0, "timeout": 300, "micro_batch_tokens": 40} | (ways or {"sequence_parallel": world})
        config = settings(Path(path), model=model, trainer=trainer, placement={"ranks": world})
        worker = Worker(config, roles_of(config)[0], rank, world, path, 1)
        try:
            worker.start("127.0.0.1", at)
            found[kind] = worker.score(TEXTS, 1)
        except ConfigError as error:
            found[kind] = str(error)
    return found


def replayed(
    rank: int, world: int, port: int, path: str, trainer: dict[str, Any], experts: list[Any]
) -> tuple[torch.Tensor, dict[str, float]]:
    """What a rank says of TEXTS, all of them, whose tokens took these experts, and the numbers of a step that learns from them."""
    sequences = [replace(text, experts=each) for text, each in zip(TEXTS, experts, strict=True)]
    trainer = {"zero_stage": 0, "timeout": 300, "micro_batch_tokens": 40, **trainer}
    config = settings(Path(path), model={"path": path, "dtype": "float32"}, trainer=trainer, placement={"ranks": world})
    worker = Worker(config, roles_of(config)[0], rank, world, path, 1)
    worker.start("127.0.0.1", port)
    said_N = worker.score(sequences, 1)
    mask_N, episode_N = (
        torch.ones(len(said_N)),
        torch.arange(len(TEXTS)).repeat_interleave(torch.tensor([len(t.response_ids) for t in TEXTS])),
    )
    tokens_N = {"mask": mask_N, "rollout": said_N, "advantages": torch.linspace(-1, 2, len(mask_N))}
    return said_N, worker.optimizer_step(sequences, tokens_N, denominators(mask_N, episode_N, len(TEXTS)), 1)
