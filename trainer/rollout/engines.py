"""The rollout engines of a run, as its launcher starts them, and the weight sync between them and the policy."""

from __future__ import annotations

import asyncio
import importlib
import time
import traceback
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from trainer import weights
from trainer.cluster import actors, heartbeat, placement
from trainer.cluster.launcher import Launcher
from trainer.cluster.spans import Recorded, span
from trainer.cluster.turns import Memory
from trainer.configs.ppo import PpoConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError, RunError
from trainer.models.routers import DENSE
from trainer.rollout import RolloutEngine, Sampling, nodes, sample
from trainer.weights.here import Handover
from trainer.weights.meeting import call_off
from trainer.weights.published import Fetcher, Published

ENGINES = {"vllm": "trainer.rollout.vllm:VllmEngine", "hf": "trainer.rollout.hf:HfEngine"}
Work = tuple[dict[int, "Answers"], float, int, int]
Request = tuple[int, list[int], Sampling | None]  # its name, the prompt, and how it is sampled, where that is not as all are
Answers = tuple[list[Turn], list[str]]  # to one prompt, and their texts
NOTICE_SECONDS = 10  # within which Ray knows that a process has died


class RolloutActor(Recorded):
    """A process that holds one rollout engine, or an object of the run's own; an engine's kind is imported there only."""

    KIND, WAITS = "engine", "idle"

    def __init__(self, name: str, config: PpoConfig, model_path: str, seed: int, threads: int):
        actors.settle(threads)
        self.name, self.config, self.model_path, self.seed = name, config, model_path, seed
        self.version = -1  # of weights that were published

    def beat(self, limit: float, silence: float | None) -> None:
        heartbeat.begin(limit, silence)

    def facts(self) -> nodes.Facts:
        """Of this node; from now on `nodes.reach` of another finds it."""
        self.listener = nodes.Listener()
        return nodes.facts(self.listener.port)

    def unreached(self, others: list[nodes.Facts]) -> list[str]:
        """Errors, one per node that this one cannot connect to."""
        return nodes.unreached(nodes.facts(0), others)

    def address(self) -> tuple[str, int]:
        """Where the engine's other nodes find this one."""
        return actors.here()

    def start(self, meet: tuple[str, int] | None = None, node: int = 0) -> int:
        """Build the engine, or its part on another node than the first; the number of its processes that receive weights, which the
        first node counts. Not in the constructor, whose errors Ray wraps in its own.

        Raises RunError with the engine's own word.
        """
        engine = self.config.rollout.engine
        module, name = ENGINES[engine].split(":")
        try:
            imported = importlib.import_module(module)
            if meet and node:
                self.part = imported.Part(self.config, self.model_path, self.seed, meet, node)
            else:
                more = (meet,) if meet else ()
                self.engine: RolloutEngine = getattr(imported, name)(self.config, self.model_path, self.seed, *more)
        except ConfigError:
            raise
        except Exception as error:
            traceback.print_exc()
            raise RunError(f"rollout.engine={engine} does not start: {type(error).__name__}: {error}") from None
        heartbeat.ready.set()
        return 0 if node else self.engine.receivers()

    def start_alone(self, plan: weights.Plan) -> None:
        """`start`, and take weights as they are published: without a place in the sync group."""
        self.start()
        self.engine.seed(self.seed)
        self.fetcher = Fetcher(plan)

    def work_alone(self, requests: list[Request], sampling: Sampling, seconds: float, news: Published | None) -> Work:
        """`work` of such an engine, which takes the weights that have come by now. `news` may begin to come where none are on their way.

        Returns the version of its weights besides, -1 before the first.
        """
        if news:
            self.fetcher.begin(news)
        if not requests and not self.engine.asked():
            self.fetcher.done.wait(seconds)
        if (buckets := self.fetcher.take()) is not None:
            with span("take weights"):
                for bucket in buckets:
                    self.engine.load(bucket)
                self.engine.loaded(self.fetcher.version)
            self.version = self.fetcher.version
        return *self.work(requests, sampling, seconds), self.version

    def sample(self, *args: Any) -> list[Episode]:
        """See `rollout.sample`."""
        episodes = asyncio.run(sample(self.engine, *args))
        for turn in (turn for episode in episodes for turn in episode.turns):
            turn.engine = self.name
        return episodes

    def answer(self, requests: list[tuple[list[int], Sampling]], seed: int) -> list[Turn]:
        """One turn to each, sampled together. The same weights, requests and seed give the same."""

        async def together() -> list[list[Turn]]:
            return await asyncio.gather(*(self.engine.generate(*request) for request in requests))

        self.engine.seed(seed)
        found = [turn for turns in asyncio.run(together()) for turn in turns]
        for turn in found:
            turn.engine = self.name
        return found

    def work(self, requests: list[Request], sampling: Sampling, seconds: float) -> tuple[dict[int, Answers], float, int]:
        """Ask for these, by name and prompt, and work for so long on all that was asked (`RolloutEngine.work`).

        Returns the answers that are complete, the seconds that it worked, and the steps that it took.
        """
        begin, steps = time.perf_counter(), self.engine.steps
        for name, prompt_ids, own in requests:
            self.engine.ask(name, prompt_ids, own or sampling)
        complete = self.engine.work(seconds)
        for turn in (turn for turns in complete.values() for turn in turns):
            turn.engine = self.name
        answers = {name: (turns, self.engine.decode([turn.token_ids for turn in turns])) for name, turns in complete.items()}
        return answers, time.perf_counter() - begin, self.engine.steps - steps

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.engine, method)(*args)


