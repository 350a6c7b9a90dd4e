"""data.mix: settings and their mistakes, shares of a batch, resuming, rows that are held out, and the reward of each source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.configs import unplaced

from trainer import preflight
from trainer.chat.tokenizer import load_tokenizer
from trainer.cli import parse, to_yaml
from trainer.configs.data import DataConfig
from trainer.configs.ppo import PpoConfig
from trainer.configs.reward import RewardConfig
from trainer.configs.sft import SftConfig
from trainer.data.loader import Mixture, by_source, hold_out, make_loader
from trainer.data.prompts import load_prompts
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.online.roles import Rollout
from trainer.online.scored import describe

SUMS = "data.mix.sums.path=trainer.data.tasks:arithmetic"
pytestmark = pytest.mark.usefixtures("runs")


def read(*argv: str, model: type = PpoConfig) -> PpoConfig:
    checks = [preflight.data, *([preflight.reward] if model is PpoConfig else [])]
    return parse(["model.init.model_type=gpt2", "model.tokenizer=characters:0123456789+-=s", *argv], prog="x", model=model, checks=checks)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(5)))
    return path


def mixture(batch: int = 4, seed: int = 0, **sizes: int) -> Mixture:
    sources = {name: [Prompt(i, [i], {"mix": name}) for i in range(size)] for name, size in sizes.items()}
    return Mixture(sources, {"a": 5.0, "b": 2.0, "c": 1.0}, batch, seed)


def served(loader: Mixture, batches: int) -> list[tuple[str, int]]:
    return [(prompt.row["mix"], prompt.index) for _ in range(batches) for prompt in loader.next()]


def test_every_batch_has_its_share_of_each_source_and_small_ones_are_repeated_in_new_orders():
    loader = mixture(batch=8, a=100, b=3, c=50)
    for _ in range(6):
        names = [name for name, _ in served(loader, 1)]
        assert (names.count("a"), names.count("b"), names.count("c")) == (5, 2, 1)
    of_b = [index for name, index in served(mixture(batch=8, a=100, b=3, c=50), 6) if name == "b"]
    epochs = [of_b[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_part_of_a_batch_is_served_too():
    whole, parts = mixture(a=10, b=5), mixture(a=10, b=5)
    assert [*parts.next(1), *parts.next(3), *parts.next()] == [*whole.next(), *whole.next()]
    assert parts.state() == whole.state()


def test_shares_hold_over_batches_that_are_too_small_for_them():
    names = [name for name, _ in served(mixture(batch=3, a=9, b=9, c=9), 800)]
    for end in range(3, len(names), 3):
        for name, share in (("a", 5 / 8), ("b", 2 / 8), ("c", 1 / 8)):
            assert abs(names[:end].count(name) - share * end) <= 1


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_restart_goes_on_exactly(stop):
    whole = served(mixture(a=7, b=2, c=3), 12)
    loader = mixture(a=7, b=2, c=3)
    before = served(loader, stop)
    again = mixture(a=7, b=2, c=3)
    again.load(json.loads(json.dumps(loader.state())))
    assert before + served(again, 12 - stop) == whole != served(mixture(a=7, b=2, c=3, seed=1), 12)


def test_a_state_of_other_sources_is_refused():
    with pytest.raises(ConfigError, match=r"^data\.mix: the checkpoint was trained on other sources \(a, b\)"):
        mixture(a=7, b=2, c=3).load(mixture(a=7, b=2).state())
    with pytest.raises(ConfigError, match=r"^data\.mix\.b\.path: the checkpoint was trained on other data \(2 prompts"):
        mixture(a=7, b=3).load(mixture(a=7, b=2).state())


def test_rows_know_their_source_and_each_source_has_settings_of_its_own(file, tmp_path):
    config = read(SUMS, "data.mix.sums.args.rows=20", f"data.mix.own={{path: {file}, prompt: text, weight: 3}}", "reward.function=exact")
    loaded = load_prompts(config.data, load_tokenizer(config.model)).prompts
    assert [prompt.index for prompt in loaded] == list(range(25))
    assert [len(of) for of in by_source(loaded).values()] == [20, 5]
    assert loaded[-1].row == {"text": "4+1=", "prompt": "4+1=", "answer": "5", "mix": "own"}
    loader = make_loader(config.data, loaded, 4, seed=0)
    assert [prompt.row["mix"] for prompt in loader.next()].count("own") == 3
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert parse(["--config", str(tmp_path / "again.yaml")], prog="x", model=PpoConfig) == config


def test_the_last_rows_of_each_source_are_held_out_by_weight():
    data = DataConfig.model_validate({"mix": {"a": {"path": "a:a", "weight": 3}, "b": {"path": "b:b"}}})
    prompts = [Prompt(i, [i], {"mix": "a" if i < 10 else "b"}) for i in range(14)]
    train, held_out = hold_out(data, prompts, 6)
    assert [prompt.index for prompt in held_out] == [6, 7, 8, 9, 12, 13]  # 4.5 and 1.5
    assert [prompt.index for prompt in train] == [0, 1, 2, 3, 4, 5, 10, 11]
    with pytest.raises(ConfigError, match=r"^trainer\.eval_prompts=16: data\.mix\.a\.weight makes 12 of them its own, and it has 10"):
        hold_out(data, prompts, 16)


def test_the_reward_of_each_source_is_reported():
    rewards = {"a": [1.0, 0.0], "b": [1.0, 1.0]}
    episodes = [
        Episode(Prompt(0, [1], {"mix": name}), 0, [Turn([2], [0.0], "stop")], reward=reward)
        for name, each in rewards.items()
        for reward in each
    ]
    found = describe(Rollout.of(episodes), RewardConfig())
    assert (found["reward"], found["reward_of/a"], found["reward_of/b"]) == (0.75, 0.5, 1.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data.path=a:b", SUMS], 'data.path=a:b, data.mix={{"sums": {{"path": "trainer.data.tasks'),
        (["data.mix.own.weight=2"], "data.mix.own.path: is missing; it is text"),
        ([SUMS, "data.mix.sums.weight=0"], "data.mix.sums.weight: 0 is not a number > 0"),
        ([SUMS, "data.mix.sums.weight=true"], "data.mix.sums.weight: True is not a number"),
        ([SUMS, "data.mix.sums.weigth=1"], "data.mix.sums.weigth: unknown key"),
        ([SUMS, "data.mix.own.path={}/none.jsonl"], "data.mix.own.path: {}/none.jsonl: No such file or directory; set a path that "),
        ([SUMS, "data.mix.own.path={}/own.jsonl"], "data.mix.own.prompt: {}/own.jsonl:1: column 'prompt' is missing; the columns are text"),
        ([SUMS, "data.mix.sums.args.digit=2"], "data.mix.sums.args: got an unexpected keyword argument 'digit'"),
        ([SUMS, "data.mix.sums.args.digits=0"], "data.mix.sums.args.digits: 0; must be at least 1"),
        ([SUMS, "data.mix.sums.split=test"], "data.mix.sums.split=test: not read; of a dataset organization/name of the hub only"),
        ([SUMS, "data.args.rows=9"], "data.args="),
        ([SUMS, "data.mix.a b.path=a:b"], "data.mix: 'a b' is not a name of letters"),
    ],
)
@pytest.mark.parametrize("model", [PpoConfig, SftConfig])
def test_a_mistake_names_the_source_and_its_setting(file, arguments, said, model):
    reward = ["reward.function=exact"] if model is PpoConfig else []
    with pytest.raises(ConfigError) as caught:
        read(*(argument.format(file.parent) for argument in arguments), *reward, model=model)
    assert [unplaced(line).startswith(said.format(file.parent)) for line in str(caught.value).splitlines()] == [True], caught.value


def test_null_takes_back_the_path_of_a_recipe(tmp_path):
    recipe = tmp_path / "run.yaml"
    recipe.write_text("model: {path: gpt2}\ndata: {path: a.jsonl}\n")
    config = parse(["--config", str(recipe), "data.path=null", SUMS], prog="train_ppo", model=PpoConfig)
    assert list(config.data.sources()) == ["sums"]
