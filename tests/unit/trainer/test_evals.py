"""Several sets of rows to evaluate on: their settings, their mistakes, and what is reported of each."""

from __future__ import annotations

import gzip
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.configs import settings, unplaced

from trainer import preflight, train_ppo
from trainer.chat.tokenizer import load_tokenizer
from trainer.cli import parse, to_yaml
from trainer.configs.ppo import PpoConfig
from trainer.data import prompts
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.metrics import Metrics
from trainer.online.scored import evaluations

pytestmark = pytest.mark.usefixtures("runs")


def read(*argv: str) -> PpoConfig:
    base = ["model.path=gpt2", "data.path=trainer.data.tasks:sort_digits"]
    return parse([*base, *argv], prog="x", model=PpoConfig, checks=(preflight.data, preflight.evals))


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "test.jsonl").write_text('{"prompt": "1", "answer": "2"}\n' * 5)
    (tmp_path / "other.jsonl").write_text('{"question": "1", "truth": "2"}\n')
    (tmp_path / "broken.jsonl").write_text("{\n")
    with gzip.open(tmp_path / "empty.jsonl.gz", "w"):
        pass
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evals.gsm.path={}/none.jsonl"], "evals.gsm.path: {}/none.jsonl: No such file or directory; set a path that "),
        (["evals.GSM-8k.path={}/none.jsonl"], "evals.GSM-8k.path: {}/none.jsonl: No such file or directory; set a path that "),
        (["evals.gsm.path={}/test.csv"], "evals.gsm.path: '{}/test.csv' is neither a file"),
        (["evals.gsm.path={}/broken.jsonl"], "evals.gsm.path: {}/broken.jsonl:1: not JSON"),
        (["evals.gsm.path={}/empty.jsonl.gz"], "evals.gsm.path: {}/empty.jsonl.gz has no rows; at least one is needed"),
        (["evals.gsm.path={}/other.jsonl"], "evals.gsm.prompt: {}/other.jsonl:1: column 'prompt' is missing; the columns are question"),
        (["evals.gsm.path={}/other.jsonl", "evals.gsm.prompt=question"], "evals.gsm.answer: {}/other.jsonl:1: column 'answer' is missing"),
        (["evals.gsm.prompt=question"], "evals.gsm.prompt: trainer.data.tasks:sort_digits: row 0: column 'question' is missing"),
        (["evals.gsm.path=nowhere:rows"], "evals.gsm.path"),
        (["evals.gsm.path=trainer.data.tasks:sort_digits", "evals.gsm.args.wide=1"], "evals.gsm.args"),
        (["evals.gsm.path={}/test.jsonl", "evals.gsm.args.rows=1"], 'evals.gsm.args={{"rows": 1}}: not read; files and datasets take no'),
        (["evals.gsm.split=test"], "evals.gsm.split=test: not read; of a dataset organization/name of the hub only"),
        (["evals.gsm.rows=0"], "evals.gsm.rows: 0 is not an integer >= 1 or null"),
        (["evals.gsm.rows=true"], "evals.gsm.rows: True is not an integer >= 1 or null"),
        (["evals.gsm.pth=x"], "evals.gsm.pth: unknown key"),
        (["evals.gsm=test.jsonl"], "evals.gsm: 'test.jsonl' is not a map of settings"),
        (["evals={{'a b': {{}}}}"], "evals: 'a b' is not a name of letters, digits, _ and -, with a letter or _ first"),
        (["evals={{'a/b': {{}}}}"], "evals: 'a/b' is not a name of letters"),
        (["evals={{8k: {{}}}}"], "evals: '8k' is not a name of letters"),
    ],
)
def test_a_mistake_names_the_set_and_its_setting(place, arguments, said):
    with pytest.raises(ConfigError) as caught:
        read(*(argument.format(place) for argument in arguments))
    assert [unplaced(line).startswith(said.format(place)) for line in str(caught.value).splitlines()] == [True], caught.value


def test_what_a_set_leaves_out_is_as_in_data_but_what_belongs_to_the_path(place):
    config = read(
        "data.path=trainer.data.tasks:sort_digits",
        "data.args={rows: 9, length: 2}",
        "data.max_prompt_tokens=7",
        "evals.same.rows=3",
        "evals.longer.args={rows: 4, length: 5}",
        f"evals.file={{path: {place}/other.jsonl, prompt: question, answer: truth}}",
    )
    sets = config.eval_data()
    assert sets["same"] == config.data
    assert (sets["longer"].path, sets["longer"].args) == (config.data.path, {"rows": 4, "length": 5})
    assert (sets["file"].path, sets["file"].args, sets["file"].prompt) == (f"{place}/other.jsonl", {}, "question")
    assert {each.max_prompt_tokens for each in sets.values()} == {7}
    (place / "again.yaml").write_text(to_yaml(config))
    assert parse(["--config", str(place / "again.yaml")], prog="x", model=PpoConfig) == config


