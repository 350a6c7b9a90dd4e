"""The environment shell, on the tasks of its demo."""

from __future__ import annotations

import string
import sys
from itertools import islice
from typing import Any

import pytest
from support.talks import CHARACTERS
from support.tasks import harbor

from trainer import environments
from trainer.configs.sandbox import SandboxConfig
from trainer.data.tasks import NAMES, PROGRAMS, attempts, repairs, trails, walks
from trainer.environments.policy import Limits
from trainer.environments.runner import Job, Runner
from trainer.environments.sandboxes.episode import Sandboxes
from trainer.environments.sandboxes.tasks.check import main
from trainer.episodes import Prompt, Turn
from trainer.errors import ConfigError
from trainer.models import character_tokenizer
from trainer.rewards.terms import Reward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


def played(rows: list[dict[str, Any]], texts: list[list[str]], **args: Any) -> list[tuple[float, str]]:
    """Reward and all that was said of an episode of each row, in which the policy writes these lines."""
    tokenizer = character_tokenizer("".join(sorted({*CHARACTERS, *string.ascii_letters, *"$|&"})))
    function = environments.resolve("shell", args)
    sandboxes = Sandboxes(SandboxConfig(provider="auto", memory_mb=64, disk_mb=4))
    try:
        runner = Runner(Reward("shell", function, batched=False, awaited=True), tokenizer, Limits(9, 50, 500, 120), sandboxes=sandboxes)
        runner.begin([Job((i, 0), Prompt(i, [5], row), 3) for i, row in enumerate(rows)])
        ended: list[Any] = []
        while runner.tasks:
            asked, more = runner.advance(whole=True)
            ended += more
            for each in asked:
                ids: Any = tokenizer(texts[each.key[0]].pop(0), add_special_tokens=False)["input_ids"]
                runner.answer({each.name: Turn(ids, [-0.5] * len(ids), "stop")})
    finally:
        sandboxes.close()
    assert not any(each.mistake for each in ended), ended
    return [(each.reward, each.sequences[0].said) for each in sorted(ended, key=lambda each: each.key)]


def test_what_walks_show_right_is_rewarded_and_nothing_else():
    rows: list[Any] = list(islice(trails(100, seed=3), 6))
    right = [["cat a\n", f"{row['prompt'][:-1]} {row['files']['a'][0]}>o\n"] for row in rows]
    wrong = [["cat a\n", f"{next(name for name in PROGRAMS if name != row['prompt'][:-1])} {row['files']['a'][0]}>o\n"] for row in rows]
    found = played([*rows, *rows], [*right, *wrong], turns=2)
    assert [reward for reward, _ in found] == [1.0] * 6 + [0.0] * 6
    assert found[0][1] == f"cat a\n{rows[0]['files']['a']}{rows[0]['prompt'][:-1]} {rows[0]['files']['a'][0]}>o\n"


def test_tests_in_a_fresh_sandbox_decide_on_a_repair():
    rows: list[Any] = list(islice(repairs(100, seed=3), 3))
    wrong = [row["fix"].replace(f"/{row['prompt'][0]}/", f"/{another(row)}/") for row in rows]
    texts = [["cat a\n", f"{command}\n"] for command in [*(row["fix"] for row in rows), *wrong, "ls", f"echo echo {wanted(rows[0])}>a"]]
    found = played([*rows, *rows, rows[0], rows[0]], texts, turns=2, tests="tests")
    assert [reward for reward, _ in found] == [1.0] * 3 + [0.0] * 5, "a repair; another variable, the program as it was, and a constant"
    assert found[0][1] == f"cat a\n{rows[0]['files']['a']}{rows[0]['fix']}\n"


def test_what_the_policy_leaves_beside_its_program_does_not_pass_tests():
    """The first two pass in the sandbox that they were done in: a shell on the path, and a program elsewhere. The last leaves none."""
    row: Any = next(repairs(100, seed=3))
    right = f"echo ${row['prompt'][0]}"
    cheats = [
        [f"echo '{right}' >sh; chmod +x sh\n", "export PATH=$PWD:$PATH\n"],
        [f"echo '{right}' >/tmp/a\n", "echo . /tmp/a >a\n"],
        ["rm a\n", "exit\n"],
    ]
    assert [reward for reward, _ in played([row] * len(cheats), cheats, turns=2, tests="tests")] == [0.0] * len(cheats)


