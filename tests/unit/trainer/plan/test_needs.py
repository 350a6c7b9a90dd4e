"""What a run takes of a cluster, by its settings alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.plan.needs import main, needs

DEMO = ["--config", "trainer/recipes/demo.yaml", "run.name=r"]
GPUS = [*DEMO, "placement.gpus_per_rank=1", "placement.ranks=4", "rollout.engines=2"]
ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_ranks_and_engines_are_added_up() -> None:
    assert needs("train_ppo", GPUS)["sizes"] == [{"gpus": 6, "cpus": 6.0, "settings": []}]
    shared = [*DEMO, "placement.gpus_per_rank=1", "placement.ranks=4", "rollout.engines=4", "placement.colocate=true"]
    assert needs("train_ppo", shared)["sizes"][0]["gpus"] == 4
    known = needs("train_sft", ["--config", "trainer/recipes/demo-sft.yaml"])
    assert (known["sizes"], known["driver"]) == ([{"gpus": 0.0, "cpus": 1.0, "settings": []}], True)


def test_between_floor_and_ceiling_are_the_ranks_that_the_settings_allow() -> None:
    sizes = needs("train_ppo", GPUS, floor=1, ceiling=8)["sizes"]
    assert [each["gpus"] for each in sizes] == sorted({each["gpus"] for each in sizes}, reverse=True)
    assert sizes[0] == {"gpus": 10, "cpus": 10.0, "settings": ["placement.ranks=8", "run.name=r"]}
    assert sizes[-1]["settings"] == ["placement.ranks=1", "run.name=r"]
    assert all(8 % int(each["settings"][0].partition("=")[2]) == 0 for each in sizes)  # as its batch divides


def test_colocated_engines_go_with_their_ranks() -> None:
    shared = [*DEMO, "placement.gpus_per_rank=1", "placement.ranks=4", "rollout.engines=4", "placement.colocate=true"]
    sizes = needs("train_ppo", shared, floor=2)["sizes"]
    assert [each["gpus"] for each in sizes] == [4, 2]
    assert sizes[1]["settings"] == ["placement.ranks=2", "run.name=r", "rollout.engines=2", "run.allow=[rollout.engines]"]


@pytest.mark.parametrize(
    ("trainer", "argv", "floor", "ceiling", "said"),
    [
        ("train_ppo", DEMO, 4, 2, "--floor 4, --ceiling 2: the floor is from 1 to the ceiling"),
        ("train_ppo", DEMO, 0, 0, "--floor 0"),
        ("train_ppo", DEMO, -1, None, "--floor -1"),
        ("train_ppo", [*DEMO, "optim.lrr=1"], None, None, "optim.lrr: unknown key"),
        ("train_ppo", [*DEMO, "placement.processes=one"], None, None, "placement.processes=one: such a run is one process"),
        ("train_sft", ["--config", "trainer/recipes/demo-sft.yaml"], 1, 2, "--floor, --ceiling: train_sft is one process"),
        (
            "train_ppo",
            [*DEMO, "trainer.tensor_parallel=2", "placement.ranks=4"],
            2,
            4,
            "--floor, --ceiling: the queue gives a model that is cut",
        ),
    ],
)
def test_a_mistake_is_one_line(trainer: str, argv: list[str], floor: int | None, ceiling: int | None, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        needs(trainer, argv, floor, ceiling)
    assert said in str(error.value)


def test_it_prints_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--floor", "1", "--ceiling", "2", "train_ppo", *DEMO])
    assert json.loads(capsys.readouterr().out)["run"] == "r"
