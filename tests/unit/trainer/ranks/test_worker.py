"""One rank in this process, on gloo: what its model, engine and checkpoints do."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid

from trainer.checkpoints.folders import CheckpointError, Checkpoints
from trainer.cluster.actors import free_port
from trainer.configs.ppo import PpoConfig
from trainer.configs.preferences import PreferenceConfig
from trainer.configs.sft import SftConfig
from trainer.data.packing import Sequence
from trainer.episodes import Batch
from trainer.errors import ConfigError
from trainer.models.heads import PolicyModel, ValueModel
from trainer.objectives import Stats
from trainer.objectives.preference import preference
from trainer.objectives.supervised import supervised
from trainer.offline.loop import optimizer_step
from trainer.offline.saver import Saver
from trainer.online.roles import roles_of
from trainer.ranks.worker import Role, Worker

ROOT = Path(__file__).resolve().parents[2]
DRAW = torch.Generator().manual_seed(0)
BATCHES = [[Sequence([3, 4, 5], torch.randint(3, 15, (6,), generator=DRAW).tolist()) for _ in range(4)] for _ in range(6)]

pytestmark = pytest.mark.usefixtures("one_rank", "small_buckets")


def supervised_role(config: SftConfig) -> Role:
    objective = partial(supervised, config.algorithm)
    return Role("policy", PolicyModel, 0, config.optim, objective, config.updates())


def started(path: Path, role_of: Callable[[SftConfig], Role] = supervised_role, **sections: Any) -> Worker:
    values: dict[str, Any] = {
        "model": {"path": str(path), "dtype": "float32"},
        "data": {"path": "a:b", "max_prompt_tokens": 8},
        "optim": {"lr": 1e-2},
        "trainer": {"prompts_per_step": 4, "micro_batch_tokens": 20, "steps": 6},
        "placement": {"gpus_per_rank": 0},
    }
    for key, value in sections.items():
        values[key] = {**values.get(key, {}), **value}
    config = SftConfig.model_validate(values)
    worker = Worker(config, role_of(config), 0, 1, None, 1)
    worker.start("127.0.0.1", free_port())
    return worker


def losses(worker: Worker, batches: list[list[Sequence]]) -> list[dict[str, float]]:
    return [optimizer_step(worker, batch) for batch in batches]


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 0), ("bfloat16", 2)])
def test_a_lower_learning_rate_is_taken_on_resume(tiny_model, tmp_path, dtype, stage):
    settings: dict[str, Any] = {"model": {"dtype": dtype}, "trainer": {"zero_stage": stage}}
    first = started(tiny_model, **settings)
    losses(first, BATCHES[:2])
    first.save_shard(tmp_path)
    assert first.saved(60)
    again = started(tiny_model, **settings, optim={"lr": 1e-4, "warmup_steps": 4, "weight_decay": 0.5})
    again.load_shard(tmp_path)
    assert [step["lr"] for step in losses(again, BATCHES[2:5])] == [1e-4 * 3 / 4, 1e-4, 1e-4]
    optimizer: Any = again.engine.engine.optimizer
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(("dtype", "stage"), [("bfloat16", 0), ("bfloat16", 2), ("bfloat16", 3), ("float32", 3)])
def test_four_steps_and_two_after_a_restart_are_six(tiny_model, tmp_path, dtype, stage):
    settings: dict[str, Any] = {"model": {"dtype": dtype}, "trainer": {"zero_stage": stage}}
    whole = losses(started(tiny_model, **settings), BATCHES)
    first = started(tiny_model, **settings)
    before = losses(first, BATCHES[:4])
    first.save_shard(tmp_path)
    assert first.saved(60)
    again = started(tiny_model, **settings)
    again.load_shard(tmp_path)
    assert before + losses(again, BATCHES[4:]) == whole
    assert len({step["loss"] for step in whole}) == 6
    assert all(step["grad_norm"] > 0 for step in whole)


def test_a_checkpoint_that_a_rank_does_not_see_is_a_mistake_that_names_the_folder(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=rf"{tmp_path}: rank 0 .* same one on every node"):
        started(tiny_model).load_shard(tmp_path)


def test_a_checkpoint_without_every_ranks_shard_is_none(tiny_model, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=r"random-1\.pt did not arrive"):
        Saver(started(tiny_model), checkpoints, rank=0, world=2).save(1, {}, last=True)
    assert checkpoints.latest() is None


LOOK = """
import sys, torch
from trainer.offline.saver import from_rank_0
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
print(from_rank_0(lambda: f"seen by {rank}", rank, 2))
torch.distributed.destroy_process_group()
"""


@pytest.mark.wide
def test_rank_0_chooses_the_checkpoint_for_all():
    command = [sys.executable, "-c", LOOK]
    port = str(free_port())
    ranks = [subprocess.Popen([*command, str(rank), port], cwd=ROOT, stdout=subprocess.PIPE, text=True) for rank in range(2)]
    assert [rank.communicate(timeout=300)[0] for rank in ranks] == ["seen by 0\n"] * 2


def test_under_zero_3_a_model_is_loaded_in_parts_and_exported_whole(tiny_model, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("trainer.ranks.worker.Engine", lambda model, *_: seen.append([p.numel() for p in model.parameters()]))
    monkeypatch.setattr("trainer.ranks.worker.trial.alone", lambda *_: False)  # which needs the engine
    started(tiny_model, trainer={"zero_stage": 3})
    monkeypatch.undo()
    assert not any(seen[0]), "every parameter must be a placeholder already before there is an engine"
    worker = started(tiny_model, trainer={"zero_stage": 3})
    worker.export(tmp_path / "model")
    exported, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", tiny_model))
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)


@pytest.mark.parametrize(("checkpointing", "passes"), [(True, 2), (False, 1)])
def test_gradient_checkpointing_runs_every_layer_again_in_the_backward_pass(tiny_model, checkpointing, passes):
    worker = started(tiny_model, model={"gradient_checkpointing": checkpointing}, trainer={"micro_batch_tokens": 64})
    ran: Counter[int] = Counter()
    for i, layer in enumerate(worker.lm.base_model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, i=i: ran.update([i]))
    losses(worker, BATCHES[:1])
    assert ran == {0: passes, 1: passes}


def test_checkpointed_layers_learn_the_same(tiny_model):
    with_it, without = (losses(started(tiny_model, model={"gradient_checkpointing": on}), BATCHES[:3]) for on in (True, False))
    assert with_it == without


def test_what_has_no_objective_is_not_trained_and_checkpoints_nothing(tiny_model):
    reference = started(tiny_model, lambda _: Role("reference", PolicyModel, 0), model={"gradient_checkpointing": True})
    assert not reference.lm.training
    assert not reference.lm.is_gradient_checkpointing
    assert reference.score(BATCHES[0], 0).shape == (24,)
    with pytest.raises(AssertionError, match="reference does not learn"):
        losses(reference, BATCHES[:1])


def test_updates_span_the_schedule(tiny_model):
    found = losses(started(tiny_model, optim={"schedule": "linear"}), BATCHES)
    assert [step["lr"] for step in found] == pytest.approx([1e-2 * (6 - i) / 6 for i in range(6)])


def test_epochs_and_minibatches_span_the_schedule_of_reinforcement():
    values = {"model": {"path": "m"}, "data": {"path": "a:b"}, "trainer": {"steps": 6}, "algorithm": {"epochs": 3, "minibatches": 2}}
    assert [role.updates for role in roles_of(PpoConfig.model_validate(values))] == [36]


# --- a new kind of training is one objective and one role: two of them, made here, learn as the trainer's own do -------------------


PROMPT = [3, 4, 5]
# Chosen and rejected, one after the other: chosen answers have a 9 at their end, whatever came before, and then the token that ends them,
# at which a value has seen all that was written.
PAIRS = [Sequence(PROMPT, [*range(4, 4 + n), last, 1]) for n in (1, 2, 3, 4) for last in (9, 10)]


def bradley_terry(batch: Batch, output: tuple[torch.Tensor]) -> tuple[torch.Tensor, Stats]:
    """-log sigmoid(chosen - rejected) of the scores at each answer's end (https://arxiv.org/abs/1706.03741, equation 1)."""
    ends = torch.nonzero(torch.diff(batch.episode_N, append=torch.tensor([-1])))[:, 0]
    chosen_P, rejected_P = output[0][ends].unflatten(0, (-1, 2)).unbind(1)
    assert batch.counts is not None
    return -logsigmoid(chosen_P - rejected_P).sum() / (batch.counts.sequences / 2), {"ratio": (chosen_P > rejected_P).float().sum()}