class Pending:
    """Episodes on their way, or what `method` of rollout engines returns."""

    def __init__(self, engines: RolloutEngines, parts: dict[int, tuple[Any, ...]], method: str = "sample"):
        """`parts`: what each rollout engine is asked to generate, by its number."""
        self.engines, self.parts, self.method = engines, parts, method
        self.refs: dict[int, Any] = {}
        self.ask(list(parts))

    def ask(self, engines: list[int]) -> None:
        """Have these do their parts, for a second time perhaps: the same weights and seeds give the same episodes."""
        serving = self.engines.serving()
        for i in self.parts.keys() & engines:
            actor = serving[i] if i in serving else [*serving.values()][i % len(serving)]
            self.refs[i] = getattr(actor, self.method).remote(*self.parts[i])

    def owed(self) -> list[int]:
        """Numbers of the rollout engines that died before they had done their part."""
        return [i for i, ref in self.refs.items() if self.engines.launcher.died(ref)]

    def result(self) -> list[Episode]:
        """Wait for them. Raises as `parts_done` does."""
        return [episode for part in self.parts_done() for episode in part]

    def parts_done(self) -> list[Any]:
        """What each rollout engine returns, once all have. Raises RunError at the deadline or when one died or fell silent."""
        refs = [self.refs[i] for i in self.parts]
        self.engines.awaited = True
        try:
            return self.engines.launcher.wait(refs, self.engines.config.rollout.timeout, "sampling (rollout.timeout)")
        finally:
            self.engines.awaited = False


