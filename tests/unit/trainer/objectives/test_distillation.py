"""Learning a teacher's distribution: the divergence by hand and as TRL computes it, and the two models in one process."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.cluster.actors import free_port
from trainer.configs.algorithm import AlgorithmConfig
from trainer.configs.teacher import TeacherConfig
from trainer.data.packing import Sequence, attach, pack
from trainer.models import heads
from trainer.models.heads import PolicyModel, after_head
from trainer.objectives.aggregation import denominators
from trainer.objectives.distillation import divergence, taught
from trainer.online.roles import roles_of
from trainer.ranks import teacher
from trainer.ranks.worker import Worker

T = torch.tensor
SEQUENCES = [Sequence([3, 4, 5], [6, 7, 1]), Sequence([5, 5], [9, 8, 7, 6, 1]), Sequence([3], [4])]
EPISODE_N = T([0, 0, 0, 1, 1, 1, 1, 1, 2])
MASK_N = T([1.0, 1, 1, 1, 0, 1, 1, 1, 1])
ZEROS = {"rollout": torch.zeros(9), "advantages": torch.zeros(9)}


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (1.0, 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)),
        (0.0, 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)),
        # A quarter of the teacher and three of the policy: 0.6875 and 0.3125.
        (
            0.25,
            0.25 * (0.5 * math.log(0.5 / 0.6875) + 0.5 * math.log(0.5 / 0.3125))
            + 0.75 * (0.75 * math.log(0.75 / 0.6875) + 0.25 * math.log(0.25 / 0.3125)),
        ),
    ],
)
def test_the_divergence_by_hand(beta, expected):
    """The policy says 3/4 and 1/4, the teacher 1/2 and 1/2."""
    assert divergence(T([[0.75, 0.25]]).log(), T([[0.5, 0.5]]).log(), beta).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_loss_and_gradient_are_those_of_trl(beta):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gkd import GKDTrainer
    draw = torch.Generator().manual_seed(0)
    ours_NV, theirs_NV = (torch.randn(6, 11, generator=draw).requires_grad_() for _ in range(2))
    teacher_NV = torch.randn(6, 11, generator=draw)
    theirs_NV.data.copy_(ours_NV.data)
    loss = divergence((ours_NV / 0.7).log_softmax(-1), (teacher_NV / 0.7).log_softmax(-1), beta).mean()
    other = GKDTrainer.generalized_jsd_loss(theirs_NV, teacher_NV, beta=beta, temperature=0.7)
    loss.backward()
    other.backward()
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(ours_NV.grad, theirs_NV.grad)


@pytest.fixture
def other(tiny_model: Path, tmp_path: Path) -> Path:
    """A teacher: wider, of other weights, with a vocabulary that is padded."""
    config = AutoModelForCausalLM.from_pretrained(tiny_model).config
    config.hidden_size, config.intermediate_size = 2 * config.hidden_size, 2 * config.intermediate_size
    config.vocab_size += 5
    torch.manual_seed(7)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lm.lm_head.weight.data.mul_(20)  # of random weights all answers are nearly as likely
    lm.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def compared(
    path: Path, other: Path, budget: int, beta: float = 1.0, mask_N: torch.Tensor = MASK_N
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
    """Loss, gradients and sums of statistics over micro-batches of so many tokens, without an engine."""
    student = teacher.Student(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), 0.7, beta=beta)
    reader = teacher.Reader(AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32))
    batches = pack(SEQUENCES, budget, pad_id=0)
    attach(batches, {"mask": mask_N, **ZEROS}, denominators(mask_N, EPISODE_N, 3))
    loss, found = torch.zeros(()), {}
    for batch in batches:
        with torch.no_grad():
            batch.teacher = reader(batch), [reader.lm.lm_head.weight], after_head(reader.lm)
        part, stats = taught(AlgorithmConfig(name="distillation"), TeacherConfig(path="x", beta=beta), batch, student(batch))
        part.backward()
        loss, found = loss + part.detach(), {name: found.get(name, 0) + value for name, value in stats.items()}
    return loss, {name: p.grad for name, p in student.named_parameters() if p.grad is not None}, found


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_it_is_the_divergence_of_whole_distributions_over_the_tokens_that_both_have(tiny_model, other, beta):
    loss, _, stats = compared(tiny_model, other, 64, beta)
    own, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (tiny_model, other))
    size, each = own.config.vocab_size, []
    for s in SEQUENCES:
        ids, where = T([[*s.prompt_ids, *s.response_ids]]), slice(len(s.prompt_ids) - 1, -1)
        said, wanted = ((lm(input_ids=ids).logits[0, where, :size] / 0.7).log_softmax(-1) for lm in (own, theirs))
        each.append(divergence(said, wanted, beta))
    kept = torch.cat(each)[T([0, 1, 2, 3, 5, 6, 7, 8])]
    assert kept.mean() > 0.1, "nothing to learn"
    torch.testing.assert_close(loss, kept.mean(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(stats["divergence"], kept.sum(), rtol=1e-4, atol=1e-6)


def test_neither_packing_nor_chunks_change_loss_or_gradient(tiny_model, other, monkeypatch):
    loss, gradients, _ = compared(tiny_model, other, 64)
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 2 * 20)
    for budget in (64, 8):
        again, its, _ = compared(tiny_model, other, budget)
        torch.testing.assert_close(again, loss)
        for name, gradient in gradients.items():
            torch.testing.assert_close(its[name], gradient, atol=1e-5, rtol=1e-4)


def test_its_own_teacher_teaches_nothing(tiny_model):
    loss, gradients, _ = compared(tiny_model, tiny_model, 64)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert max(g.abs().max().item() for g in gradients.values()) < 1e-6


@pytest.mark.usefixtures("one_rank", "small_buckets")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_learns_from_a_teacher_whatever_is_sharded(tiny_model, other, stage):
    config = settings(
        tiny_model,
        algorithm={"name": "distillation"},
        teacher={"path": str(other)},
        rollout={"temperature": 0.7},
        trainer={"zero_stage": stage, "micro_batch_tokens": 16},
        optim={"lr": 3e-3},
    )
    (role,) = roles_of(config)
    worker = Worker(config, role, 0, 1, str(tiny_model), 1)
    worker.start("127.0.0.1", free_port())
    counts = denominators(torch.ones(9), EPISODE_N, 3)
    found = [worker.optimizer_step(SEQUENCES, {"mask": torch.ones(9), **ZEROS}, counts, 2)["divergence"] for _ in range(30)]
    _, _, stats = compared(tiny_model, other, 64, mask_N=torch.ones(9))
    assert found[0] == pytest.approx(stats["divergence"].item(), rel=1e-4)
    assert found[-1] < 0.5 * found[0]
    assert {p.name for p in worker.parameters()} == {name for name, _ in worker.lm.named_parameters()}, "the teacher is never sent"


def test_without_a_teacher_the_policy_is_what_it_was(tiny_model):
    (role,) = roles_of(settings(tiny_model))
    assert role.teacher is None and isinstance(role.head(AutoModelForCausalLM.from_pretrained(tiny_model)), PolicyModel)
