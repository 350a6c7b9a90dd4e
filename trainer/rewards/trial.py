"""A person's reward, called once on the first row before anything starts."""

from __future__ import annotations

from typing import Any

from trainer.configs.reward import RewardConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.rewards.scorer import Scorer

SECONDS = 5.0  # one that takes longer, such as a judge, is not waited for
ELSEWHERE = ("http", "judge", "reward_model")  # services, that may be there for the run alone


def try_out(config: RewardConfig, row: dict[str, Any]) -> None:
    """Score the row's own answer. Raises ConfigError as `Scorer.score` does; what fails later is left to reward.on_error."""
    specs = [spec for spec, _ in config.functions().values()]
    if not any(":" in spec for spec in specs) or any(spec in ELSEWHERE for spec in specs) or config.on_error != "fail":
        return
    answer = row.get("answer")
    episode = Episode(Prompt(0, [0], row), 0, [Turn([0], [0.0], "stop")], text=answer if isinstance(answer, str) else str(answer or ""))
    alone = {"workers": 1, "retries": 0, "timeout": min(config.timeout, SECONDS), "answer_timeout": None}
    try:
        with Scorer(config.model_copy(update=alone)) as rewards:
            rewards.score([episode])
    except TimeoutError:
        return