class RolloutEngines:
    """All rollout engines of a run."""

    recording = False  # whether the policy wants the experts that tokens took

    def __init__(self, config: PpoConfig, model_path: str, launcher: Launcher):
        self.config, self.model_path, self.launcher = config, model_path, launcher
        self.awaited = False  # the run's loop waits for them, and has an ear for signs of life itself
        numbers = range(config.rollout.engines)
        self.actors: list[Any] = [self._actor(i) for i in numbers]
        self.parts: list[list[Any]] = [self._parts(i) for i in numbers]  # of each engine, on its further nodes
        self._check_nodes(list(numbers))
        self.starts = [self._start(i) for i in numbers]  # of each engine, its first node's first
        self.away: dict[int, float] = {}  # numbers of those that start again while the others serve; since when

    def serving(self) -> dict[int, Any]:
        """The first process of each engine that has a place in the sync group, by its number."""
        return {i: actor for i, actor in enumerate(self.actors) if i not in self.away}

    def _parts(self, number: int) -> list[Any]:
        return [self._actor(number, node) for node in range(1, self.config.rollout.nodes_per_engine)]

    def _check_nodes(self, numbers: list[int]) -> None:
        """Raises ConfigError with a line for each thing that would stop or hang a rollout engine over these nodes."""
        for i in numbers:
            if self.parts[i]:
                members = [self.actors[i], *self.parts[i]]
                seconds = self.config.trainer.timeout
                facts = self.launcher.wait([m.facts.remote() for m in members], seconds, f"the nodes of rollout-{i} (trainer.timeout)")
                found = nodes.problems(facts)
                if not found:
                    refs = [m.unreached.remote([f for f in facts if f.node != own.node]) for m, own in zip(members, facts, strict=True)]
                    links = self.launcher.wait(refs, seconds, f"links between the nodes of rollout-{i} (trainer.timeout)")
                    found = [line for lines in links for line in lines]
                if found:
                    raise ConfigError("\n".join(f"rollout.nodes_per_engine={len(members)}: rollout-{i}: {line}" for line in found))

    def _start(self, number: int) -> list[Any]:
        """Begin starting an engine on all its nodes."""
        for actor in (self.actors[number], *self.parts[number]):
            self._watch(actor)
        if not self.parts[number]:
            return [self.actors[number].start.remote()]
        meet = self.actors[number].address.remote()
        return [actor.start.remote(meet, node) for node, actor in enumerate([self.actors[number], *self.parts[number]])]

    def _watch(self, actor: Any) -> None:
        rollout = self.config.rollout
        self.launcher.watch(actor, self.config.trainer.silence, rollout.silence if rollout.mode == "async" else None)

    def _actor(self, number: int, node: int = 0) -> Any:
        bundle = self.launcher.plan.engine_bundle(number, node, self.config.rollout.nodes_per_engine)
        return self._at(bundle, f"rollout-{number}" + (f"-node-{node}" if node else ""), self.config.run.seed + number)

    def _at(self, where: int | str, name: str, seed: int) -> Any:
        threads = placement.threads(self.config.placement, self.config.placement.cpus_per_engine)
        given, share = (name, self.config, self.model_path, seed, threads), placement.engine_share(self.config)
        return self.launcher.start(RolloutActor, *given, share=share, threads=threads, name=name, where=where)

    def alone(self, name: str, node: str, seed: int, plan: weights.Plan) -> tuple[Any, Any]:
        """A rollout engine on this node, outside the placement group and the sync group; and the reference of its start."""
        actor = self._at(node, name, seed)
        self._watch(actor)
        return actor, actor.start_alone.remote(plan)

    def lost(self) -> list[int]:
        """Numbers of the rollout engines of which a process has ended, on any of their nodes."""
        refs = {i: [member.address.remote() for member in (actor, *self.parts[i])] for i, actor in self.serving().items()}
        every = [ref for engine in refs.values() for ref in engine]
        self.launcher.done(every, NOTICE_SECONDS)  # those at work do not answer
        refs |= {i: self.starts[i] for i in self.away}
        return sorted(i for i, engine in refs.items() if any(map(self.launcher.died, engine)))

    def start_again(self, numbers: list[int]) -> None:
        """New processes in place of these, which are away until `started` or `returned`; `connect` comes next."""
        for i in numbers:
            for actor in (self.actors[i], *self.parts[i]):
                self.launcher.end(actor)  # where only its node does not answer: its name is taken until then
            self.actors[i], self.parts[i] = self._actor(i), self._parts(i)
            self._check_nodes([i])
            self.starts[i] = self._start(i)
            self.away[i] = time.monotonic()

    def returned(self) -> list[int]:
        """Numbers of those that were away and are up by now; `connect` comes next.

        Raises what starting one raised, RunError where it died or takes longer than trainer.timeout.
        """
        up = []
        for i, since in self.away.items():
            done, pending = self.launcher.done(self.starts[i])
            self.launcher.wait(done, heartbeat.EVERY, f"starting rollout-{i} again")
            if not pending:
                up.append(i)
            elif time.monotonic() - since > (limit := self.config.trainer.timeout):
                raise RunError(f"rollout-{i} did not start again within {limit} s (trainer.timeout)")
        for i in up:
            del self.away[i]
        return up

    def ready(self) -> list[Any]:
        """One reference per rollout engine that ends once it has done all that it was asked."""
        return [actor.call.remote("receivers") for actor in self.serving().values()]

    def connect(self, policy: list[Any], plan: weights.Plan, timeout: int) -> None:
        """Join all rollout engines that are not away with the policy's first rank in one sync group; on shared devices each with the rank
        on its own."""
        serving = self.serving()
        receivers = self._receivers([*serving])
        seconds = self.config.rollout.timeout  # they may be at work; who joins waits for the others for a short time alone
        self.launcher.wait(self.ready(), seconds, "rollout engines before they join the weight sync (rollout.timeout)")
        pairs = self.config.placement.colocate
        senders = policy[: len(serving)] if pairs else policy[:1]
        addresses = self.launcher.wait([rank.address.remote() for rank in senders], timeout, "the policy's addresses (trainer.timeout)")
        world, backend = 2 if pairs else 1 + sum(receivers), placement.sync_backend(self.config)
        meetings = [weights.Rendezvous(host, port, world, self.config.rollout.timeout, backend) for host, port in addresses]
        if backend == "local":
            meetings = [replace(meeting, handover=Handover(world)) for meeting in meetings]
        places = [(meetings[i], 1) if pairs else (meetings[0], 1 + sum(receivers[:i])) for i in range(len(receivers))]
        joined = [actor.call.remote("connect", *place, plan) for actor, place in zip(serving.values(), places, strict=True)]
        joined += [rank.connect.remote(meeting, plan) for rank, meeting in zip_longest(policy, meetings)]
        try:
            self.launcher.wait(joined, timeout, "joining policy and rollout engines for weight sync (trainer.timeout)")
        except RunError as error:
            for meeting in meetings:  # who is left would wait for the one that died, and not be free for another meeting
                call_off(meeting.address, meeting.port, str(error))
            raise

    def receive(self, version: int) -> list[Any]:
        """Begin taking the weights that the policy sends; `version` is how many steps it had learned."""
        return [actor.call.remote("receive", version) for actor in self.serving().values()]

    def sleep(self) -> None:
        """Once they have done what they were asked, free the devices that they share. Raises RunError."""
        self._call("sleep")

    def wake(self, memory: Memory) -> None:
        """Raises RunError."""
        self._call("wake", memory)

    def _call(self, method: str, *args: Any) -> None:
        refs = [actor.call.remote(method, *args) for actor in self.serving().values()]
        self.launcher.wait(refs, self.config.rollout.timeout, f"rollout engines: {method} (rollout.timeout)")

    def started(self) -> None:
        """Wait until all are up. Raises RunError at trainer.timeout."""
        self._receivers([*range(len(self.starts))])
        self.away.clear()

    def _receivers(self, numbers: list[int]) -> list[int]:
        """Wait until these are up; the number of processes of each that receive weights. Raises RunError at trainer.timeout."""
        refs = [ref for i in numbers for ref in self.starts[i]]
        counts = iter(self.launcher.wait(refs, self.config.trainer.timeout, "starting the rollout engines (trainer.timeout)"))
        return [sum(next(counts) for _ in self.starts[i]) for i in numbers]

    def record(self, unreplayed: str) -> None:
        """Have answers come with the experts that tokens took, where the policy, whose word is `unreplayed`, and these engines can."""
        if not unreplayed:
            self._receivers([*self.serving()])  # raises what starting one raised
        asked = [] if unreplayed else [actor.call.remote("unrecorded") for actor in self.serving().values()]
        seconds = self.config.trainer.timeout
        why = unreplayed or next(filter(None, self.launcher.wait(asked, seconds, "rollout engines (trainer.timeout)")), "")
        self.recording = not why
        if why and self.config.rollout.router_replay == "auto" and not why.endswith(DENSE):
            print(f"router replay is off (rollout.router_replay=auto): {why}", flush=True)

    def sampling(self, samples: int, greedy: bool = False) -> Sampling:
        """How answers are sampled, so many to each prompt."""
        rollout = self.config.rollout
        experts = 0 if self.recording and not greedy else None
        return Sampling(rollout.max_new_tokens, 0.0 if greedy else rollout.temperature, rollout.top_p, samples, experts=experts)

    def start(self, prompts: list[Prompt], samples: int, seed: int, greedy: bool = False) -> Pending:
        """Begin sampling; prompts are dealt to the rollout engines in turn of equal shares."""
        sampling, serving = self.sampling(samples, greedy), self.serving()
        share = -(-len(prompts) // len(serving))
        parts = {}
        for place, i in enumerate(serving):
            part = slice(place * share, (place + 1) * share)
            groups = list(range(len(prompts)))[part]
            if groups:
                parts[i] = (prompts[part], groups, sampling, seed + i)
        return Pending(self, parts)

    def answer(self, requests: dict[int, list[tuple[list[int], Sampling]]], seed: int) -> Pending:
        """Begin sampling one turn to each of these, by the number of the rollout engine that is asked."""
        return Pending(self, {i: (mine, seed + i) for i, mine in requests.items()}, "answer")
