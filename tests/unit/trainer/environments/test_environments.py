"""What an environment may say to the policy, what becomes of it, and how episodes go on together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from support.configs import errors, ok
from support.talks import CHARACTERS, CHATML, TOOL, Talk, with_template
from transformers import PreTrainedTokenizerFast

from trainer.chat.calls import Form
from trainer.configs.algorithm import AlgorithmConfig
from trainer.data.experts import experts_of
from trainer.environments import resolve
from trainer.environments.calculator import calculate, calculator
from trainer.environments.guess import guess
from trainer.environments.policy import LimitReached, Limits, Misuse, Policy, Request
from trainer.environments.pool import Environments, _episodes
from trainer.environments.runner import Asked, Ended, Job, Runner
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.models import character_tokenizer
from trainer.online.roles import Rollout
from trainer.online.scored import advantages
from trainer.rewards.terms import Reward

FORGETS = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split(';')[-1] }}")
BARE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
USER = {"role": "user", "content": "1+1"}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(CHARACTERS)


def test_text_that_goes_on_lengthens_a_sequence_and_only_what_is_new_is_tokenized(tokenizer):
    async def talk(policy: Policy) -> None:
        first = await policy.generate("ab=")
        assert (first.text, first.finish) == ("cd", "stop")
        await policy.generate("ab=cd!?")
        await policy.generate()

    assert Talk(tokenizer, "cd", "e...", "f").run(talk) == ["ab=|cd<eos>|!?|e||f<eos>|"]


def test_none_begins_with_the_datas_prompt_and_ids_go_on_by_their_own(tokenizer):
    async def talk(policy: Policy) -> None:
        answer = await policy.generate()
        await policy.generate([*policy.prompt_ids, *answer.token_ids, 5, 6])
        await policy.generate([7, 8])

    made = Talk(tokenizer, "3", "4", "5")
    assert made.run(talk) == [f"12=|3<eos>|{tokenizer.decode([5, 6])}|4<eos>|", f"{tokenizer.decode([7, 8])}|5<eos>|"]


def test_a_history_that_was_rewritten_begins_another_sequence(tokenizer):
    async def talk(policy: Policy) -> None:
        await policy.generate("long history:")
        await policy.generate("short:")
        await policy.generate("short:b!")

    assert Talk(tokenizer, "a", "b", "c").run(talk) == ["long history:|a<eos>|", "short:|b<eos>|!|c<eos>|"]


def test_an_engine_need_not_tell_again_which_experts_tokens_took(tokenizer):
    made = Talk(tokenizer, "1", "2", "3")
    plain = made.policy._ask

    async def ask(request: Request) -> Turn:
        turn = await plain(request)
        turn.experts = np.zeros((len(request.token_ids) - request.known + len(turn.token_ids) - 1, 1, 1), np.uint8)
        return turn

    made.policy._ask = ask

    async def talk(policy: Policy) -> None:
        await policy.generate("12=")
        await policy.generate(observation="45")
        await policy.generate("9=")

    made.run(talk)
    first, second, other = made.requests
    assert first.known == other.known == 0, "a history that was rewritten is read anew"
    assert second.known == len(first.token_ids) + 1, "all but the last token of the answer, which was not read"
    episode = Episode(Prompt(0, made.policy.sequences[0].prompt_ids, {}), 0, made.policy.sequences[0].turns)
    record = experts_of(episode)
    assert record is not None and not record.any() and len(record) == len(episode.prompt.token_ids) + len(episode.response_ids) - 1


def test_requests_that_are_made_together_are_sequences_of_their_own(tokenizer):
    async def talk(policy: Policy) -> None:
        await policy.generate("q:")
        await asyncio.gather(policy.generate("q:a"), policy.generate("q:a"))

    assert Talk(tokenizer, "a", "b", "c").run(talk) == ["q:|a<eos>||b<eos>|", "q:a|c<eos>|"]


def test_messages_that_go_on_lengthen_a_sequence_by_what_the_template_writes_between(tokenizer):
    async def talk(policy: Policy) -> None:
        said = await policy.chat([USER])
        assert said == {"role": "assistant", "content": "3"}
        said = await policy.chat([USER, said, {"role": "user", "content": "no"}])
        await policy.chat([USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "no"}, said, USER])

    made = Talk(with_template(tokenizer, CHATML), "3", "4...", "2").run(talk)
    assert made == ["[user]1+1<eos>\n[assistant]|3<eos>|\n[user]no<eos>\n[assistant]|4|<eos>\n[user]1+1<eos>\n[assistant]|2<eos>|"]


def test_a_turn_that_ends_with_another_token_than_the_template_s_begins_another_sequence(tokenizer):
    async def talk(policy: Policy) -> None:
        said = await policy.chat([USER])
        await policy.chat([USER, said, {"role": "user", "content": "no"}])

    made = Talk(with_template(tokenizer, CHATML.replace("<eos>", "<bos>")), "3", "4").run(talk)  # it ends its turns with <eos>
    assert made == ["[user]1+1<bos>\n[assistant]|3<eos>|", "[user]1+1<bos>\n[assistant]3<bos>\n[user]no<bos>\n[assistant]|4<eos>|"]


def test_a_template_that_drops_older_thoughts_begins_another_sequence(tokenizer):
    async def talk(policy: Policy) -> None:
        said = await policy.chat([USER])
        await policy.chat([USER, said, {"role": "user", "content": "no"}])

    made = Talk(with_template(tokenizer, FORGETS), "hm;3", "4").run(talk)
    assert made == ["[user]1+1<eos>\n[assistant]|hm;3<eos>|", "[user]1+1<eos>\n[assistant]3<eos>\n[user]no<eos>\n[assistant]|4<eos>|"]


def test_a_template_without_the_token_that_ends_a_turn(tokenizer):
    async def talk(policy: Policy) -> None:
        said = await policy.chat([USER])
        await policy.chat([USER, said, {"role": "user", "content": "no"}])

    made = Talk(with_template(tokenizer, BARE), "3", "4").run(talk)
    assert made == ["user:1+1\nassistant:|3<eos>|\nuser:no\nassistant:|4<eos>|"]


def test_tool_calls_are_read_and_their_results_lengthen_the_sequence_as_it_was_written(tokenizer):
    written = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'  # without the blanks that the template would write

    async def talk(policy: Policy) -> None:
        said = await policy.chat([USER], tools=[TOOL])
        assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}} and said["content"] == "hm"
        await policy.chat([USER, said, {"role": "tool", "content": "2"}], tools=[TOOL])

    [made] = Talk(with_template(tokenizer, CHATML), f"hm {written}", "2").run(talk)
    assert f"|hm {written}<eos>|\n[tool]2<eos>\n[assistant]|2<eos>|" in made


@pytest.mark.parametrize("text", ["<tool_call>{nonsense}</tool_call>", '<tool_call>{"arguments": {}}</tool_call>', "no call"])
def test_what_is_no_tool_call_stays_text(text):
    assert Form().read(text) == {"role": "assistant", "content": text}


def misuse(talk: Talk, what: Callable[[Policy], Awaitable[Any]], error: type[Exception] = Misuse) -> str:
    with pytest.raises(error) as caught:
        talk.run(what)
    return str(caught.value)


def test_what_no_policy_could_answer_says_so(tokenizer):
    assert "model.tokenizer has no chat template" in misuse(Talk(tokenizer, "1"), lambda policy: policy.chat([USER]))
    bare = with_template(tokenizer, BARE)
    assert "chat template leaves tools out" in misuse(Talk(bare, "1"), lambda policy: policy.chat([USER], tools=[TOOL]))
    for none in ([], [{"role": "user"}], ["1+1"]):
        assert "a list of chat messages with role" in misuse(Talk(bare, "1"), lambda policy, none=none: policy.chat(none))  # type: ignore[misc]
    assert "the context has no tokens" in misuse(Talk(tokenizer, "1"), lambda policy: policy.generate(""))


def test_limits_are_of_turns_of_tokens_of_one_and_of_all(tokenizer):
    async def twice(policy: Policy) -> None:
        await policy.generate("a")
        await policy.generate()

    assert misuse(Talk(tokenizer, "b", "c", turns=1), twice, LimitReached) == "1 turns are over (environment.max_turns)"
    assert misuse(Talk(tokenizer, "b...", turns=9, tokens=2), twice, LimitReached) == "2 of 2 tokens are used (environment.max_tokens)"
    talk = Talk(tokenizer, "b", "c", tokens=12, turn_tokens=10)
    talk.run(twice)
    assert [request.max_tokens for request in talk.requests] == [10, 9]


# Episodes that go on together


def runner(tokenizer: PreTrainedTokenizerFast, function: Any, **limits: Any) -> Runner:
    given = Limits(**{"turns": 9, "turn_tokens": 5, "tokens": 50, "seconds": 120, **limits})
    return Runner(Reward("mine", function, batched=False, awaited=True), tokenizer, given)


def jobs(tokenizer: PreTrainedTokenizerFast, *prompts: str) -> list[Job]:
    ids: list[list[int]] = [tokenizer(text)["input_ids"] for text in prompts]  # type: ignore[misc]
    return [
        Job((i, 0), Prompt(i, mine, {"prompt": text, "answer": text[0]}), 3)
        for i, (mine, text) in enumerate(zip(ids, prompts, strict=True))
    ]


def turn(tokenizer: PreTrainedTokenizerFast, text: str) -> Turn:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    return Turn([*ids, tokenizer.eos_token_id], [-1.0] * (len(ids) + 1), "stop")  # type: ignore[list-item]


def played_out(made: Runner, tokenizer: PreTrainedTokenizerFast, answer: Callable[[Asked], str]) -> list[Ended]:
    ended: list[Ended] = []
    while made.tasks:
        asked, more = made.advance(whole=True)
        ended += more
        made.answer({each.name: turn(tokenizer, answer(each)) for each in asked})
    return sorted(ended, key=lambda each: each.key)


def test_a_round_has_all_turns_in_the_order_of_the_episodes_however_long_each_takes(tokenizer):
    async def slow(policy: Policy, row: dict[str, Any]) -> float:
        await asyncio.sleep(0.1 - int(row["answer"]) / 20)
        await policy.generate(row["prompt"])
        return float(row["answer"])

    made = runner(tokenizer, slow)
    made.begin(jobs(tokenizer, "0=", "1=", "2="))
    asked, ended = made.advance(whole=True)
    assert [each.key for each in asked] == [(0, 0), (1, 0), (2, 0)] and not ended
    made.answer({each.name: turn(tokenizer, "5") for each in asked})
    assert [each.reward for each in sorted(made.advance(whole=True)[1], key=lambda each: each.key)] == [0, 1, 2]


def test_without_a_whole_round_it_returns_with_the_first_and_at_the_end_of_its_slice(tokenizer):
    async def one_waits(policy: Policy, row: dict[str, Any]) -> float:
        await asyncio.sleep(0 if row["answer"] == "0" else 1000)
        await policy.generate(row["prompt"])
        return 1.0

    made = runner(tokenizer, one_waits, seconds=2000)
    made.begin(jobs(tokenizer, "0=", "1="))
    assert [each.key for each in made.advance(whole=False)[0]] == [(0, 0)]
    begin = time.monotonic()
    assert made.advance(whole=False) == ([], []) and time.monotonic() - begin < 100
    made.drop(1)
    made.drop(0)
    assert made.advance(whole=True) == ([], []) and not made.tasks


def test_seconds_stand_still_while_the_policy_writes(tokenizer):
    async def patient(policy: Policy, row: dict[str, Any]) -> float:
        await policy.generate(row["prompt"])
        return 1.0

    made = runner(tokenizer, patient, seconds=3)
    made.begin(jobs(tokenizer, "0="))
    asked, _ = made.advance(whole=True)
    time.sleep(4)
    made.answer({each.name: turn(tokenizer, "5") for each in asked})
    [ended] = made.advance(whole=True)[1]
    assert ended.mistake is None and ended.reward == 1


def test_guess_is_worth_less_with_every_turn(tokenizer):
    made = runner(tokenizer, guess)
    made.begin(jobs(tokenizer, "4:", "5:", "6:"))
    ended = played_out(made, tokenizer, lambda asked: "4" if asked.name[1] == 1 else "6")
    assert [each.reward for each in ended] == [1.0, 0.0, 0.75]
    assert ended[2].sequences[0].said == "4>6", "the observation is a part of the sequence"


def test_the_calculator_writes_the_result_behind_the_brackets(tokenizer):
    made = runner(tokenizer, calculator, turn_tokens=20)
    given = jobs(tokenizer, "17*45=")
    made.begin([Job(given[0].key, Prompt(0, given[0].prompt.token_ids, {"prompt": "17*45=", "answer": "765"}), 0)])
    asked, _ = made.advance(whole=True)
    assert asked[0].request.stop == ("]",)
    ids: list[int] = tokenizer("[17*45]", add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    made.answer({asked[0].name: Turn(ids, [-1.0] * len(ids), "stop")})
    [ended] = played_out(made, tokenizer, lambda _: "")
    assert (ended.reward, ended.metrics, ended.sequences[0].said) == (1.0, {"calculations": 1.0}, "[17*45]765")


@pytest.mark.parametrize(
    ("text", "value"), [("17*45", "765"), ("2+3*4", "14"), ("-(4-9)", "5"), ("2**9", "?"), ("open()", "?"), ("1+", "?"), ("9" * 200, "?")]
)
def test_a_calculation_has_whole_numbers_and_three_operations(text, value):
    assert calculate(text) == value


# What is learned


def test_an_episode_in_two_sequences_is_compared_once_and_both_get_its_advantage():
    def of(group: int, reward: float, part: int, size: int) -> Episode:
        return Episode(
            Prompt(group, [1], {}), group, [Turn([2] * size, [-1.0] * size), Turn([3]), Turn([4], [-1.0])], reward=reward, part=part
        )

    one = [of(0, 1.0, 0, 2), of(0, 0.0, 0, 1), of(1, 0.5, 0, 1), of(1, 0.0, 0, 1)]
    two = [one[0], of(0, 1.0, 1, 3), of(0, 1.0, 2, 1), *one[1:]]
    whole, _ = advantages(AlgorithmConfig(), Rollout.of(one), None, None, 0.0)
    parts, _ = advantages(AlgorithmConfig(), Rollout.of(two), None, None, 0.0)
    assert parts.tolist()[:4] == whole.tolist()[:4] and parts.tolist()[12:] == pytest.approx(whole.tolist()[4:])
    first = whole[0].item()
    assert parts.tolist()[4:12] == pytest.approx([first, first, first, 0, first, first, 0, first])


def test_an_episode_of_which_nothing_is_left_is_an_empty_one():
    [episode] = _episodes(Prompt(4, [1, 2], {}), Ended((7, 0), 1.0, {}, [], {"searches": 2.0}))
    assert (episode.group, episode.response_ids, episode.reward, episode.metrics) == (7, [], 1.0, {"searches": 2.0})
    assert Rollout.of([episode, episode]).flat.lengths_E.tolist() == [0, 0]


# Mistakes


@pytest.mark.parametrize(
    ("spec", "args", "said"),
    [
        (
            "gues",
            {},
            "environment.function: no 'gues'; known are guess, peek, calculator, search, screen, shell, task, tools, agent, verifiers, or ",
        ),
        ("gues", {}, "or package.module:function; did you mean 'guess'?"),
        ("support.environments:plain", {}, "support.environments:plain is not an async function; write async def rollout(policy, row)"),
        ("support.environments:nobody", {}, "support.environments has no 'nobody'"),
        ("nowhere.at_all:f", {}, "cannot import it"),
        ("guess", {"turn": 3}, "environment.args: got an unexpected keyword argument 'turn'"),
    ],
)
def test_a_function_that_is_none(spec, args, said):
    with pytest.raises(ConfigError) as caught:
        resolve(spec, args)
    assert said in str(caught.value)


PLAYED = ["model.path=gpt2", "data.path=package.module:rows", "environment.function=guess"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["reward.function=numeric"], "reward.function=numeric: what the environment returns is the reward"),
        (["reward.terms={a: {function: exact}}"], "what the environment returns is the reward; leave reward.function, args and terms out"),
        (["reward.overlong.buffer=5"], "reward.overlong.buffer=5: an episode has tokens that the policy did not write"),
        (["environment.max_tokens=10"], "environment.max_tokens=10, rollout.max_new_tokens=1024: an episode must have room for one turn"),
        (["environment.max_turns=0"], "environment.max_turns"),
        (["environment.on_limit=drop"], "environment.on_limit"),
        (["environment.max_turns=100"], "environment.max_turns=100, rollout.max_new_tokens=1024: the longest sequence (103424 tokens)"),
    ],
)
def test_settings_that_do_not_go_together(more, said):
    assert any(said in line for line in errors(*PLAYED, *more)), errors(*PLAYED, *more)


def test_settings_of_an_environment_are_refused_without_one():
    assert any("environment.max_turns" in line for line in errors("model.path=gpt2", "data.path=a:b", "environment.max_turns=3"))


def test_an_episode_has_room_for_its_turns_or_as_said():
    assert ok().max_response_tokens() == 1024
    assert ok("environment.function=guess", "environment.max_turns=3").max_response_tokens() == 3 * 1024
    assert ok("environment.function=guess", "environment.max_tokens=2000").max_response_tokens() == 2000


def test_failed_episodes_end_the_run_or_not(monkeypatch):
    from trainer.rewards.terms import Mistake

    pool = Environments.__new__(Environments)
    pool.config, pool.name = ok("environment.function=guess", "reward.on_error=drop"), "environment.function=guess"
    bad = Ended((0, 0), 0.0, {}, [], {}, Mistake(0, "raised ValueError()"))
    good = Ended((0, 1), 1.0, {}, [], {})
    prompt = Prompt(5, [1], {})
    assert [episode.failed for episode in pool.episodes([(prompt, bad), (prompt, good)])] == [True, False]
    bad.mistake.final = True  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"environment.function=guess on row 5: raised ValueError\(\)"):
        pool.episodes([(prompt, bad), (prompt, good)])
