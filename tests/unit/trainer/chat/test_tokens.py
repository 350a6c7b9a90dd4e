"""Texts that go on: without an end that tokenizers put behind, and without the space that they put before."""

from __future__ import annotations

from typing import Any

import pytest
from support.chats import LETTERS, spaced_tokenizer
from support.talks import Talk
from tokenizers.processors import TemplateProcessing

from trainer.chat.tokens import alone, following, within
from trainer.environments.policy import Policy
from trainer.models import character_tokenizer

TEXTS = ["12", "12<eos>", " 12", "a\n", "\n", "<eos>"]


def ending(single: str) -> Any:
    """A tokenizer that adds these around a text."""
    made = character_tokenizer(LETTERS)
    ids: Any = [(token, made.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>")]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=ids)
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_an_end_that_the_tokenizer_adds_is_left_out_and_one_in_the_text_is_not(text):
    plain = within(text, ending("$A"))
    for single, before in (("$A <eos>", []), ("<bos> $A <eos>", [2]), ("<bos> $A", [2]), ("$A <eos> <eos>", [])):
        assert alone([text, text], ending(single)) == [[*before, *plain]] * 2


def test_an_empty_text_has_no_tokens_and_nothing_is_nothing():
    assert alone([""], ending("$A <eos>")) == [[]]
    assert alone([], ending("$A <eos>")) == []
    assert following("", ending("$A")) == []


@pytest.mark.parametrize("scheme", ["first", "always", "prepend"])
@pytest.mark.parametrize("text", ["x", " x", "\nx", ".x", "xx", "\n"])
def test_a_text_that_follows_has_no_space_of_the_tokenizer_before_it(scheme, text):
    tokenizer = spaced_tokenizer(scheme)
    assert tokenizer.convert_ids_to_tokens(following(text, tokenizer)) == list(text.replace(" ", "▁"))
    assert text[0] == " " or len(within(text, tokenizer)) > len(text), "alone it would have one"


def test_an_observation_follows_on_a_turn_without_a_space():
    async def talk(policy: Policy) -> None:
        await policy.generate("1=")
        await policy.generate(observation="2=")

    made = Talk(spaced_tokenizer("always"), "1", "2")
    made.run(talk)
    assert str(made.tokenizer.decode(made.requests[1].token_ids)).replace("<eos>", "") == "1= 12="


def test_a_context_of_the_policy_is_without_an_end_behind_it():
    made = Talk(ending("$A <eos>"), "1", "2")

    async def talk(policy: Policy) -> None:
        await policy.generate("1=")

    made.run(talk)
    assert made.tokenizer.decode(made.requests[0].token_ids) == "1="
