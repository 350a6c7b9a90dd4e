import asyncio
import shutil
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from trainer import weights
from trainer.configs.ppo import PpoConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.rollout import Sampling, sample
from trainer.rollout.hf import HfEngine, _nucleus

PROMPTS = [Prompt(0, [3, 4, 5], {}), Prompt(1, [13, 6, 6, 7, 8, 9, 14], {}), Prompt(2, [10], {})]


def engine(folder, **rollout) -> HfEngine:
    config = PpoConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"path": "a:b", "max_prompt_tokens": 16},
            "rollout": {"engine": "hf", "max_new_tokens": 12, "max_sequences": 64} | rollout,
            "placement": {"gpus_per_rank": 0},
        }
    )
    return HfEngine(config, str(folder), 0)


def drawn(engine: HfEngine, samples: int, seed: int, groups: tuple[int, ...] = (0, 1, 2), **how: Any) -> list[Episode]:
    """A step's batch."""
    return asyncio.run(sample(engine, PROMPTS, list(groups), Sampling(12, samples=samples, **how), seed))


def asked(engine: HfEngine, *requests: tuple[list[int], Sampling]) -> list[list[Turn]]:
    """Requests that are made at once."""

    async def ask() -> list[list[Turn]]:
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    return asyncio.run(ask())


