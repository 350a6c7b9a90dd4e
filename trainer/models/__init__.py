"""Language models and tokenizers of transformers: loaded, checked, exported. Runs in ranks and rollout engines."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from trainer.chat.processor import processor_of
from trainer.chat.scorers import Scorer
from trainer.chat.template import stops
from trainer.chat.tokenizer import character_tokenizer as character_tokenizer
from trainer.chat.tokenizer import load_tokenizer, sees
from trainer.checkpoints.folders import fsync
from trainer.configs.sections import ModelConfig
from trainer.errors import ConfigError
from trainer.models import attention, lora, quantize, vision

transformers_logging.disable_progress_bar()  # one bar per process and model is noise in a job's log

SAID = 600  # characters of an error of transformers
SAMPLED = 256  # numbers of a frozen weight that go into a fingerprint
UNLISTED = {"qwen3_moe": {"head_dim": None}}  # settings that a family's model reads, and its configuration does not list


def load_lm(
    config: ModelConfig, seed: int, device: torch.device, train: bool = False, classifier: bool = False, home: torch.device | None = None
) -> Any:
    """The language model of `config.path`, or one with random weights drawn from `seed`; without dropout, in train mode too.

    With `config.lora` its adapters are in it, and nothing else is trainable, and linear layers may be quantized; what `config.freeze`
    names is not trainable either. With `classifier` it is one of one output, whose head is drawn from `seed` where the path has none.
    It will compute on `device`; its weights stay in `home` where one is given, for who moves them there in parts.
    Raises ConfigError when transformers cannot read the path or the configuration, when the head is not one that this trainer applies, or
    for adapters that it has no layers for.
    """
    kernel = "sdpa" if config.attention == "auto" else config.attention
    settings: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "attn_implementation": kernel}
    if config.lora.quantize:
        settings |= quantize.settings(settings["dtype"], device)
    kind: Any = _kind(config, classifier)
    labels = {"num_labels": 1} if classifier else {}
    if classifier or not config.path:
        torch.manual_seed(seed)
    try:
        if config.path:
            lm = _loaded(kind, config, settings) if not classifier else kind.from_pretrained(config.path, **settings, **labels)
        else:
            lm = kind.from_config(_init_config(config, **labels), **settings)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        if config.attention == "auto" and "scaled_dot_product_attention" in str(error):  # said before weights are read
            return load_lm(config.model_copy(update={"attention": "eager"}), seed, device, train, classifier, home)
        raise _unread(config, error) from error
    if classifier:
        _require_score(lm, config)
    else:
        _require_head(lm, config)
    _require_steady(lm, config)
    _require_generation(lm, config)
    attention.fit(lm, config, device)
    _remove_dropout(lm)
    if config.lora.quantize:
        quantize.settle(lm)
    if config.lora.rank:
        lora.add(lm, config.lora, seed)
    freeze(lm, config.freeze)
    lm.train(train)  # transformers checkpoints nothing in eval mode, in which models are loaded
    if train and config.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return lm.to(home or device)  # type: ignore[arg-type]


def _unread(config: ModelConfig, error: Exception) -> ConfigError:
    """Of transformers' words in one line; it lists all families that it knows where one is of another kind."""
    what = f"model.{'path' if config.path else 'init'}: {config.path or config.init}"
    why = " ".join(str(error).split()) or repr(error)
    if "Unrecognized configuration class" in why:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = AutoConfig.from_pretrained(config.path or "")
            why = f"transformers has no class for {known.model_type} that is asked for here"
            if hasattr(known, "vision_config") and not sees(config):
                why = f"{known.model_type} reads pictures and is none of the tested families; model.vision=on tries it"
    return ConfigError(f"{what}: {textwrap.shorten(why, SAID, placeholder=' ...')}")


