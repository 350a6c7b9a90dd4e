"""One training process: a model, and the objective that it learns if it has one.

A rank gets its share of the sequences, packs them into micro-batches and answers in the order in which it was asked. Everything
that couples ranks (denominators, minibatches, advantages) was computed by the driver over the whole batch.
"""

from __future__ import annotations

import gc
import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer import models, weights
from trainer.cluster import actors, heartbeat, placement
from trainer.cluster.spans import Recorded, recording, span
from trainer.configs.sections import Config, LoraConfig, ModelConfig, OptimConfig
from trainer.data.packing import Sequence, attach, pack, scatter
from trainer.episodes import Batch, Denominators
from trainer.errors import ConfigError, RunError
from trainer.models import checkpoint_names, lora, quantize, streaming
from trainer.models.heads import PolicyModel
from trainer.models.vision import counted
from trainer.objectives import Objective
from trainer.ranks import parallel, trial
from trainer.ranks.engine import Engine, init_distributed, record_apart
from trainer.ranks.loading import sharded
from trainer.ranks.replay import Replay
from trainer.ranks.sequence_parallel import SequenceParallel
from trainer.ranks.teacher import Teacher
from trainer.weights.published import Published, Publisher

EXPORT_BYTES = 256 << 20  # of weights that rank 0 collects at a time
Tokens = dict[str, torch.Tensor]  # per-token inputs of a loss, flat, in the order of the sequences they come with


@dataclass(frozen=True)
class Role:
    """What the ranks of a group are: their model, what it learns if anything, and where they run."""

    name: str  # of its actors, and of its folder in a checkpoint
    head: Callable[[Any], nn.Module]  # makes of a language model what `score` and the objective see: a tuple, the first a tensor per token
    gpus: float  # per rank
    optim: OptimConfig | None = None
    objective: Objective | None = None  # None: it is asked, and never learns
    updates: int = 1  # optimizer steps that the learning rate's schedule spans
    together: int = 1  # so many consecutive sequences are compared with each other, and never parted
    classifier: bool = False  # the model has one output for a sequence, in place of one for each token of the vocabulary
    bundle: placement.Bundle | None = None  # of resources for each rank; None: it shares the bundles of the ranks
    teacher: ModelConfig | None = None  # that the objective compares the model with
    model: ModelConfig | None = None  # it starts from; None: as the policy does
    held: int = 0  # optimizer steps, the first ones, with a learning rate of 0
    replay: str = "off"  # rollout.router_replay: whether tokens take the experts that sequences say
    gpus_setting: str = "placement.gpus_per_rank"  # named where a GPU is missing