def logprobs_of(lm, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits = lm(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_log_probabilities_are_those_of_the_model_though_prompts_differ_in_length_and_rows_leave_the_batch(tiny_model):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    episodes = drawn(engine(tiny_model), 16, seed=3, temperature=0.8)
    assert [e.group for e in episodes] == [0] * 16 + [1] * 16 + [2] * 16
    lengths = {len(e.response_ids) for e in episodes}
    assert len(lengths) > 3, "answers of one length would not show that rows leave the batch"
    for episode in episodes:
        expected = logprobs_of(lm, episode.prompt.token_ids, episode.response_ids, 0.8)
        torch.testing.assert_close(torch.tensor(episode.logprobs), expected, atol=1e-4, rtol=1e-4)
        assert episode.finished == (episode.response_ids[-1] == 1)
        assert len(episode.response_ids) == 12 or episode.finished


def test_greedy_answers_are_those_of_transformers(tiny_model):
    lm: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    episodes = drawn(engine(tiny_model), 1, seed=0, temperature=0.0)
    for episode in episodes:
        ids = torch.tensor([episode.prompt.token_ids])
        expected = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
        assert episode.response_ids == expected[0, ids.size(1) :].tolist()


def test_answers_end_where_the_chat_template_ends_a_turn(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<bos>{% endfor %}")
    built = engine(folder)
    assert built.ends.tolist() == [1, 2]
    ended = [e for e in drawn(built, 64, seed=0, temperature=2.0) if e.finished]
    assert {e.response_ids[-1] for e in ended} == {1, 2}
    assert not any({1, 2} & {*e.response_ids[:-1]} for e in ended)


def test_a_seed_gives_the_same_answers_and_another_seed_others(tiny_model):
    built = engine(tiny_model)
    first, again, other = ([e.response_ids for e in drawn(built, 8, seed)] for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_batches_larger_than_the_rollout_engine_are_cut(tiny_model):
    episodes = drawn(engine(tiny_model, max_sequences=4), 4, seed=0, groups=(7, 8, 9))
    assert [e.group for e in episodes] == [7] * 4 + [8] * 4 + [9] * 4
    assert [e.prompt.index for e in episodes] == [0] * 4 + [1] * 4 + [2] * 4


def test_texts_are_the_decoded_answers(tiny_model):
    built = engine(tiny_model)
    for episode in drawn(built, 8, seed=1):
        assert episode.text == built.tokenizer.decode(episode.response_ids, skip_special_tokens=True)
    assert built.decode([[3, 4, 1]]) == ["01"]


def test_a_batch_runs_as_many_rows_as_the_engine_has_room_for(tiny_model, monkeypatch):
    built = engine(tiny_model, max_sequences=10)
    rows: list[int] = []
    begin = built._begin
    monkeypatch.setattr(built, "_begin", lambda: [begin(), built.batch and rows.append(len(built.batch.rows))])
    asked(built, *[(PROMPTS[0].token_ids, Sampling(3, samples=4))] * 5)
    asked(built, (PROMPTS[0].token_ids, Sampling(3, samples=16)), (PROMPTS[0].token_ids, Sampling(3)))
    assert rows == [8, 8, 4, 16, 1]


def test_requests_with_other_parameters_wait_for_the_next_batch_and_get_their_own(tiny_model):
    built = engine(tiny_model)
    ids = PROMPTS[1].token_ids
    short, greedy, (again,), three = asked(
        built, (ids, Sampling(2)), (ids, Sampling(12, temperature=0.0)), (ids, Sampling(12, temperature=0.0)), (ids, Sampling(2, samples=3))
    )
    assert len(short[0].token_ids) <= 2
    assert [turn.token_ids for turn in greedy] == [again.token_ids]
    assert len(three) == 3


def test_a_request_with_a_seed_draws_alike_whoever_is_in_its_batch(tiny_model):
    built = engine(tiny_model)
    mine = (PROMPTS[1].token_ids, Sampling(12, samples=4, seed=40))
    (alone,) = asked(built, mine)
    others = [(prompt.token_ids, Sampling(12, samples=9, seed=seed)) for prompt, seed in zip(PROMPTS, (7, 8, None), strict=True)]
    *_, among, later = asked(built, *others, mine, (PROMPTS[1].token_ids, Sampling(12, samples=4, seed=41)))
    assert [turn.token_ids for turn in among] == [turn.token_ids for turn in alone]
    assert len({tuple(turn.token_ids) for turn in alone}) > 1
    assert [turn.token_ids for turn in later[:3]] == [turn.token_ids for turn in alone[1:]], "sample i draws from seed + i"


def test_a_text_ends_an_answer_that_is_otherwise_the_same(tiny_model):
    built = engine(tiny_model)
    first, second = built.decode([[7], [5, 6]])
    [free] = asked(built, (PROMPTS[1].token_ids, Sampling(12, samples=200, seed=40)))
    [cut] = asked(built, (PROMPTS[1].token_ids, Sampling(12, samples=200, seed=40, stop=(first, second))))
    ended = 0
    for whole, turn in zip(free, cut, strict=True):
        ids, n = turn.token_ids, len(turn.token_ids)
        assert ids == whole.token_ids[:n] and turn.logprobs == pytest.approx(whole.logprobs[:n], abs=1e-5)
        assert not any(7 in ids[:i] or ids[i - 2 : i] == [5, 6] for i in range(n))
        by_text = ids[-1] == 7 or ids[-2:] == [5, 6]
        ended += by_text
        assert by_text or n == len(whole.token_ids)
        assert turn.finish == ("stop" if by_text else whole.finish)
    assert 20 < ended < 200


def test_every_token_that_the_model_ends_turns_with_ends_a_turn(tiny_model, tmp_path):
    folder = tmp_path / "more-ends"
    shutil.copytree(tiny_model, folder)  # whose tokenizer ends turns with token 1
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(folder)
    episodes = drawn(engine(folder), 32, seed=3)
    last = [e.response_ids[-1] for e in episodes]
    assert {1, 5, 6} <= set(last)
    for episode in episodes:
        assert not {1, 5, 6} & set(episode.response_ids[:-1])
        assert episode.finished == (episode.response_ids[-1] in {1, 5, 6})
        assert episode.finished or len(episode.response_ids) == 12


def test_turns_carry_the_version_of_the_weights(tiny_model):
    built = engine(tiny_model)
    built.version = 7
    assert {turn.version for episode in drawn(built, 2, seed=0) for turn in episode.turns} == {7}


def test_answers_at_work_go_on_with_weights_that_come_meanwhile(tiny_model, monkeypatch):
    built = engine(tiny_model)
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for number, prompt in enumerate(PROMPTS):
        built.ask(number, prompt.token_ids, Sampling(12, samples=8))
    assert built.work(0) == {}
    for _ in range(4):
        built._step()
    newer = [(name, parameter + 0.1) for name, parameter in lm.named_parameters()]
    monkeypatch.setattr(weights, "receive", lambda *_: [newer])
    built.plan, built.group = (), weights.Group(None, torch.device("cpu"))
    built.receive(version=5)
    answers = built.work(60)
    assert answers.keys() == {0, 1, 2} and built.work(60) == {}, "each answer is returned once, and without a request it does not wait"
    lengths = set()
    for prompt in PROMPTS:
        for turn in answers[prompt.index]:
            assert turn.versions == [0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 5][: len(turn.token_ids)]
            own = logprobs_of(lm, prompt.token_ids, turn.token_ids)
            torch.testing.assert_close(torch.tensor(turn.logprobs[:4]), own[:4], atol=1e-4, rtol=1e-4)
            assert len(turn.token_ids) <= 4 or not torch.allclose(torch.tensor(turn.logprobs[4:]), own[4:], atol=1e-3)
            lengths.add(len(turn.token_ids))
    assert min(lengths) <= 4 < max(lengths)


def test_a_prompt_without_tokens_is_refused(tiny_model):
    with pytest.raises(ValueError, match="a prompt without tokens"):
        asked(engine(tiny_model), ([], Sampling(2)))


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p():
    logprobs = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log()
    assert _nucleus(logprobs, 0.7).isfinite().tolist() == [[True, False, True, False]]
    assert _nucleus(logprobs, 0.4).isfinite().tolist() == [[True, False, False, False]]
    assert _nucleus(logprobs, 1.0).isfinite().all()
