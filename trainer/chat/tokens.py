"""Token ids of texts that stand alone, and of texts that follow on others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

BEFORE = ("\n", ".", "x")  # what a text is put behind, to see how it is tokenized there; the first that stays a token of its own


def alone(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Of each text with what the tokenizer puts before it, such as the first token of a sequence, and without what some put behind: an end,
    which these texts go on from."""
    if not texts:
        return []
    encoded: Any = tokenizer(list(texts), return_special_tokens_mask=True)
    return [_open(ids, added) for ids, added in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)]


def _open(ids: list[int], added: list[int]) -> list[int]:
    end = len(ids)
    while end and added[end - 1]:
        end -= 1
    return ids[:end]


def within(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Of a text that has all of its special tokens itself, as a chat template writes it."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []  # type: ignore[return-value]


def each_within(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The same of many, at once."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []  # type: ignore[return-value]


def following(text: str, tokenizer: PreTrainedTokenizerBase, before: str = "") -> list[int]:
    """Of a text behind another one, `before` or any: tokenizers like Llama 2's begin whatever they are given with a space."""
    found = within(text, tokenizer)
    if not text or within("\nx", tokenizer) == within("\n", tokenizer) + within("x", tokenizer):
        return found
    for each in filter(None, (before, *BEFORE)):
        first, both = within(each, tokenizer), within(each + text, tokenizer)
        if both[: len(first)] == first:
            return both[len(first) :]
    return found