class Worker(Recorded):
    """Started by `trainer.online.roles`, each in a process of its own or all in one; `train_sft` uses it under torchrun."""

    KIND = "rank"

    def __init__(self, config: Config, role: Role, rank: int, world: int, model_path: str | None, threads: int | None):
        actors.settle(threads)
        self.config, self.role, self.rank, self.world, self.model_path = config, role, rank, world, model_path
        self.group: Any = None
        self.files = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None
        self.published: Published | None = None
        self.said_N: torch.Tensor | None = None

    def beat(self, limit: float, silence: float | None) -> None:
        heartbeat.begin(limit, silence)

    def address(self) -> tuple[str, int]:
        return actors.here()

    def sees(self, path: Path) -> tuple[bool, str]:
        """Whether a file that the driver wrote is there for this rank, and on which host this is."""
        return path.exists(), socket.gethostname()

    def start(self, address: str, port: int) -> None:
        """Join the role's other ranks, load the model and build the engine. Raises ConfigError for a model that cannot be read."""
        self.join(address, port)
        self.build()
        heartbeat.ready.set()

    def join(self, address: str, port: int) -> None:
        """Returns once all ranks are there, or raises."""
        config = self.config
        self.device = placement.device_of(self.role.gpus, self.role.gpus_setting)
        record_apart(self.role.name, os.environ)
        try:
            init_distributed(self.rank, self.world, address, port, config.trainer.timeout, self.device)
        except torch.distributed.DistError as error:
            who, others = f"{self.role.name}-{self.rank} on {socket.gethostname()} (pid {os.getpid()})", f"all {self.world} ranks"
            late = f"waited for {others} at {address}:{port}, at most {config.trainer.timeout} s (trainer.timeout)"
            raise RunError(f"{who} {late}: {str(error).strip().splitlines()[0]}") from error
        freeze_imports()
        seed(config.run.seed + self.rank)

    def build(self) -> None:
        """Load the model and build the engine. Collective under ZeRO-3."""
        config, role = self.config, self.role
        # Rollout engines load from a folder, so random weights are written to one first; without engines (train_sft) they are drawn here.
        source = config.model.model_copy(update={"path": self.model_path, "init": None}) if self.model_path else config.model
        source = role.model or source
        if role.objective is None:  # the reference is the model as it was
            source = source.model_copy(update={"lora": LoraConfig(quantize=source.lora.quantize), "freeze": []})
        if source.lora.rank or source.freeze:
            models.without_weights(source, role.classifier)  # raises what is wrong with the names of layers before weights are read
        # Random weights are drawn whole: drawn part by part they would be others under ZeRO-3 than without.
        shard = config.trainer.zero_stage == 3 and source.path is not None
        with sharded(getattr(torch, source.dtype)) if shard else nullcontext():
            home = parallel.home(config.trainer, shard, self.device)
            lm = models.load_lm(source, config.run.seed, self.device, role.objective is not None, role.classifier, home)
        self.tokenizer = models.load_tokenizer(source)
        self.pad_id: int = self.tokenizer.pad_token_id  # type: ignore[assignment]
        sight = models.sight(lm, self.tokenizer)
        if sight and (config.trainer.cut or config.trainer.sequence_parallel > 1):
            setting = config.trainer.cut or f"trainer.sequence_parallel={config.trainer.sequence_parallel}"
            raise ConfigError(f"{setting}: {lm.config.model_type} reads pictures, whose tokens ranks cannot share; use 1")
        if sight and sight.apart and config.trainer.zero_stage == 3:  # ranks would gather the tower's weights as often as each has pictures
            raise ConfigError(f"trainer.zero_stage=3: {lm.config.model_type} reads pictures one by one; use 2, or model.vision=off")
        self.sight = sight
        model, shared = role.head(lm), None
        if config.trainer.sequence_parallel > 1:
            shared = SequenceParallel(config.trainer.sequence_parallel, self.rank, self.world, config.trainer.tensor_parallel)
            shared.attach(model, lm)
        self.tensors = {name: _parameter(name, tensor) for name, tensor in models.saved_tensors(lm).items()}
        self.shapes = models.shapes(lm)
        self.trains = {name: tensor.requires_grad for name, tensor in models.saved_tensors(lm).items()}
        trainer = parallel.fitting(lm, config.trainer) if role.model else config.trainer
        whole_LD = None
        if trainer.cut:
            with shared.not_parted(lm) if shared else nullcontext():
                whole_LD = parallel.whole(lm, self.device)
        self.engine = Engine(model, role.optim, trainer, role.updates, self.device, config.divergence, role.held)
        self.lm, self.source = lm, source
        self.teacher = Teacher(role.teacher, config, self.device, shared) if role.teacher else None
        engines = [(self.engine, whole_LD), *([(self.teacher.engine, self.teacher.whole_LD)] if self.teacher else [])]
        self.alone = trial.alone(source, config.trainer, engines, shared, self.device, sight, config.data.max_images)
        self.replay = Replay(self.engine, lm, role.replay, self.device, shared)

    def unreplayed(self) -> str:
        """Why tokens do not take the experts that sequences say; "" where they do."""
        return self.replay.why

    def packing(self) -> dict[str, Any]:
        """How `pack` and `split` cut micro-batches; the driver counts them as the ranks do."""
        return {"budget": self.config.trainer.micro_batch_tokens, "one_row": self.config.flash_attention(), "alone": self.alone}

    # Reading and learning from a batch

    @torch.no_grad()
    def score(self, sequences: list[Sequence], count: int) -> torch.Tensor:
        """What the model says of all response tokens (log-probabilities, values), flat [N], in the order of `sequences`."""
        batches = self._pack(sequences, count)
        found = [self._forward(self._to_device(batch))[0] for batch in batches]
        with span("gather"):
            return scatter(found, batches).cpu()

    def optimizer_step(
        self, sequences: list[Sequence], tokens_N: Tokens, counts: Denominators, count: int, numbers: dict[str, float] | None = None
    ) -> dict[str, float]:
        """One optimizer step. `counts` are global, so `loss` and the other sums add up over ranks to those of the global batch.

        `tokens_N` and `numbers` are what the objective reads besides the sequences.
        """
        sums, batches = self._sums(sequences, tokens_N, counts, count, numbers)
        sums["real_tokens"] = sum(b.real_tokens for b in batches)
        sums["padded_tokens"] = sum(b.input_ids_RL.numel() for b in batches)
        sums |= counted(batches)
        with span("optimizer"):
            stepped = self.engine.step()
            self._settle()
        return {**sums, **stepped}

    def said(self) -> torch.Tensor | None:
        """The policy's log-probabilities of all response tokens before the last optimizer step, flat [N], in the order of its sequences."""
        return self.said_N

    @torch.no_grad()
    def evaluate(
        self, sequences: list[Sequence], tokens_N: Tokens, counts: Denominators, count: int, numbers: dict[str, float] | None = None
    ) -> dict[str, float]:
        """What `optimizer_step` says of the loss and its statistics, with nothing learned."""
        return self._sums(sequences, tokens_N, counts, count, numbers)[0]

    def _sums(
        self, sequences: list[Sequence], tokens_N: Tokens, counts: Denominators, count: int, numbers: dict[str, float] | None
    ) -> tuple[dict[str, float], list[Batch]]:
        """Of the objective over micro-batches, with gradients where they are enabled."""
        assert self.role.objective is not None, f"{self.role.name} does not learn"
        batches = self._pack(sequences, count)
        with span("pack"):
            attach(batches, tokens_N, counts, numbers)
        sums: Counter[str] = Counter()
        said: list[torch.Tensor] = []
        for i, batch in enumerate(map(self._to_device, batches)):
            if self.teacher:
                with span("teacher"):
                    self.teacher.read(batch)
            out = self._forward(batch)
            said.append(out[0].detach())
            with span("loss"):
                loss, stats = self.role.objective(batch, out)
            if torch.is_grad_enabled():
                with span("backward"):
                    self.engine.backward(loss, last=i == len(batches) - 1)
                    self._settle()
            with span("sum"):
                stats = {"loss": loss.detach(), **stats, **self.replay.counts()}
                sums.update({name: float(value) for name, value in stats.items()})
        self.said_N = scatter(said, batches).cpu() if isinstance(self.engine.model, PolicyModel) else None
        return dict(sums), batches

    def _forward(self, batch: Batch) -> Any:
        with span("forward", tokens=batch.real_tokens):
            out = self.engine(batch)
            self._settle()
        return out

    def _settle(self) -> None:
        """Where spans are recorded, what was launched on a GPU belongs to the one that launched it."""
        if self.device.type == "cuda" and recording():
            torch.cuda.synchronize(self.device)

    def _pack(self, sequences: list[Sequence], count: int) -> list[Batch]:
        with span("pack", sequences=len(sequences)):
            batches = pack(sequences, **self.packing(), pad_id=self.pad_id, count=count, together=self.role.together)
            if self.sight:
                for batch in batches:
                    self.sight.look(batch)
            return batches

    def _to_device(self, batch: Batch) -> Batch:
        return batch if self.device.type == "cpu" else batch.to(self.device)

    # Weight sync

    def parameters(self) -> list[weights.Parameter]:
        """The language model's weights under their Hugging Face names, with the buffers that are saved; a tied output head is one with the
        embeddings. Of a model with adapters these alone; of others, experts may be sent some at a time."""
        if self.source.lora.rank:
            return self._parameters(trained=True)
        if self.engine.sharded and self.engine.wholes is None:  # ZeRO-3 gathers a tensor at once, and would again for each part of it
            return self._parameters(trained=None)
        bare = models.without_weights(self.source, self.role.classifier)
        return [replace(each, apart=checkpoint_names.apart(bare, each.name, each.shape)) for each in self._parameters(trained=None)]

    def _parameters(self, trained: bool | None) -> list[weights.Parameter]:
        """Those that are trained, or that are not, as buffers never are, or all."""
        return [parameter for name, parameter in self.tensors.items() if trained in (None, self.trains[name])]

    def connect(self, rendezvous: weights.Rendezvous | None, plan: weights.Plan) -> None:
        """Every rank learns the plan, because gathering is collective; those with a rendezvous join rollout engines, to which they send."""
        self.plan = plan
        self.group = weights.join(rendezvous, 0) if rendezvous else None

    def send(self, version: int | None = None) -> Published | None:
        """To the rollout engines of the sync group. With a `version` rank 0 publishes them under it, and returns the copy."""
        if version is None or self.rank:
            weights.send(self.group, self.plan, self._gather)
            return None
        published = Publisher(version, self.published)
        weights.send(self.group, self.plan, self._gather, published.add)
        self.published = published.end()
        return self.published

    def _gather(self, names: list[str]) -> Iterator[torch.Tensor]:
        """One after another, each of which is freed once it is taken; ZeRO-3 gathers all at once. Collective: every rank takes all."""
        for some in [names] if self.engine.sharded else [[name] for name in names]:
            tensors = self.engine.weights([f"lm.{name}" for name in some])[::-1]
            while tensors:
                yield tensors.pop()
        if self.engine.wholes is not None:  # whose parts and copies have many sizes
            actors.trim()

    # Turns on a device that others share

    def offload(self) -> None:
        for engine in self._engines():
            engine.offload()

    def reload(self) -> None:
        for engine in self._engines():
            engine.reload()

    def _engines(self) -> list[Engine]:
        return [self.engine, self.teacher.engine] if self.teacher else [self.engine]

    # Checkpoints

    def save_shard(self, folder: Path) -> None:
        """Begin to copy this rank's shards, and to write them below `folder`; the driver completes the checkpoint.

        Collective; after the next `saved` that is True they are written. With trainer.checkpoint_async=false they are on return.
        """
        folder.mkdir(parents=True, exist_ok=True)
        writes = self.engine.save_state(folder, at_once=not self.config.trainer.checkpoint_async)
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state()
        writes.append(partial(torch.save, state, folder / f"random-{self.rank}.pt"))  # last: it stands for the others
        self.writing = self.files.submit(_call, writes)

    def saved(self, seconds: float = 0) -> bool:
        """Whether what `save_shard` began is written, after at most `seconds`. Raises what went wrong with it."""
        if self.writing is None:
            return True
        return bool(wait([self.writing], seconds).done) and self.writing.result() is None

    def load_shard(self, folder: Path, resharded: Path | None = None) -> None:
        """Continue from what `save_shard` wrote: with another number of ranks from `resharded`, where that was necessary.

        A rank that was not there before has the random state that its seed gives. Raises ConfigError where this rank sees no checkpoint.
        """
        file = folder / f"random-{self.rank}.pt"
        if not (folder / "random-0.pt").is_file():
            raise ConfigError(
                f"{folder}: rank {self.rank} on {socket.gethostname()} does not see its part of the checkpoint; is this folder the same "
                "one on every node? (flotilla:checkpoints.kind shared or network; $FLOTILLA_RUNS)"
            )
        self.engine.load_state(resharded or folder, universal=resharded is not None)
        if not file.is_file():
            return
        state = torch.load(file, weights_only=False)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"])

    def export(self, folder: Path, files: Mapping[str, bytes] | None = None) -> None:
        """Write a Hugging Face model with `files`. Collective; rank 0 alone writes, and has a bucket of the weights at a time.

        Adapters are merged into it, which rank 0 collects in CPU memory for that, and lie in a folder of it besides.
        """
        if self.source.lora.rank:
            self._export_merged(folder, files)
            return
        coming = self._taken(self.parameters())
        try:
            if self.rank == 0:
                names = checkpoint_names.CheckpointNames(models.without_weights(self.source, self.role.classifier))
                streaming.write(self.lm, coming, names, self.tokenizer, folder, files)
        finally:
            for _ in coming:  # the other ranks gather with this one, whatever has become of its disk
                pass

    def _export_merged(self, folder: Path, files: Mapping[str, bytes] | None) -> None:
        whole = {name: tensor.cpu() for name, tensor in self._whole(trained=True) if self.rank == 0}
        frozen = [(name, tensor.cpu()) for name, tensor in self._whole(trained=False) if self.rank == 0]
        if self.rank == 0:
            merged, more = lora.exported(frozen, whole, self.source.lora, self.config.model.path or self.source.path)
            models.export(self.lm, merged, self.tokenizer, folder, {**(files or {}), **more})

    def _whole(self, trained: bool | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters that are trained, or that are not, or all, by name, EXPORT_BYTES at a time. Collective."""
        return self._taken(self._parameters(trained))

    def _taken(self, parameters: list[weights.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        found = models.saved_tensors(self.lm)
        for bucket in weights.plan(parameters, EXPORT_BYTES):
            names = [parameter.name for parameter in bucket]
            if self.source.lora.quantize:  # never sharded
                yield from ((name, quantize.whole(found[name])) for name in names)
            else:
                yield from zip(names, self._gather(names), strict=True)

    def fingerprint(self) -> str:
        """Of the model whose checkpoints this one reads. Collective."""
        return models.fingerprint(self.shapes, (tensor for _, tensor in self._whole(trained=False)))


def _parameter(name: str, tensor: torch.Tensor) -> weights.Parameter:
    return weights.Parameter(name, tuple(getattr(tensor, "ds_shape", tensor.shape)), str(tensor.dtype).removeprefix("torch."))


@cache
def freeze_imports() -> None:
    """Half a million objects of imports are never garbage. DeepSpeed collects it three times in each move of its states: 0.3 s each."""
    gc.freeze()


def _call(writes: list[Callable[[], None]]) -> None:
    while writes:  # each copy is freed once it is written
        writes.pop(0)()


def seed(value: int) -> None:
    """Seed every source of randomness of this process."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
