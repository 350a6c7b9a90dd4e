"""rollout.mode=async: rollout engines never stop to sample.

A thread keeps `rollout.in_flight` prompts at the engines, another one scores groups as they are complete, in whatever order, and the loop
takes a step's worth of them. So many prompts are begun that none has to be learned from more than `rollout.max_staleness` steps after the
weights that it was begun with; where one that is late would miss that, the next step waits for it, or it is sampled anew.

The corrections of old weights are PipelineRL's (https://arxiv.org/abs/2509.19128) and AReaL's (https://arxiv.org/abs/2505.24298): requests
stay in the engines while these take weights, and every token is learned with the log-probability that it was sampled with.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from trainer import faults
from trainer.actors import RunError
from trainer.clock import Clock
from trainer.configs.ppo import PpoConfig
from trainer.data.loader import Loader, Mixture
from trainer.divergence import require_sampled
from trainer.environments.playing import Playing
from trainer.environments.pool import Environments
from trainer.episodes import Episode, Prompt, Turn
from trainer.producer import Score, seed_of
from trainer.rollout.calls import Calls
from trainer.rollout.elastic import LOOK as LOOK_AROUND
from trainer.rollout.elastic import Elastic
from trainer.rollout.slow import Slow
from trainer.stopping import Stopped, Stopping
from trainer.worker_groups import WorkerGroups

LOOK = 0.1  # seconds between two looks of the loop, and of the threads where nothing happens
END = 10  # seconds that a thread has to end
IN_VAIN = 10  # steps' worth of groups in a row without a signal, after which there is none (DAPO's max_num_gen_batches)


@dataclass(eq=False)
class Group:
    """A prompt on its way to be learned from."""

    number: int
    prompt: Prompt
    version: int  # of the newest weights when it was begun; no token is of older ones
    episodes: list[Episode] = field(default_factory=list)


class Continuous:
    """Implements `producer.Producer`."""

    def __init__(self, config: PpoConfig, workers: WorkerGroups, loader: Loader | Mixture, score: Score):
        rollout, self.samples = config.rollout, config.algorithm.group_size
        self.config, self.workers, self.loader, self.score = config, workers, loader, score
        self.batch, self.oldest = config.trainer.prompts_per_step, rollout.max_staleness
        self.calls = Calls(workers.engines, workers.engines.sampling(self.samples))
        self.playing = Playing(Environments(config, workers.model_path), self.samples) if config.environment.function else None
        self.turn = workers.engines.sampling(1)
        self.elastic = Elastic(config, workers, self.calls) if rollout.elastic else None
        self.slow = Slow(rollout.slow, self.calls) if rollout.slow else None
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
        self.values: dict[str, float] = {}  # of the last step
        self.since = self.progress = time.monotonic()  # the last step; an answer
        self.changed = threading.Condition()  # guards all this
        self.error: BaseException | None = None
        self.closing = Stopping()
        self.threads: list[threading.Thread] = []

    # The loop's side

    def begin(self, step: int, clock: Clock) -> None:
        if step <= self.config.trainer.steps:
            self.workers.sync()
        with self.changed:
            self.learned, self.learning, self.calls.actors = step - 1, 0, self.workers.engines.serving()
            self.calls.news = self.workers.published if self.elastic else None
            self.changed.notify_all()
        clock.lap("sync")
        if not self.threads and step <= self.config.trainer.steps:
            self.since = self.progress = time.monotonic()
            for number, actor in self.workers.engines.serving().items():
                actor.call.remote("seed", seed_of(self.config, step) + number)
            works = (self._sample, self._score, *([self._look] if self.elastic else []))
            self.threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for work in works]
            for thread in self.threads:
                thread.start()

    def next(self, step: int, stopping: Stopping, clock: Clock) -> list[Episode]:
        with self.changed:
            self.progress = time.monotonic()  # while the loop learned, all may have been complete
            while not (chosen := self._choose(step)):
                self._check(stopping)
                self.changed.wait(LOOK)
                if self.calls.error:
                    self._revive()
            taken = {group.number for group in chosen}
            for number in taken:
                del self.open[number]
            self.scored = [group for group in self.scored if group.number not in taken]
            self.learning = len(chosen)
            self.changed.notify_all()
            self._describe(step, chosen)
        clock.lap("wait")
        episodes: list[Episode] = []
        for place, group in enumerate(chosen):
            for episode in group.episodes:
                episode.group = place
            episodes += group.episodes
        require_sampled(episodes, step)
        return episodes

    def _check(self, stopping: Stopping) -> None:
        limit = self.config.rollout.timeout
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if stopping:
            raise Stopped(str(stopping))
        if time.monotonic() - self.progress > limit:
            raise RunError(f"no prompt was answered or scored within {limit} s (rollout.timeout): {self._where()}")

    def _where(self) -> str:
        asked, waiting = self.calls.open, len(self.sampled)
        return f"{len(self.open)} are begun, {asked} of them are at the rollout engines and {waiting} wait for their rewards"

    def _revive(self) -> None:
        """Engines that died, in the loop's thread: all ranks join the others anew, and these once they are up."""
        error, self.calls.error = self.calls.error, None
        assert error is not None
        self.changed.release()
        try:
            if not self.workers.revive(error):  # a sync has done it since
                print(f"warning: {error}", flush=True)
        finally:
            self.changed.acquire()
        self.calls.actors = self.workers.engines.serving()
        self.progress = time.monotonic()

    def _choose(self, step: int) -> list[Group] | None:
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

    def _new(self, prompt: Prompt) -> Group:
        group = Group(next(self.numbers), prompt, self.learned)
        self.open[group.number] = group
        return group

    def _describe(self, step: int, chosen: list[Group]) -> None:
        ages: Counter[int] = Counter()  # of tokens
        sampled = (turn for group in chosen for episode in group.episodes for turn in episode.turns if turn.sampled)
        for version, tokens in (span for turn in sampled for span in turn.spans):
            ages[step - 1 - version] += tokens
        tokens, now = max(1, sum(ages.values())), time.monotonic()
        busy, self.calls.busy = self.calls.busy, 0.0
        self.values = {
            "staleness": sum(age * number for age, number in ages.items()) / tokens,
            **{f"staleness/{age}": ages[age] / tokens for age in range(self.oldest + 1)},
            "engines_idle": max(0.0, 1 - busy / ((now - self.since) * (len(self.calls.seats) or 1))),
            "in_flight": self.calls.open,
            "queued": len(self.scored),
            "thrown_tokens": self.counts["thrown_tokens"],
        }
        if news := self.calls.news:
            self.values |= {"engines": len(self.calls.seats), "sync_bytes": news.bytes, "changed_weights": news.changed}
        if self.config.rollout.no_signal == "replace":
            self.values["no_signal"] = self.counts["no_signal"] / (self.counts["no_signal"] + len(chosen))
        self.since = now
        self.counts.clear()

    def settle(self) -> None:
        """Nothing: episodes here take new weights at any time."""

    def metrics(self) -> dict[str, float]:
        return self.values

    def state(self) -> dict[str, Any]:
        with self.changed:
            prompts = [*(group.prompt for group in self.open.values()), *self.fresh]
            return self.loader.state() | {"open": [_key(prompt) for prompt in prompts]}

    def load(self, state: dict[str, Any]) -> None:
        self.loader.load(state)
        prompts = {_key(prompt): prompt for prompt in self.loader.prompts} if state.get("open") else {}
        self.fresh = deque(prompts[source, index] for source, index in state.get("open", []))

    def close(self) -> None:
        self.closing.signal = signal.SIGTERM
        for thread in self.threads:
            thread.join(END)
        if self.elastic:
            self.elastic.close()
        self.calls.forget()
        if self.playing:
            self.playing.pool.close()

    # The threads' side

    def _run(self, work: Callable[[], None]) -> None:
        try:
            while not self.closing:
                work()
        except BaseException as error:
            with self.changed:
                self.error = self.error or error
                self.changed.notify_all()

    def _look(self) -> None:
        assert self.elastic is not None
        self.elastic.look()
        time.sleep(LOOK_AROUND)

    def _sample(self) -> None:
        slow = self.slow.look() if self.slow else []
        for what, _ in slow:
            print(what, flush=True)
            faults.note(self.workers.folder, self.learned + 1, what)
        with self.changed:
            self.twice.extend(self.open[number] for _, numbers in slow for number in numbers if number in self.open)
            self._lose(self.calls.find())
            # By default each has at least one prompt per sequence: of each prompt perhaps one answer, a long one, is left.
            serving = len(self.calls.seats) - len(self.calls.slow)
            most = self.config.rollout.in_flight or serving * self.config.rollout.max_sequences
            most += sum(len(self.calls.seats[name].asked) for name in self.calls.slow)
            if self.playing:
                self._play(self.playing, most)
            else:
                self.calls.most = math.ceil(most / max(1, serving))  # what is more waits for an engine that comes
                self._ask(most)
        answers, lost = self.calls.collect(LOOK if self.playing is None or self.calls.open else LOOK / 10)
        if answers or lost or self.calls.error:
            with self.changed:
                self._lose(lost)
                for number, answer in answers.items():
                    self._complete(number, *answer)
                self.changed.notify_all()

    def _ask(self, most: int) -> None:
        """For answers to further prompts.

        Most are begun just after a sync, when no engine that comes and goes has its weights. So these may begin with older ones, by half of
        `oldest`, as long as all that is begun can be learned from in time.
        """
        lowest = max(0, self.learned - self.oldest // 2) if self.elastic and not self.twice else self.learned
        left: Counter[int] = Counter()  # of all that is begun, by its version
        while self.calls.open < most and (name := self.calls.free(lowest)) and (group := self._next()):
            seat = self.calls.seats[name]
            behind = seat.alone and seat.version < group.version
            if left:
                left[group.version] += 1
            elif behind:
                left = Counter(group.version for group in self.open.values())
            if behind:
                left[group.version] -= 1
                left[seat.version] += 1
                if not in_time(left, self.learned + bool(self.learning), self.batch, self.oldest):
                    left.clear()
                    self.again.appendleft(group)
                    lowest = self.learned
                    continue
                group.version = seat.version
            self.calls.ask(group.number, group.prompt.token_ids, lowest)

    def _play(self, playing: Playing, most: int) -> None:
        """Begin as many episodes as there may be requests, and ask for the turns that those at work wait for."""
        while self.unwanted:
            playing.drop(self.unwanted.popleft())
        while len(playing.prompts) < most and (group := self._next()):
            playing.drop(group.number)  # where it is begun anew
            playing.begin(group.number, group.prompt, seed_of(self.config, self.learned + 1) + group.number, group.version)
        for number, episodes in playing.look().items():
            self._played(number, episodes)
        for name, asked, version in playing.turns(self.calls.free):
            self.calls.ask(name, asked.request.token_ids, version, asked.sampled(self.turn))

    def _played(self, number: int, episodes: list[Episode]) -> None:
        self.progress = time.monotonic()
        if group := self.open.get(number):
            group.episodes = episodes
            self._take(group)
            self.changed.notify_all()

    def _next(self) -> Group | None:
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

    def _lose(self, numbers: list[int]) -> None:
        if not numbers:
            return
        if self.playing:
            return self.playing.lose(numbers)
        asked = {number for seat in self.calls.seats.values() for number in seat.asked}
        lost = {number for number in numbers if number not in asked}  # of no second engine
        self.twice = deque(group for group in self.twice if group.number not in lost)
        for group in (self.open[number] for number in sorted(lost) if number in self.open and not self.open[number].episodes):
            group.version = self.learned  # at least; it is begun anew
            self.again.append(group)

    def _complete(self, number: int, turns: list[Turn], texts: list[str]) -> None:
        self.progress = time.monotonic()
        if self.playing:
            return self.playing.answer(number, turns[0])
        group = self.open.get(number)
        if group is None or group.episodes:
            self.counts["thrown_tokens"] += sum(len(turn.token_ids) for turn in turns)
            return
        group.episodes = [Episode(group.prompt, number, [turn], text) for turn, text in zip(turns, texts, strict=True)]
        self.sampled.append(group)

    def _score(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.sampled or self.closing, LOOK)
            groups, step = self.sampled[:], self.learned + 1
        if not groups:
            return
        self.score([episode for group in groups for episode in group.episodes], step, self.closing)
        with self.changed:
            self.progress = time.monotonic()
            done = {group.number for group in groups}
            groups = [group for group in self.sampled if group.number in done]  # the others were thrown away meanwhile
            self.sampled = [group for group in self.sampled if group.number not in done]
            for group in groups:
                self._take(group)
            self.changed.notify_all()

    def _take(self, group: Group) -> None:
        """A group with its rewards."""
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
                "look at samples.jsonl, or learn from what there is with rollout.no_signal=keep"
            )


def in_time(left: Mapping[int, int], step: int, batch: int, oldest: int) -> bool:
    """Whether all groups that `step` leaves can be learned from before they are too old, `batch` of them in each step after it.

    `left`: how many there are, by the version that they were begun with. Each deadline is looked at, as for jobs of equal length.
    """
    return all(sum(left[v] for v in left if v + oldest < step + after) <= after * batch for after in range(oldest + 1))


def _key(prompt: Prompt) -> tuple[str | None, int]:
    """JSON-able, but for being a list there: its source in a mixture, and its position."""
    return prompt.row.get("mix"), prompt.index
