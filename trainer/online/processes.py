"""All processes of a reinforcement-learning run: placed, started together, connected, and gone when the run ends."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer import models, weights
from trainer.cluster import placement, spans
from trainer.cluster.launcher import Launcher, launcher
from trainer.cluster.turns import Turns
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import LoraConfig
from trainer.environments.ahead import Ahead
from trainer.environments.journal import Journal
from trainer.environments.pool import Environments, Rounds
from trainer.episodes import Episode, Prompt
from trainer.errors import ConfigError, RunError
from trainer.models import attention, quantize
from trainer.models import others as other_models
from trainer.online.roles import RoleGroup, roles_of
from trainer.plan import memory
from trainer.ranks.worker import Role
from trainer.rollout.engines import Pending, RolloutEngines
from trainer.runs import alive, faults
from trainer.weights.published import Published


@dataclass
class WorkerGroups:
    policy: RoleGroup
    critic: RoleGroup | None
    reference: RoleGroup | None
    engines: RolloutEngines
    launcher: Launcher
    config: PpoConfig
    fingerprint: str
    plan: weights.Plan
    folder: Path  # of the run
    turns: Turns
    environments: Environments | None = None
    model_path: str = ""
    restarts: int = 0  # of rollout engines, in this run
    published: Published | None = None  # with rollout.elastic: the newest weights, for engines outside the sync group
    learned: int = 0  # steps that the policy has learned: the version of its weights
    journal: Journal | None = None  # of what the policy says to environments, with rollout.mode=sync
    saving: float | None = None  # since when a checkpoint is written (time.perf_counter)

    def sync(self) -> None:
        """Give the rollout engines the policy's weights. Returns when they have them; raises RunError at rollout.timeout."""
        self.engines.awaited = True
        try:
            if back := self.engines.returned():
                print(f"{', '.join(f'rollout-{i}' for i in back)}: back", flush=True)
                self.engines.connect(self.policy.ranks, self.plan, self.config.trainer.timeout)
            self._sync()
        except self.launcher.errors as error:
            if not self.revive(error):
                raise
        finally:
            self.engines.awaited = False

    def to_ranks(self) -> None:
        """Where they share devices, the rollout engines sleep before ranks do anything. Raises RunError."""
        try:
            self.turns.to_ranks()
        except self.launcher.errors as error:
            if not self.revive(error):
                raise
            self.turns.to_ranks()

    def _sync(self) -> None:
        self.turns.to_engines(self._send)

    def _send(self) -> None:
        new = self.published is None or self.published.version != self.learned
        version = self.learned if self.config.rollout.elastic and new else None
        with spans.aside("weights", "sync"):
            refs = [rank.send.remote(version) for rank in self.policy.ranks] + self.engines.receive(self.learned)
            sent = self.launcher.wait(refs, self.config.rollout.timeout, "weight sync (rollout.timeout)")
        if version is not None:
            self.published = sent[0]

    def start(self, prompts: list[Prompt], samples: int, seed: int, greedy: bool = False) -> Pending | Rounds:
        """Begin sampling `samples` episodes of each prompt."""
        if self.environments:
            batch = self.journal.batch(self.learned, prompts, samples, seed, greedy) if self.journal else None
            return self.environments.start(self.engines, prompts, samples, seed, greedy, batch)
        return self.engines.start(prompts, samples, seed, greedy)

    def episodes(self, pending: Pending | Rounds | Ahead) -> list[Episode]:
        """Wait for them; what a rollout engine that died still owed is sampled again. Raises RunError at rollout.timeout."""
        while True:
            try:
                return pending.result()
            except RunError as error:
                if not (owed := pending.owed()):
                    raise
                # Unless a sync has restarted them since, after which it may have been the ranks' turn.
                if not self.revive(error) and self.turns.whose == "ranks":
                    self.sync()
                pending.ask(owed)

    def revive(self, error: Exception) -> bool:
        """Restart rollout engines whose process died, and give all of them the policy's weights: they have nothing else to lose.

        In rollout.mode=async the others go on meanwhile, and `sync` takes in those that are up again. False when none died.
        Raises `error` when that happened more often than rollout.restarts allows.
        """
        if not (lost := self.engines.lost()):
            return False
        while lost:  # more may die while some start, or join
            self._note(lost, error)
            try:
                self.turns.start_engines(partial(self._start_again, lost))
                if not (lost := self.engines.lost()):
                    self.engines.connect(self.policy.ranks, self.plan, self.config.trainer.timeout)
            except self.launcher.errors as late:
                error = late
                if not (lost := self.engines.lost()):
                    raise
        try:
            self._sync()
        except self.launcher.errors as late:
            if not self.revive(late):
                raise
        return True

    def _note(self, lost: list[int], error: Exception) -> None:
        """Count rollout engines that died, and say so. Raises `error` when that happened more often than rollout.restarts allows."""
        self.restarts += len(lost)
        if self.restarts > (limit := self.config.rollout.restarts):
            raise error
        if isinstance(error, RunError):
            print(f"warning: {error}", flush=True)
        names = ", ".join(f"rollout-{i}" for i in lost)
        again = f"{names}: the process died; started again ({self.restarts} of {limit}, rollout.restarts)"
        print(again, flush=True)
        faults.note(self.folder, self.learned + 1, f"{again}: {error}")

    def _start_again(self, lost: list[int]) -> None:
        self.engines.start_again(lost)
        if self.config.rollout.mode != "async" or not self.engines.serving():
            self.engines.started()

    def save_shards(self, folder: Path) -> None:
        """Have every trained role copied to memory, and written below `folder` from there."""
        self.saving = time.perf_counter()
        for role in self._trained():
            role.call("save_shard", folder / role.role.name)
        spans.aside_ended("checkpoints", "copy", self.saving)

    def saved(self) -> bool:
        """Whether all ranks have written what `save_shards` began. Raises what went wrong on one."""
        written = all(done for role in self._trained() for done in role.call("saved"))
        if written and self.saving is not None:
            spans.aside_ended("checkpoints", "write", self.saving)
            self.saving = None
        return written

    def load_shards(self, folder: Path, resharded: Path | None) -> None:
        for role in self._trained():
            role.call("load_shard", folder / role.role.name, resharded and resharded / role.role.name)

    def shards(self) -> list[str]:
        """A file of every rank, below the folder that `save_shards` was given: missing ones mean that a node does not share it."""
        return [f"{role.role.name}/random-{rank}.pt" for role in self._trained() for rank in range(len(role.ranks))]

    def _trained(self) -> list[RoleGroup]:
        return [group for group in (self.policy, self.critic, self.reference) if group and group.role.objective]


