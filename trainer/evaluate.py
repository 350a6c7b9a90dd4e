"""flotilla eval RUN.yaml: a model's reward and pass@k on the sets that a run of train_ppo evaluates on, without training anything.

Asked are the run's own rollout engines, or a server elsewhere: one that completes token ids (`POST /v1/completions` of vLLM or SGLang), or
with --chat one that takes messages alone (`POST /v1/chat/completions`). Rewards, environments and limits are the run's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer import preflight
from trainer.cli import exits_cleanly, parse
from trainer.cli.streams import stdout_is_stderr
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError

PROG = "flotilla eval"
CONNECT_SECONDS = 10  # within which a server that has not answered yet must take a connection
RETRY_SECONDS = 0.5  # before a server that is busy is asked again; twice as long each time, up to 8


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What is this command's own, and what is the run's."""
    parser = argparse.ArgumentParser(prog=PROG, description="What a model is worth on the evaluation sets of a run of train_ppo.")
    parser.add_argument("run", metavar="RUN.yaml", help="settings of train_ppo; what follows as key=value is on top")
    parser.add_argument("--model", help="a folder, a hub name, or run:NAME; default: the run's model.path")
    parser.add_argument("--samples", type=int, metavar="K", help="answers to each prompt, for pass@k; default: trainer.eval_samples")
    parser.add_argument("--endpoint", metavar="URL", help="of a server that completes token ids, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--chat", action="store_true", help="that server takes messages alone, as hosted models do; no environments")
    parser.add_argument("--served", metavar="NAME", help="model name on that server; default: the one of --model")
    parser.add_argument("--key-env", metavar="VARIABLE", help="environment variable that holds the key of that server")
    parser.add_argument("--concurrency", type=int, default=64, help="requests to that server at a time")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="a line for each answer")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON, and nothing else on stdout")
    return parser.parse_known_args(argv)


def read(args: argparse.Namespace, overrides: list[str]) -> PpoConfig:
    """The run's settings, with no ranks to train. Raises ConfigError as train_ppo does, and for what is this command's own."""
    if args.endpoint and not args.endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--endpoint {args.endpoint}: an address is needed, such as http://127.0.0.1:8000/v1")
    if args.key_env and not os.environ.get(args.key_env):
        raise ConfigError(f"--key-env {args.key_env}: not set")
    if args.chat and not args.endpoint:
        raise ConfigError("--chat: is how a server is asked; name it with --endpoint, such as https://api.openai.com/v1")
    if args.concurrency < 1:
        raise ConfigError(f"--concurrency {args.concurrency}: 1 or more")
    if args.out and not args.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {args.out}: {args.out.absolute().parent} is no folder")
    own = []
    if args.model:
        own += [f"model.path={args.model}", "model.init=null", "model.lora=null", "model.freeze=[]"]
    if args.samples is not None:
        own.append(f"trainer.eval_samples={args.samples}")
    checks = (preflight.allowed, preflight.options, preflight.model, preflight.split, preflight.data, preflight.evals)
    checks = (*checks, preflight.reward, preflight.environment)
    config = parse(["--config", args.run, *overrides, *own], prog=PROG, model=PpoConfig, checks=checks)
    if config.model.path is None:
        raise ConfigError("model.init: random weights are worth nothing; name a model with --model, such as run:NAME")
    if args.chat and config.environment.function:
        text = f"--chat: environment.function={config.environment.function} speaks by token ids"
        raise ConfigError(f"{text}; give a server that completes them, without --chat")
    if not config.trainer.eval_prompts and not config.evals:
        raise ConfigError("trainer.eval_prompts=0: nothing to evaluate on; hold some of data out, or name sets in evals")
    alone = {"rollout": {"mode": "sync", "elastic": False}, "placement": {"colocate": False}}  # there is nobody to share with
    return config.model_copy(update={key: getattr(config, key).model_copy(update=values) for key, values in alone.items()})


ASIDE = ExitStack()  # with --json, what else than the numbers is printed, by imports too

