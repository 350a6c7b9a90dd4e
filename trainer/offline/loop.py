"""The loop of what learns from data alone: answers, preferences. Its ranks are processes of torchrun, or one process by itself.

An entry point says what a row of its data becomes, which model learns and by which objective: an `Offline` of its own.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from trainer import models, preflight
from trainer.checkpoints.folders import Checkpoints
from trainer.checkpoints.reshard import reshard
from trainer.cli.paths import run_folder
from trainer.cluster import spans
from trainer.cluster.actors import free_port
from trainer.cluster.stopping import Stopping, stop_signals
from trainer.configs.offline import OfflineConfig
from trainer.configs.sections import values_read
from trainer.data.loader import Loader, Mixture, hold_out, make_loader
from trainer.data.packing import Sequence, select, split
from trainer.data.positions import positions
from trainer.data.prompts import chat_for, say_day
from trainer.episodes import Denominators, Prompt
from trainer.errors import STOPPED, ConfigError, RunError
from trainer.metrics import Metrics, model_card, plot
from trainer.metrics.progress import JOB
from trainer.metrics.sinks import sinks
from trainer.models import attention, load_tokenizer, others
from trainer.objectives.aggregation import denominators, part
from trainer.offline.saver import Saver, from_rank_0, gather
from trainer.offline.tracing import Tracing
from trainer.ranks import packed
from trainer.ranks.reduction import combine, means
from trainer.ranks.worker import Role, Tokens, Worker
from trainer.runs import alive, dated, faults, held, save_resolved
from trainer.runs.divergence import Diverged, Skips, go_back, require_finite, slowed

C = TypeVar("C", bound=OfflineConfig)


class Offline(Generic[C]):
    """What sets one entry point apart from another. `tokenizer` is the model's, `chat` its template, where it has one."""

    def __init__(self, config: C) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.model)
        self.chat = chat_for(config.data, self.tokenizer)

    @property
    def together(self) -> int:
        """Sequences of a row, which are compared with each other."""
        return 1

    def role(self) -> Role:
        """The model, its head and its objective."""
        raise NotImplementedError

    def rows(self) -> list[Prompt]:
        """All of the data, tokenized. Raises ConfigError."""
        raise NotImplementedError

    def sequences(self, row: Prompt) -> list[Sequence]:
        """What a row becomes, `together` of them."""
        raise NotImplementedError

    def prepare(self, worker: Worker, rows: list[Prompt], folder: Path, *, fresh: bool) -> None:
        """Once before the first step of a start; `fresh`: the model has learned nothing yet. Collective."""

    def numbers(self, worker: Worker, rows: list[Prompt]) -> dict[str, float]:
        """What the objective has to know of a batch as a whole, before the model learns from it. Collective."""
        return {}


def train(task: type[Offline[C]], config: C, folder: Path, rank: int, world: int) -> int:
    """Run to the end on this rank, back to a good checkpoint where it diverges.

    Returns the exit code: 0, 1 when it diverged too often, or 143 when it was asked to stop and has saved.
    """
    if rank == 0 and JOB in os.environ:
        from trainer.cluster.on_ray import connect

        connect()  # the cluster has nothing to do here; it takes the gauges
    while True:
        try:
            return _train(task(config), folder, rank, world)
        except Diverged as error:  # on all ranks: they have the same numbers
            diverged = error.with_traceback(None)  # it would keep the model
        gc.collect()
        if why := from_rank_0(partial(_go_back, config, folder, diverged), rank, world):
            if rank == 0:
                faults.note(folder, diverged.step, why)
                print(f"error: {why}", file=sys.stderr)
            return 1


def _go_back(config: OfflineConfig, folder: Path, diverged: Diverged) -> str:
    """Why that cannot be; nothing where it is done."""
    try:
        go_back(config, folder, diverged)
    except RunError as error:
        return str(error)
    return ""


