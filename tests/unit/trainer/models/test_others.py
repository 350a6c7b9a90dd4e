"""A critic that starts from a reward model, and a reference that is another model than the policy was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import settings
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trainer import models, preflight
from trainer.cli.paths import resolved_paths
from trainer.cluster.actors import free_port
from trainer.configs.preferences import DpoConfig
from trainer.configs.sections import Config
from trainer.data.packing import Sequence
from trainer.errors import ConfigError
from trainer.models import others
from trainer.online.roles import roles_of
from trainer.plan.memory import Shape, learners, reference
from trainer.ranks.worker import Worker

SEQUENCES = [Sequence([1, 2], [3, 4, 5]), Sequence([3], [2, 1])]
SETTINGS = ("teacher.path", "critic.path", "algorithm.kl.reference", "algorithm.reference")


def naming(setting: str, model: Path, other: str | Path) -> Config:
    """Settings in which `setting` names the other model."""
    if setting == "algorithm.reference":
        given = {"model": {"path": str(model)}, "data": {"path": "package.module:rows"}, "algorithm": {"reference": str(other)}}
        return DpoConfig.model_validate(given)
    changes: dict[str, Any] = {
        "teacher.path": {"teacher": {"path": str(other)}},
        "critic.path": {"algorithm": {"name": "ppo"}, "critic": {"path": str(other)}},
        "algorithm.kl.reference": {"algorithm": {"kl": {"coef": 0.1, "reference": str(other)}}},
    }[setting]
    return settings(model, **changes)


@pytest.fixture(scope="module")
def scores(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, as train_rm exports it."""
    folder = tmp_path_factory.mktemp("scores")
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    models.load_tokenizer(settings(tiny_model).model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_with_other_tokens_or_none_at_all_is_refused_by_its_setting(tiny_model, tmp_path, monkeypatch, setting):
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    models.character_tokenizer("0123456789=s").save_pretrained(tmp_path / "other")
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=rf"^{setting}=\S+other: has other tokens than the policy: \d+ differ, such as ") as caught:
        others.require(naming(setting, tiny_model, tmp_path / "other"))
    assert "with the policy's tokenizer" in str(caught.value)
    (line,) = preflight.other_models(naming(setting, tiny_model, tmp_path / "nowhere"))
    assert line == f"{setting}={tmp_path}/nowhere: no such folder; a hub name has the form organization/name"
    (line,) = preflight.other_models(naming(setting, tiny_model, "run:none"))
    assert line.startswith(f"{setting}=run:none: that run has exported no model to {tmp_path}/none/model")
    (found,) = resolved_paths(naming(setting, tiny_model, "run:some")).other_models()
    assert found.model.path == str(tmp_path / "some/model")
    others.require(naming(setting, tiny_model, tiny_model))
    assert preflight.other_models(naming(setting, tiny_model, tiny_model)) == []


def score(config: Any, role: int, model: Path) -> torch.Tensor:
    worker = Worker(config, roles_of(config)[role], 0, 1, str(model), 1)
    worker.start("127.0.0.1", free_port())
    return worker.score(SEQUENCES, 1)


@pytest.mark.usefixtures("one_rank", "small_buckets")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_critic_that_starts_from_a_reward_model_has_its_head(tiny_model, scores, stage):
    critic: dict[str, Any] = {"algorithm": {"name": "ppo"}, "trainer": {"zero_stage": stage}}
    found = score(settings(tiny_model, **critic, critic={"path": str(scores)}), 1, tiny_model)
    model = AutoModelForSequenceClassification.from_pretrained(scores, dtype=torch.float32)
    said = []
    with torch.no_grad():
        for s in SEQUENCES:
            hidden = model.model(input_ids=torch.tensor([[*s.prompt_ids, *s.response_ids]])).last_hidden_state[0]
            said.append(model.score(hidden)[len(s.prompt_ids) - 1 : -1, 0])
    torch.testing.assert_close(found, torch.cat(said), atol=1e-5, rtol=1e-4)
    assert found.abs().mean() > 0.01


@pytest.mark.usefixtures("one_rank", "small_buckets")
def test_a_critic_that_starts_from_a_language_model_knows_nothing_yet(tiny_model, wide_model):
    config = settings(tiny_model, algorithm={"name": "ppo"}, critic={"path": str(wide_model)})
    worker = Worker(config, roles_of(config)[1], 0, 1, str(tiny_model), 1)
    worker.start("127.0.0.1", free_port())
    assert worker.score(SEQUENCES, 1).tolist() == [0.0] * 5
    whole: Any = AutoModelForCausalLM.from_pretrained(wide_model, dtype=torch.float32)
    assert torch.equal(worker.lm.get_input_embeddings().weight, whole.get_input_embeddings().weight)


@pytest.mark.usefixtures("one_rank", "small_buckets")
def test_a_reference_of_its_own_says_what_that_model_says(tiny_model, wide_model):
    kl = {"kl": {"coef": 0.1, "reference": str(wide_model)}}
    found = score(settings(tiny_model, algorithm=kl, model={"lora": {"rank": 2}}), 1, tiny_model)
    alone = score(settings(wide_model), 0, wide_model)
    assert torch.equal(found, alone)


def test_memory_is_of_the_models_that_there_are(tiny_model):
    policy, critic, referred = (Shape(n, 1, 1, 1, 1, 1, 1, 1, n) for n in (1, 2, 3))
    config = settings(tiny_model, algorithm={"name": "ppo", "kl": {"coef": 0.1}})
    assert learners(config, policy) == [policy, policy] and reference(config, policy) == policy
    whole = Shape(1, 1, 1, 1, 1, 1, 1, 1, 1, critic=critic, reference=referred)
    assert learners(config, whole) == [whole, critic] and reference(config, whole) == referred