def dpo(beta: float, batch: Batch, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Stats]:
    """-log sigmoid(beta (margin - the reference's margin)) (https://arxiv.org/abs/2305.18290, equation 7)."""
    assert batch.counts is not None
    gain_N = beta * (output[0] - batch.tokens_N["reference"])
    gain_E = torch.zeros(len(batch.counts.lengths_E)).index_add(0, batch.episode_N, gain_N)[batch.episode_N.unique()]
    chosen_P, rejected_P = gain_E.unflatten(0, (-1, 2)).unbind(1)
    return -logsigmoid(chosen_P - rejected_P).sum() / (batch.counts.sequences / 2), {}


def learner(path: Path, role_of: Callable[[SftConfig], Role], budget: int = 24) -> Worker:
    return started(path, role_of, trainer={"micro_batch_tokens": budget, "steps": 20})


def judge(config: SftConfig) -> Role:
    return Role("judge", ValueModel, 0, config.optim, bradley_terry, config.updates(), together=2)


@pytest.mark.parametrize("budget", [18, 24, 200])
def test_a_reward_model_learns_which_answer_was_chosen(tiny_model, budget):
    worker = learner(tiny_model, judge, budget)
    found = [optimizer_step(worker, PAIRS) for _ in range(20)]
    assert found[0]["loss"] == pytest.approx(0.6931, abs=1e-4), "a head of zeros knows nothing: log 2"
    assert found[-1]["loss"] < 0.1
    scores_N = worker.score(PAIRS, 0)
    ends = torch.tensor([len(s.response_ids) for s in PAIRS]).cumsum(0) - 1
    chosen_P, rejected_P = scores_N[ends].unflatten(0, (-1, 2)).unbind(1)
    assert (chosen_P > rejected_P).all()


