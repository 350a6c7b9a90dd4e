"""Every advantage and every loss teaches a policy of fifteen numbers to write 1 2 3: no process, no model, some seconds."""

from __future__ import annotations

import pytest
import torch

from trainer.configs.algorithm import AlgorithmConfig
from trainer.episodes import Batch
from trainer.objectives.advantages import estimate
from trainer.objectives.aggregation import denominators
from trainer.objectives.policy import policy

ANSWER = torch.tensor([1, 2, 3])
GROUPS, SIZE, PASSES, STEPS = 4, 8, 2, 60
LEARNERS = {
    "grpo": {},
    "dr_grpo": {"name": "dr_grpo", "aggregation": "constant"},
    "rloo": {"name": "rloo"},
    "reinforce++": {"name": "reinforce_plus_plus"},
    "reinforce++ without baseline": {"name": "reinforce_plus_plus", "baseline": False},
    "remax": {"name": "remax"},
    "ppo": {"name": "ppo"},
    "gspo": {"loss": "gspo"},
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo"},
    "masked answers": {"importance_level": "sequence", "importance_mode": "mask"},
}


def reward(tokens_ET: torch.Tensor) -> torch.Tensor:
    return (tokens_ET == ANSWER).float().mean(-1)


def learn(algorithm: AlgorithmConfig, seed: int) -> list[float]:
    """Mean reward of each step's answers."""
    draw = torch.Generator().manual_seed(seed)
    logits_TV, values_T = torch.zeros(3, 5, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([logits_TV, values_T], lr=0.1)
    episodes = GROUPS * SIZE
    lengths_E, group_E = torch.full((episodes,), 3), torch.arange(episodes) // SIZE
    mask_N, episode_N = torch.ones(3 * episodes), torch.arange(3 * episodes) // 3
    none, rewards = torch.zeros(0, dtype=torch.int64), []
    counts = denominators(mask_N, episode_N, episodes, limit=3)
    for _ in range(STEPS):
        tokens_ET = torch.multinomial(logits_TV.detach().softmax(-1), episodes, replacement=True, generator=draw).T
        rewards_E, greedy = reward(tokens_ET), reward(logits_TV.detach().argmax(-1))
        rewards.append(rewards_E.mean().item())

        def logp(tokens_ET: torch.Tensor = tokens_ET) -> torch.Tensor:
            return logits_TV.log_softmax(-1).expand(episodes, 3, 5).gather(2, tokens_ET[..., None]).flatten()

        old_N, values_N = logp().detach(), values_T.detach().repeat(episodes)
        rollout_N = old_N + 0.01 * torch.randn(3 * episodes, generator=draw)  # other kernels
        given = (rewards_E, group_E, lengths_E, mask_N, values_N)
        advantages_N, returns_N = estimate(algorithm, *given, baselines_E=greedy.expand(episodes))
        tokens_N = {"mask": mask_N, "old": old_N, "rollout": rollout_N, "advantages": advantages_N}
        batch = Batch(none, none, none, none, episode_N, none, tokens_N, packed=False, real_tokens=0, counts=counts)
        for _ in range(PASSES):
            loss, _ = policy(algorithm, batch, (logp(), torch.zeros(3 * episodes)))
            if returns_N is not None:
                loss = loss + (values_T.repeat(episodes) - returns_N).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return rewards


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_gets_there(name, seed):
    rewards = learn(AlgorithmConfig.model_validate(LEARNERS[name]), seed)
    assert rewards[0] < 0.4, "a fifth by chance"
    assert sum(rewards[-5:]) / 5 > 0.8
