"""The tokenizer of a model. No torch: transformers reads tokenizers without it."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.configs.sections import ModelConfig
from trainer.errors import ConfigError


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `config.tokenizer` or of the model's folder; `characters:ABC` makes one token per character."""
    name = config.tokenizer or config.path
    if name is None:
        raise ConfigError("model.tokenizer: needed with model.init; a folder, a hub name or characters:ABC")
    if name.startswith("characters:"):
        return character_tokenizer(name.removeprefix("characters:"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.tokenizer: {name}: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token per ASCII character: enough for tasks over a small alphabet, without a download. Raises ConfigError for another character.

    By bytes as GPT-2 has them, space as "Ġ": transformers loads an exported Qwen's tokenizer as that, whatever its files say.
    """
    if not characters.isascii():
        wrong = next(letter for letter in characters if not letter.isascii())
        raise ConfigError(f"model.tokenizer=characters:{characters}: {wrong!r} is not ASCII; give a tokenizer's folder for other letters")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [level.pre_tokenize_str(letter)[0][0] for letter in dict.fromkeys(characters)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = level  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")