def test_dpo_prefers_the_chosen_answers_to_the_reference(tiny_model):
    worker = learner(tiny_model, lambda config: Role("policy", PolicyModel, 0, config.optim, partial(dpo, 0.5), 20, together=2))
    reference_N = worker.score(PAIRS, 0)
    found = [optimizer_step(worker, PAIRS, {"reference": reference_N}) for _ in range(10)]
    assert found[0]["loss"] == pytest.approx(0.6931, abs=1e-4), "the policy is the reference yet"
    assert found[-1]["loss"] < 0.3


def test_preferences_are_reported_as_means_over_pairs(tiny_model):
    worker = learner(
        tiny_model, lambda config: Role("policy", PolicyModel, 0, config.optim, partial(preference, PreferenceConfig()), 20, 2)
    )
    reference_N = worker.score(PAIRS, 0) - torch.tensor([1.0 if s.response_ids[-2] == 9 else 0.0 for s in PAIRS]).repeat_interleave(
        torch.tensor([len(s.response_ids) for s in PAIRS])
    )
    found = optimizer_step(worker, PAIRS, {"reference": reference_N})
    assert found["accuracy"] == 1.0, "each chosen answer has gained 1 per token"
    assert found["margin"] == pytest.approx(0.1 * sum(len(s.response_ids) for s in PAIRS[::2]) / 4, abs=1e-5)
