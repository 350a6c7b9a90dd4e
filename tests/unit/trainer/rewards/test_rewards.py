import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from trainer.episodes import Episode
from trainer.errors import ConfigError
from trainer.rewards import REWARDS, batched, needs_answer, resolve
from trainer.rewards.verifiable import contains, digits_share, exact, format_regex, length, math_verify, numeric, overlong, result


def test_exact():
    assert [exact(text, {"answer": "0123"}) for text in (" 0123\n", "123", "0123.")] == [1.0, 0.0, 0.0]
    assert exact("42", {"answer": 42}) == 1.0


def test_digits_share_gives_part_of_the_half():
    row = {"answer": "0123"}
    assert [digits_share(text, row) for text in ("0123", "0132", "01239", "")] == [1.0, 0.25, 0.4, 0.0]
    assert digits_share("0132", row, partial=0.2) == pytest.approx(0.1)


def test_contains():
    assert contains("It is Paris.", {"answer": "paris"}) == 1.0
    assert contains("It is Paris.", {"answer": "paris"}, ignore_case=False) == 0.0


def test_format_regex_asks_for_the_whole_text():
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert format_regex("<think>a\nb</think>\n<answer>3</answer>", {}, pattern) == 1.0
    assert format_regex("well, <think></think><answer></answer>", {}, pattern) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("first 7, so the answer is 1,234.5 apples.", Fraction("1234.5")),
        (r"I get 3 or \boxed{\frac{3}{4}}, checked 9 times", Fraction(3, 4)),
        (r"\boxed{1} no, \boxed{-\frac{1}{2}}", Fraction(-1, 2)),
        (r"\boxed{x = 5}", Fraction(5)),
        (r"\boxed{\$1,200}", Fraction(1200)),
        (r"\boxed{5\text{ cm}}", Fraction(5)),
        (r"\boxed{50\%}", Fraction(50)),
        (r"\boxed{5x+3}", "5x+3"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{(1, 2)}", "(1,2)"),
        ("#### -42", Fraction(-42)),
        ("10-3=7", Fraction(7)),
        ("10-3", Fraction(3)),
        (".5", Fraction(1, 2)),
        ("2e3", Fraction(2000)),
        ("no idea", None),
        ("1/0", None),
        ("7" * 5000, None),
    ],
)
def test_the_result_of_a_text(text: str, expected):
    assert result(text) == expected


def test_numeric_compares_values_not_spellings():
    assert numeric(r"thus \boxed{0.75}", {"answer": "3/4"}) == 1.0
    assert numeric("72", {"answer": "She sold 24 + 48 #### 72"}) == 1.0
    assert numeric("72.1", {"answer": "72"}) == 0.0
    assert numeric("72.1", {"answer": "72"}, tolerance=0.01) == 1.0
    assert numeric("no number", {"answer": "none either"}) == 0.0


def test_an_absurd_exponent_costs_nothing():
    assert numeric("1e999999999", {"answer": "1"}) == 0.0


def several(episodes: list[Episode]) -> list[float]:
    return [1.0] * len(episodes)


marked = batched(lambda episodes, bonus=0.0: [bonus] * len(episodes))


async def eventually(text: str, row: dict) -> float:
    return 1.0


class Judge:
    async def __call__(self, text: str, row: dict) -> float:
        return 1.0


judge = Judge()


@pytest.mark.parametrize(
    ("spec", "args", "message"),
    [
        ("exakt", {}, r"no 'exakt'; known are exact, .*did you mean 'exact'\?"),
        ("trainer.rewards:exat", {}, r"did you mean 'exact'\?"),
        ("nowhere:f", {}, r"cannot import it: No module named 'nowhere'"),
        (":f", {}, r"not of the form package\.module:function"),
        ("digits_share", {"part": 1}, r"reward\.args: got an unexpected keyword argument 'part'; digits_share takes"),
        ("format_regex", {}, r"reward\.args: missing a required argument: 'pattern'"),
        ("os:getpid", {}, r"reward\.args: too many positional arguments"),
        (
            f"{__name__}:several",
            {},
            r"too many positional arguments.*; a function of a list of episodes is marked with @trainer\.rewards\.batched",
        ),
        (f"{__name__}:marked", {"bonos": 1.0}, r"reward\.args: got an unexpected keyword argument 'bonos'"),
        (f"{__name__}:eventually", {"row": {}}, r"reward\.args: multiple values for argument 'row'"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_before_anything_runs(spec: str, args: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        resolve(spec, args)


def test_a_mark_is_only_hinted_at_where_it_would_help():
    with pytest.raises(ConfigError) as refused:
        resolve("os:getpid", {})
    assert "batched" not in str(refused.value)


def test_resolve_finds_names_and_functions_with_their_arguments():
    assert resolve("digits_share", {"partial": 1.0}).function("13", {"answer": "12"}) == 0.5
    assert resolve("trainer.rewards:exact", {}).function is exact


@pytest.mark.parametrize(
    ("spec", "takes_episodes", "awaited"),
    [
        ("exact", False, False),
        (f"{__name__}:marked", True, False),
        (f"{__name__}:eventually", False, True),
        (f"{__name__}:judge", False, True),
    ],
)
def test_how_a_reward_is_written_decides_how_it_is_called(spec: str, takes_episodes: bool, awaited: bool):
    reward = resolve(spec, {})
    assert (reward.batched, reward.awaited) == (takes_episodes, awaited)


def test_rewards_are_found_without_torch():
    code = "import sys, trainer.rewards.scorer; sys.exit(bool({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4], check=False).returncode == 0


def test_who_needs_an_answer_column():
    without = ["format_regex", "overlong", "length", "none", "reasoning_gym", "http", "judge", "reward_model"]
    assert [name for name in REWARDS if not needs_answer(name)] == without
    assert not needs_answer("my.module:reward")


def test_overlong_is_the_punishment_of_dapo():
    found = [overlong("", {}, 100, 20, token_ids=[0] * n) for n in (0, 80, 85, 90, 100, 120)]
    assert found == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert [overlong("", {}, 100, 0, token_ids=[0] * n) for n in (100, 101)] == [0.0, -1.0]


def test_length_is_one_within_its_bounds():
    assert [length("", {}, 8, 4, token_ids=[0] * n) for n in (0, 2, 4, 8, 16)] == [0.0, 0.5, 1.0, 1.0, 0.5]
    assert length("", {}, 8, token_ids=[]) == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "worth"),
    [(r"so $\frac{1}{2}$", "0.5", 1.0), (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0), (r"\boxed{3}", "4", 0.0), ("no idea", "4", 0.0)],
)
def test_math_verify_compares_expressions(text: str, answer: str, worth: float):
    pytest.importorskip("math_verify")
    assert math_verify(text, {"answer": answer}) == worth