@dataclass
class Sharing:
    """Roles whose ranks share devices with rollout engines."""

    roles: list[RoleGroup]

    def offload(self) -> None:
        for role in self.roles:
            role.call("offload")

    def reload(self) -> None:
        for role in self.roles:
            role.call("reload")


@contextmanager
def start(config: PpoConfig, folder: Path) -> Iterator[WorkerGroups]:
    """Start all processes, and end them on leaving.

    Raises ConfigError when the cluster has fewer resources than asked, TimeoutError when they stay busy, RunError when a process
    does not come up.
    """
    if config.model.lora.rank or config.model.freeze:
        models.without_weights(config.model)  # raises what is wrong with the names of layers before anything starts
    other_models.require(config)
    with launcher(config) as starts, alive.asking(lambda: {"parts": starts.doing()}):
        model_path = initial_model(config, folder)
        lm = models.without_weights(config.model.model_copy(update={"path": model_path, "init": None}))
        _require_cache(config, lm)
        total, unable = _gpu(config, starts) if config.placement.gpus_per_rank else (0, "no GPU")
        config = attention.settle(config, lm, unable)
        if total:
            print(_memory(config, lm, total), flush=True)
        groups = _start(config, folder, model_path, roles_of(config), starts)
        try:
            yield groups
        finally:
            if groups.environments:
                groups.environments.close()


def _require_cache(config: PpoConfig, lm: Any) -> None:
    """Raises ConfigError for a model whose answers the hf engine cannot go on with."""
    if config.rollout.engine == "hf" and (lm._is_stateful or memory.recurrent(lm.config)):
        raise ConfigError(
            f"rollout.engine=hf: {lm.config.model_type} has recurrent layers, whose states this engine does not keep; use vllm"
        )


def _memory(config: PpoConfig, lm: Any, total: int) -> str:
    """How the first rank's GPU is going to be filled. Raises ConfigError where that cannot be."""
    others = {other.role: memory.Shape.of(models.without_weights(other.model)) for other in config.other_models()}
    shape = replace(memory.Shape.of(lm), **others)
    return memory.check(config, shape, total)


