"""What rollout.mode=async has begun and not learned from: what is asked next, what a step learns from, and what comes too late for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from trainer.configs.ppo import PpoConfig
from trainer.data.loader import Loader, Mixture
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import RunError

IN_VAIN = 10  # steps' worth of groups in a row without a signal, after which there is none (DAPO's max_num_gen_batches)


@dataclass(eq=False)
class Group:
    """A prompt on its way to be learned from."""

    number: int
    prompt: Prompt
    version: int  # of the newest weights when it was begun; no token is of older ones
    episodes: list[Episode] = field(default_factory=list)


class Groups:
    """Neither engines nor threads: whoever has it guards it.

    So many are begun that none has to be learned from more than `rollout.max_staleness` steps after the weights that it was begun with;
    where one that is late would miss that, the next step waits for it, or it is sampled anew.
    """

    def __init__(self, config: PpoConfig, loader: Loader | Mixture):
        self.config, self.loader = config, loader
        self.batch, self.oldest = config.trainer.prompts_per_step, config.rollout.max_staleness
        self.numbers = count()
        self.fresh: deque[Prompt] = deque()  # not begun
        self.again: deque[Group] = deque()  # begun, and lost with their engine
        self.twice: deque[Group] = deque()  # to be asked of a second engine, as their own is slow
        self.unwanted: deque[int] = deque()  # thrown away, and perhaps still played
        self.open: dict[int, Group] = {}  # begun and not learned from
        self.sampled: list[Group] = []  # of these, complete
        self.scored: list[Group] = []
        self.learned = 0  # steps, whose weights the engines have
        self.dropped = 0  # step for which `_drop` has looked: what is begun later is newer
        self.learning = 0  # groups that the loop has taken and not learned
        self.in_vain = 0  # groups without a signal in a row
        self.counts: Counter[str] = Counter()  # since the last step

    # Asked

    def next(self) -> Group | None:
        """What is asked next; None while all is begun that may be."""
        while self.twice:
            group = self.twice.popleft()  # its version stays: its first engine may still answer
            if self.open.get(group.number) is group and not group.episodes:
                return group
        if self.again:
            group = self.again.popleft()
            group.version = self.learned
            return group
        steps = min(self.oldest + 1, self.config.trainer.steps - self.learned)
        if len(self.open) + self.learning >= steps * self.batch:
            return None
        if not self.fresh:
            self.fresh.extend(self.loader.next())
        return self._new(self.fresh.popleft())

    def second(self, numbers: Collection[int]) -> None:
        """Have these asked of another engine too."""
        self.twice.extend(self.open[number] for number in numbers if number in self.open)

    def lost(self, numbers: Collection[int]) -> None:
        """No engine has these any more: they are begun anew, where they were not complete."""
        self.twice = deque(group for group in self.twice if group.number not in numbers)
        for group in (self.open[number] for number in sorted(numbers) if number in self.open and not self.open[number].episodes):
            group.version = self.learned  # at least; it is begun anew
            self.again.append(group)

    def _new(self, prompt: Prompt) -> Group:
        group = Group(next(self.numbers), prompt, self.learned)
        self.open[group.number] = group
        return group

    # Answered

    def answered(self, number: int, turns: list[Turn], texts: list[str]) -> None:
        """All answers to its prompt, which want rewards next. Of two engines' the first count."""
        group = self.open.get(number)
        if group is None or group.episodes:
            self.counts["thrown_tokens"] += sum(len(turn.token_ids) for turn in turns)
            return
        group.episodes = [Episode(group.prompt, number, [turn], text) for turn, text in zip(turns, texts, strict=True)]
        self.sampled.append(group)

    def played(self, number: int, episodes: list[Episode]) -> None:
        """Its episodes with their rewards, from an environment. Raises as `rewarded` does."""
        if group := self.open.get(number):
            group.episodes = episodes
            self._take(group)

    def rewarded(self, groups: list[Group]) -> None:
        """These have their rewards now. Raises RunError where too many in a row have nothing to learn from (rollout.no_signal)."""
        done = {group.number for group in groups}
        kept = [group for group in self.sampled if group.number in done]  # the others were thrown away meanwhile
        self.sampled = [group for group in self.sampled if group.number not in done]
        for group in kept:
            self._take(group)

    def _take(self, group: Group) -> None:
        alike = len({episode.reward for episode in group.episodes if not episode.failed}) <= 1
        if self.config.rollout.no_signal == "keep" or not alike:
            self.scored.append(group)
            self.in_vain = 0
            return
        del self.open[group.number]
        self.counts["no_signal"] += 1
        self.counts["thrown_tokens"] += sum(len(episode.response_ids) for episode in group.episodes)
        self.in_vain += 1
        if self.in_vain >= IN_VAIN * self.batch:
            reward = group.episodes[0].reward
            raise RunError(
                f"rollout.no_signal=replace: in {self.in_vain} groups in a row all answers had the same reward, the last time {reward:g}; "
                "look at flotilla ui, or learn from what there is with rollout.no_signal=keep"
            )

    # Learned

    def choose(self, step: int) -> list[Group] | None:
        """The oldest groups, once there is a step's worth; and once no other would come too late after them, where that is waited for."""
        dropping = self.config.rollout.stragglers == "drop"
        if dropping and self.dropped != step:
            self._drop(step)
            self.dropped = step
        if len(self.scored) < self.batch:
            return None
        chosen = sorted(self.scored, key=lambda group: (group.version, group.number))[: self.batch]
        left = Counter(group.version for group in self.open.values())
        left.subtract(group.version for group in chosen)
        return chosen if dropping or in_time(left, step, self.batch, self.oldest) else None

    def take(self, chosen: list[Group]) -> None:
        """These are learned from now."""
        taken = {group.number for group in chosen}
        for number in taken:
            del self.open[number]
        self.scored = [group for group in self.scored if group.number not in taken]
        self.learning = len(chosen)

    def _drop(self, step: int) -> None:
        """Sample anew what is too old for `step`. The rollout engines still end what they have of it, and nobody reads that."""
        for group in [group for group in self.open.values() if group.version + self.oldest < step - 1]:
            if group in self.again:
                continue  # it is begun with the newest weights
            del self.open[group.number]
            self.unwanted.append(group.number)
            self.counts["thrown_tokens"] += sum(len(episode.response_ids) for episode in group.episodes)
            self.sampled, self.scored = ([g for g in groups if g is not group] for groups in (self.sampled, self.scored))
            self.again.append(self._new(group.prompt))

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """JSON-able; what was begun and not learned is begun again."""
        prompts = [*(group.prompt for group in self.open.values()), *self.fresh]
        return self.loader.state() | {"open": [_key(prompt) for prompt in prompts]}

    def load(self, state: dict[str, Any]) -> None:
        """Raises ConfigError where the state is of other data."""
        self.loader.load(state)
        prompts = {_key(prompt): prompt for prompt in self.loader.prompts} if state.get("open") else {}
        self.fresh = deque(prompts[source, index] for source, index in state.get("open", []))


def in_time(left: Mapping[int, int], step: int, batch: int, oldest: int) -> bool:
    """Whether all groups that `step` leaves can be learned from before they are too old, `batch` of them in each step after it.

    `left`: how many there are, by the version that they were begun with. Each deadline is looked at, as for jobs of equal length.
    """
    return all(sum(left[v] for v in left if v + oldest < step + after) <= after * batch for after in range(oldest + 1))


def _key(prompt: Prompt) -> tuple[str | None, int]:
    """JSON-able, but for being a list there: its source in a mixture, and its position."""
    return prompt.row.get("mix"), prompt.index
