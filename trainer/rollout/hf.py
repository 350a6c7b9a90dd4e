"""A rollout engine on transformers alone: runs wherever torch runs, and is the faster one for very small models.

A prompt is read once for all its samples, and finished sequences leave the batch, so that the cost follows the mean length of
the answers and not the longest.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache

from trainer import placement, weights
from trainer.configs.ppo import PpoConfig
from trainer.models import load_lm, load_tokenizer
from trainer.types import Episode, Prompt, Turn

# A batch is compacted when at least this share of its rows has finished: copying the cache costs about one step.
COMPACT_AT = 0.25


class HfEngine:
    """Implements `rollout.RolloutEngine`."""

    def __init__(self, config: PpoConfig, model_path: str, seed: int):
        self.config = config.rollout
        self.device = placement.device_of(placement.gpus_per_engine(config), "placement.gpus_per_engine")
        model = config.model.model_copy(update={"path": model_path, "init": None, "gradient_checkpointing": False})
        self.lm = load_lm(model, seed, self.device).eval()
        self.tokenizer = load_tokenizer(config.model.model_copy(update={"path": model_path}))
        self.parameters = dict(self.lm.named_parameters())
        # Some models end a turn with more tokens than the tokenizer's own, and list all of them.
        listed = self.lm.generation_config.eos_token_id
        more = [listed] if isinstance(listed, int) else listed or []
        self.ends = torch.tensor(sorted({self.tokenizer.eos_token_id, *more}), device=self.device)  # type: ignore[type-var]

    def receivers(self) -> int:
        return 1

    def connect(self, rendezvous: weights.Rendezvous, rank: int, plan: weights.Plan) -> None:
        self.plan = plan
        self.group = weights.join(rendezvous, rank)

    @torch.no_grad()
    def receive(self) -> None:
        for bucket in weights.receive(self.group, self.plan, self.device):
            for name, tensor in bucket:
                self.parameters[name].copy_(tensor)

    def generate(self, prompts: list[Prompt], groups: list[int], samples: int, seed: int, greedy: bool = False) -> list[Episode]:
        generator = torch.Generator(self.device).manual_seed(seed)
        ends = set(self.ends.tolist())
        episodes: list[Episode] = []
        at_once = max(1, self.config.max_sequences // samples)
        for start in range(0, len(prompts), at_once):
            part = prompts[start : start + at_once]
            tokens, logprobs = self._sample([p.token_ids for p in part], samples, generator, greedy)
            for i, (ids, scores) in enumerate(zip(tokens, logprobs, strict=True)):
                turn = Turn(ids, scores, "stop" if ids[-1] in ends else "length")
                episodes.append(Episode(part[i // samples], groups[start + i // samples], [turn]))
        for episode, text in zip(
            episodes, self.tokenizer.batch_decode([e.response_ids for e in episodes], skip_special_tokens=True), strict=True
        ):
            episode.text = text
        return episodes

    @torch.inference_mode()
    def _sample(
        self, prompts: list[list[int]], samples: int, generator: torch.Generator, greedy: bool
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities of `samples` answers per prompt; an answer's end-of-sequence token is part of it."""
        limit = self.config.max_new_tokens
        logits, cache, mask, position = self._read(prompts, samples)
        rows = torch.arange(len(prompts) * samples, device=self.device)
        tokens = torch.full((len(rows), limit), -1, device=self.device)
        scores = torch.zeros(len(rows), limit, device=self.device)
        alive = torch.ones(len(rows), dtype=torch.bool, device=self.device)
        for step in range(limit):
            chosen, logprobs = self._choose(logits, generator, greedy)
            write = rows[alive] if not alive.all() else rows
            tokens[write, step] = chosen[alive]
            scores[write, step] = logprobs[alive]
            alive &= ~torch.isin(chosen, self.ends)
            living = int(alive.sum())
            if living == 0 or step == limit - 1:
                break
            if living <= (1 - COMPACT_AT) * len(rows):
                keep = alive.nonzero()[:, 0]
                cache.batch_select_indices(keep)
                rows, chosen, position, alive = rows[keep], chosen[keep], position[keep], alive[keep]
                mask = mask[keep] if mask is not None else None
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            out = self.lm(input_ids=chosen[:, None], attention_mask=mask, position_ids=position[:, None], past_key_values=cache)
            logits, position = out.logits[:, -1], position + 1
        lengths = (tokens >= 0).sum(1).tolist()
        return (
            [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)],
            [row[:n] for row, n in zip(scores.tolist(), lengths, strict=True)],
        )

    def _read(self, prompts: list[list[int]], samples: int) -> tuple[torch.Tensor, DynamicCache, torch.Tensor | None, torch.Tensor]:
        """Read each prompt once, left-padded; then repeat logits and cache for its samples."""
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
        out = self.lm(input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(samples)
        logits, position = out.logits[:, -1].repeat_interleave(samples, 0), lengths.repeat_interleave(samples)
        return logits, cache, mask.repeat_interleave(samples, 0) if mask is not None else None, position

    def _choose(self, logits: torch.Tensor, generator: torch.Generator, greedy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Next tokens and their log-probabilities under the distribution that was sampled from."""
        if greedy:
            logprobs = torch.log_softmax(logits.float(), -1)
            chosen = logprobs.argmax(-1)
        else:
            logprobs = torch.log_softmax(logits.float() / self.config.temperature, -1)
            if self.config.top_p < 1:
                logprobs = torch.log_softmax(_nucleus(logprobs, self.config.top_p), -1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
        return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


def _nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Drop all but the smallest set of tokens whose probability reaches `top_p` (Holtzman et al., 2020)."""
    ordered, order = logprobs.sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    return logprobs.masked_fill((before >= top_p).gather(1, order.argsort()), -torch.inf)
