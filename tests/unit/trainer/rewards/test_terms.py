"""Rewards made of terms, and what functions may ask for about an answer."""

from __future__ import annotations

from typing import Any

import pytest
from support import configs

from trainer import preflight
from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.configs.reward import RewardConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.online.roles import Rollout
from trainer.online.scored import describe
from trainer.rewards import resolve
from trainer.rewards.scorer import Scorer


def episodes(*texts: str, **row: Any) -> list[Episode]:
    """Two to a group; the last one was cut off."""
    return [
        Episode(Prompt(i, [1] * 3, {"answer": "b", **row}), i // 2, [Turn([5] * (i + 1), [0.0] * (i + 1), "stop")], text=text)
        for i, text in enumerate(texts[:-1])
    ] + [Episode(Prompt(9, [1] * 3, {"answer": "b", **row}), 1, [Turn([5], [0.0], "length")], text=texts[-1])]


def scored(batch: list[Episode], **settings: Any) -> list[float]:
    with Scorer(RewardConfig.model_validate({"timeout": 60, **settings})) as rewards:
        return rewards.score(batch, step=7)


EXACT = {"function": "exact"}


@pytest.mark.parametrize("kind", ["plain", "asks_later", "asks_step"])
def test_terms_of_every_kind_are_weighed_and_added(kind: str):
    other = (
        {"function": "support.judges:plain", "weight": 0.5, "args": {"bonus": 6.0}}
        if kind == "plain"
        else {"function": f"support.judges:{kind}", "weight": 0.5}
    )
    batch = episodes("a", "b", "c")
    assert scored(batch, terms={"right": EXACT, "other": other}) == [3.5, 4.5, 3.5]
    assert [e.terms for e in batch] == [{"right": float(e.text == "b"), "other": 7.0} for e in batch]
    metrics = describe(Rollout.of(batch), RewardConfig.model_validate({"terms": {"right": EXACT, "other": other}}))
    assert metrics["reward/right"] == pytest.approx(1 / 3)
    assert metrics["reward/other"] == 7.0


@pytest.mark.parametrize("others", [{}, {"all": {"function": "support.judges:asks_step"}}])
def test_an_answer_fails_with_one_of_its_terms_which_is_named(others: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    terms = {"right": EXACT, "strict": {"function": "support.judges:given"}, **others}
    batch = episodes("a", "b", value=1.0)
    del batch[0].prompt.row["value"]
    assert scored(batch, terms=terms, on_error="zero")[0] == 0.0
    assert [e.failed for e in batch] == [True, False]
    assert "raised KeyError('value') (judges.py:" in (said := capsys.readouterr().out)
    assert ") as strict" in said


def test_a_function_may_return_its_terms():
    batch = episodes("a", "b", terms={"right": 1, "style": 0.5})
    assert scored(batch, function="support.judges:parts", weights={"right": 2.0, "style": -1.0}) == [1.5, 1.5]
    assert batch[0].terms == {"right": 1.0, "style": 0.5}


@pytest.mark.parametrize(
    ("terms", "weights", "message"),
    [
        ({"right": 1.0}, {}, r"returned the terms right, which have no weights; set reward\.weights$"),
        ({"right": 1.0, "styel": 1.0}, {"right": 1.0, "style": 1.0}, r"returned the terms right, styel; reward\.weights has right, style$"),
        ({"right": 1.0}, {"right": 1.0, "style": 1.0}, r"returned the terms right; reward\.weights has right, style$"),
        (1.0, {"right": 1.0}, r"returned 1\.0; reward\.weights needs a dict of right$"),
        ({"right": float("nan")}, {"right": 1.0}, r"returned nan as right; a reward is finite$"),
        ({"right": "much"}, {"right": 1.0}, r"returned 'much' as right, which is not a number$"),
    ],
)
def test_terms_that_do_not_fit_their_weights_end_the_run(terms: Any, weights: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=f"^reward\\.function: parts on row 0 with the text 'a' {message}"):
        scored(episodes("a", "b", terms=terms), function="support.judges:parts", weights=weights)


def test_terms_without_weights_end_the_run_whatever_becomes_of_failures():
    with pytest.raises(ConfigError, match="which have no weights"):
        scored(episodes("a", "b", terms={"right": 1}), function="support.judges:parts", on_error="zero")


def test_a_function_gets_what_it_asks_for():
    assert scored(episodes("a", "b", "c"), function="support.judges:asks", args={"scale": 2.0}) == [14062.0, 14064.0, 14263.0]
    assert scored(episodes("a", "b"), function="support.judges:asks_later") == [7.0, 7.0]
    assert scored(episodes("a", "b"), function="support.judges:asks_step") == [7.0, 7.0]


def test_what_is_asked_for_is_no_column_and_no_argument():
    assert resolve("support.judges:needs_group", {}, ["group"]).asks == ("group",)
    with pytest.raises(ConfigError, match=r"^reward\.args\.group=1: the trainer gives group itself; rename the function's parameter$"):
        resolve("support.judges:needs_group", {"group": 1})


TERM = "reward.terms.right"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["reward.answer_timeout=0"], "reward.answer_timeout: 0 is not a number > 0 or null"),
        (["reward.answer_timeout=-1"], "reward.answer_timeout: -1 is not a number > 0 or null"),
        (["reward.answer_timeout=soon"], "reward.answer_timeout: 'soon' is not a number > 0 or null"),
        (["reward.retries=-1"], "reward.retries: -1 is not an integer between 0 and 100"),
        (["reward.retries=1.5"], "reward.retries: 1.5 is not an integer between 0 and 100"),
        (["reward.retries=1000"], "reward.retries: 1000 is not an integer between 0 and 100"),
        (["reward.on_error=skip"], "reward.on_error: 'skip' is not one of fail, zero, drop"),
        (["reward.weights={a: x}"], "reward.weights"),
        (["reward.weights={a b: 1}"], "reward.weights"),
        (["reward.terms={a: exact}"], "reward.terms"),
        (["reward.terms={a: {weight: 1}}"], "reward.terms"),
        (["reward.terms={a: {function: exact, wieght: 1}}"], "reward.terms"),
        (["reward.terms={a: {function: exact, weight: heavy}}"], "reward.terms"),
        (["reward.terms={'a.b': {function: exact}}"], "reward.terms"),
        (["reward.terms={a: {function: exact}}", "reward.function=numeric"], "reward.function"),
        (["reward.terms={a: {function: exact}}", "reward.args={x: 1}"], "reward.args"),
        (["reward.terms={a: {function: exact}}", "reward.weights={a: 1}"], "reward.weights"),
        ([f"{TERM}.function=exakt"], "reward.terms.right.function: no 'exakt'; "),
        ([f"{TERM}.function=no:f"], "reward.terms.right.function: no:f: cannot import it"),
        ([f"{TERM}.function=exact", f"{TERM}.args.x=1"], "reward.terms.right.args: got an unexpected keyword argument 'x'"),
        (["reward.function=support.judges:needs_group", "reward.args.group=1"], "reward.args.group=1: the trainer gives group itself"),
    ],
)
def test_settings_of_rewards_that_are_wrong_are_one_error_each_with_their_place(settings: list[str], message: str):
    with pytest.raises(ConfigError) as refused:
        parse([*configs.BASE, *settings], prog=configs.PROG, model=PpoConfig, checks=(preflight.reward,))
    (line,) = str(refused.value).splitlines()
    assert configs.unplaced(line).startswith(message)
    assert line.startswith("command line: ")