def _train(task: Offline[Any], folder: Path, rank: int, world: int) -> int:
    config: OfflineConfig = task.config
    schedule = config.trainer
    others.require(config)
    if rank == 0:
        say_day(config.data, task.tokenizer)
    found, rows, held_out = read(task)
    loader = make_loader(config.data, rows, schedule.prompts_per_step, config.run.seed)
    checkpoints = Checkpoints(folder / "checkpoints", schedule.keep_checkpoints)
    role = task.role()
    worker = Worker(config, role, rank, world, None, config.placement.threads)
    worker.join(os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT") or free_port()))
    lm = models.without_weights(config.model, role.classifier)  # on all ranks, or the others would wait for one that cannot
    config = from_rank_0(lambda: attention.settle(slowed(config, folder), lm, attention.unable(worker.device)), rank, world)
    task.config = worker.config = config
    worker.role = replace(role, optim=config.optim)
    # Rank 0 alone looks: on a shared file system another node may see a checkpoint later, and would resume from another step.
    last = from_rank_0(lambda: checkpoints.to_resume(config.run.resume), rank, world)
    done = last.step if last else 0
    if from_rank_0(lambda: bool(last and done >= schedule.steps and last.is_exported(folder / "model")), rank, world):
        if rank == 0:
            print(f"{folder} has all {done} steps; to train on raise trainer.steps, to train anew choose another run.name")
        return 0
    worker.build()
    if worker.alone and rank == 0:
        print(f"model: {packed.SAYS}", flush=True)
    fingerprint = worker.fingerprint()
    if last:
        last.require_model(fingerprint)
        worker.load_shard(last.folder, from_rank_0(partial(reshard, last, world, schedule.timeout, schedule.mesh), rank, world))
        loader.load(last.state["loader"])
    task.prepare(worker, found, folder, fresh=done == 0)
    metrics = Metrics(folder, total=schedule.steps, done=done, sinks=sinks(config, folder, done)) if rank == 0 else None
    saver = Saver(worker, checkpoints, rank, world)
    trace = Tracing(config.log.trace, folder, rank, world, done)
    with stop_signals() as stopping, saver.background, metrics or nullcontext(), trace, alive.asking(_says):
        code = _loop(Run(task, worker, folder, loader, held_out, saver, metrics, fingerprint, trace), done, stopping)
    if code == 0 and metrics:
        print(metrics.cost.report(schedule.steps))
        if config.log.plot:
            print(f"plot: {plot(folder)}", flush=True)
    return code


@dataclass(frozen=True)
class Run:
    """What the loop works with on one rank."""

    task: Offline[Any]
    worker: Worker
    folder: Path
    loader: Loader | Mixture
    held_out: list[Prompt]
    saver: Saver
    metrics: Metrics | None  # of rank 0
    fingerprint: str  # of the model
    trace: Tracing

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.metrics:
            self.metrics.log(step, values)

    def evaluate(self) -> dict[str, float]:
        return evaluate(self.task, self.worker, self.held_out) if self.held_out else {}

    def save(self, step: int, last: bool) -> None:
        mesh = self.worker.config.trainer.mesh
        state = {"model": self.fingerprint, "world_size": self.worker.world, "mesh": mesh, "loader": self.loader.state()}
        self.saver.save(step, state, last=last)

    def export(self, step: int, folder: Path) -> None:
        """Collective; rank 0 writes."""
        first = self.worker.rank == 0
        self.worker.export(folder, model_card.files(self.folder, values_read(self.worker.config), step) if first else None)
        if first:
            print(f"model: {folder}", flush=True)


def _says() -> dict[str, dict[str, str]]:
    """For the page of runs, of this rank: the others do the same."""
    return {"parts": {"rank-0": spans.doing() or "data and log"}}


def _loop(run: Run, done: int, stopping: Stopping) -> int:
    """All steps after `done`. Returns the exit code: 0, or 143 when it was asked to stop and has saved."""
    task, worker, saver, schedule = run.task, run.worker, run.saver, run.task.config.trainer
    if done == 0 and run.held_out:
        run.log(0, run.evaluate())
    skips = Skips(run.task.config.divergence.patience)
    for step in range(done + 1, schedule.steps + 1):
        run.trace.begin(step)
        alive.say(doing=f"step {step}")
        begin, last = time.perf_counter(), step == schedule.steps
        rows = run.loader.next()
        sequences = [sequence for row in rows for sequence in task.sequences(row)]
        spans.lap("data")
        numbers = task.numbers(worker, rows)
        stats = optimizer_step(worker, sequences, numbers=numbers) | numbers
        spans.lap("learn")
        seconds = time.perf_counter() - begin
        stats |= {"seconds": seconds, "tokens_per_second": sum(s.length for s in sequences) / seconds}
        if last or (schedule.eval_every and step % schedule.eval_every == 0):
            stats |= run.evaluate()
            spans.lap("evaluate")
        run.log(step, stats | saver.blocked)
        spans.lap("log")
        skips.count(step, stats)
        stop = saver.look(bool(stopping) or step == task.config.run.pause_at)[0]
        exporting = schedule.export_every and step % schedule.export_every == 0
        saving = stop or last or (step % schedule.checkpoint_every == 0 and not skips.in_row)
        if saving or exporting or skips.in_row:  # else the next step's loss shows it
            require_finite(worker.score(sequences[: task.together], 1).tolist(), step, step - skips.in_row)
        if exporting:
            run.export(step, run.folder / "models" / f"step_{step}")
            spans.lap("export")
        if saving:
            run.save(step, last=stop or last)
            spans.lap("checkpoint")
        if stop and not last:
            print(f"{stopping or 'run.pause_at'}: saved after step {step}; the same command resumes", flush=True)
            return STOPPED
    run.trace.end()
    run.export(schedule.steps, run.folder / "model")
    return 0


def read(task: Offline[Any]) -> tuple[list[Prompt], list[Prompt], list[Prompt]]:
    """All rows, those to learn from, and those held out. Raises ConfigError, also where one cannot be learned from."""
    schedule = task.config.trainer
    found = task.rows()
    rows, held_out = hold_out(task.config.data, found, schedule.eval_prompts) if schedule.eval_prompts else (found, [])
    _check_lengths(task, found)
    return found, rows, held_out


def _check_lengths(task: Offline[Any], rows: list[Prompt]) -> None:
    """Raises ConfigError at the door, not at the step that meets the sequence."""
    budget, most = task.config.trainer.micro_batch_tokens, positions(preflight.shape(task.config))
    lengths = [[sequence.length for sequence in task.sequences(row)] for row in rows]
    (together, at), (alone, longest) = (max((size(some), i) for i, some in enumerate(lengths)) for size in (sum, max))
    if together > budget:
        raise ConfigError(
            f"trainer.micro_batch_tokens={budget}: row {rows[at].index} of data.path has {together} tokens; raise it to at least that"
        )
    if most and alone > most:
        raise ConfigError(
            f"data.path: row {rows[longest].index} has {alone} tokens with its answer, and the model has {most} positions; leave it out"
        )


def optimizer_step(
    worker: Worker,
    sequences: list[Sequence],
    tokens_N: Tokens | None = None,
    numbers: dict[str, float] | None = None,
) -> dict[str, float]:
    """One optimizer step on the global batch, of which each rank takes its share; all ranks return the same numbers.

    `tokens_N` are inputs of the objective per response token of the batch, besides the mask and what the sequences bring themselves.
    """
    mine, mine_N, counts, local, count = _share(worker, sequences, tokens_N or {})
    stats = worker.optimizer_step(mine, mine_N, local, count, numbers)
    with spans.span("gather"):
        everyone = gather(stats, worker.world)
    return combine(everyone[:: _shared(worker)], counts.tokens, counts.sequences / worker.role.together)


def evaluate(task: Offline[Any], worker: Worker, rows: list[Prompt]) -> dict[str, float]:
    """The objective and its statistics over rows that are not learned from, as eval_NAME; all ranks return the same numbers."""
    sequences = [sequence for row in rows for sequence in task.sequences(row)]
    mine, mine_N, counts, local, count = _share(worker, sequences, {})
    sums = gather(worker.evaluate(mine, mine_N, local, count, task.numbers(worker, rows)), worker.world)[:: _shared(worker)]
    return {f"eval_{name}": value for name, value in means(sums, counts.tokens, counts.sequences / worker.role.together).items()}


def score(worker: Worker, sequences: list[Sequence]) -> torch.Tensor:
    """What the model says of all response tokens, flat [N], on every rank."""
    lengths_E = torch.tensor([len(s.response_ids) for s in sequences])
    shares, count, own = _split(worker, sequences)
    parts = gather(worker.score([sequences[i] for i in shares[own]], count), worker.world)[:: _shared(worker)]
    out_N = torch.empty(int(lengths_E.sum()), dtype=parts[0].dtype)
    for mine, values_N in zip(shares, parts, strict=True):
        out_N[select(lengths_E, mine)] = values_N
    return out_N


def _share(
    worker: Worker, sequences: list[Sequence], tokens_N: Mapping[str, torch.Tensor]
) -> tuple[list[Sequence], Tokens, Denominators, Denominators, int]:
    """This rank's sequences and what belongs to their tokens, counts of the whole batch, and for this rank, its micro-batches."""
    lengths_E = torch.tensor([len(s.response_ids) for s in sequences])
    episode_N = torch.repeat_interleave(torch.arange(len(sequences)), lengths_E)
    masks = [s.tokens.get("mask") for s in sequences]
    mask_N = torch.cat([torch.ones(len(s.response_ids)) if m is None else torch.tensor(m) for s, m in zip(sequences, masks, strict=True)])
    counts = denominators(mask_N, episode_N, len(sequences))
    shares, count, own = _split(worker, sequences)
    mine = shares[own]
    where_N = select(lengths_E, mine)
    mine_N = {name: values_N[where_N] for name, values_N in {"mask": mask_N, **tokens_N}.items()}
    return [sequences[i] for i in mine], mine_N, counts, part(counts, mine), count


def _shared(worker: Worker) -> int:
    """So many consecutive ranks have the same sequences, and return the same."""
    return worker.config.trainer.shared


def _split(worker: Worker, sequences: list[Sequence]) -> tuple[list[list[int]], int, int]:
    """The sequences of each group of ranks that share them, the micro-batches that every rank must run, and the group of this one."""
    groups, together = worker.world // _shared(worker), worker.role.together
    shares, count = split([s.length for s in sequences], groups, **worker.packing(), together=together)
    return shares, count, worker.rank // _shared(worker)


def main(task: type[Offline[C]], config: C) -> int:
    """Exit codes: 0 done, 1 diverged too often or cannot go on, 2 a mistake in settings, data or paths, 143 stopped and saved."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    shared, rows = config.trainer.shared, config.trainer.prompts_per_step
    for way in ("sequence_parallel", "tensor_parallel", "expert_parallel"):
        if world % (size := getattr(config.trainer, way)):
            raise ConfigError(f"trainer.{way}={size}: the {world} ranks of torchrun do not divide by it")
    if world % shared:
        ways = f"trainer.sequence_parallel={config.trainer.sequence_parallel}, trainer.tensor_parallel={config.trainer.tensor_parallel}"
        raise ConfigError(f"{ways}: the {world} ranks of torchrun do not divide by {shared}")
    if rows % (world // shared):
        raise ConfigError(f"trainer.prompts_per_step={rows}: does not divide by the {world} ranks of torchrun")
    folder = run_folder(config)
    with held(folder) if rank == 0 else nullcontext():
        config = dated(config, folder)
        if rank == 0:
            save_resolved(config, folder, sys.orig_argv)
        try:
            return train(task, config, folder, rank, world)
        except (RunError, TimeoutError) as error:
            if rank == 0:
                faults.note(folder, None, str(error))
            print(f"error: {error}", file=sys.stderr)
            return 1
