"""Tasks in others' formats: read, prepared, graded in a clean copy, and found out where they teach nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.talks import CHARACTERS, CHATML, with_template
from support.tasks import TESTS, harbor

from trainer import environments
from trainer.configs.sandbox import SandboxConfig
from trainer.environments.policy import Limits
from trainer.environments.runner import Job, Runner
from trainer.environments.sandboxes.episode import Sandboxes
from trainer.environments.sandboxes.machine import Machine
from trainer.environments.sandboxes.spec import SandboxError, Spec
from trainer.environments.sandboxes.tasks import rows
from trainer.environments.sandboxes.tasks.check import main
from trainer.environments.sandboxes.tasks.grading import graded, prepared, solve
from trainer.environments.sandboxes.tasks.reading import Task, read
from trainer.episodes import Prompt, Turn
from trainer.errors import ConfigError
from trainer.models import character_tokenizer
from trainer.rewards.terms import Reward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


def terminal(folder: Path) -> Path:
    for name, text in {
        "task.yaml": "instruction: |-\n  Make out.txt say hello.\nmax_test_timeout_sec: 30\n",
        "Dockerfile": "FROM debian\nWORKDIR /app\n",
        "run-tests.sh": "python3 $TEST_DIR/test_outputs.py\n",
        "tests/test_outputs.py": "assert open('out.txt').read() == 'hello\\n'\nprint('1 passed in 0.1s')\n",
        "solution.sh": "# says it\necho hello > out.txt\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def sandboxes() -> Iterator[Sandboxes]:
    made = Sandboxes(SandboxConfig(provider="auto", timeout=20))
    yield made
    made.close()


def within(task: Task, body: Callable[[Machine], Any], spec: Spec | None = None) -> None:
    async def run() -> None:
        made = Sandboxes(SandboxConfig(provider="auto"))
        try:
            machine = await prepared(task, spec or Spec(), made)
            await body(machine)
        finally:
            made.close()

    asyncio.run(run())


@pytest.mark.parametrize("make", [harbor, terminal])
def test_a_task_is_prepared_solved_and_graded(make, tmp_path):
    task = read(make(tmp_path / "sum"))

    async def body(machine: Machine) -> None:
        assert task.solution
        assert (await graded(task, machine)).reward == 0
        await solve(task, machine, task.solution.read_text())
        assert (await graded(task, machine)).reward == 1
        assert (await machine.exec("ls /tests /solution")).code, "neither is left for the policy"

    within(task, body)


def test_limits_and_seconds_are_the_tasks(tmp_path):
    task = read(harbor(tmp_path / "sum"))
    assert (task.workdir, task.tests_seconds, task.limits) == ("/app", 20.0, {"cpu": 1.0, "memory_mb": 256})

    async def body(machine: Machine) -> None:
        assert (await machine.exec("pwd; cat made; echo $LEFT")).stdout == "/app\nmade\n20\n"
        assert machine.spec.memory_mb == 256

    within(task, body)
    with pytest.raises(SandboxError, match=r"wants memory_mb 256, environment.sandbox.memory_mb is 128; raise it"):
        within(task, body, Spec(memory_mb=128))


def test_a_dockerfile_may_have_comments_and_here_documents(tmp_path):
    text = "FROM a\nWORKDIR /app\nRUN echo 1 \\\n# between\n   2 > a\nRUN <<END\nx=4\necho $x > b\nEND\n"
    text += "RUN cat <<-'X' > c && \\\n  echo 5 >> c\n\t$y\n\tX\nVOLUME /v\n"
    task = read(harbor(tmp_path / "sum", **{"environment/Dockerfile": text}))

    async def body(machine: Machine) -> None:
        assert (await machine.exec("cat a b c")).stdout == "1 2\n4\n$y\n5\n"

    within(task, body)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("FROM a AS b\nFROM c\nCOPY --from=b /x /y\n", "has several stages"),
        ("FROM a\nCOPY <<END /app/x\ntext\nEND\n", "COPY <<END /app/x"),
    ],
)
def test_what_only_an_engine_can_build_is_named(text, why, tmp_path):
    task = read(harbor(tmp_path / "sum", **{"environment/Dockerfile": text}))

    async def body(machine: Machine) -> None:
        raise AssertionError("not prepared")

    with pytest.raises(SandboxError, match=rf"sum: its Dockerfile: {why}: only docker and podman build that \(environment.sandbox.build\)"):
        within(task, body)


def test_what_the_policy_left_for_the_tests_changes_nothing(tmp_path):
    task = read(harbor(tmp_path / "sum"))

    async def body(machine: Machine) -> None:
        await machine.exec(
            "mkdir -p /tests /logs/verifier; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; echo 1 > /logs/verifier/reward.txt"
        )
        await machine.exec("export PATH=/app:$PATH BASH_ENV=/app/env; cat() { echo 42; }; export -f cat; echo 'exit 0' > env")
        await machine.exec("(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) >/dev/null 2>&1 &")
        assert (await graded(task, machine)).reward == 0

    within(task, body)


def test_the_share_of_tests_counts_where_that_is_asked_for(tmp_path):
    task = read(harbor(tmp_path / "sum", **{"tests/test.sh": "echo '1 failed, 3 passed in 0.1s'; exit 1\n"}))

    async def body(machine: Machine) -> None:
        assert (await graded(task, machine)).reward == 0
        grade = await graded(task, machine, partial=True)
        assert (grade.reward, grade.passed, grade.tests) == (0.75, 3, 4)

    within(task, body)


FAULTS: dict[str, tuple[str, dict[str, str | None]]] = {
    "good": ("good", {}),
    "wrong-solution": ("unsolvable", {"solution/solve.sh": "cd /app\necho 41 > sum.txt\n"}),
    "by-the-clock": ("flaky", {"solution/solve.sh": "cd /app\n[ $(($(date +%N | sed 's/^0*//') / 1000 % 2)) = 0 ] && echo 42 > sum.txt\n"}),
    "nothing-to-do": ("free", {"tests/test.sh": "mkdir -p /logs/verifier\necho 1 > /logs/verifier/reward.txt\n"}),
    "tests-lie-there": ("leaking", {"environment/hidden": TESTS, "environment/Dockerfile": "FROM a\nCOPY b.txt hidden /app/\n"}),
    "half-is-enough": ("weak", {"solution/solve.sh": "echo 42 > /app/sum.txt\nexit 0\n: the rest\n: is idle\n"}),
    "fits-anything": ("weak", {"instruction.md": "Write 42 to sum.txt.", "tests/test.sh": TESTS.replace("= 42", "!= ''")}),
    "no-tests": ("broken", {"tests/test.sh": None}),
    "no-solution": ("broken", {"solution/solve.sh": None}),
    "no-step": ("broken", {"environment/Dockerfile": "FROM debian\nRUN exit 3\n"}),
}  # fmt: skip


def test_tasks_that_teach_nothing_are_named_and_left_out(tmp_path, capsys):
    for name, (_, changes) in FAULTS.items():
        harbor(tmp_path / "tasks" / name, **changes)
    kept, tasks = tmp_path / "kept", str(tmp_path / "tasks")
    assert main(["check", tasks, "--runs", "8", "--keep", str(kept)]) == 1
    printed = capsys.readouterr().out
    found = {each["task"]: each["verdict"] for each in json.loads((tmp_path / "tasks/verdicts.json").read_text())}
    assert found == {name: verdict for name, (verdict, _) in FAULTS.items()}, printed
    assert "1 of 10 tasks are fit to train on" in printed and "RUN exit 3: exit code 3" in printed
    chosen: tuple[dict[str, Any], ...] = ({"only": str(kept)}, {"leave_out": "bad"})
    for args in chosen:
        assert [Path(row["task"]).name for row in rows(tasks, **args)] == ["good"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task.toml": "= 1"}, "task.toml: Invalid statement"),
        ({"task.toml": "verifier = 1"}, "task.toml: verifier: 1; a table is needed"),
        ({"task.toml": "[verifier]\ntimeout_sec = 0"}, "task.toml: timeout_sec: 0; a number > 0 is needed"),
        ({"task.toml": '[environment]\nmemory = "much"'}, "task.toml: environment.memory: 'much'; a size such as 2G is needed"),
        ({"instruction.md": " "}, "instruction.md: missing or empty"),
        ({"tests/test.sh": None}, "no tests: tests/test.sh is missing"),
        ({"environment/Dockerfile": "FROM a\nONCE x\n"}, "Dockerfile: ONCE: not read here"),
        ({"environment/Dockerfile": "FROM a\nCOPY b.txt\n"}, "Dockerfile: COPY b.txt: a source and a target are needed"),
    ],
)
def test_a_folder_that_is_no_task_is_named(changes, said, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(harbor(tmp_path / "sum", **changes))
    assert said in str(caught.value)


def test_paths_without_tasks_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "none", "no such folder of tasks"), (tmp_path / "empty", "no tasks; each is a folder with task.toml")):
        with pytest.raises(ConfigError, match=said):
            list(rows(str(path)))
    harbor(tmp_path / "tasks/sum")
    (tmp_path / "kept").write_text("other\n")
    for only, said in ((tmp_path / "not", "no such file"), (tmp_path / "kept", "names no task below")):
        with pytest.raises(ConfigError, match=said):
            list(rows(str(tmp_path / "tasks"), only=str(only)))


def test_a_copy_from_outside_of_its_folder_is_refused(tmp_path):
    task = read(harbor(tmp_path / "sum", **{"environment/Dockerfile": "FROM a\nCOPY ../solution/solve.sh /app/\n"}))

    async def body(machine: Machine) -> None:
        raise AssertionError("not prepared")

    with pytest.raises(SandboxError, match=r"COPY ../solution/solve.sh: not there in environment/"):
        within(task, body)


def test_a_policy_works_on_a_task_by_tools(sandboxes, tmp_path):
    call = '<tool_call>{"name":"bash","arguments":{"command":"echo 42 > sum.txt"}}</tool_call>'
    tokenizer = with_template(character_tokenizer(CHARACTERS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ|\\%$&"), CHATML)
    function = environments.resolve("task", {})
    [row] = rows(str(harbor(tmp_path / "tasks/sum").parent))
    environments.check("task", {}, row)
    for texts, reward in (((call, "done"), 1.0), (("done",), 0.0)):
        runner = Runner(Reward("task", function, batched=False, awaited=True), tokenizer, Limits(9, 200, 5000, 120), sandboxes=sandboxes)
        runner.begin([Job((0, 0), Prompt(0, [5], row), 7)])
        said, ended = iter(texts), []
        while not ended:
            asked, ended = runner.advance(whole=True)
            for each in asked:
                ids: Any = tokenizer(next(said) + "<eos>", add_special_tokens=False)["input_ids"]
                runner.answer({each.name: Turn(ids, [-0.5] * len(ids), "stop")})
        assert (ended[0].mistake, ended[0].reward) == (None, reward)
        sandboxes.close()
        sandboxes.provider, sandboxes.turn = None, None  # the next runner has an event loop of its own
