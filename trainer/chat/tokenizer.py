"""The tokenizer of a model. No torch: transformers reads tokenizers without it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.configs.sections import PROCESSOR_FILES, SEEING, ModelConfig
from trainer.errors import ConfigError


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `config.tokenizer` or of the model's folder; `characters:ABC` makes one token per character."""
    name = config.tokenizer or config.path
    if config.vision != "off" and sees(config) and _has_processor(str(name)):
        return _with_processor(config, str(name))
    if name is None:
        raise ConfigError("model.tokenizer: needed with model.init; a folder, a hub name or characters:ABC")
    if name.startswith("characters:"):
        return character_tokenizer(name.removeprefix("characters:"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.tokenizer: {name}: {error}") from error
    return _padded(tokenizer)


def _padded(tokenizer: Any) -> PreTrainedTokenizerBase:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def sees(config: ModelConfig) -> bool:
    """Whether the model is one that can read pictures; False where its configuration cannot be read, said where it is loaded."""
    if config.init is not None:
        kind, able = config.init.get("model_type"), "vision_config" in config.init
    else:
        kind, able = (_shape if Path(config.path or "").exists() else _shape_of_hub)(config.path or "")
    return kind in SEEING or (config.vision == "on" and able)


def _shape(path: str) -> tuple[str, bool]:
    """Its `model_type`, and whether it has a tower."""
    try:
        own = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, KeyError):
        return "", False
    return own.model_type, hasattr(own, "vision_config")


_shape_of_hub = cache(_shape)  # asked once: a hub that is out of reach is waited for


def _has_processor(name: str) -> bool:
    """Whether a folder has one; without it, a model that could see is trained on texts. Of a hub's model transformers says it."""
    return not Path(name).is_dir() or any((Path(name) / file).is_file() for file in PROCESSOR_FILES)


def _with_processor(config: ModelConfig, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the model's processor, which `processor_of` finds. Raises ConfigError."""
    from transformers import AutoProcessor  # which imports torch

    from trainer.chat import processor

    if name.startswith("characters:"):
        kind = (config.init or {}).get("model_type")
        if kind not in processor.MADE:
            raise ConfigError(f"model.tokenizer={name}: made for {', '.join(processor.MADE)} alone; give a folder with {kind}'s processor")
        own = processor.make(character_tokenizer(name.removeprefix("characters:")), dict(config.init or {}))
    else:
        try:
            own = AutoProcessor.from_pretrained(name)
        except (OSError, ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
            raise ConfigError(f"model.tokenizer: {name}: its processor of pictures cannot be read: {error}") from error
    tokenizer = _padded(own.tokenizer)
    processor.attach(tokenizer, own)
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