def _kind(config: ModelConfig, classifier: bool) -> Any:
    if classifier:
        return Scorer if sees(config) else AutoModelForSequenceClassification
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def without_weights(config: ModelConfig, classifier: bool = False) -> Any:
    """The language model that `load_lm` gives, on the device meta: its configuration and the names of its parameters.

    Raises ConfigError where `load_lm` would, without reading weights.
    """
    kind: Any = _kind(config, classifier)
    labels = {"num_labels": 1} if classifier else {}
    try:
        found = AutoConfig.from_pretrained(config.path, **labels) if config.path else _init_config(config, **labels)
        with torch.device("meta"):
            lm = kind.from_config(found, dtype=getattr(torch, config.dtype))
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _unread(config, error) from error
    if config.path and not classifier:
        with contextlib.suppress(OSError):  # models without one have their defaults
            lm.generation_config = GenerationConfig.from_pretrained(config.path)
        _require_generation(lm, config)
    if config.lora.rank:
        lora.add(lm, config.lora, 0)
    freeze(lm, config.freeze)
    return lm


def unsampled(config: ModelConfig) -> list[int]:
    """`vision.unsampled` of the model that `load_lm` gives, without its weights."""
    known = AutoConfig.from_pretrained(config.path) if config.path else _init_config(config)
    return vision.unsampled(without_weights(config)) if hasattr(known, "vision_config") else []


def sight(lm: Any, tokenizer: PreTrainedTokenizerBase) -> vision.Sight | None:
    """What feeds a model its pictures; None of a text model's. Raises ConfigError for one that is called in another way than is known."""
    processor = processor_of(tokenizer)
    if not processor or not vision.reads_pictures(lm):
        return None
    try:
        return vision.Sight(lm, processor)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        off = "model.vision=off trains it on text only"
        raise ConfigError(f"model.vision: {lm.config.model_type} is not supported with pictures: {error}; {off}") from error


def freeze(lm: nn.Module, parts: list[str]) -> None:
    """Leave parameters as they are whose names have one of these parts: `mlp.gate`, the routers of a mixture of experts, or `layers.0`.

    Raises ConfigError for one that no parameter has, or where nothing is left to train.
    """
    parameters = dict(lm.named_parameters())
    for part in parts:
        found = [parameter for name, parameter in parameters.items() if f".{part}." in f".{name}."]
        if not found:
            known = list(dict.fromkeys(word for name in parameters for word in name.split(".") if not word.isdecimal()))
            near = difflib.get_close_matches(part, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"their names are made of {', '.join(known)}"
            raise ConfigError(f"model.freeze: {part}: no parameter of the model has that in its name; {hint}")
        for parameter in found:
            parameter.requires_grad_(False)
    if parts and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"model.freeze={parts}: all parameters are frozen; leave some to train")


