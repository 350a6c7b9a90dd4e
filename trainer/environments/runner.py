"""Many episodes on one event loop, which stops whenever all of them wait for the policy, and goes on with its turns."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.chat.pictures import Limits as PictureLimits
from trainer.chat.template import Chat, chat_of
from trainer.environments.endpoint import serving
from trainer.environments.eyes import Eyes
from trainer.environments.policy import LimitReached, Limits, Misuse, Policy, Request, Spoken
from trainer.environments.sandboxes.episode import EpisodeSandbox, Sandboxes
from trainer.environments.sandboxes.pools import queued
from trainer.environments.sandboxes.spec import Lost, Unavailable
from trainer.episodes import Prompt, Turn
from trainer.rewards.terms import Mistake, Reward, mistake, worth
from trainer.rollout import Sampling

SLICE = 0.2  # seconds after which `advance` returns at last, so that the run has a look at it
SHOWN = 3  # errors: tracebacks in the log of a process, and kinds that the run names of each step
Key = tuple[int, int]  # number of a prompt, and of the episode among those to it
Name = tuple[Key, int]  # of a request: its episode's, and the number of the turn


@dataclass(frozen=True, slots=True)
class Job:
    """An episode to be played."""

    key: Key
    prompt: Prompt
    seed: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn that an episode waits for."""

    name: Name
    request: Request
    commands: list[list[str]] = field(default_factory=list)  # of its sandbox since it asked last, as of Episode

    @property
    def key(self) -> Key:
        return self.name[0]

    def sampled(self, sampling: Sampling) -> Sampling:
        """How, where all else is as usual."""
        experts = None if sampling.experts is None else self.request.known
        asked = self.request
        return replace(sampling, max_tokens=asked.max_tokens, stop=asked.stop, pictures=asked.pictures, experts=experts)


@dataclass(frozen=True, slots=True)
class Ended:
    key: Key
    reward: float
    terms: dict[str, float]
    sequences: list[Spoken]
    metrics: dict[str, float]
    mistake: Mistake | None = None
    limited: str = ""  # the limit that ended it
    commands: list[list[str]] = field(default_factory=list)  # as of Episode


