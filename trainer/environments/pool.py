"""The processes of a run that play episodes; and a batch of episodes, round by round."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from trainer import environments
from trainer.chat.tokenizer import load_tokenizer
from trainer.cluster.launcher import Launcher
from trainer.cluster.spans import Recorded
from trainer.configs.ppo import PpoConfig
from trainer.data.pictures import limits as picture_limits
from trainer.data.prompts import chat_for
from trainer.environments.journal import Batch
from trainer.environments.policy import Limits
from trainer.environments.runner import SHOWN, Asked, Ended, Job, Key, Name, Runner
from trainer.environments.sandboxes.episode import Sandboxes
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError, RunError
from trainer.rewards.terms import Mistake, Reward

if TYPE_CHECKING:
    from trainer.rollout.engines import Pending, RolloutEngines

BLOCKED_SECONDS = 10.0  # for an episode to end at environment.timeout by itself; one that blocks its event loop does not
WHERE_SECONDS = 15.0  # for a process to say where it is; code that holds Python's lock does not let it
Progress = tuple[list[Asked], list[Ended]]


class Lost(Exception):
    """A process of episodes is of no use any more: it died, or hangs in the episode `key`, where that is known."""

    def __init__(self, why: str, key: Key | None = None, *, died: bool = False):
        super().__init__(why)
        self.key, self.died = key, died


class EnvironmentActor(Recorded):
    """A process that plays episodes."""

    KIND, WAITS = "environment", "waiting"

    def __init__(self, config: PpoConfig, model_path: str):
        self.config, self.model_path = config, model_path
        self.runner: Runner | None = None  # made by the first call, whose errors come through as they were raised

    def advance(self, jobs: list[Job], turns: dict[Name, Turn], unwanted: list[int], *, whole: bool) -> Progress:
        """`Runner.advance`, once these have begun, these are answered, and the episodes of these prompts are forgotten."""
        if self.runner is None:
            self.runner = runner_of(self.config, self.model_path)
        self.runner.begin(jobs)
        self.runner.answer(turns)
        for prompt in unwanted:
            self.runner.drop(prompt)
        return self.runner.advance(whole=whole)

    def where(self) -> tuple[Key | None, str]:
        return self.runner.where() if self.runner else (None, "")


def runner_of(config: PpoConfig, model_path: str) -> Runner:
    """Raises ConfigError where the settings name no environment."""
    environment = config.environment
    function = environments.resolve(environment.function or "", environment.args)
    tokenizer = load_tokenizer(config.model.model_copy(update={"path": model_path}))
    reward = Reward(environment.function or "", function, batched=False, awaited=True, weights=config.reward.weights)
    longest = config.data.max_prompt_tokens + config.max_response_tokens()
    limits = Limits(environment.max_turns, config.rollout.max_new_tokens, longest, environment.timeout)
    sandboxes = Sandboxes(environment.sandbox) if environment.sandbox.provider else None
    chat = chat_for(config.data, tokenizer)
    return Runner(
        reward,
        tokenizer,
        limits,
        chat,
        limit_is_error=environment.on_limit == "error",
        sandboxes=sandboxes,
        pictures=picture_limits(config.data),
        most_pictures=config.data.max_images,
    )


class Environments:
    """All processes of a run that play episodes; one that hangs or dies is started again."""

    def __init__(self, config: PpoConfig, model_path: str, launcher: Launcher):
        self.config, self.model_path, self.launcher = config, model_path, launcher
        self.name = f"environment.function={config.environment.function}"
        self.started: set[int] = set()  # processes that have answered
        self.processes = [self._process() for _ in range(config.environment.workers)]

    def _process(self) -> Any:
        share = {"CPU": self.config.environment.cpus, **self.config.environment.resources}
        return self.launcher.start(EnvironmentActor, self.config, self.model_path, share=share, threads=1, beside=("where",))

    def replace(self, number: int, lost: Lost, deaths: int, jobs: dict[Key, Job]) -> tuple[list[Ended], list[Job]]:
        """Another process in place of one that hangs or has died with `jobs`: the episode that hangs has failed, the others begin anew.

        All have failed where nobody knows which one hangs. Raises RunError where it is not the first of `deaths`.
        """
        self.launcher.end(self.processes[number])
        self.started.discard(number)
        self.processes[number] = self._process()
        if deaths > 1:
            raise RunError(f"{self.name}: {lost}, again") from lost
        guilty = [] if lost.died else [jobs[lost.key]] if lost.key in jobs else [*jobs.values()]
        fresh = [job for job in jobs.values() if job not in guilty]
        if fresh:
            print(f"{self.name} {lost}; {len(fresh)} episodes of that process begin anew", flush=True)
        return [Ended(job.key, 0.0, {}, [], {}, Mistake(0, str(lost), late=True)) for job in guilty], fresh

    def close(self) -> None:
        for process in self.processes:
            self.launcher.end(process)
        self.processes = []

    def patience(self, number: int) -> float:
        """Seconds that a call may take."""
        start = 0 if number in self.started else self.config.trainer.timeout
        return start + self.config.environment.timeout + BLOCKED_SECONDS

    def get(self, number: int, ref: Any, seconds: float) -> Progress:
        """What a call to a process returned, within `seconds`. Raises Lost where it died or hangs, and as the call did."""
        if not self.launcher.done([ref], max(0.0, seconds))[0]:
            raise self.hang(number)
        try:
            found: Any = self.launcher.get(ref)
        except Exception as error:
            if not self.launcher.is_death(error):
                raise
            raise Lost(f"its process died: {str(error).strip().splitlines()[0]}", died=True) from error
        self.started.add(number)
        return found

    def hang(self, number: int) -> Lost:
        """In which episode a process hangs, as far as is known."""
        late = f"did not go on within {self.config.environment.timeout:g} s (environment.timeout"
        where = self.processes[number].where.remote()
        if not self.launcher.done([where], WHERE_SECONDS)[0] or self.launcher.died(where):
            return Lost(f"{late}; it holds Python's lock)")
        key, line = self.launcher.get(where)
        return Lost(f"{late}{f'; {line}' if line else ''})", key)

    def start(
        self, engines: RolloutEngines, prompts: list[Prompt], samples: int, seed: int, greedy: bool = False, batch: Batch | None = None
    ) -> Rounds:
        """Begin `samples` episodes of each prompt. `batch`: where what the policy says is kept for the run that resumes."""
        return Rounds(self, engines, prompts, samples, seed, greedy, batch)

    def episodes(self, ended: list[tuple[Prompt, Ended]]) -> list[Episode]:
        """Raises as `episodes_of` does."""
        return episodes_of(self.config, ended)


def episodes_of(config: PpoConfig, ended: list[tuple[Prompt, Ended]]) -> list[Episode]:
    """In this order; groups are the numbers of the prompts in their keys. Raises ConfigError, or TimeoutError, where one has failed and
    reward.on_error is `fail`, or where all would.
    """
    failed = [(prompt, each.mistake) for prompt, each in ended if each.mistake]
    final = [(prompt, mistake) for prompt, mistake in failed if mistake.final]
    policy = config.reward.on_error
    if final or (failed and policy == "fail"):
        prompt, mistake = (final or failed)[0]
        error = TimeoutError if mistake.late else ConfigError
        name = f"environment.function={config.environment.function}"
        raise error(f"{name} on row {prompt.index}: {mistake.text} (reward.on_error={policy})")
    if failed:
        count = f"{len(failed)} of {len(ended)} episodes failed (reward.on_error={policy})"
        first: dict[str, int] = {}
        for prompt, mistake in failed:
            first.setdefault(mistake.text, prompt.index)
        print(f"{count}; " + "; ".join(f"row {row}: {text}" for text, row in [*first.items()][:SHOWN]), flush=True)
    return [episode for prompt, each in ended for episode in _episodes(prompt, each)]


class Rounds:
    """A batch of episodes, played by rounds: all turns that episodes wait for are sampled together, then all episodes go on.

    So what is sampled together does not depend on how long an environment takes, and the same weights and seed give the same episodes.
    """

    def __init__(
        self,
        pool: Environments,
        engines: RolloutEngines,
        prompts: list[Prompt],
        samples: int,
        seed: int,
        greedy: bool,
        batch: Batch | None = None,
    ):
        self.batch = batch
        self.pool, self.engines, self.prompts, self.seed, self.greedy = pool, engines, prompts, seed, greedy
        jobs = [Job((p, i), prompt, seed) for p, prompt in enumerate(prompts) for i in range(samples)]
        self.place = {job.key: place for place, job in enumerate(jobs)}
        count = len(pool.processes)
        share = -(-len(jobs) // count)
        self.jobs = [{job.key: job for job in jobs[i * share : (i + 1) * share]} for i in range(count)]  # not ended, by process
        self.fresh: list[list[Job]] = [[*mine.values()] for mine in self.jobs]
        self.turns: list[dict[Name, Turn]] = [{} for _ in range(count)]
        self.ended: dict[Key, Ended] = {}
        self.round = self.deaths = 0
        self.asked: list[list[tuple[int, Asked]]] = []  # by rollout engine, with the process that asked
        self.pending: Pending | None = None

    def result(self) -> list[Episode]:
        """Wait for them. Raises RunError at a deadline or when a rollout engine died; and as `Environments.episodes` does."""
        while any(self.jobs):
            if self.pending is None:
                self._play()
            if self.pending is not None:
                said: list[tuple[Asked, Turn]] = []
                for asked, turns in zip(self.asked, self.pending.parts_done(), strict=True):
                    for (process, each), turn in zip(asked, turns, strict=True):
                        self.turns[process][each.name] = turn
                        said.append((each, turn))
                if self.batch:
                    self.batch.add(said)
                self.pending = None
        if self.batch:
            self.batch.end(self.prompts)
        order = sorted(self.ended, key=self.place.__getitem__)
        return self.pool.episodes([(self.prompts[key[0]], self.ended[key]) for key in order])

    def owed(self) -> list[int]:
        """Numbers of the rollout engines that died before they had done their part of the round."""
        return self.pending.owed() if self.pending else []

    def ask(self, engines: list[int]) -> None:
        """Have these do their parts of the round for a second time."""
        if self.pending:
            self.pending.ask(engines)

    def _play(self) -> None:
        """Have all episodes go on to their next turns, and ask the rollout engines for these."""
        playing = {i: self._advance(i) for i, jobs in enumerate(self.jobs) if jobs}
        found: list[tuple[int, Asked]] = []
        for i, ref in playing.items():
            asked, ended = self._advanced(i, ref)
            found += [(i, each) for each in asked]
            for each in ended:
                self.ended[each.key] = each
                del self.jobs[i][each.key]
        seed = self.seed if self.round == 0 else Random(f"{self.seed}/{self.round}").getrandbits(62)
        self.round += bool(found)
        if found := [each for each in found if not self._said_before(*each)]:
            by_engine: dict[int, list[tuple[int, Asked]]] = {}
            serving = [*self.engines.serving()]
            for each in found:  # an episode stays with its engine, which may have what was said before in its cache
                by_engine.setdefault(serving[self.place[each[1].key] * len(serving) // len(self.place)], []).append(each)
            sampling = self.engines.sampling(1, self.greedy)
            requests = {i: [(each.request.token_ids, each.sampled(sampling)) for _, each in mine] for i, mine in by_engine.items()}
            self.pending, self.asked = self.engines.answer(requests, seed), [*by_engine.values()]

    def _said_before(self, process: int, asked: Asked) -> bool:
        """Whether the policy has said it before the run was resumed."""
        turn = self.batch.turn(asked) if self.batch else None
        if turn:
            self.turns[process][asked.name] = turn
        return turn is not None

    def _advance(self, number: int) -> Any:
        jobs, self.fresh[number] = self.fresh[number], []
        turns, self.turns[number] = self.turns[number], {}
        return self.pool.processes[number].advance.remote(jobs, turns, [], whole=True)

    def _advanced(self, number: int, ref: Any) -> Progress:
        """What a process says of its episodes. Where it hangs, the episode that it is in has failed, and others begin anew."""
        try:
            return self.pool.get(number, ref, self.pool.patience(number))
        except Lost as error:
            self.deaths += error.died
            failed, self.fresh[number] = self.pool.replace(number, error, self.deaths, self.jobs[number])
        if not self.fresh[number]:
            return [], failed
        asked, ended = self._advanced(number, self._advance(number))
        return asked, [*failed, *ended]


def _episodes(prompt: Prompt, ended: Ended) -> list[Episode]:
    """One for each sequence that the policy wrote in; one that is empty where it wrote nothing."""
    found = []
    for part, spoken in enumerate(ended.sequences or [None]):
        own = prompt
        if spoken and not (spoken.prompt_ids == prompt.token_ids and spoken.prompt_pictures == prompt.pictures):
            own = Prompt(prompt.index, spoken.prompt_ids, prompt.row, spoken.prompt_pictures)
        episode = Episode(own, ended.key[0], spoken.turns if spoken else [], reward=ended.reward, terms=ended.terms, part=part)
        episode.failed, episode.limited, episode.metrics = ended.mistake is not None, bool(ended.limited), ended.metrics
        episode.text = spoken.said if spoken else ""
        episode.commands = ended.commands if part == 0 else []
        found.append(episode)
    return found
