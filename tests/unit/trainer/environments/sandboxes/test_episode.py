"""policy.sandbox: a machine for each episode that asks for it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.configs import BASE, errors, ok
from support.talks import CHARACTERS
from transformers import PreTrainedTokenizerFast

from trainer.configs.sandbox import SandboxConfig
from trainer.environments.policy import Limits, Policy
from trainer.environments.runner import Job, Runner
from trainer.environments.sandboxes.episode import Sandboxes, spec_of
from trainer.environments.sandboxes.host import owner
from trainer.environments.sandboxes.namespaces import NamespaceMachine
from trainer.environments.sandboxes.spec import Lost, SandboxError
from trainer.episodes import Prompt
from trainer.models import character_tokenizer
from trainer.rewards.terms import Reward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


@pytest.fixture
def sandboxes() -> Iterator[Sandboxes]:
    made = Sandboxes(SandboxConfig(provider="namespaces", memory_mb=64, disk_mb=16, timeout=60))
    yield made
    made.close()


def played(sandboxes: Sandboxes | None, function: Any, count: int = 3, seconds: float = 120) -> list[Any]:
    tokenizer: PreTrainedTokenizerFast = character_tokenizer(CHARACTERS)
    limits = Limits(turns=9, turn_tokens=5, tokens=50, seconds=seconds)
    runner = Runner(Reward("mine", function, batched=False, awaited=True), tokenizer, limits, sandboxes=sandboxes)
    runner.begin([Job((i, 0), Prompt(i, [1], {"number": i}), 3) for i in range(count)])
    ended: list[Any] = []
    while runner.tasks:
        asked, more = runner.advance(whole=True)
        assert not asked
        ended += more
    return sorted(ended, key=lambda each: each.key)


def test_each_episode_has_its_own_and_it_ends_with_the_episode(sandboxes):
    machines = []

    async def rollout(policy: Policy, row: dict[str, Any]) -> float:
        await policy.sandbox.write("mine", f"{row['number']}")
        result = await policy.sandbox.exec("cat mine; ls | wc -l")
        machines.append(policy.sandbox.machine)
        assert result.stdout == f"{row['number']}1\n"
        other = await policy.sandbox.fork()
        machines.append(other)
        return float(await policy.sandbox.text("mine"))

    ended = played(sandboxes, rollout)
    assert [each.reward for each in ended] == [0.0, 1.0, 2.0] and not any(each.mistake for each in ended)
    assert all(each.metrics == {"commands": 1, "commands_timed_out": 0, "commands_out_of_memory": 0} for each in ended)
    assert len(machines) == 6 and all(machine.why == "it was closed" for machine in machines)


def test_an_episode_that_is_cut_or_fails_leaves_none(sandboxes):
    machines = []

    async def rollout(policy: Policy, row: dict[str, Any]) -> float:
        machines.append(await policy.sandbox.open(env={"WHO": "me"}))
        assert (await policy.sandbox.exec("echo $WHO")).stdout == "me\n"
        if row["number"] == 0:
            raise RuntimeError("mine")
        await policy.sandbox.exec("sleep 100", timeout=100)
        return 1.0

    ended = played(sandboxes, rollout, count=2, seconds=6)
    assert "mine" in ended[0].mistake.text and "did not end within 6 s" in ended[1].mistake.text
    assert all(machine.why == "it was closed" for machine in machines)


def test_an_episode_whose_sandbox_was_lost_is_played_again_once(sandboxes, capsys):
    seen: list[Any] = []

    async def rollout(policy: Policy, row: dict[str, Any]) -> float:
        machine = await policy.sandbox.open()
        assert isinstance(machine, NamespaceMachine)
        seen.append((machine, row.pop("number"), policy.random.random()))
        if len(seen) == 1:
            machine.lost("its pool has ended", Lost)
        await policy.sandbox.exec("true")
        return 0.5

    [ended] = played(sandboxes, rollout, count=1)
    assert (ended.reward, ended.mistake, ended.metrics["commands"]) == (0.5, None, 1)
    assert len(seen) == 2 and seen[0][1:] == seen[1][1:] and all(each[0].why for each in seen)
    assert "row 0: the sandbox is gone: its pool has ended; its episode begins anew" in capsys.readouterr().out

    async def hopeless(policy: Policy, row: dict[str, Any]) -> float:
        machine = await policy.sandbox.open()
        seen.append(machine)
        assert isinstance(machine, NamespaceMachine)
        machine.lost("its pool has ended", Lost)
        await policy.sandbox.exec("true")
        return 0.5

    seen.clear()
    [ended] = played(sandboxes, hopeless, count=1)
    assert len(seen) == 2 and ended.reward == 0 and "its pool has ended" in ended.mistake.text and not ended.mistake.final


def test_without_a_provider_it_is_named_what_to_set():
    async def rollout(policy: Policy, row: dict[str, Any]) -> float:
        return float((await policy.sandbox.exec("true")).code)

    [ended] = played(None, rollout, count=1)
    assert ended.mistake.final and "environment.sandbox.provider is not set; set it to auto" in ended.mistake.text


def test_where_no_sandbox_can_be_made_every_row_would_fail(monkeypatch):
    monkeypatch.setattr(owner, "PROGRAM", owner.PROGRAM.with_name("none"))

    async def rollout(policy: Policy, row: dict[str, Any]) -> float:
        return float((await policy.sandbox.exec("true")).code)

    made = Sandboxes(SandboxConfig(provider="namespaces"))
    [ended] = played(made, rollout, count=1)
    assert ended.mistake.final and ended.mistake.text.startswith("environment.sandbox.provider=namespaces: namespaces: ")


def test_what_was_done_is_recorded_the_same_twice(sandboxes):
    records = []

    async def rollout(policy: Policy, row: dict[str, Any]) -> float:
        await policy.sandbox.exec("echo same")
        await policy.sandbox.exec("date +%N")
        records.append(policy.sandbox.steps)
        return 1.0

    played(sandboxes, rollout, count=2)
    first, second = records
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False]


def test_the_rows_image_is_its_own_and_a_column_that_is_missing_is_named():
    config = SandboxConfig(provider="auto", image="/images/{repo}", output_kb=2, network=["www.example.org:443"])
    spec = spec_of(config, {"repo": "a"})
    assert (spec.image, spec.output, spec.network, spec.memory_mb) == ("/images/a", 2048, ("www.example.org:443",), 512)
    with pytest.raises(SandboxError, match=r"environment.sandbox.image='/images/\{repo\}': the row has no column 'repo'; it has text"):
        spec_of(config, {"text": ""})


GUESS, AUTO = "environment.function=guess", "environment.sandbox.provider=auto"


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("provider", "chroot", "is not one of auto, pool, namespaces"),
        ("wait", "0", "> 0"),
        ("memory_mb", "1", ">= 16"),
        ("memory_mb", "much", "an integer"),
        ("cpu", "0", "> 0"),
        ("processes", "1", ">= 4"),
        ("disk_mb", "0", ">= 1"),
        ("files", "2", ">= 16"),
        ("workdir", "here", "workdir"),
        ("folders", "{data: /data}", "folders"),
        ("network", "[http://www.example.org]", "network"),
        ("timeout", "0", "> 0"),
        ("output_kb", "0", ">= 1"),
        ("strict", "perhaps", "true or false"),
        ("memory", "1", "memory_mb"),
    ],
)
def test_a_setting_that_is_none_is_named(setting, value, said):
    [line] = errors(*BASE, GUESS, AUTO, f"environment.sandbox.{setting}={value}")
    assert line.startswith(f"command line: environment.sandbox.{setting}") and said in line, line


def test_without_a_provider_other_settings_are_refused():
    assert ok(GUESS, AUTO).environment.sandbox.provider == "auto"
    [line] = errors(*BASE, GUESS, "environment.sandbox.memory_mb=64")
    assert "environment.sandbox.memory_mb" in line and "environment.sandbox.provider" in line


def test_metrics_count_over_forks():
    counted: Counter[str] = Counter()
    assert not Sandboxes(SandboxConfig(provider="auto")).of_episode({}, counted).machines and not counted
