"""Text is what was written, in files and on the command line; what can be read in two ways is refused."""

from __future__ import annotations

import pytest
from support.configs import PROG, errors, ok, recipe

from trainer.cli import parse
from trainer.configs.ppo import PpoConfig

NUMBERS = ["1.10", "0123", "1_000", "+5", "5.", ".5", "1e5", "1234567e8", ".inf", ".NaN", "0x1F"]
WRITTEN = [*NUMBERS, "12:30", "2026-01-31", "yes", "No", "on", "OFF", "true"]
FILE = """
model: {path: gpt2}
run:
  allow: [%(text)s]
data:
  path: a/b
  split: &split %(text)s
evals:
  other: {prompt: %(text)s}
  merged: &set
    path: a/b
    <<: {prompt: %(text)s, answer: *split}
"""
TWO_WAYS = "is not true or false, nor text in quotes"


@pytest.mark.parametrize("text", WRITTEN)
def test_text_of_a_file_is_as_it_was_written(tmp_path, text):
    config = parse(["--config", recipe(tmp_path, FILE % {"text": text})], prog=PROG, model=PpoConfig)
    of_sets = [config.evals["other"].prompt, config.evals["merged"].prompt, config.evals["merged"].answer]
    assert {*config.run.allow, config.data.split, *of_sets} == {text}


@pytest.mark.parametrize("text", [*WRITTEN, "[ab]*.jsonl", "*.jsonl", "a: b", "a #b", "{x}", "@a", "a\tb "])
def test_text_that_is_typed_is_as_it_was_typed(text):
    config = ok(f"data.prompt={text}", f"evals.other.prompt={text}")
    assert (config.data.prompt, config.evals["other"].prompt) == (text, text)


@pytest.mark.parametrize("text", ["1.10", "yes", "2026-01-31"])
def test_in_lists_and_sections_that_are_typed_it_is_too(text):
    config = ok(f"run={{name: {text}, allow: [{text}]}}", f"evals={{other: {{prompt: {text}}}}}")
    assert (config.run.name, config.run.allow, config.evals["other"].prompt) == (text, [text], text)


def test_quotes_and_null_are_those_of_yaml():
    assert ok("data.prompt='a'", 'data.answer="b\\n"', "data.split=null").data.model_dump(include={"prompt", "answer", "split"}) == {
        "prompt": "a",
        "answer": "b\n",
        "split": None,
    }
    assert errors("model.path=gpt2", "data.path=a.jsonl", "data.prompt='a") == [
        'command line: data.prompt: "\'a" is not YAML: found unexpected end of stream'
    ]


def test_numbers_and_booleans_of_settings_that_are_none_of_text_stay():
    config = ok("trainer.steps=1_000", "optim.lr=1e-5", "log.plot=no", "rollout.options={a: 1.10, b: true, c: 'no', d: 12:30}")
    assert (config.trainer.steps, config.optim.lr, config.log.plot) == (1000, 1e-5, False)
    assert config.rollout.options == {"a": 1.1, "b": True, "c": "no", "d": "12:30"}


def test_yes_and_no_in_a_map_of_a_persons_own_are_refused_without_quotes(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata:\n  path: m:f\n  args:\n    language: no\n    some: [{deep: On}, 'off']\n")
    found = errors("--config", file, "reward.args.strict=yes", "rollout.options={a: {b: off}}")
    assert found == [
        f"{file}:5: data.args.language: no {TWO_WAYS}",
        f"{file}:6: data.args.some.0.deep: On {TWO_WAYS}",
        f"command line: reward.args.strict: yes {TWO_WAYS}",
        f"command line: rollout.options.a.b: off {TWO_WAYS}",
    ]
