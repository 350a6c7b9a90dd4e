"""A rollout engine on transformers alone: runs wherever torch runs, and is the faster one for very small models.

Requests with the same parameters run as one batch, to its end; those that come meanwhile are the next one. A prompt is read once for all
its samples, and finished sequences leave the batch, so that the cost follows the mean length of the answers and not the longest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from trainer import weights
from trainer.chat.template import stops
from trainer.cluster import placement
from trainer.cluster.spans import span
from trainer.configs.ppo import PpoConfig
from trainer.episodes import Turn
from trainer.models import load_lm, load_tokenizer, routers, saved_tensors, sight, vision
from trainer.models.checkpoint_names import rows_of
from trainer.rollout import Sampling
from trainer.rollout.stepped import SteppedEngine

# A batch is compacted when at least this share of its rows has finished: copying the cache costs about one step.
COMPACT_AT = 0.25
TRIED = 13  # tokens with which the model's routers are looked for


@dataclass(frozen=True, slots=True)
class _Request:
    number: int
    prompt_ids: list[int]
    sampling: Sampling

    def runs_with(self, other: _Request) -> bool:
        """Whether both may be in one batch: how long and from what its rows are sampled is the same for all of them."""
        mine, its = self.sampling, other.sampling
        return (mine.max_tokens, mine.temperature, mine.top_p, mine.stop) == (its.max_tokens, its.temperature, its.top_p, its.stop)


@dataclass
class _Batch:
    """Answers at work. R rows of answers that go on, of all S; finished ones leave now and then."""

    requests: list[_Request]
    draws: torch.Generator | list[torch.Generator]
    tokens: torch.Tensor  # [S, max_tokens], -1 after an answer's end
    scores: torch.Tensor  # their log-probabilities
    rows: torch.Tensor  # [R], of tokens and scores
    alive: torch.Tensor  # [R]
    logits: torch.Tensor  # [R, vocabulary] of the next tokens
    cache: DynamicCache
    mask: torch.Tensor | None
    position: torch.Tensor  # [R] of the next tokens
    version: int
    switches: list[tuple[int, int]] = field(default_factory=list)  # as of Turn
    length: int = 0
    stopped: set[int] = field(default_factory=set)  # rows of S that a text of Sampling.stop ended
    # Experts that tokens took: in each request's prompt, as far as it asks, and in answers [S, max_tokens, layers, experts of a token].
    prompts: list[np.ndarray | None] = field(default_factory=list)
    experts: torch.Tensor | None = None

    def keep(self, rows: torch.Tensor) -> None:
        """These alone, by their places among the R."""
        self.cache.batch_select_indices(rows)
        self.rows, self.position, self.alive = self.rows[rows], self.position[rows], self.alive[rows]
        self.mask = self.mask[rows] if self.mask is not None else None
        self.draws = [self.draws[i] for i in rows.tolist()] if isinstance(self.draws, list) else self.draws

    def turns(self, ends: list[int]) -> list[Turn]:
        """All answers, request by request."""
        lengths = (self.tokens >= 0).sum(1).tolist()
        before = [self.prompts[i] if self.prompts else None for i, each in enumerate(self.requests) for _ in range(each.sampling.samples)]
        return [
            Turn(
                ids[:n],
                logprobs[:n],
                "stop" if ids[n - 1] in ends or row in self.stopped else "length",
                self.version,
                [at for at in self.switches if at[0] < n],
                experts=self._experts(before[row], row, n),
            )
            for row, (ids, logprobs, n) in enumerate(zip(self.tokens.tolist(), self.scores.tolist(), lengths, strict=True))
        ]

    def _experts(self, before: np.ndarray | None, row: int, length: int) -> np.ndarray | None:
        """Of an answer and what is `before` it; its last token was never read."""
        if before is None or self.experts is None:
            return None
        return np.concatenate([before, self.experts[row, : length - 1].cpu().numpy()])


class HfEngine(SteppedEngine):
    """Implements `rollout.RolloutEngine`."""

    def __init__(self, config: PpoConfig, model_path: str, seed: int):
        super().__init__()
        self.config = config.rollout
        self.device = placement.device_of(placement.gpus_per_engine(config), "placement.gpus_per_engine")
        kernel = "sdpa" if config.model.attention in ("auto", "varlen") else config.model.attention  # varlen reads no cache
        changes = {"path": model_path, "init": None, "gradient_checkpointing": False, "attention": kernel}
        model = config.model.model_copy(update=changes)
        self.lm = load_lm(model, seed, self.device).eval()
        self.tokenizer = load_tokenizer(config.model.model_copy(update={"path": model_path}))
        self.sight, self.never = sight(self.lm, self.tokenizer), vision.unsampled(self.lm)
        self.tensors = saved_tensors(self.lm)
        self.ends = torch.tensor(stops(self.tokenizer, self.lm.generation_config.eos_token_id), device=self.device)
        self.waiting: list[_Request] = []
        self.batch: _Batch | None = None
        self.seed(seed)
        self.routers, self.why = routers.tried(self.lm, self._read_some, TRIED, config.rollout.router_replay)

    @torch.inference_mode()
    def _read_some(self) -> None:
        self.lm(input_ids=torch.arange(TRIED, device=self.device)[None] % self.lm.config.get_text_config().vocab_size, use_cache=False)

    def unrecorded(self) -> str:
        return self.why

    def receivers(self) -> int:
        return 1

    def connect(self, rendezvous: weights.Rendezvous, rank: int, plan: weights.Plan) -> None:
        self.plan = plan
        self.group = weights.join(rendezvous, rank)

    def receive(self, version: int) -> None:
        for bucket in weights.receive(self.group, self.plan, self.device):
            self.load(bucket)
        self.loaded(version)

    @torch.no_grad()
    def load(self, bucket: weights.Named) -> None:
        copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]  # a kernel for many
        places = [(self.tensors[name], rows) for name, rows in (rows_of(part) for part, _ in bucket)]
        copy([whole if rows is None else whole[rows] for whole, rows in places], [tensor for _, tensor in bucket])

    def loaded(self, version: int) -> None:
        self.version = version
        if self.batch is not None:
            self.batch.switches.append((self.batch.length, version))

    def sleep(self) -> None:
        self.lm.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, memory: str) -> None:
        if memory == "weights":  # a cache lasts only as long as its batch
            self.lm.to(self.device)

    def seed(self, value: int) -> None:
        self.generator = torch.Generator(self.device).manual_seed(value)

    def decode(self, answers: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(answers, skip_special_tokens=True)

    def add(self, number: int, prompt_ids: list[int], sampling: Sampling) -> None:
        if not prompt_ids:
            raise ValueError("a prompt without tokens: the first answer token has nothing to follow on")
        self.waiting.append(_Request(number, prompt_ids, sampling))

    def step(self) -> dict[int, list[Turn]]:
        """A token for every answer of the batch; when they are complete, the next requests are one, from their prompts on."""
        if self.batch is None:
            with span("prefill", prompts=len(self.waiting)):
                self._begin()
        assert self.batch is not None
        with span("decode", running=len(self.batch.rows), waiting=len(self.waiting), count=1):
            complete = self._step_batch(self.batch)
        if not complete:
            return {}
        batch, self.batch = self.batch, None
        turns = iter(batch.turns(self.ends.tolist()))
        return {request.number: [next(turns) for _ in range(request.sampling.samples)] for request in batch.requests}

    @torch.inference_mode()
    def _begin(self) -> None:
        """A batch of up to rollout.max_sequences rows, or one request, where that has more."""
        first, count, rows = self.waiting[0], 0, 0
        for request in self.waiting:
            rows += request.sampling.samples
            if count and (rows > self.config.max_sequences or not request.runs_with(first)):
                break
            count += 1
        requests, self.waiting = self.waiting[:count], self.waiting[count:]
        samples_P = torch.tensor([request.sampling.samples for request in requests], device=self.device)
        recording = self.routers is not None and any(request.sampling.experts is not None for request in requests)
        with self._recorded(recording) as taken:
            logits, cache, mask, position = self._read(requests, samples_P)
            read_NMK = taken() if taken else None
        rows_R = torch.arange(int(samples_P.sum()), device=self.device)
        self.batch = _Batch(
            requests,
            self._draws(requests),
            torch.full((len(rows_R), first.sampling.max_tokens), -1, device=self.device),
            torch.zeros(len(rows_R), first.sampling.max_tokens, device=self.device),
            rows_R,
            torch.ones(len(rows_R), dtype=torch.bool, device=self.device),
            logits,
            cache,
            mask,
            position,
            self.version,
        )
        if read_NMK is not None:
            read = read_NMK.unflatten(0, (len(requests), -1)).cpu().numpy()
            starts = [each.sampling.experts for each in requests]
            self.batch.prompts = [
                None if start is None else rows[len(rows) - len(each.prompt_ids) + start :]
                for rows, each, start in zip(read, requests, starts, strict=True)
            ]
            self.batch.experts = read_NMK.new_zeros(len(rows_R), first.sampling.max_tokens, *read_NMK.shape[1:])

    def _recorded(self, recording: bool) -> AbstractContextManager[Callable[[], torch.Tensor] | None]:
        """Within it, a call gives the experts that the tokens of the last pass took."""
        return self.routers.taken() if recording and self.routers else nullcontext()

    @torch.inference_mode()
    def _step_batch(self, batch: _Batch) -> bool:
        """The next token of all answers; an answer's end-of-sequence token is part of it. Returns whether all are complete."""
        sampling, rows, alive = batch.requests[0].sampling, batch.rows, batch.alive
        chosen, logprobs = _choose(batch.logits, sampling, batch.draws)
        write = rows[alive] if not alive.all() else rows
        batch.tokens[write, batch.length] = chosen[alive]
        batch.scores[write, batch.length] = logprobs[alive]
        batch.length += 1
        alive &= ~torch.isin(chosen, self.ends)
        if sampling.stop:
            self._stop_at_texts(batch, sampling.stop)
        living = int(alive.sum())
        if living == 0 or batch.length == sampling.max_tokens:
            return True
        if living <= (1 - COMPACT_AT) * len(rows):
            keep = alive.nonzero()[:, 0]
            chosen = chosen[keep]
            batch.keep(keep)
        if batch.mask is not None:
            batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(chosen), 1)], 1)
        with self._recorded(batch.experts is not None) as taken:
            out = self.lm(
                input_ids=chosen[:, None], attention_mask=batch.mask, position_ids=batch.position[:, None], past_key_values=batch.cache
            )
            if taken and batch.experts is not None:
                batch.experts[batch.rows, batch.length - 1] = taken()
        batch.logits, batch.position = vision.barred(out.logits[:, -1], self.never), batch.position + 1
        return False

    def _stop_at_texts(self, batch: _Batch, texts: tuple[str, ...]) -> None:
        """End the answers that have come to one of these. A text may be complete in the midst of a token."""
        rows = batch.rows[batch.alive].tolist()
        if not rows:
            return
        longest = max(map(len, texts))  # a token that adds less than a character is a part of one, and there are at most four
        tails = batch.tokens[rows, max(0, batch.length - 4 * longest) : batch.length].tolist()
        places = batch.alive.nonzero()[:, 0].tolist()
        for place, row, text in zip(places, rows, self.decode(tails), strict=True):
            if any(stop in text for stop in texts):
                batch.alive[place] = False
                batch.stopped.add(row)

    def _draws(self, batch: list[_Request]) -> torch.Generator | list[torch.Generator]:
        """One generator for all rows, or, where a request has a seed, one for each: its draws do not depend on who else is in the batch."""
        if all(request.sampling.seed is None for request in batch):
            return self.generator
        return [
            self.generator if request.sampling.seed is None else torch.Generator(self.device).manual_seed(request.sampling.seed + i)
            for request in batch
            for i in range(request.sampling.samples)
        ]

    def _read(
        self, requests: list[_Request], samples_P: torch.Tensor
    ) -> tuple[torch.Tensor, DynamicCache, torch.Tensor | None, torch.Tensor]:
        """Read each prompt once, left-padded; then repeat logits and cache for its samples."""
        prompts = [request.prompt_ids for request in requests]
        longest = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=self.device)
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        mask = None
        position_ids = None
        if int(lengths.min()) < longest:  # without padding plain causal attention is right, and faster
            mask = (torch.arange(longest, device=self.device) >= longest - lengths[:, None]).long()
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.lm.config)
        seen = self._look(requests, ids, position_ids)
        arguments = {"attention_mask": mask, "position_ids": position_ids, "past_key_values": cache, "logits_to_keep": 1, **seen}
        out = self.lm(input_ids=ids, **arguments)
        if "position_ids" in seen:  # what follows goes on from the largest
            lengths = seen["position_ids"].amax((0, 2)) + 1
        cache.batch_repeat_interleave(samples_P)  # type: ignore[arg-type]  # only handed on to Tensor.repeat_interleave
        logits, position = (
            vision.barred(out.logits[:, -1], self.never).repeat_interleave(samples_P, 0),
            lengths.repeat_interleave(samples_P),
        )
        return logits, cache, mask.repeat_interleave(samples_P, 0) if mask is not None else None, position

    def _look(self, requests: list[_Request], ids: torch.Tensor, position_ids: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """What the model is fed besides, where prompts have pictures."""
        if self.sight is None or not any(request.sampling.pictures for request in requests):
            return {}
        longest = ids.size(1)
        places = [(i * longest + longest - len(each.prompt_ids), len(each.prompt_ids)) for i, each in enumerate(requests)]
        seen_S = [(*place, each.sampling.pictures) for place, each in zip(places, requests, strict=True)]
        positions = torch.arange(longest)[None] if position_ids is None else position_ids.cpu()
        found = self.sight.inputs(ids.cpu(), seen_S, positions)
        if "position_ids" in found:
            found["position_ids"] = found["position_ids"][1:]
        return vision.arguments(self.sight.core, {name: tensor.to(self.device) for name, tensor in found.items()})


def _choose(logits: torch.Tensor, sampling: Sampling, draws: torch.Generator | list[torch.Generator]) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens and their log-probabilities under the distribution that was sampled from."""
    if sampling.temperature == 0:
        logprobs = torch.log_softmax(logits.float(), -1)
        chosen = logprobs.argmax(-1)
    else:
        logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
        if sampling.top_p < 1:
            logprobs = torch.log_softmax(_nucleus(logprobs, sampling.top_p), -1)
        probabilities = logprobs.exp().nan_to_num(nan=1.0)  # of a ruined model; the run knows it by the log-probabilities
        if isinstance(draws, torch.Generator):
            chosen = torch.multinomial(probabilities, 1, generator=draws)[:, 0]
        else:
            rows = zip(probabilities, draws, strict=True)
            chosen = torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


def _nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Drop all but the smallest set of tokens whose probability reaches `top_p` (Holtzman et al., 2020)."""
    ordered, order = logprobs.sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    return logprobs.masked_fill((before >= top_p).gather(1, order.argsort()), -torch.inf)
