"""A step with a gradient that is not to be used changes nothing; a run that has ruined its weights goes back. One rank, on gloo."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from trainer.checkpoints.folders import Checkpoints
from trainer.cluster.actors import free_port
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import DivergenceConfig, OptimConfig, TrainerConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import RunError
from trainer.online.scored import require_sampled
from trainer.ranks.engine import Engine, init_distributed
from trainer.runs.divergence import Diverged, Skips, go_back, rows, slowed


@pytest.mark.usefixtures("one_rank", "small_buckets")
@pytest.mark.parametrize(
    ("dtype", "stage"), [("float32", 0), ("float32", 1), ("float32", 2), ("float32", 3), ("bfloat16", 0), ("bfloat16", 2), ("bfloat16", 3)]
)
def test_a_step_whose_gradient_is_not_finite_or_too_long_is_skipped(dtype, stage):
    init_distributed(0, 1, "127.0.0.1", free_port(), 60, torch.device("cpu"))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False).to(getattr(torch, dtype))
    limit = DivergenceConfig(grad_norm=10.0)
    engine = Engine(model, OptimConfig(lr=0.1, grad_clip=0.01), TrainerConfig(zero_stage=stage), 9, torch.device("cpu"), limit)

    def step(scale: float) -> tuple[dict[str, float], list[float]]:
        engine.backward(engine(torch.full((1, 4), scale, dtype=getattr(torch, dtype))).float().sum(), last=True)
        return engine.step(), engine.weights(["weight"])[0].float().flatten().tolist()

    taken, first = step(1.0)
    assert taken == {"grad_norm": pytest.approx(2.0), "lr": 0.1, "skipped": 0.0}
    for scale in (math.nan, math.inf, 100.0):
        stats, weights = step(scale)
        assert stats["skipped"] == 1 and not stats["grad_norm"] <= 10, (scale, stats)
        assert weights == first
    stats, weights = step(1.0)
    assert stats["skipped"] == 0 and weights != first and all(map(math.isfinite, weights))


def test_skipped_steps_in_a_row_are_counted_and_the_weights_before_them_blamed():
    skips = Skips(3)
    for step, skipped in enumerate([1, 1, 0.5, 0, 1, 1], 1):
        skips.count(step, {"skipped": skipped})
    with pytest.raises(Diverged, match=r"^step 7: the gradients of 3 steps in a row were not finite") as error:
        skips.count(7, {"skipped": 0.0, "value_skipped": 1.0})
    assert error.value.bad == 4


def test_answers_of_a_ruined_model_are_known_by_their_log_probabilities():
    good = Turn([5], [-0.5], "stop", version=4)
    require_sampled([Episode(Prompt(0, [1], {}), 0, [good])], 6)
    bad = Turn([5, 6], [-0.5, math.nan], "stop", version=4)
    with pytest.raises(Diverged, match="probabilities are not numbers") as error:
        require_sampled([Episode(Prompt(0, [1], {}), 0, [good, bad])], 6)
    assert (error.value.step, error.value.bad) == (6, 4)


@pytest.fixture
def config() -> PpoConfig:
    return PpoConfig.model_validate(
        {"model": {"path": "x"}, "data": {"path": "a:b"}, "optim": {"lr": 0.8}, "divergence": {"rollbacks": 2, "lr_factor": 0.25}}
    )


def saved(folder: Path, *steps: int) -> None:
    for step in steps:
        with Checkpoints(folder / "checkpoints", keep=9).writing(step, {}) as draft:
            (draft / "weights").write_text(str(step))
        (folder / f"models/step_{step}").mkdir(parents=True)


def kept(folder: Path) -> tuple[list[int], list[str]]:
    found = [checkpoint.step for checkpoint in Checkpoints(folder / "checkpoints").complete()]
    return found, sorted(path.name for path in (folder / "models").iterdir())


def test_going_back_removes_what_is_ruined_and_lowers_the_learning_rate(config, tmp_path, capsys):
    saved(tmp_path, 2, 4, 6, 8)
    assert slowed(config, tmp_path) == config
    go_back(config, tmp_path, Diverged(9, 6, "why"))
    assert kept(tmp_path) == ([4, 2], ["step_2", "step_4"])
    assert capsys.readouterr().out == "step 9: why; back to step 4 with optim.lr=0.2 (divergence.lr_factor)\n"
    again = slowed(config, tmp_path)
    assert (again.optim.lr, again.critic.lr) == (0.2, config.critic.lr / 4)
    go_back(config, tmp_path, Diverged(5, 4, "why"))
    assert slowed(config, tmp_path).optim.lr == pytest.approx(0.05)
    assert [(row["step"], row["to"], row["factor"]) for row in rows(tmp_path)] == [(9, 4, 0.25), (5, 2, 0.0625)]
    with pytest.raises(RunError, match=r"gone back 2 times already \(divergence.rollbacks\).*goes on from step 2, the newest good"):
        go_back(config, tmp_path, Diverged(3, 3, "why"))
    lower = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 0.1})})
    assert slowed(lower, tmp_path).optim.lr == 0.1, "a learning rate that a person has changed is taken as it is"


def test_without_a_good_checkpoint_the_run_begins_anew(config, tmp_path):
    saved(tmp_path, 1)
    go_back(config, tmp_path, Diverged(2, 1, "why"))
    assert kept(tmp_path) == ([], [])
    assert json.loads((tmp_path / "rollbacks.jsonl").read_text())["to"] == 0
