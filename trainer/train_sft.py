"""Supervised fine-tuning on prompts and answers; the loss is on the answers. Alone, as a Ray job, or under torchrun:

python -m trainer.train_sft --config trainer/recipes/demo-sft.yaml
torchrun --nproc-per-node 8 -m trainer.train_sft --config ...
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from trainer import faults, model_card, preflight
from trainer.cli import exits_cleanly, parse
from trainer.configs.sections import values_read
from trainer.configs.sft import SftConfig


def read(argv: list[str]) -> SftConfig:
    """The settings, once all that they name has been looked at."""
    checks, before_start = (preflight.allowed, preflight.model, preflight.data, preflight.sinks), (preflight.gpu,)
    return parse(argv, prog="python -m trainer.train_sft", model=SftConfig, checks=checks, before_start=before_start)


if __name__ == "__main__":  # errors are reported, and --help printed, before the seconds that torch takes to import
    with exits_cleanly():
        CONFIG = read(sys.argv[1:])

import torch
import torch.distributed as dist

from trainer.actors import RunError, connect, free_port
from trainer.background import Background
from trainer.checkpoint import Checkpoints
from trainer.data.loader import make_loader
from trainer.data.packing import Sequence, select, split
from trainer.data.prompts import answer_ids, load_prompts
from trainer.divergence import Diverged, Skips, go_back, require_finite, slowed
from trainer.episodes import Prompt
from trainer.errors import ConfigError
from trainer.metrics import Metrics, plot
from trainer.models import PolicyModel, load_tokenizer
from trainer.objectives.aggregation import denominators, part
from trainer.objectives.supervised import supervised
from trainer.reshard import reshard
from trainer.roles import combine
from trainer.runs import held, run_folder, save_resolved
from trainer.sinks import sinks
from trainer.stopping import STOPPED, stop_signals
from trainer.workers import Role, Tokens, Worker, packing

T = TypeVar("T")
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for what it was given as a job


def train(config: SftConfig, folder: Path, rank: int, world: int) -> int:
    """Run to the end on this rank, back to a good checkpoint where it diverges.

    Returns the exit code: 0, 1 when it diverged too often, or 143 when it was asked to stop and has saved.
    """
    if rank == 0 and JOB in os.environ:
        connect()  # the cluster has nothing to do here; it takes the gauges
    while True:
        try:
            return _train(config, folder, rank, world)
        except Diverged as error:  # on all ranks: they have the same numbers
            diverged = error.with_traceback(None)  # it would keep the model
        gc.collect()
        if why := _from_rank_0(partial(_go_back, config, folder, diverged), rank, world):
            if rank == 0:
                faults.note(folder, diverged.step, why)
                print(f"error: {why}", file=sys.stderr)
            return 1


def _go_back(config: SftConfig, folder: Path, diverged: Diverged) -> str:
    """Why that cannot be; nothing where it is done."""
    try:
        go_back(config, folder, diverged)
    except RunError as error:
        return str(error)
    return ""


def _train(config: SftConfig, folder: Path, rank: int, world: int) -> int:
    schedule = config.trainer
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(config.data, tokenizer).prompts
    loader = make_loader(config.data, prompts, schedule.prompts_per_step, config.run.seed)
    _check_lengths(prompts, tokenizer, schedule.micro_batch_tokens)
    checkpoints = Checkpoints(folder / "checkpoints", schedule.keep_checkpoints)
    objective = partial(supervised, config.algorithm)
    role = Role("policy", PolicyModel, config.placement.gpus_per_rank, config.optim, objective, config.updates())
    worker = Worker(config, role, rank, world, None, config.placement.threads)
    worker.join(os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT") or free_port()))
    config = _from_rank_0(lambda: slowed(config, folder), rank, world)
    worker.config, worker.role = config, replace(role, optim=config.optim)
    # Rank 0 alone looks: on a shared file system another node may see a checkpoint later, and would resume from another step.
    last, exported = _from_rank_0(lambda: (checkpoints.to_resume(config.run.resume), (folder / "model").exists()), rank, world)
    done = last.step if last else 0
    if done >= schedule.steps and exported:
        if rank == 0:
            print(f"{folder} has all {done} steps; to train on raise trainer.steps, to train anew choose another run.name")
        return 0
    worker.build()
    identity = {"model": worker.fingerprint(), "world_size": world}
    if last:
        last.require_model(identity["model"])
        worker.load(last.folder, _from_rank_0(partial(reshard, last, world, schedule.timeout), rank, world))
        loader.load(last.state["loader"])
    skips = Skips(config.divergence.patience)
    metrics = Metrics(folder, total=schedule.steps, done=done, sinks=sinks(config, folder, done)) if rank == 0 else None
    saver = Saver(worker, checkpoints, rank, world)
    with stop_signals() as stopping, saver.background, metrics or nullcontext():
        for step in range(done + 1, schedule.steps + 1):
            begin = time.perf_counter()
            sequences = [Sequence(p.token_ids, answer_ids(p, tokenizer)) for p in loader.next()]
            stats = update(worker, sequences, rank, world)
            seconds = time.perf_counter() - begin
            if metrics:
                rate = sum(s.length for s in sequences) / seconds
                metrics.log(step, stats | saver.blocked | {"seconds": seconds, "tokens_per_second": rate})
            skips.count(step, stats)
            stop, exporting = saver.look(bool(stopping))[0], schedule.export_every and step % schedule.export_every == 0
            saving = stop or step == schedule.steps or (step % schedule.checkpoint_every == 0 and not skips.in_row)
            if saving or exporting or skips.in_row:  # else the next step's loss shows it
                require_finite(worker.score(sequences[:1], 1).tolist(), step, step - skips.in_row)
            if exporting:
                _export(worker, folder, folder / "models" / f"step_{step}", step)
            if saving:
                saver.save(step, {**identity, "loader": loader.state()}, last=stop or step == schedule.steps)
            if stop and step < schedule.steps:
                print(f"{stopping}: saved after step {step}; the same command resumes", flush=True)
                return STOPPED
    _export(worker, folder, folder / "model", schedule.steps)
    if metrics:
        print(metrics.cost.report(schedule.steps))
        if config.log.plot:
            print(f"plot: {plot(folder)}", flush=True)
    return 0


def _check_lengths(prompts: list[Prompt], tokenizer: Any, budget: int) -> None:
    """Raises ConfigError at the door, not at the step that meets the sequence."""
    longest = max(prompts, key=lambda p: len(p.token_ids) + len(answer_ids(p, tokenizer)))
    length = len(longest.token_ids) + len(answer_ids(longest, tokenizer))
    if length > budget:
        raise ConfigError(
            f"trainer.micro_batch_tokens={budget}: row {longest.index} of data.path has {length} tokens; raise it to at least that"
        )


def update(worker: Worker, sequences: list[Sequence], rank: int, world: int, tokens_N: Tokens | None = None) -> dict[str, float]:
    """One optimizer step on the global batch, of which each rank takes its share; all ranks return the same numbers.

    `tokens_N` are inputs of the objective per response token of the batch, besides the mask.
    """
    lengths_E = torch.tensor([len(s.response_ids) for s in sequences])
    episode_N = torch.repeat_interleave(torch.arange(len(sequences)), lengths_E)
    counts = denominators(torch.ones(len(episode_N)), episode_N, len(sequences))
    shares, count = split([s.length for s in sequences], world, **packing(worker.config), together=worker.role.together)
    mine = shares[rank]
    where_N = select(lengths_E, mine)
    mine_N = {name: values_N[where_N] for name, values_N in {"mask": torch.ones(len(episode_N)), **(tokens_N or {})}.items()}
    stats = worker.update([sequences[i] for i in mine], mine_N, part(counts, mine), count)
    return combine(_gather(stats, world), counts.tokens)


def _gather(stats: dict[str, float], world: int) -> list[dict[str, float]]:
    if world == 1:
        return [stats]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, stats)
    return everyone


def _from_rank_0(look: Callable[[], T], rank: int, world: int) -> T:
    """What rank 0 found, on every rank."""
    found: list[Any] = [look() if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _any_rank(flags: list[bool], world: int, device: torch.device) -> list[bool]:
    """Each is True on all ranks if it is on one: a signal may reach only some."""
    if world == 1:
        return flags
    summed = torch.tensor(flags, dtype=torch.float32, device=device)
    dist.all_reduce(summed)
    return [bool(flag) for flag in summed.tolist()]


class Saver:
    """All ranks write their shards, each in a thread of its own, into the folder that rank 0 opens and completes."""

    def __init__(self, worker: Worker, checkpoints: Checkpoints, rank: int, world: int) -> None:
        self.worker, self.checkpoints, self.rank, self.world = worker, checkpoints, rank, world
        self.background = Background(checkpoints, worker.config.trainer.timeout)
        self.everywhere = Event()  # on rank 0: the other ranks have written
        self.step = 0
        self.blocked: dict[str, float] = {}  # seconds that `save` held this rank up, until the next `look`

    def look(self, stop: bool, seconds: float = 0) -> list[bool]:
        """`stop`, and whether shards are unwritten after `seconds`; both of any rank. Collective. Raises what went wrong on this rank."""
        self.background.check()
        self.blocked = {}
        try:
            busy = not self.worker.saved(seconds)
        except Exception as error:
            if self.rank > 0:
                raise self.checkpoints.explained(error, self.step) or error from None
            self.background.wait()  # raises the same, explained, once the folder is removed
            raise
        stop, busy = _any_rank([stop, busy], self.world, self.worker.device)
        if not busy:
            self.everywhere.set()
        return [stop, busy]

    def save(self, step: int, state: dict[str, Any], last: bool) -> None:
        """Begin a checkpoint; the `last` is complete on return. Collective."""
        begin = time.perf_counter()
        if self.look(False, self.background.timeout)[1]:
            raise RunError(f"the checkpoint of step {self.step} was not written within {self.background.timeout} s (trainer.timeout)")
        self.background.wait()
        self.background.tell(begin)
        self.everywhere.clear()
        self.step = step
        if self.rank == 0:
            expected = [f"random-{i}.pt" for i in range(self.world)]
            self.background.save(step, state, self._begin, self._written, expected=expected)
        else:
            self._begin(self.checkpoints.draft(step))
        if last:
            self.look(False, self.background.timeout)
            self.background.wait()
            _barrier(self.world)
        self.blocked = {"seconds_checkpoint": time.perf_counter() - begin}

    def _begin(self, draft: Path) -> None:
        _barrier(self.world)  # it is there
        self.worker.save(draft)

    def _written(self) -> bool:
        return self.worker.saved() and (self.world == 1 or self.everywhere.is_set())


def _export(worker: Worker, run: Path, folder: Path, step: int) -> None:
    """Collective; rank 0 writes."""
    first = worker.rank == 0
    worker.export(folder, model_card.files(run, values_read(worker.config), step) if first else None)
    if first:
        print(f"model: {folder}", flush=True)


def _barrier(world: int) -> None:
    if world > 1:
        dist.barrier()


def main(config: SftConfig) -> int:
    """Exit codes: 0 done, 1 diverged too often, 2 a mistake in settings, data or paths, 143 stopped and saved."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if config.trainer.prompts_per_step % world:
        raise ConfigError(f"trainer.prompts_per_step={config.trainer.prompts_per_step}: does not divide by the {world} ranks of torchrun")
    folder = run_folder(config)
    if rank > 0:
        return train(config, folder, rank, world)
    with held(folder):
        save_resolved(config, folder, sys.orig_argv)
        return train(config, folder, rank, world)


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(CONFIG))  # pyright: ignore[reportPossiblyUnboundVariable]  # read above, under the same condition