class Runner:
    """All methods but `where` are for one thread at a time."""

    def __init__(
        self,
        reward: Reward,
        tokenizer: PreTrainedTokenizerBase,
        limits: Limits,
        chat: Chat | None = None,
        *,
        limit_is_error: bool = False,
        sandboxes: Sandboxes | None = None,
        pictures: PictureLimits | None = None,
        most_pictures: int = 16,
    ):
        """`reward.function` is the environment's, its weights are those of the terms that it returns."""
        self.reward, self.tokenizer, self.limits, self.chat = reward, tokenizer, limits, chat or chat_of(tokenizer)
        self.limit_is_error, self.sandboxes = limit_is_error, sandboxes
        self.pictures, self.most_pictures = pictures, most_pictures
        self.loop = asyncio.new_event_loop()
        self.tasks: dict[Key, asyncio.Task[None]] = {}
        self.waiting: dict[Name, asyncio.Future[Turn]] = {}
        self.asked: list[Asked] = []  # since `advance` returned last
        self.ended: list[Ended] = []
        self.current: Key | None = None  # the episode whose code runs, or ran last
        self.thread: int | None = None  # that runs it
        self.queued: Counter[Key] = Counter()  # episodes that wait for room in a pool of sandboxes
        self.changed = asyncio.Event()
        self.shown = 0  # errors

    def begin(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.tasks[job.key] = self.loop.create_task(self._play(job))

    def answer(self, turns: dict[Name, Turn]) -> None:
        """Turns that the policy has written; those that nobody waits for any more are forgotten."""
        for name, turn in turns.items():
            future = self.waiting.pop(name, None)
            if future and not future.done():
                future.set_result(turn)

    def drop(self, prompt: int) -> None:
        """Episodes of this prompt, which nobody wants any more."""
        for key in [key for key in self.tasks if key[0] == prompt]:
            self.tasks.pop(key).cancel()

    def advance(self, *, whole: bool) -> tuple[list[Asked], list[Ended]]:
        """Play on, until all episodes wait for the policy or have ended (`whole`), or until one of them does, for SLICE seconds at most.

        In the order in which the episodes were begun; of one episode in the order of its requests.
        """
        self.thread = threading.get_ident()
        try:
            self.loop.run_until_complete(self._advance(whole))
        finally:
            self.current = None
        order = {key: place for place, key in enumerate([*self.tasks, *(ended.key for ended in self.ended)])}
        asked = sorted(self.asked, key=lambda each: (order.get(each.key, 0), each.name))
        ended, self.asked, self.ended = self.ended, [], []
        return asked, ended

    def where(self) -> tuple[Key | None, str]:
        """For another thread: the episode whose code does not go on, and its line."""
        frame, line = sys._current_frames().get(self.thread or 0), ""
        while frame and not line:
            file = Path(frame.f_code.co_filename)
            if "asyncio" not in file.parts and file.name != "runner.py" and not file.is_relative_to(sys.base_prefix):
                line = f"{file.name}:{frame.f_lineno}"
            frame = frame.f_back
        return self.current, line

    async def _advance(self, whole: bool) -> None:
        deadline = self.loop.time() + SLICE
        while True:
            self.changed.clear()
            await asyncio.sleep(0)  # what was answered goes on
            thinking = self.tasks.keys() - {key for key, _ in self.waiting}
            # Those that wait for room may wait for what others hold who wait for the policy.
            stuck = not any(not self.queued[key] for key in thinking)
            if not thinking or ((stuck or not whole) and (self.asked or self.ended)):
                return
            left = deadline - self.loop.time()
            if (stuck or not whole) and left <= 0:
                return
            try:
                await asyncio.wait_for(self.changed.wait(), left if stuck or not whole else None)
            except TimeoutError:
                return

    def _sandbox(self, prompt: Prompt) -> Callable[[Policy], EpisodeSandbox] | None:
        sandboxes = self.sandboxes
        return (lambda policy: sandboxes.of_episode(prompt.row, policy.metrics)) if sandboxes else None

    def _policy(self, job: Job, ask: Callable[[Request], Awaitable[Turn]]) -> Policy:
        return Policy(
            job.prompt,
            self.tokenizer,
            self.limits,
            ask,
            seed=(job.seed, job.key),
            chat=self.chat,
            serve=serving,
            sandbox=self._sandbox(job.prompt),
            eyes=Eyes(self.tokenizer, job.prompt.pictures, self.pictures, self.most_pictures),
        )

    async def _play(self, job: Job) -> None:
        limit = asyncio.timeout(self.limits.seconds)
        clock = _Clock(limit, self.limits.seconds, self.loop.time)

        async def ask(request: Request) -> Turn:
            name = job.key, before + policy.turns
            future: asyncio.Future[Turn] = self.loop.create_future()
            self.waiting[name] = future
            self.asked.append(Asked(name, request, policy.sandbox.since_last() if self.sandboxes else []))
            self.changed.set()
            clock.stop()
            try:
                return await future
            finally:
                self.waiting.pop(name, None)
                clock.go_on()

        async def played() -> Any:
            return await _Marked(self.reward.function(policy, deepcopy(job.prompt.row)), lambda: setattr(self, "current", job.key))

        queued.set(partial(self._wait_for_room, job.key, clock))
        policy, before = self._policy(job, ask), 0
        reward, terms, wrong, limited = 0.0, {}, None, ""
        try:
            async with limit:
                try:
                    value = await played()
                except Lost as error:  # not the episode's doing: once more from its beginning, within the same time
                    print(f"row {job.prompt.index}: {error}; its episode begins anew", flush=True)
                    policy.sandbox.close()
                    before, policy = policy.turns + 1, self._policy(job, ask)
                    value = await played()
            reward, terms = worth(self.reward, value, 0)
        except LimitReached as error:
            limited = str(error)
            if self.limit_is_error:
                wrong = Mistake(0, f"reached a limit: {limited}")
        except (Misuse, Unavailable) as error:
            wrong = Mistake(0, str(error), final=True)
        except TimeoutError as error:
            wrong = mistake(error, 0)
            if limit.expired():
                wrong = Mistake(0, f"did not end within {self.limits.seconds:g} s (environment.timeout)", late=True)
        except Exception as error:
            wrong = mistake(error, 0)
            self.shown += 1
            if self.shown <= SHOWN:
                traceback.print_exc()
        finally:
            if self.sandboxes:
                policy.sandbox.close()
        self._end(job.key, policy, partial(Ended, job.key, reward, terms, mistake=wrong, limited=limited))

    def _wait_for_room(self, key: Key, clock: _Clock, waits: bool) -> None:
        clock.stop() if waits else clock.go_on()
        self.queued[key] += 1 if waits else -1
        self.changed.set()

    def _end(self, key: Key, policy: Policy, ended: Callable[..., Ended]) -> None:
        said = [spoken for spoken in policy.sequences if spoken.turns]
        for spoken in said:
            [spoken.said] = self.tokenizer.batch_decode([spoken.token_ids[len(spoken.prompt_ids) :]], skip_special_tokens=True)
        metrics = {name: float(number) for name, number in policy.metrics.items()}
        commands = [[step.asked, step.digest] for step in policy.sandbox.steps] if self.sandboxes else []
        self.ended.append(ended(sequences=said, metrics=metrics, commands=commands))
        self.tasks.pop(key, None)
        self.queued.pop(key, None)
        self.changed.set()


class _Clock:
    """The seconds of an episode, which stand still while the policy writes."""

    def __init__(self, limit: asyncio.Timeout, seconds: float, now: Callable[[], float]):
        self.limit, self.left, self.now, self.since, self.writing = limit, seconds, now, now(), 0

    def stop(self) -> None:
        if self.writing == 0:
            self.left -= self.now() - self.since
            self.limit.reschedule(None)
        self.writing += 1

    def go_on(self) -> None:
        self.writing -= 1
        if self.writing == 0 and not self.limit.expired():
            self.since = self.now()
            self.limit.reschedule(self.since + max(0.0, self.left))


class _Marked:
    """A coroutine that says whenever it goes on."""

    def __init__(self, coroutine: Awaitable[Any], mark: Callable[[], None]):
        self.coroutine, self.mark = coroutine, mark

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.coroutine.__await__()
        sent, raised = None, None
        while True:
            self.mark()
            try:
                waited = steps.throw(raised) if raised else steps.send(sent)  # type: ignore[attr-defined]
            except StopIteration as end:
                return end.value
            sent, raised = None, None
            try:
                sent = yield waited
            except BaseException as error:
                raised = error
