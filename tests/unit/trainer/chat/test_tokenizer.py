"""Text that a tokenizer has no token for is refused, whatever its kind."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.chat.tokenizer import load_tokenizer
from trainer.configs.sections import ModelConfig
from trainer.data.prompts import require_known
from trainer.errors import ConfigError

WORDS = {"[UNK]": 0, "1": 1, "2": 2, "<eos>": 3}


def words() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<eos>", pad_token="<eos>")


def pieces() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], unk_id=0))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<eos>", pad_token="<eos>")


@pytest.mark.parametrize("make", [words, pieces])
def test_a_character_without_a_token_is_named(make):
    tokenizer = make()
    for text, refused in (("1 2" if make is words else "12", False), ("1 x", True)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if refused:
            with pytest.raises(ConfigError, match=r"^data\.prompt: a:1: model\.tokenizer has no token for .*; remove it, or give a model"):
                require_known(text, ids, tokenizer, "data.prompt: a:1")
        else:
            require_known(text, ids, tokenizer, "data.prompt: a:1")


def test_the_token_of_what_is_unknown_may_be_written_out():
    require_known("1 [UNK]", [1, 0], words(), "data.prompt: a:1")


def test_what_is_added_to_characters_is_known():
    tokenizer = load_tokenizer(ModelConfig(init={}, tokenizer="characters:1 "))
    require_known("1 1", tokenizer("1 1")["input_ids"], tokenizer, "data.prompt: a:1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no token for '2'; add it to characters:, or remove it"):
        require_known("1 2", tokenizer("1 2")["input_ids"], tokenizer, "data.prompt: a:1")  # type: ignore[arg-type]
