"""rollout.mode=async: rollout engines never stop to sample.

A thread keeps `rollout.in_flight` prompts at the engines, another one scores groups as they are complete, in whatever order, and the loop
takes a step's worth of them: rollout/groups.py says which, and which prompts come next.

The corrections of old weights are PipelineRL's (https://arxiv.org/abs/2509.19128) and AReaL's (https://arxiv.org/abs/2505.24298): requests
stay in the engines while these take weights, and every token is learned with the log-probability that it was sampled with.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.cluster.stopping import Stopped, Stopping
from trainer.configs.ppo import PpoConfig
from trainer.data.loader import Loader, Mixture
from trainer.environments.playing import Playing
from trainer.environments.pool import Environments
from trainer.episodes import Episode, Turn
from trainer.errors import RunError
from trainer.online.clock import Clock
from trainer.online.groups import Group, Groups, in_time
from trainer.online.processes import WorkerGroups
from trainer.online.producer import Score, seed_of
from trainer.online.scored import require_sampled
from trainer.rollout import of_prompt
from trainer.rollout.calls import Calls
from trainer.rollout.slow import Slow
from trainer.runs import alive, faults

if TYPE_CHECKING:
    from trainer.online.elastic import Elastic

LOOK_AROUND = 1.0  # seconds between two looks at nodes that come and go
LOOK = 0.1  # seconds between two looks of the loop, and of the threads where nothing happens
END = 10  # seconds that a thread has to end


class Continuous:
    """Implements `producer.Producer`."""

    def __init__(self, config: PpoConfig, workers: WorkerGroups, loader: Loader | Mixture, score: Score):
        rollout, self.samples = config.rollout, config.algorithm.group_size
        self.config, self.workers, self.score = config, workers, score
        self.groups = Groups(config, loader)
        self.calls = Calls(workers.engines, workers.engines.sampling(self.samples))
        self.playing = (
            Playing(Environments(config, workers.model_path, workers.launcher), self.samples) if config.environment.function else None
        )
        self.turn = workers.engines.sampling(1)
        self.elastic: Elastic | None = None
        if rollout.elastic:
            from trainer.online.elastic import Elastic  # Ray's alone

            self.elastic = Elastic(config, workers, self.calls)
        self.slow = Slow(rollout.slow, self.calls) if rollout.slow else None
        self.values: dict[str, float] = {}  # of the last step
        self.tokens: dict[str, int] = {}  # that each engine had sampled by then
        self.since = self.progress = time.monotonic()  # the last step; an answer
        self.changed = threading.Condition()  # guards all this
        self.error: BaseException | None = None
        self.closing = Stopping()
        self.threads: list[threading.Thread] = []

    # The loop's side

    def sync_and_begin(self, step: int, clock: Clock) -> None:
        if step <= self.config.trainer.steps:
            self.workers.sync()
        with self.changed:
            self.groups.learned, self.groups.learning, self.calls.actors = step - 1, 0, self.workers.engines.serving()
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
            while not (chosen := self.groups.choose(step)):
                self._check(stopping)
                self.changed.wait(LOOK)
                if self.calls.error:
                    self._revive()
            self.groups.take(chosen)
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
        asked, waiting = self.calls.open, len(self.groups.sampled)
        return f"{len(self.groups.open)} are begun, {asked} of them are at the rollout engines and {waiting} wait for their rewards"

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

    def _describe(self, step: int, chosen: list[Group]) -> None:
        groups = self.groups
        ages: Counter[int] = Counter()  # of tokens
        sampled = (turn for group in chosen for episode in group.episodes for turn in episode.turns if turn.sampled)
        for version, tokens in (span for turn in sampled for span in turn.spans):
            ages[step - 1 - version] += tokens
        tokens, now = max(1, sum(ages.values())), time.monotonic()
        busy, self.calls.busy = self.calls.busy, 0.0
        self.values = {
            "staleness": sum(age * number for age, number in ages.items()) / tokens,
            **{f"staleness/{age}": ages[age] / tokens for age in range(groups.oldest + 1)},
            "engines_idle": max(0.0, 1 - busy / ((now - self.since) * (len(self.calls.seats) or 1))),
            "in_flight": self.calls.open,
            "queued": len(groups.scored),
            "thrown_tokens": groups.counts["thrown_tokens"],
        }
        if news := self.calls.news:
            self.values |= {"engines": len(self.calls.seats), "sync_bytes": news.bytes, "changed_weights": news.changed}
        self._say(now - self.since)
        if self.config.rollout.no_signal == "replace":
            self.values["no_signal"] = groups.counts["no_signal"] / (groups.counts["no_signal"] + len(chosen))
        self.since = now
        groups.counts.clear()

    def _say(self, seconds: float) -> None:
        """For the page of runs: what each engine has to do, and how fast it was since the last step."""
        engines = {}
        for name, seat in self.calls.seats.items():
            tokens = seat.tokens - self.tokens.get(name, 0)
            engines[name] = {"asked": len(seat.asked), "tokens_per_second": round(tokens / seconds, 1), "seconds_per_step": seat.pace}
        self.tokens = {name: seat.tokens for name, seat in self.calls.seats.items()}
        alive.say(engines=engines)

    def settle(self) -> None:
        """Nothing: episodes here take new weights at any time."""

    def metrics(self) -> dict[str, float]:
        return self.values

    def state(self) -> dict[str, Any]:
        with self.changed:
            return self.groups.state()

    def load(self, state: dict[str, Any]) -> None:
        self.groups.load(state)

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
            faults.note(self.workers.folder, self.groups.learned + 1, what)
        with self.changed:
            self.groups.second([number for _, numbers in slow for number in numbers])
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
        groups = self.groups
        lowest = max(0, groups.learned - groups.oldest // 2) if self.elastic and not groups.twice else groups.learned
        left: Counter[int] = Counter()  # of all that is begun, by its version
        while self.calls.open < most and (name := self.calls.free(lowest)) and (group := groups.next()):
            seat = self.calls.seats[name]
            behind = seat.alone and seat.version < group.version
            if left:
                left[group.version] += 1
            elif behind:
                left = Counter(group.version for group in groups.open.values())
            if behind:
                left[group.version] -= 1
                left[seat.version] += 1
                if not in_time(left, groups.learned + bool(groups.learning), groups.batch, groups.oldest):
                    left.clear()
                    groups.again.appendleft(group)
                    lowest = groups.learned
                    continue
                group.version = seat.version
            sampling = of_prompt(self.calls.sampling, group.prompt) if group.prompt.pictures else None
            self.calls.ask(group.number, group.prompt.token_ids, lowest, sampling)

    def _play(self, playing: Playing, most: int) -> None:
        """Begin as many episodes as there may be requests, and ask for the turns that those at work wait for."""
        groups = self.groups
        while groups.unwanted:
            playing.drop(groups.unwanted.popleft())
        while len(playing.prompts) < most and (group := groups.next()):
            playing.drop(group.number)  # where it is begun anew
            playing.begin(group.number, group.prompt, seed_of(self.config, groups.learned + 1) + group.number, group.version)
        for number, episodes in playing.look().items():
            self.progress = time.monotonic()
            groups.played(number, episodes)
            self.changed.notify_all()
        for name, asked, version in playing.turns(self.calls.free):
            self.calls.ask(name, asked.request.token_ids, version, asked.sampled(self.turn))

    def _lose(self, numbers: list[int]) -> None:
        if not numbers:
            return
        if self.playing:
            return self.playing.lose(numbers)
        asked = {number for seat in self.calls.seats.values() for number in seat.asked}
        self.groups.lost({number for number in numbers if number not in asked})  # of no second engine

    def _complete(self, number: int, turns: list[Turn], texts: list[str]) -> None:
        self.progress = time.monotonic()
        if self.playing:
            return self.playing.answer(number, turns[0])
        self.groups.answered(number, turns, texts)

    def _score(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.groups.sampled or self.closing, LOOK)
            groups, step = self.groups.sampled[:], self.groups.learned + 1
        if not groups:
            return
        self.score([episode for group in groups for episode in group.episodes], step, self.closing)
        with self.changed:
            self.progress = time.monotonic()
            self.groups.rewarded(groups)
            self.changed.notify_all()