def test_as_folders_repairs_are_good_tasks(tmp_path, capsys):
    """Their solutions pass; nothing done, half of a solution and another task's do not."""
    rows: list[Any] = list(islice(repairs(100, seed=3), 2))
    for number, row in enumerate(rows):
        folder: dict[str, Any] = {
            "instruction.md": row["prompt"],
            "environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY a .\n",
            "environment/a": row["files"]["a"],
            "environment/b.txt": None,
            "tests/test.sh": row["tests"],
            "solution/solve.sh": f"cd /app\n{row['fix']}\n",
        }
        harbor(tmp_path / f"tasks/{number}", **folder)
    assert main(["check", str(tmp_path / "tasks"), "--runs", "1"]) == 0, capsys.readouterr().out


def wanted(row: dict[str, Any]) -> str:
    """What the first of its tests wants."""
    return row["tests"].splitlines()[0].split(" = ")[1][0]


def another(row: dict[str, Any]) -> str:
    return next(name for name in NAMES if name not in row["fix"].split("/")[1:3])


def test_no_constant_passes_the_tests_of_a_repair():
    for row in islice(repairs(1000, seed=5), 1000):
        first, second = (line.split(" = ")[1][0] for line in f"{row['tests']}".splitlines())
        assert first != second


def test_the_last_rows_have_pairs_of_variables_that_no_other_row_and_no_attempt_has():
    rows: list[Any] = [*repairs(3000, unseen=400, seed=2)]
    pairs = [(row["files"]["a"], row["prompt"]) for row in rows]
    shown = {(f"{row['answer']}"[6:14], row["prompt"]) for row in attempts(3000, seed=1)}
    assert set(pairs[:-400]) == shown and len(set(pairs[-400:])) == 16 and not set(pairs[-400:]) & shown


def test_attempts_are_right_at_the_share_that_is_asked_for():
    pairs = [*zip(repairs(3000, seed=1), attempts(3000, share=0.3, seed=1), strict=True)]
    right = [f"{given['answer']}".endswith(f"{row['fix']}\n") for row, given in pairs]
    assert all(row["prompt"] == given["prompt"] for row, given in pairs)
    assert abs(sum(right) / 3000 - (0.3 + 0.7 / 8)) < 0.03


def test_exit_ends_it_and_long_output_is_cut_and_files_count_by_their_share():
    row = {"files": {"deep/a": "x" * 99}, "expected": {"b": "1\n", "c": "2\n"}}
    [(reward, said)] = played([row], [["cat deep/a\n", "echo 1>b\n", "echo 1 >b\n", "exit\n"]], max_observation=5)
    assert said.startswith("cat deep/a\nxxxxx\n") and reward == 0.5


def test_walks_are_right_at_the_share_that_is_asked_for():
    given = [f"{row['answer']}" for row in walks(3000, file=0.3, program=0.25, seed=1)]
    programs = [row["prompt"][:-1] for row in walks(3000, seed=1)]  # type: ignore[index]
    right = [text.split("\n")[2] == f"{program} {text[6]}>o" for text, program in zip(given, programs, strict=True)]
    assert abs(sum(right) / 3000 - (0.3 + 0.7 / 8) * (0.25 + 0.75 / 3)) < 0.02


@pytest.mark.parametrize(
    ("row", "args", "said"),
    [
        ({"expected": {"a": ""}}, {}, "environment.args.files: the data has no column 'files'; there are expected"),
        ({"files": {}}, {}, "environment.args.expected: the data has no column 'expected'"),
        ({"files": ["a"], "expected": {"a": ""}}, {}, "the column 'files' has ['a']; texts by path are needed"),
        ({"files": {}, "expected": {"a": 1}}, {}, "the column 'expected' has {'a': 1}; texts by path are needed"),
        ({"files": {}, "expected": {}}, {}, "the column 'expected' is empty; at least one file is needed"),
        ({"files": {}}, {"tests": "check"}, "environment.args.tests: the data has no column 'check'; there are files"),
        ({"files": {}, "tests": ["true"]}, {"tests": "tests"}, "the column 'tests' has ['true']; lines of the shell are needed"),
        ({"files": {}, "expected": {"a": ""}}, {"turns": 0}, "environment.args.turns=0; at least 1"),
    ],
)
def test_data_and_settings_that_it_cannot_play_are_named(row, args, said):
    with pytest.raises(ConfigError) as caught:
        environments.check("shell", args, row)
    assert said in str(caught.value)
