"""One training process of one role: policy, critic or reference.

A rank gets its share of the sequences, packs them into micro-batches and answers in the order in which it was asked. Everything
that couples ranks (denominators, minibatches, advantages) was computed by the driver over the whole batch.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainer import actors, models, placement, weights
from trainer.algorithms.importance_sampling import importance_weight
from trainer.algorithms.kl import kl, kl_loss
from trainer.algorithms.losses import Denominators, aggregate, policy_loss, value_loss
from trainer.config import ConfigError, TrainConfig
from trainer.data.packing import Sequence, attach, pack, scatter
from trainer.engine import Engine, init_distributed, sharded
from trainer.types import Batch

Role = Literal["policy", "critic", "reference"]
Tokens = dict[str, torch.Tensor]  # per-token inputs of a loss, flat, in the order of the sequences they come with


class Worker:
    """Made into a Ray actor by `trainer.roles`; `train_sft` uses it under torchrun, without Ray."""

    def __init__(
        self, config: TrainConfig, role: Role, rank: int, world: int, model_path: str | None, threads: int | None, supervised: bool = False
    ):
        if threads:
            torch.set_num_threads(threads)
        self.config, self.role, self.rank, self.world, self.model_path = config, role, rank, world, model_path
        self.supervised = supervised
        self.group: Any = None

    def address(self) -> tuple[str, int]:
        return actors.here()

    def sees(self, path: Path) -> tuple[bool, str]:
        """Whether a file that the driver wrote is there for this rank, and on which host this is."""
        return path.exists(), socket.gethostname()

    def start(self, address: str, port: int) -> None:
        """Join the role's other ranks, load the model and build the engine. Raises ConfigError for a model that cannot be read."""
        self.join(address, port)
        self.build()

    def join(self, address: str, port: int) -> None:
        """Returns once all ranks are there, or raises."""
        config = self.config
        own = self.role == "reference" and config.placement.gpus_per_reference is not None
        setting = "placement.gpus_per_reference" if own else "placement.gpus_per_rank"
        self.device = placement.device_of(placement.gpus_per_rank(config, self.role), setting)
        init_distributed(self.rank, self.world, address, port, config.trainer.timeout, self.device)
        seed(config.run.seed + self.rank)

    def build(self) -> None:
        """Load the model and build the engine. Collective under ZeRO-3."""
        config = self.config
        # Rollout engines load from a folder, so random weights are written to one first; without engines (train_sft) they are drawn here.
        source = config.model.model_copy(update={"path": self.model_path, "init": None}) if self.model_path else config.model
        # Random weights are drawn whole: drawn part by part they would be others under ZeRO-3 than without.
        shard = config.trainer.zero_stage == 3 and source.path is not None
        with sharded(getattr(torch, source.dtype)) if shard else nullcontext():
            lm = models.load_lm(source, config.run.seed, self.device, train=self.role != "reference")
        self.tokenizer = models.load_tokenizer(source)
        self.pad_id: int = self.tokenizer.pad_token_id  # type: ignore[assignment]
        steps = config.trainer.steps * (1 if self.supervised else config.algorithm.epochs * config.algorithm.minibatches)
        if self.role == "critic":
            self.engine = Engine(models.ValueModel(lm), config.critic, config.trainer, steps, self.device)
        else:
            temperature = 1.0 if self.supervised else config.rollout.temperature
            policy = models.PolicyModel(lm, temperature, config.algorithm.entropy_coef > 0)
            self.engine = Engine(policy, config.optim if self.role == "policy" else None, config.trainer, steps, self.device)
        self.lm = lm

    # Reading and learning from a batch

    @torch.no_grad()
    def score(self, sequences: list[Sequence], count: int) -> torch.Tensor:
        """Log-probabilities (policy, reference) or values (critic) of all response tokens, flat [N], in the order of `sequences`."""
        batches = self._pack(sequences, count)
        outputs = [self.engine(self._to_device(batch)) for batch in batches]
        return scatter([o if self.role == "critic" else o[0] for o in outputs], batches).cpu()

    def update(
        self, sequences: list[Sequence], tokens_N: Tokens, counts: Denominators, count: int, kl_coef: float = 0.0
    ) -> dict[str, float]:
        """One optimizer step. `counts` are global, so `loss` and the other sums add up over ranks to the whole batch's."""
        batches = self._pack(sequences, count)
        attach(batches, tokens_N)
        loss_of = self._critic_loss if self.role == "critic" else self._policy_loss
        sums: Counter[str] = Counter()
        for i, batch in enumerate(batches):
            loss, stats = loss_of(self._to_device(batch), counts, kl_coef)
            self.engine.backward(loss, last=i == len(batches) - 1)
            sums.update({name: float(value) for name, value in {"loss": loss.detach(), **stats}.items()})
        sums["real_tokens"] = sum(b.real_tokens for b in batches)
        sums["padded_tokens"] = sum(b.input_ids_RL.numel() for b in batches)
        return {**sums, **self.engine.step()}

    def _policy_loss(self, batch: Batch, counts: Denominators, kl_coef: float) -> tuple[torch.Tensor, Tokens]:
        algorithm, t = self.config.algorithm, batch.tokens_N
        logp_N, entropy_N = self.engine(batch)
        if "advantages" not in t:
            return aggregate(-logp_N, t["mask"], batch.episode_N, algorithm.aggregation, counts), {}
        # Without old log-probabilities this is the only update on these episodes: old and current policy are the same.
        old_N = t["old"] if "old" in t else logp_N.detach()
        weight_N, mismatch = importance_weight(old_N, t["rollout"], algorithm.importance_cap, t["mask"])
        loss_N, stats = policy_loss(
            logp_N,
            old_N,
            t["advantages"],
            t["mask"],
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            weight_N=weight_N,
        )
        if algorithm.entropy_coef:
            loss_N = loss_N - algorithm.entropy_coef * entropy_N
        if "reference" in t:
            with torch.no_grad():
                stats["kl"] = (kl(logp_N, t["reference"], algorithm.kl.estimator) * t["mask"]).sum()
            if algorithm.kl.where == "loss":
                loss_N = loss_N + kl_coef * kl_loss(logp_N, t["reference"], algorithm.kl.estimator)
        stats |= {name: mismatch[name] for name in ("logprob_diff", "dropped")}
        stats["entropy"] = (entropy_N.detach() * t["mask"]).sum()
        return aggregate(loss_N, t["mask"], batch.episode_N, algorithm.aggregation, counts), stats

    def _critic_loss(self, batch: Batch, counts: Denominators, kl_coef: float) -> tuple[torch.Tensor, Tokens]:
        t = batch.tokens_N
        values_N = self.engine(batch)
        loss_N = value_loss(values_N, t["values"], t["returns"], self.config.algorithm.value_clip)
        return aggregate(loss_N, t["mask"], batch.episode_N, "token", counts), {}

    def _pack(self, sequences: list[Sequence], count: int) -> list[Batch]:
        return pack(sequences, **packing(self.config), pad_id=self.pad_id, count=count)

    def _to_device(self, batch: Batch) -> Batch:
        return batch if self.device.type == "cpu" else batch.to(self.device)

    # Weight sync

    def parameters(self) -> list[weights.Parameter]:
        """The language model's parameters under their Hugging Face names; a tied output head is one with the embeddings."""
        return [
            weights.Parameter(name, tuple(getattr(p, "ds_shape", p.shape)), str(p.dtype).removeprefix("torch."))
            for name, p in self.lm.named_parameters()
        ]

    def connect(self, rendezvous: weights.Rendezvous, plan: weights.Plan) -> None:
        """Every rank learns the plan, because gathering is collective; rank 0 alone joins the rollout engines."""
        self.plan = plan
        if self.rank == 0:
            self.group = weights.join(rendezvous, 0)

    def send(self) -> None:
        weights.send(self.group, self.plan, self._gather)

    def _gather(self, names: list[str]) -> list[torch.Tensor]:
        return self.engine.weights([f"lm.{name}" for name in names])

    # Checkpoints

    def save(self, folder: Path) -> None:
        """This rank's shards and random states below `folder`; the driver completes the checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.save(folder)
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state()
        torch.save(state, folder / f"random-{self.rank}.pt")

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote with the same number of ranks. Raises ConfigError where this rank does not see it."""
        if not (folder / f"random-{self.rank}.pt").is_file():
            raise ConfigError(
                f"{folder}: rank {self.rank} on {socket.gethostname()} does not see its part of the checkpoint; is this folder the same "
                "one on every node? (flotilla:checkpoints.kind shared or network; $FLOTILLA_RUNS)"
            )
        self.engine.load(folder)
        state = torch.load(folder / f"random-{self.rank}.pt", weights_only=False)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"])

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder. Collective; rank 0 alone collects the weights, bucket by bucket, in CPU memory."""
        whole: dict[str, torch.Tensor] = {}
        for bucket in weights.plan(self.parameters(), self.config.rollout.bucket_mb << 20):
            names = [parameter.name for parameter in bucket]
            tensors = self._gather(names)
            if self.rank == 0:
                whole |= {name: tensor.cpu() for name, tensor in zip(names, tensors, strict=True)}
        if self.rank == 0:
            models.export(self.lm, whole, self.tokenizer, folder)

    def fingerprint(self) -> str:
        return models.fingerprint(self.lm)

    def peak_memory(self) -> float:
        """GiB of the accelerator, 0 on CPUs."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0


def packing(config: TrainConfig) -> dict[str, Any]:
    """How `pack` and `plan` cut micro-batches; the driver counts them as the ranks do."""
    return {"budget": config.trainer.micro_batch_tokens, "one_row": config.model.attention == "flash_attention_2"}


def seed(value: int) -> None:
    """Seed every source of randomness of this process."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