def _loaded(kind: Any, config: ModelConfig, settings: dict[str, Any]) -> Any:
    """transformers draws weights that a folder lacks, with a warning, and what the model says then is noise. Raises ConfigError."""
    lm, found = kind.from_pretrained(config.path, **settings, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        some = ", ".join(missing[:2]) + (", ..." if len(missing) > 2 else "")
        text = f"its files lack {len(missing)} weights of {type(lm).__name__} ({some}); they are incomplete, or of another class"
        raise ConfigError(f"model.path: {config.path}: {text}")
    return lm


def _require_head(lm: Any, config: ModelConfig) -> None:
    if lm.get_output_embeddings() is None:
        name = f"model.path={config.path}" if config.path else "model.init"
        kind = lm.config.get_text_config().model_type
        raise ConfigError(f"{name}: {kind} has no output head; a causal language model is needed")


def _require_generation(lm: Any, config: ModelConfig) -> None:
    """transformers loads settings of generation that it refuses to save, after the last step: a temperature without do_sample is common,
    and gets that. Raises ConfigError for others."""
    settings = getattr(lm, "generation_config", None)
    if settings is None:
        return
    kept = settings.do_sample
    for settings.do_sample in (kept, True):
        try:
            settings.validate(strict=True)
        except ValueError as error:
            wrong = error
        else:
            return
    settings.do_sample = kept
    raise ConfigError(f"model.path={config.path}: generation_config.json is not one that transformers saves: {wrong}") from None


def _require_score(lm: Any, config: ModelConfig) -> None:
    if not isinstance(getattr(lm, "score", None), nn.Linear):
        name = f"model.path={config.path}" if config.path else "model.init"
        raise ConfigError(f"{name}: a classifier of {lm.config.model_type} has no linear head over its last token; take a decoder model")


def _require_steady(lm: Any, config: ModelConfig) -> None:
    """Phi-3.5-MoE's experts are drawn at random in train mode, by scores that its jitter cuts off: log-probabilities cannot be compared."""
    if lm.config.get_text_config().model_type == "phimoe":
        name = f"model.path={config.path}" if config.path else "model.init"
        raise ConfigError(f"{name}: phimoe is not supported: it draws experts at random while it learns")


def _remove_dropout(lm: nn.Module) -> None:
    """Old and new log-probabilities are compared token by token: what differs must be the update, not noise of the forward pass."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # attention_dropout, drop_prob of whole layers, router jitter: without a module
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _init_config(config: ModelConfig, **also: Any) -> PreTrainedConfig:
    """The architecture of `model.init`. transformers would take any key, so a misspelt one is refused here."""
    given = dict(config.init or {})
    model_type = given.pop("model_type", None)
    if model_type is None:
        raise ConfigError("model.init: model_type is missing; such as qwen2 or llama")
    known = AutoConfig.for_model(model_type).to_dict() | UNLISTED.get(model_type, {})
    if sees(config):
        given = vision.init(given, known, tokenizer := load_tokenizer(config))
        return AutoConfig.for_model(model_type, **given, **also)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(f"model.init.{key}: {model_type} has no such setting" + (f"; did you mean {near[0]}?" if near else ""))
    tokenizer = load_tokenizer(config)
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "eos", "bos")}
    return AutoConfig.for_model(model_type, **{"vocab_size": len(tokenizer), **ids, **given, **also})


def export(
    lm: Any, weights: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path, files: Mapping[str, bytes] | None = None
) -> None:
    """Write a Hugging Face model folder that transformers, vLLM and this trainer load. It is complete or not there.

    Its generation_config.json lists all tokens that end an answer. `files` lie beside it, by name; those of adapters in a folder.
    """
    with drafted(lm, tokenizer, folder, files) as draft:
        lm.save_pretrained(draft, state_dict=weights, safe_serialization=True)


@contextlib.contextmanager
def drafted(lm: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, files: Mapping[str, bytes] | None) -> Iterator[Path]:
    """A folder to write weights to, which becomes `folder` with all else of a model's once they are there."""
    if (settings := getattr(lm, "generation_config", None)) is not None:
        first, *more = stops(tokenizer, settings.eos_token_id)
        settings.eos_token_id = [first, *more] if more else first
    draft = folder.with_name(f"tmp_{folder.name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(draft, ignore_errors=True)
    yield draft
    processor = processor_of(tokenizer)
    (processor.own if processor else tokenizer).save_pretrained(draft)
    for name, content in (files or {}).items():
        (draft / name).parent.mkdir(exist_ok=True)
        (draft / name).write_bytes(content)
    for path in (*draft.rglob("*"), draft):
        fsync(path)
    replaced = folder.with_name(f"tmp_replaced_{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():  # a removal that is cut short must not leave a part of it under its name
        folder.rename(replaced)
    draft.rename(folder)
    fsync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def saved_tensors(lm: nn.Module) -> dict[str, torch.Tensor]:
    """Of a model's folder, by name, module by module: parameters, a shared one once, and buffers that no optimizer trains, such as the
    biases by which DeepSeek-V3 chooses experts."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, module in lm.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in seen and name not in module._non_persistent_buffers_set:
                seen.add(id(tensor))
                found[f"{path}.{name}" if path else name] = tensor
    return found


def shapes(lm: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of parameters by name, however they are sharded."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in lm.named_parameters()}


def fingerprint(shapes: Mapping[str, tuple[int, ...]], frozen: Iterable[torch.Tensor] = ()) -> str:
    """Architecture as a hash of parameter names and shapes: a checkpoint of another model is refused by it.

    `frozen` weights are in no checkpoint, so some numbers of each are hashed besides.
    """
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode())
    for tensor in frozen:
        some = tensor.reshape(-1)[:: max(1, tensor.numel() // SAMPLED)]
        digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