def _gpu(config: PpoConfig, starts: Launcher) -> tuple[int, str]:
    """Bytes of the first rank's GPU, and `attention.unable` of it. Raises ConfigError where it is missing."""
    asked = starts.ask(_asked_gpu, config.placement.gpus_per_rank, share=placement.rank_share(config), where=0)
    return starts.wait(asked, config.trainer.timeout, "the size of a GPU (trainer.timeout)")


def _asked_gpu(gpus: float) -> tuple[int, str]:
    device = placement.device_of(gpus, "placement.gpus_per_rank")
    return torch.cuda.get_device_properties(device).total_memory, attention.unable(device)


def _require_shared(folder: Path, roles: Mapping[str, RoleGroup]) -> None:
    """Every rank must see the run's folder, or their shards would be missing from checkpoints. Raises ConfigError before the first step."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.resolve() / f".seen-by-every-rank-{os.getpid()}"
    file.write_text("a rank that does not see this would write its shards elsewhere\n")
    try:
        for name, role in roles.items():
            blind = [f"{name}-{rank} on {host}" for rank, (sees, host) in enumerate(role.call("sees", file)) if not sees]
            if blind:
                raise ConfigError(
                    f"{folder}: not the same folder on every node; {', '.join(blind)} do not see what the driver wrote there "
                    "(flotilla:checkpoints.kind shared or network; $FLOTILLA_RUNS)"
                )
    finally:
        file.unlink(missing_ok=True)


def _start(config: PpoConfig, folder: Path, model_path: str, members: list[Role], starts: Launcher) -> WorkerGroups:
    played = Environments(config, model_path, starts) if config.environment.function else None
    # Rollout engines first: they take longest to start.
    engines = RolloutEngines(config, model_path, starts)
    if config.placement.colocate:  # one after the other: vLLM measures what is free of a device
        engines.started()
        engines.sleep()
    together = sum(role.bundle is None for role in members)
    roles = {role.name: RoleGroup(config, role, model_path, starts, together) for role in members}
    seconds = config.trainer.timeout
    starts.wait([ref for role in roles.values() for ref in role.start()], seconds, f"starting {', '.join(roles)} (trainer.timeout)")
    for role in roles.values():
        role.started()
    policy = roles["policy"]
    engines.record(policy.unreplayed)
    _require_shared(folder, roles)
    # What is lent where it lies needs no buffer; ZeRO-3 gathers one.
    whole = placement.sync_backend(config) == "ipc" and config.trainer.zero_stage < 3
    half = math.inf if whole else config.rollout.bucket_mb << 19  # of the bytes: one is sent while the other is gathered
    plan = weights.plan(policy.call("parameters")[0], half)
    engines.connect(policy.ranks, plan, seconds)
    everyone = {f"{name}-{i}": rank for name, role in roles.items() for i, rank in enumerate(role.ranks)}
    everyone |= {f"rollout-{i}": actor for i, actor in engines.serving().items()}
    found = starts.wait([each.address.remote() for each in everyone.values()], seconds, "addresses of all processes (trainer.timeout)")
    alive.say(actors=[{"name": name, "node": address} for name, (address, _) in zip(everyone, found, strict=True)])
    sharing = Sharing([role for role in roles.values() if role.role.bundle is None])
    turns = Turns(engines, sharing, shared=config.placement.colocate)
    fingerprint = policy.call("fingerprint")[0]
    groups = WorkerGroups(
        policy, roles.get("critic"), roles.get("reference"), engines, starts, config, fingerprint, plan, folder, turns, played, model_path
    )
    if played and config.rollout.mode == "sync":
        deciding = config.model_dump(mode="json", exclude={"run": True, "log": True, "trainer": {"checkpoint_every"}})
        groups.journal = Journal(folder / "turns", deciding)
    return groups


def initial_model(config: PpoConfig, folder: Path) -> str:
    """Where rollout engines and ranks load from: model.path; or random weights, or those of model.path as quantizing leaves them, written
    once into the run's folder."""
    lora = config.model.lora
    if config.model.path and not lora.quantize:
        return config.model.path
    path = folder / "initial"
    if not path.exists():
        # Each rank adds its adapters, which are alike.
        base = config.model.model_copy(update={"lora": LoraConfig(quantize=lora.quantize), "freeze": []})
        lm = models.load_lm(base, config.run.seed, torch.device("cpu"))
        state = lm.state_dict()
        if lora.quantize:
            state = {name: quantize.whole(tensor) for name, tensor in models.saved_tensors(lm).items()}
        models.export(lm, state, models.load_tokenizer(config.model), path)
    return str(path.resolve())
