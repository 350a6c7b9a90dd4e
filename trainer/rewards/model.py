"""A reward that a model computes: a classifier of one output, held by a process of Ray's with GPUs of its own beside the run's.

This module loads neither torch nor Ray: the reward's process asks, the model's process loads them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

from trainer.episodes import Episode
from trainer.rewards.arguments import Count, ModelName, NotNegative, Positive
from trainer.rewards.terms import Mistake

ACTORS: dict[tuple[Any, ...], Any] = {}  # by what they were started with; one here, as a process computes one batch after another


async def reward_model(
    episodes: list[Episode],
    model: ModelName,
    gpus: NotNegative = 1.0,
    batch_size: Count = 16,
    max_tokens: Count = 4096,
    prompt: str = "prompt",
    start_seconds: Positive = 240.0,
) -> list[Any]:
    """What `model` (folder or hub name of an AutoModelForSequenceClassification) says to the column `prompt` and the answer.

    A conversation of more than `max_tokens` fails alone. A process that dies is started again by the next try.
    """
    from ray.exceptions import RayActorError, RayTaskError

    if missing := [e.prompt.index for e in episodes if prompt not in e.prompt.row]:
        raise Mistake(None, f"its argument prompt={prompt!r} is not a column of row {missing[0]}", final=True)
    key = (model, gpus, max_tokens)
    try:
        if key not in ACTORS:
            ACTORS[key] = await _started(model, gpus, max_tokens, start_seconds)
        pairs = [(e.prompt.row[prompt], e.text, e.prompt.pictures) for e in episodes]
        parts = [pairs[i : i + batch_size] for i in range(0, len(pairs), batch_size)]
        scored = await asyncio.gather(*(ACTORS[key].score.remote(part) for part in parts))
    except RayActorError as error:
        ACTORS.pop(key, None)
        raise RuntimeError(f"the process of the model died: {str(error).partition(chr(10))[0]}") from None
    except RayTaskError as error:
        raise RuntimeError(_cause(error)) from None
    return [ValueError(value) if isinstance(value, str) else value for part in scored for value in part]


async def _started(model: str, gpus: float, max_tokens: int, seconds: float) -> Any:
    """The actor, once it has loaded the model. Raises Mistake."""
    import ray
    from ray.exceptions import RayTaskError

    from trainer.cluster.placement import ELASTIC, ROLE

    if not ray.is_initialized():
        if not os.environ.get("RAY_ADDRESS"):
            raise Mistake(None, "its model needs a Ray cluster, and there is none", final=True)
        kept = signal.getsignal(signal.SIGTERM)
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        signal.signal(signal.SIGTERM, kept)  # Ray's would end this process, which the run does
    stays = {ROLE: f"!{ELASTIC}"}
    actor: Any = ray.remote(num_cpus=1, num_gpus=gpus, label_selector=stays)(RewardModel).remote(model, gpus, max_tokens)
    try:
        await asyncio.wait_for(_result(actor.load.remote()), seconds)
    except TimeoutError:
        ray.kill(actor)
        free = ray.available_resources()
        raise Mistake(
            None,
            f"its model was not up within {seconds:g} s (start_seconds): it asks for 1 CPU and {gpus:g} GPU on top of the run's, and "
            f"{free.get('CPU', 0):g} and {free.get('GPU', 0):g} are free",
            final=True,
        ) from None
    except RayTaskError as error:
        raise Mistake(None, f"its model {model} does not load: {_cause(error)}", final=True) from None
    return actor


def _cause(error: Any) -> str:
    """What was raised in the actor, without the traceback that Ray puts around it."""
    return f"{type(error.cause).__name__}: {str(error.cause).strip().partition(chr(10))[0]}"


async def _result(ref: Any) -> Any:
    return await ref


class RewardModel:
    """An actor. Prompt and answer go through the tokenizer's chat template; without one they are a pair of texts."""

    def __init__(self, model: str, gpus: float, max_tokens: int) -> None:
        self.path, self.gpus, self.max_tokens = str(Path(model).expanduser()) if model.startswith("~") else model, gpus, max_tokens

    def load(self) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from trainer.chat.processor import processor_of
        from trainer.chat.scorers import Scorer
        from trainer.chat.template import chat_of
        from trainer.chat.tokenizer import load_tokenizer, sees
        from trainer.cluster.placement import device_of
        from trainer.configs.sections import ModelConfig

        source = ModelConfig(path=self.path)
        seeing = sees(source)
        self.tokenizer = load_tokenizer(source) if seeing else AutoTokenizer.from_pretrained(self.path, padding_side="right")
        self.tokenizer.padding_side = "right"
        self.processor = processor_of(self.tokenizer)
        kind: Any = Scorer if seeing else AutoModelForSequenceClassification
        self.model = kind.from_pretrained(self.path, dtype="auto").eval()
        if getattr(self.model.config.get_text_config(), "attn_logit_softcapping", None) is not None:  # Gemma 2: sdpa leaves it out
            self.model.set_attn_implementation("eager")
        if self.model.config.num_labels != 1:
            raise ValueError(f"it has {self.model.config.num_labels} outputs, a reward model has 1")
        self.chat = chat_of(self.tokenizer)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id  # by which it finds the last token
        self.model.to(device_of(self.gpus, "reward.args.gpus"))

    def score(self, pairs: list[tuple[Any, str, tuple[Any, ...]]]) -> list[float | str]:
        """A number for each prompt, answer, and the prompt's pictures, or why there is none."""
        import torch

        encoded = [self._encoded(*pair) for pair in pairs]
        lengths = [len(each["input_ids"]) for each in encoded]
        fits = [i for i, length in enumerate(lengths) if length <= self.max_tokens]
        short = [i for i in fits if not pairs[i][2]]
        found: list[float | str] = [f"{length} tokens, more than max_tokens={self.max_tokens}" for length in lengths]
        if short:
            batch = self.tokenizer.pad([encoded[i] for i in short], return_tensors="pt").to(self.model.device)
            with torch.inference_mode():
                rewards = self.model(**batch).logits[:, 0].float().tolist()
            for i, reward in zip(short, rewards, strict=True):
                found[i] = reward
        for i in set(fits) - {*short}:
            found[i] = self._seen(encoded[i]["input_ids"], pairs[i][2])
        return found

    def _seen(self, ids: list[int], pictures: tuple[Any, ...]) -> float:
        """Alone, as pictures differ in shape."""
        import torch

        assert self.processor, "or its pictures would have been refused"
        while ids[-1] == self.tokenizer.pad_token_id:
            ids = ids[:-1]
        ids_1L = torch.tensor([ids], device=self.model.device)
        fed = self.processor.fed(ids_1L, pictures, self.model.config)
        dtype = self.model.dtype
        fed = {name: tensor.to(ids_1L.device, dtype if tensor.is_floating_point() else None) for name, tensor in fed.items()}
        with torch.inference_mode():
            return float(self.model(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), **fed).logits[0, 0])

    def _encoded(self, prompt: Any, text: str, pictures: tuple[Any, ...]) -> Any:
        from trainer.chat.learned import judged

        return judged(self.chat, self.tokenizer, prompt, text, pictures)