def test_a_set_has_at_most_as_many_prompts_as_its_rows(place, capsys):
    sets = f"evals={{few: {{path: {place}/test.jsonl, rows: 2}}, all: {{rows: 99999}}}}"
    config = read("model.path=null", "model.init.model_type=gpt2", "model.tokenizer=characters:s0123456789=", sets)
    tokenizer = load_tokenizer(config.model)
    found = prompts.load_eval_sets(config, tokenizer, answers=True)
    assert [prompt.token_ids for prompt in found["few"]] == tokenizer(["1", "1"])["input_ids"]
    assert len(found["all"]) > 5
    said = capsys.readouterr().out
    assert "evals.few: 2 prompts (0 too long)\n" in said
    assert "too long); they are rows of data itself, which are trained on\n" in said.partition("evals.all: ")[2]
    with pytest.raises(ConfigError, match=r"^evals\.few: data\.max_prompt_tokens: all 2 prompts of .*test.jsonl are longer than 0 tokens"):
        prompts.load_eval_sets(config.model_copy(update={"data": config.data.model_copy(update={"max_prompt_tokens": 0})}), tokenizer, True)


def answers(*rewards: float) -> list[Episode]:
    return [Episode(Prompt(0, [1], {}), 0, [Turn([2], [0.0], "stop")], reward=reward) for reward in rewards]


def test_each_set_is_reported_under_its_name_and_their_mean_where_data_hold_none_out():
    config = PpoConfig.model_validate({"model": {"path": "x"}, "data": {"path": "a:b"}, "trainer": {"eval_samples": 2}})
    sets = {"a": answers(1, 0), "b-c": answers(1, 1)}
    named = {
        "eval_reward/a": 0.5,
        "eval_pass@1/a": 0.5,
        "eval_pass@2/a": 1,
        "eval_reward/b-c": 1,
        "eval_pass@1/b-c": 1,
        "eval_pass@2/b-c": 1,
    }
    assert evaluations(sets, config) == {"eval_reward": 0.75} | named
    assert evaluations({"": answers(0, 0)} | sets, config) == {"eval_reward": 0, "eval_pass@1": 0, "eval_pass@2": 0} | named


def test_a_set_whose_answers_are_all_dropped_has_no_reward():
    config = PpoConfig.model_validate({"model": {"path": "x"}, "data": {"path": "a:b"}, "reward": {"on_error": "drop"}})
    failed = answers(0, 0)
    for episode in failed:
        episode.failed = True
    assert evaluations({"a": answers(1, 1), "b": failed}, config) == {"eval_reward": 1, "eval_reward/a": 1}
    assert evaluations({"a": failed}, config) == {}


def test_the_step_line_ends_with_the_sets(tmp_path):
    out = StringIO()
    with Metrics(tmp_path, total=3, console=Console(file=out, width=200)) as metrics:
        metrics.log(0, {"eval_reward": 0.75, "eval_reward/a": 0.5, "eval_reward/b-c": 1.0, "eval_pass@2/a": 1.0})
    assert "eval reward 0.75  eval reward/a 0.5  eval reward/b-c 1" in out.getvalue()
    assert "pass" not in out.getvalue()


@pytest.mark.parametrize(("samples", "greedy"), [(1, True), (4, False)])
def test_one_answer_to_each_prompt_is_the_likeliest_and_several_are_sampled(tmp_path, monkeypatch, samples, greedy):
    asked = []

    def start(prompts: list[Prompt], *given: Any, **more: Any) -> list[Episode]:
        asked.append((len(prompts), *given, more))
        return answers(*[1.0] * samples)

    monkeypatch.setattr(train_ppo, "score", lambda *_: None)  # they have their rewards
    workers: Any = SimpleNamespace(sync=lambda: None, start=start, episodes=lambda pending: pending, learned=0)
    producer: Any = SimpleNamespace(settle=lambda: None)
    config = settings(tmp_path, trainer={"eval_samples": samples}, run={"seed": 7})
    nothing: Any = None
    noted: list[Any] = []
    record: Any = SimpleNamespace(evaluated=lambda *row: noted.append(row))
    given = (config, tmp_path, workers, producer, {"": [Prompt(0, [1], {})]})
    run = train_ppo.Run(*given, nothing, nothing, nothing, record, nothing, nothing)
    assert run.evaluate(0, nothing)["eval_reward"] == 1.0
    assert asked == [(1, samples, 7, {"greedy": greedy})]
    assert [(step, len(by_set[""])) for step, by_set in noted] == [(0, samples)]