if __name__ == "__main__":  # errors are reported before the seconds that torch takes to import
    ARGS, REST = arguments(sys.argv[1:])
    if ARGS.json:
        ASIDE.enter_context(stdout_is_stderr())
    with exits_cleanly():
        CONFIG = read(ARGS, REST)

import time

from rich.console import Console
from rich.table import Table

from trainer import environments
from trainer.chat.template import stops, with_text_arguments
from trainer.chat.tokens import within
from trainer.cluster.actors import RunError
from trainer.cluster.launcher import launcher
from trainer.data.loader import hold_out
from trainer.data.prompts import chat_for, conversation, load_eval_sets, load_prompts
from trainer.environments.policy import Request
from trainer.environments.pool import Environments, episodes_of, runner_of
from trainer.environments.runner import Job
from trainer.episodes import Episode, Prompt, Turn
from trainer.models import load_tokenizer
from trainer.online.scored import evaluation
from trainer.rewards.here import scorer_of
from trainer.rollout.engines import RolloutEngines

Sample = Callable[[list[Prompt]], list[Episode]]


def run(config: PpoConfig, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The numbers of each set, by its name; "" is what data holds out. Raises RunError, and ConfigError as rewards do."""
    sets, answers = {}, preflight.needs_answer(config)
    tokenizer = load_tokenizer(config.model)
    if config.trainer.eval_prompts:
        data = load_prompts(config.data, tokenizer, answers=answers)
        sets[""] = hold_out(config.data, data.prompts, config.trainer.eval_prompts)[1]
    sets |= load_eval_sets(config, tokenizer, answers)
    if spec := config.environment.function:
        [first, *_] = next(iter(sets.values()))
        environments.check_template(spec, config.environment.args, first.row, chat_for(config.data, tokenizer))
    sampling = partial(from_server, config, args) if args.endpoint else partial(from_engines, config)
    found: dict[str, dict[str, float]] = {}
    first = next(iter(sets.values()))
    with sampling() as sample, scorer_of(config, first) as scorer, args.out.open("w") if args.out else nullcontext() as out:
        for name, prompts in sets.items():
            begin = time.perf_counter()
            episodes = sample(prompts)
            if scorer is not None:
                scorer.score(episodes, whole=False)
            tokens = sum(sum(e.mask) for e in episodes)
            found[name] = evaluation(episodes, config) | {
                "prompts": len(prompts),
                "tokens": tokens / len(episodes),
                "failed": sum(e.failed for e in episodes) / len(episodes),
                "seconds": time.perf_counter() - begin,
            }
            for episode in episodes if out else ():
                print(json.dumps(line(name, episode, config.data.prompt), default=str), file=out)
    return found


@contextmanager
def from_engines(config: PpoConfig) -> Iterator[Sample]:
    """Of rollout engines of the cluster, or of this machine, alone."""
    assert config.model.path is not None, "looked at before"
    with ExitStack() as stack:
        starts = stack.enter_context(launcher(config, engines_alone=True))
        engines = RolloutEngines(config, config.model.path, starts)
        played = stack.enter_context(closing(Environments(config, config.model.path, starts))) if config.environment.function else None
        engines.started()
        samples = config.trainer.eval_samples

        def sample(prompts: list[Prompt]) -> list[Episode]:
            if played:
                return played.start(engines, prompts, samples, config.run.seed, greedy=samples == 1).result()
            return engines.start(prompts, samples, config.run.seed, greedy=samples == 1).result()

        yield sample


@contextmanager
def from_server(config: PpoConfig, args: argparse.Namespace) -> Iterator[Sample]:
    """Of a server elsewhere; environments are played in this process."""
    assert config.model.path is not None, "looked at before"
    server = ChatCompletions(config, args) if args.chat else Completions(config, args)
    runner = runner_of(config, config.model.path) if config.environment.function else None
    samples = config.trainer.eval_samples

    def sample(prompts: list[Prompt]) -> list[Episode]:
        jobs = [Job((p, i), prompt, config.run.seed) for p, prompt in enumerate(prompts) for i in range(samples)]
        if runner is None:
            said = asyncio.run(server.ask([server.of_prompt(job.prompt) for job in jobs]))
            return [Episode(job.prompt, job.key[0], [each.turn], text=each.text) for job, each in zip(jobs, said, strict=True)]
        runner.begin(jobs)
        ended: dict[Any, Any] = {}
        while len(ended) < len(jobs):
            asked, done = runner.advance(whole=True)
            ended |= {each.key: each for each in done}
            if asked:
                said = asyncio.run(server.ask([server.of_request(each.request) for each in asked]))
                runner.answer({each.name: server.exact(it) for each, it in zip(asked, said, strict=True)})
        return episodes_of(config, [(job.prompt, ended[job.key]) for job in jobs])

    yield sample


@dataclass(frozen=True, slots=True)
class Served:
    turn: Turn  # tokens are the run's tokenizer's, where the server sends none
    text: str  # as it was served, which is what counts


class Completions:
    """`POST /completions` of a server that takes a prompt as token ids: vLLM's, SGLang's."""

    path = "completions"

    def __init__(self, config: PpoConfig, args: argparse.Namespace):
        self.config, self.url, self.concurrency = config, args.endpoint.rstrip("/"), args.concurrency
        self.model = args.served or args.model or config.model.path
        self.headers = {"Authorization": f"Bearer {os.environ[args.key_env]}"} if args.key_env else {}
        self.tokenizer: Any = load_tokenizer(config.model)
        self.answered = False

    def of_prompt(self, prompt: Prompt) -> dict[str, Any]:
        return self.of_request(Request(prompt.token_ids, self.config.rollout.max_new_tokens))

    def of_request(self, request: Request) -> dict[str, Any]:
        """Its body."""
        return {
            **self.sampling(),
            **{"prompt": request.token_ids, "max_tokens": request.max_tokens, "stop": list(request.stop)},
            **{"return_token_ids": True, "include_stop_str_in_output": True},  # vLLM's own; others read over them
            "stop_token_ids": stops(self.tokenizer),
        }

    def sampling(self) -> dict[str, Any]:
        rollout, greedy = self.config.rollout, self.config.trainer.eval_samples == 1
        return {"model": self.model, "temperature": 0 if greedy else rollout.temperature, "top_p": 1 if greedy else rollout.top_p}

    async def ask(self, bodies: list[dict[str, Any]]) -> list[Served]:
        """In their order. Raises RunError where the server refuses, or does not answer within rollout.timeout."""
        import aiohttp

        gate, timeout = asyncio.Semaphore(self.concurrency), aiohttp.ClientTimeout(self.config.rollout.timeout)
        async with aiohttp.ClientSession(timeout=timeout, headers=self.headers) as session:

            async def one(body: dict[str, Any]) -> Served:
                async with gate:
                    return await self._ask(session, body)

            return await asyncio.gather(*map(one, bodies))

    def exact(self, said: Served) -> Turn:
        """For an environment, which reads tokens. Raises RunError where they are not what was served."""
        if self._decoded(said.turn.token_ids) != said.text:
            text = f"it sends no token ids, and the run's tokenizer cannot write {said.text[:60]!r}"
            raise RunError(f"--endpoint {self.url}: {text}; give a server that sends them, such as vLLM's")
        return said.turn

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    async def _ask(self, session: Any, body: dict[str, Any]) -> Served:
        import aiohttp

        begin, wait = time.monotonic(), RETRY_SECONDS
        while True:
            try:
                async with session.post(f"{self.url}/{self.path}", json=body) as answer:
                    said = await answer.text()
                    self.answered = True
                    if answer.status == 200:
                        return self._served(json.loads(said))
                    if answer.status not in (429, 500, 502, 503, 504):
                        raise RunError(f"--endpoint {self.url}: HTTP {answer.status}: {said[:300]}")
                    why = f"HTTP {answer.status}: {said[:300]}"
            except (aiohttp.ClientError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
            limit, setting = (self.config.rollout.timeout, " (rollout.timeout)") if self.answered else (CONNECT_SECONDS, "")
            if time.monotonic() + wait > begin + limit:
                raise RunError(f"--endpoint {self.url}: no answer within {limit} s{setting}; the last: {why}")
            await asyncio.sleep(wait)
            wait = min(2 * wait, 8)

    def _served(self, answer: dict[str, Any]) -> Served:
        try:
            [choice] = answer["choices"]
            finish = "length" if choice["finish_reason"] == "length" else "stop"
            ids = choice.get("token_ids")
            text = self._said(choice) if ids is None else self._decoded(ids)
            ids = within(text, self.tokenizer) if ids is None else ids
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"--endpoint {self.url}: not an answer of /{self.path}: {json.dumps(answer)[:300]}") from error
        if not ids:  # the first token ended it, and the server leaves it out
            ids = [self.tokenizer.eos_token_id]
        return Served(Turn(ids, [0.0] * len(ids), finish), text)

    def _said(self, choice: dict[str, Any]) -> str:
        return choice["text"]


class ChatCompletions(Completions):
    """`POST /chat/completions` of a server that takes messages alone and has a chat template of its own. What it answers counts by its
    text; tokens are counted by the run's tokenizer."""

    path = "chat/completions"

    def of_prompt(self, prompt: Prompt) -> dict[str, Any]:
        messages = conversation(prompt.row[self.config.data.prompt], self.config.data)
        if messages[-1]["role"] == "assistant":
            text = f"row {prompt.index} ends with the assistant's message, which such a server does not go on with"
            raise ConfigError(f"--chat: {text}; give a server that completes token ids, without --chat")
        messages = [with_text_arguments(message) for message in messages]
        return {**self.sampling(), "messages": messages, "max_tokens": self.config.rollout.max_new_tokens}

    def _said(self, choice: dict[str, Any]) -> str:
        return choice["message"]["content"] or ""


def line(name: str, episode: Episode, prompt: str) -> dict[str, Any]:
    found = {"set": name, "row": episode.prompt.index, "prompt": episode.prompt.row.get(prompt), "answer": episode.text}
    score = {"reward": episode.reward, "failed": episode.failed, "finish": episode.finish_reason, "tokens": sum(episode.mask)}
    return found | score | ({"terms": episode.terms} if episode.terms else {}) | ({"metrics": episode.metrics} if episode.metrics else {})


def table(config: PpoConfig, found: dict[str, dict[str, float]]) -> Table:
    passes = sorted({key for numbers in found.values() for key in numbers if "@" in key}, key=lambda key: int(key.partition("@")[2]))
    heads = [key.removeprefix("eval_") for key in passes]
    shown = Table(
        "set", "prompts", "reward", *heads, "tokens", "failed", title=str(config.model.path), title_justify="left", box=None, pad_edge=False
    )
    for name, numbers in found.items():
        cells = [f"{numbers['eval_reward']:.4g}" if "eval_reward" in numbers else "-", *(f"{numbers[key]:.4g}" for key in passes)]
        shown.add_row(name or "held out", f"{numbers['prompts']:.0f}", *cells, f"{numbers['tokens']:.0f}", f"{numbers['failed']:.3g}")
    return shown


def main(config: PpoConfig, args: argparse.Namespace) -> int:
    """Exit codes: 0 done, 1 failed, 2 a mistake in settings, data or paths."""
    try:
        with stdout_is_stderr() if args.json else nullcontext():
            found = run(config, args)
    except (RunError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        ASIDE.close()
        print(json.dumps({name or "held out": numbers for name, numbers in found.items()}))
    else:
        Console().print(table(config, found))
    return 0


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(CONFIG, ARGS))  # pyright: ignore[reportPossiblyUnboundVariable]  # read above, under the same condition
