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
from functools import partial
from pathlib import Path
from typing import Any

from trainer import preflight
from trainer.cli import exits_cleanly, parse, usage
from trainer.cli.streams import stdout_is_stderr
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError
from trainer.online import first_look

PROG = "flotilla eval"


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What is this command's own, and what is the run's."""
    about = "Evaluate a model on the evaluation sets of a train_ppo run, without training."
    examples = (f"{PROG} trainer/recipes/demo.yaml --model run:demo", f"{PROG} run.yaml --samples 8 --json")
    parser = usage.parser(PROG, about, *examples, usage="RUN.yaml [flags] [key=value ...]")
    parser.add_argument("run", metavar="RUN.yaml", help="settings of train_ppo; key=value overrides them")
    parser.add_argument("--model", help="folder, hub name or run:NAME (default: the run's model.path)")
    parser.add_argument("--samples", type=int, metavar="K", help="answers per prompt, for pass@k (trainer.eval_samples)")
    parser.add_argument("--endpoint", metavar="URL", help="use this server, which completes token ids")
    parser.add_argument("--chat", action="store_true", help="the server accepts only messages; no environments")
    parser.add_argument("--served", metavar="NAME", help="model name on the server (default: that of --model)")
    parser.add_argument("--key-env", metavar="VARIABLE", help="environment variable that holds the server's key")
    parser.add_argument("--concurrency", type=int, default=64, help="parallel requests to the server (64)")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write one line per answer")
    parser.add_argument("--json", action="store_true", help="print only the metrics, as one JSON object")
    return parser.parse_known_args(argv)


def read(args: argparse.Namespace, overrides: list[str]) -> PpoConfig:
    """The run's settings, with no ranks to train. Raises ConfigError as train_ppo does, and for what is this command's own."""
    if args.endpoint and not args.endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--endpoint {args.endpoint}: not a URL, e.g. http://127.0.0.1:8000/v1")
    if args.key_env and not os.environ.get(args.key_env):
        raise ConfigError(f"--key-env {args.key_env}: the environment variable is not set")
    if args.chat and not args.endpoint:
        raise ConfigError("--chat needs --endpoint, e.g. --endpoint https://api.openai.com/v1")
    if args.concurrency < 1:
        raise ConfigError(f"--concurrency {args.concurrency} is not an integer >= 1")
    if args.out and not args.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {args.out}: the folder {args.out.absolute().parent} does not exist")
    own = []
    if args.model:
        own += [f"model.path={args.model}", "model.init=null", "model.lora=null", "model.freeze=[]"]
    if args.samples is not None:
        own.append(f"trainer.eval_samples={args.samples}")
    checks = (preflight.allowed, preflight.options, preflight.model, preflight.split, preflight.data, preflight.evals)
    checks = (*checks, preflight.reward, preflight.environment, *(() if args.endpoint else (preflight.positions,)))
    argv, look = ["--config", args.run, *overrides, *own], partial(first_look.prompts, to_learn=False)
    config = parse(argv, prog=PROG, model=PpoConfig, checks=checks, before_start=(preflight.hub,), without_start=(look,))
    if config.model.path is None:
        raise ConfigError("model.init: random weights cannot be evaluated; name a model with --model, e.g. run:NAME")
    if args.chat and config.environment.function:
        text = f"--chat: environment.function={config.environment.function} needs token ids"
        raise ConfigError(f"{text}; name a server that completes token ids, without --chat")
    if not config.trainer.eval_prompts and not config.evals:
        raise ConfigError("trainer.eval_prompts=0: there is nothing to evaluate on; hold out part of data, or add sets to evals")
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

from trainer.chat.tokenizer import load_tokenizer
from trainer.cluster.launcher import launcher
from trainer.environments.pool import Environments, episodes_of, runner_of
from trainer.environments.runner import Job
from trainer.episodes import Episode, Prompt
from trainer.errors import RunError
from trainer.online.scored import evaluation
from trainer.online.servers import ChatCompletions, Completions
from trainer.online.sets import read as read_sets
from trainer.rewards.here import scorer_of
from trainer.rollout.engines import RolloutEngines

Sample = Callable[[list[Prompt]], list[Episode]]


def run(config: PpoConfig, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The numbers of each set, by its name; "" is what data holds out. Raises RunError, and ConfigError as rewards do."""
    sets = read_sets(config, load_tokenizer(config.model), to_learn=False).evaluated
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
    path = config.model.path
    assert path is not None, "looked at before"
    nothing_learns = config.rollout.model_copy(update={"router_replay": "off"})
    config = config.model_copy(update={"rollout": nothing_learns})
    with ExitStack() as stack:
        starts = stack.enter_context(launcher(config, engines_alone=True))
        engines = RolloutEngines(config, path, starts)
        played = stack.enter_context(closing(Environments(config, path, starts))) if config.environment.function else None
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
            said = asyncio.run(server.ask([partial(server.of_prompt, job.prompt) for job in jobs]))
            return [Episode(job.prompt, job.key[0], [each.turn], text=each.text) for job, each in zip(jobs, said, strict=True)]
        runner.begin(jobs)
        ended: dict[Any, Any] = {}
        while len(ended) < len(jobs):
            asked, done = runner.advance(whole=True)
            ended |= {each.key: each for each in done}
            if asked:
                try:
                    said = asyncio.run(server.ask([partial(server.of_request, each.request) for each in asked]))
                    turns = {each.name: server.exact(it) for each, it in zip(asked, said, strict=True)}
                except RunError:
                    for prompt in range(len(prompts)):
                        runner.drop(prompt)
                    runner.advance(whole=True)  # lets them end
                    raise
                runner.answer(turns)
        return episodes_of(config, [(job.prompt, ended[job.key]) for job in jobs])

    yield sample


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
