"""What the rollout engines of a run are asked for, without their processes."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.configs import settings

from trainer.episodes import Prompt
from trainer.errors import RunError
from trainer.rollout.engines import RolloutEngines


@pytest.mark.parametrize(("away", "shares"), [([], {0: [0, 1], 1: [2, 3], 2: [4]}), ([1], {0: [0, 1, 2], 2: [3, 4]})])
def test_each_engine_that_serves_gets_a_share_of_the_prompts_and_a_seed_of_its_own(tmp_path, away, shares):
    engines = object.__new__(RolloutEngines)
    engines.config = settings(tmp_path, rollout={"engines": 3, "temperature": 0.7})
    asked: dict[int, tuple[Any, ...]] = {}

    def actor(number: int) -> Any:
        return SimpleNamespace(sample=SimpleNamespace(remote=lambda *given: asked.update({number: given})))

    engines.actors, engines.away = [actor(i) for i in range(3)], dict.fromkeys(away, 0.0)
    prompts = [Prompt(i, [1], {}) for i in range(5)]
    engines.start(prompts, 4, seed=100)
    assert {i: [prompt.index for prompt in given[0]] for i, given in asked.items()} == shares
    assert {i: given[1] for i, given in asked.items()} == shares, "groups are numbered over all engines"
    assert {i: given[3] for i, given in asked.items()} == {i: 100 + i for i in shares}
    assert {(given[2].samples, given[2].temperature) for given in asked.values()} == {(4, 0.7)}
    engines.start(prompts, 1, seed=100, greedy=True)
    assert {given[2].temperature for given in asked.values()} == {0.0}


@pytest.mark.parametrize(
    ("unreplayed", "unrecorded", "setting", "said"),
    [
        ("", ["", ""], "auto", None),
        ("", ["", "qwen3_moe: vLLM returns no experts: why"], "auto", "qwen3_moe: vLLM returns no experts: why"),
        ("mixtral: no router", ["", ""], "auto", "mixtral: no router"),
        ("llama has no experts", ["llama has no experts"], "auto", ""),
        ("rollout.router_replay=off", [""], "off", ""),
    ],
)
def test_experts_are_asked_for_where_policy_and_engines_have_a_use_for_them_and_else_it_is_said_once(
    tmp_path, capsys, unreplayed, unrecorded, setting, said
):
    engines = object.__new__(RolloutEngines)
    engines.config = settings(tmp_path, rollout={"router_replay": setting})

    def actor(why: str) -> Any:
        return SimpleNamespace(call=SimpleNamespace(remote=lambda method: why if method == "unrecorded" else None))

    engines.actors, engines.away = [actor(why) for why in unrecorded], {}
    engines.launcher, engines.starts = cast(Any, SimpleNamespace(wait=lambda refs, *_: refs)), [[1] for _ in unrecorded]
    engines.record(unreplayed)
    assert engines.sampling(4).experts == (0 if said is None else None)
    assert engines.sampling(1, greedy=True).experts is None, "nothing learns from it"
    assert capsys.readouterr().out == (f"router replay is off (rollout.router_replay=auto): {said}\n" if said else "")


def test_an_engine_that_does_not_start_is_the_error_and_not_what_it_was_asked_meanwhile(tmp_path):
    def wait(refs: list[Any], *_: Any) -> list[Any]:
        if "start" in refs:
            raise RunError("vLLM cannot run it")
        return refs

    engines = object.__new__(RolloutEngines)
    engines.config, engines.launcher = settings(tmp_path), cast(Any, SimpleNamespace(wait=wait))
    unready = SimpleNamespace(remote=lambda _: pytest.fail("it has no engine to ask"))
    engines.actors, engines.starts, engines.away = [cast(Any, SimpleNamespace(call=unready))], [["start"]], {}
    with pytest.raises(RunError, match="vLLM cannot run it"):
        engines.record("")
