"""A GRPO step in the plainest torch: what the same work costs when nothing is distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.configs.ppo import PpoConfig
from trainer.data.prompts import answer_ids
from trainer.episodes import Prompt


class HfEngine:
    """Static-batch generation with a key-value cache, by the very model that is trained."""

    def __init__(self, config: PpoConfig, model: Any, tokenizer: Any):
        self.model, self.limit = model, config.rollout.max_new_tokens
        self.temperature = config.rollout.temperature
        self.eos, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def receive(self, model: Any) -> None:
        """It is the same model."""

    @torch.no_grad()
    def generate(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, log-probabilities and mask [B, T] for prompts of one length."""
        out = self.model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        alive = torch.ones(len(prompts), dtype=torch.bool)
        tokens, logprobs, mask = [], [], []
        for step in range(self.limit):
            scores = torch.log_softmax(out.logits[:, -1].float() / self.temperature, -1)
            chosen = torch.multinomial(scores.exp(), 1)
            logprobs.append(scores.gather(1, chosen)[:, 0])
            mask.append(alive)
            chosen = torch.where(alive[:, None], chosen, self.pad)
            tokens.append(chosen[:, 0])
            alive = alive & (chosen[:, 0] != self.eos)
            if step == self.limit - 1 or not alive.any():
                break
            out = self.model(input_ids=chosen, past_key_values=out.past_key_values, use_cache=True)
        return torch.stack(tokens, 1), torch.stack(logprobs, 1), torch.stack(mask, 1)


class VllmEngine:
    """vLLM in this process, with the settings of `trainer.rollout.vllm`."""

    def __init__(self, config: PpoConfig, model: Any, tokenizer: Any):
        import vllm

        from trainer.rollout.receiver import keep_linear_weights
        from trainer.rollout.vllm import CPU_CACHE_BYTES

        keep_linear_weights()
        self.pad = tokenizer.pad_token_id
        self.llm = vllm.LLM(
            model=config.model.path or "",
            dtype=config.model.dtype,  # type: ignore[arg-type]
            max_model_len=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
            max_num_seqs=config.rollout.max_sequences,
            logprobs_mode="processed_logprobs",
            enforce_eager=True,
            kv_cache_memory_bytes=CPU_CACHE_BYTES,
            disable_log_stats=True,
        )
        self.group = config.algorithm.group_size
        self.params = vllm.SamplingParams(
            n=self.group,
            max_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            logprobs=0,
            stop_token_ids=[tokenizer.eos_token_id],
            detokenize=False,
        )

    def receive(self, model: Any) -> None:
        weights = [(name, p.detach()) for name, p in model.named_parameters()]

        def load(served: Any) -> None:
            served.load_weights(weights)

        self.llm.apply_model(load)
        self.llm.reset_prefix_cache()

    def generate(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, log-probabilities and mask [B, T]; each prompt stands `group` times in `prompts`, in a row."""
        from vllm.inputs import TokensPrompt

        once = [TokensPrompt(prompt_token_ids=ids) for ids in prompts[:: self.group]]
        answers = [answer for output in self.llm.generate(once, self.params, use_tqdm=False) for answer in output.outputs]
        longest = max(len(answer.token_ids) for answer in answers)
        tokens, logprobs, mask = [], [], []
        for answer in answers:
            n = len(answer.token_ids)
            tokens.append([*answer.token_ids] + [self.pad] * (longest - n))
            pairs: Any = zip(answer.logprobs or (), answer.token_ids, strict=True)
            logprobs.append([scores[token].logprob for scores, token in pairs] + [0.0] * (longest - n))
            mask.append([True] * n + [False] * (longest - n))
        return torch.tensor(tokens), torch.tensor(logprobs), torch.tensor(mask)


def update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    config: PpoConfig,
    prompts_BP: torch.Tensor,
    tokens_BT: torch.Tensor,
    logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    rewards_B: torch.Tensor,
) -> None:
    """One optimizer step on the whole batch: group-relative advantages, clipped ratio, mean over tokens."""
    groups = rewards_B.view(-1, config.algorithm.group_size)
    advantages_B = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).reshape(-1)
    inputs = torch.cat([prompts_BP, tokens_BT[:, :-1]], 1)
    logits = model(input_ids=inputs, use_cache=False, logits_to_keep=tokens_BT.size(1)).logits.float() / config.rollout.temperature
    scores_BT = torch.log_softmax(logits, -1).gather(2, tokens_BT[..., None])[..., 0]
    ratio = (scores_BT - logprobs_BT).exp()
    clipped = ratio.clamp(1 - config.algorithm.clip_low, 1 + config.algorithm.clip_high)
    gain = torch.min(ratio * advantages_B[:, None], clipped * advantages_B[:, None])
    loss = -(gain * mask_BT).sum() / mask_BT.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
    optimizer.step()


def grpo_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    engine: Any,
    drawn: list[Prompt],
    tokenizer: Any,
    reward: Callable[..., float],
    config: PpoConfig,
) -> tuple[int, float]:
    """Hand the weights over, sample, score, update. Returns the number of response tokens and the mean reward."""
    prompts = [p for p in drawn for _ in range(config.algorithm.group_size)]
    engine.receive(model)
    tokens_BT, logprobs_BT, mask_BT = engine.generate([p.token_ids for p in prompts])
    texts = tokenizer.batch_decode([row[keep] for row, keep in zip(tokens_BT, mask_BT, strict=True)], skip_special_tokens=True)
    rewards_B = torch.tensor([reward(text, p.row) for text, p in zip(texts, prompts, strict=True)])
    update(model, optimizer, config, torch.tensor([p.token_ids for p in prompts]), tokens_BT, logprobs_BT, mask_BT, rewards_B)
    return int(mask_BT.sum()), float(rewards_B.mean())


def supervised_step(model: Any, optimizer: torch.optim.Optimizer, prompts: list[Prompt], tokenizer: Any) -> None:
    """Cross-entropy of the answers, for prompts of one length and answers of one length."""
    asked = torch.tensor([p.token_ids for p in prompts])
    answers = torch.tensor([answer_ids(p, tokenizer) for p in prompts])
    logits = model(input_ids=torch.cat([asked, answers[:, :-1]], 1), use_cache=False, logits_to_keep=answers.size(1)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), answers.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
