"""`flotilla eval --suite SUITE:TASK,...`: named benchmarks of lm-eval, lighteval or inspect against a served model.

Each package runs in an environment of its own, since none of them fits beside the trainer's. What it measured is added to suites.jsonl in
the run's folder, one object per result, which the model card shows:

    {"time": "2026-01-01T12:00:00+0000", "suite": "lm-eval", "package": "lm_eval", "version": "0.4.13", "task": "gsm8k",
     "metric": "exact_match,strict-match", "value": 0.41, "stderr": 0.013, "model": "demo", "step": 20, "samples": 1319}
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster_tasks.node.ports import free_port
from cluster_tasks.recipes.job.process import end
from serving.guard import KEY
from serving.models import Model, model_of
from serving.packages import SUITES, Ask, Suite, program, read
from trainer.cli import exits_cleanly, usage
from trainer.errors import ConfigError, RunError

FILE = "suites.jsonl"
PROG = "flotilla eval"
ANSWER_SECONDS = 30.0
READY_SECONDS = 1800.0


def suite_of(text: str) -> tuple[Suite, list[str]]:
    """Suite and tasks of `lm-eval:gsm8k,ifeval`. Raises ConfigError."""
    name, _, tasks = text.partition(":")
    chosen, wanted = SUITES.get(name), [task for task in tasks.split(",") if task]
    if chosen is None:
        raise ConfigError(f"--suite {text}: {name!r} is no suite; must be {', '.join(SUITES)}, e.g. lm-eval:gsm8k,ifeval")
    if not wanted:
        raise ConfigError(f"--suite {text}: names no task, e.g. {chosen.example}")
    return chosen, wanted


def models_at(url: str, key: str) -> list[str]:
    """What a server says that it serves. Raises ConfigError where it does not answer."""
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return [str(each["id"]) for each in json.load(answer)["data"]]
    except urllib.error.HTTPError as error:
        token = "it asks for another token; --key-env VARIABLE names the one that holds it"
        why = token if error.code in (401, 403) else f"HTTP {error.code}"
        raise ConfigError(f"--endpoint {url}: {why}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--endpoint {url}: does not answer as a server of models: {getattr(error, 'reason', error)}") from None


@contextmanager
def served_here(model: Model, gpus: int) -> Iterator[tuple[str, str]]:
    """Address and token of an engine of this machine, for as long as the block runs. Raises RunError."""
    token, port = os.urandom(32).hex(), free_port()
    at = f"{model.path}" if model.run is None or model.step is None else f"run:{model.run.name}@{model.step}"
    words = [sys.executable, "-m", "serving.serve", at, "--name", "model", "--here", "--port", str(port), "--gpus", str(gpus)]
    env = os.environ | {KEY: token} | ({"FLOTILLA_RUNS": str(model.run.parent)} if model.run else {})
    server = subprocess.Popen(words, env=env, stdout=sys.stderr, start_new_session=True, text=True)
    url, deadline = f"http://127.0.0.1:{port}/v1", time.monotonic() + READY_SECONDS
    try:
        while not _healthy(url):
            if server.poll() is not None:
                raise RunError(f"{model.path}: its engine ended with exit code {server.returncode}; its output above says why")
            if time.monotonic() > deadline:
                raise RunError(f"{model.path} is not served within {READY_SECONDS:g} s")
            time.sleep(0.5)
        yield url, token
    finally:
        end(server, 30)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=5):
            return True
    except OSError:
        return False


def named(options: argparse.Namespace, model: Model | None, there: list[str], url: str) -> str:
    """What --model is called on the server: a run that is followed there has moved on meanwhile. Raises ConfigError."""
    of_step = f"@{model.step}" if options.endpoint and model and model.step is not None else ""
    name = options.served or next((each for each in there if each.endswith(of_step)), "")
    if name not in there:
        wanted = f"--served {name}" if name else f"--model {options.model}" if options.model else "--endpoint"
        raise ConfigError(
            f"{wanted}: {url} has {', '.join(there) or 'no model'}{'; --served NAME says which is meant' if not name else ''}"
        )
    return name


def measure(suite: Suite, ask: Ask) -> list[dict[str, Any]]:
    """Results, one for each metric of each task. Raises ConfigError for what the package does not know, RunError where it failed."""
    found = program(suite)
    with tempfile.TemporaryDirectory(prefix="flotilla-suite-") as folder:
        words, env = suite.command(str(found), ask, folder)
        print(f"$ {' '.join(words)}", file=sys.stderr, flush=True)
        own, output = os.environ | env, subprocess.PIPE
        with subprocess.Popen(words, env=own, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True) as process:
            lines = []
            try:
                assert process.stdout
                for line in process.stdout:
                    lines.append(line.rstrip())
                    print(line, end="", file=sys.stderr, flush=True)
            except BaseException:
                end(process, 10)
                raise
        results = read(suite, Path(folder))
    if unknown := next((line for line in reversed(lines) if any(said in line for said in suite.unknown)), None):
        raise ConfigError(
            f"--suite {suite.name}:{','.join(ask.tasks)}: {suite.name} knows no such task ({unknown.strip()}); {suite.listing}"
        )
    if process.returncode or not results:
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise RunError(f"{suite.name} ended with exit code {process.returncode} and {len(results)} results: {last}")
    return results


def kept(results: list[dict[str, Any]], suite: Suite, version: str, model: Model | None, name: str) -> list[dict[str, Any]]:
    """As suites.jsonl has them."""
    about = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "suite": suite.name, "package": suite.package, "version": version}
    of = {"model": name, "step": model.step if model else None}
    return [
        {**about, **{key: row[key] for key in ("task", "metric", "value", "stderr")}, **of, "samples": row["samples"]} for row in results
    ]


def append(file: Path, rows: list[dict[str, Any]]) -> None:
    """In one write: another suite of the run may add its own meanwhile."""
    with file.open("a") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows))


def parser() -> argparse.ArgumentParser:
    about = "Measure a model by benchmark suites: lm-eval, lighteval or inspect."
    examples = (
        f"{PROG} --suite lm-eval:gsm8k,ifeval --model run:demo",
        f"{PROG} --suite inspect:tasks.py@mine --endpoint URL",
    )
    made = usage.parser(PROG, about, *examples, usage="--suite SUITE:TASK[,TASK...] [flags]")
    made.add_argument("--suite", required=True, action="append", metavar="SUITE:TASKS", help=f"{', '.join(SUITES)}: its tasks")
    made.add_argument("--model", help="run:NAME[@STEP], folder or hub name; its results go to the run's folder")
    made.add_argument("--endpoint", metavar="URL", help="ask this server (default: serve --model here)")
    made.add_argument("--served", metavar="NAME", help="model name on the server (default: the first that it has)")
    made.add_argument("--key-env", metavar="VARIABLE", default=KEY, help=f"environment variable that holds the server's key ({KEY})")
    made.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of this machine to serve --model on (0)")
    made.add_argument("--limit", type=int, metavar="N", help="samples per task (all)")
    made.add_argument("--concurrency", type=int, default=16, metavar="N", help="parallel requests (16)")
    made.add_argument("--tasks-from", type=Path, metavar="PATH", help="your own tasks: lm-eval's folder, lighteval's file")
    made.add_argument("--chat", action="store_true", help="lm-eval: chat completions, with the model's template")
    made.add_argument("--out", type=Path, metavar="FILE.jsonl", help=f"add results to this file (RUN/{FILE})")
    return made


def checked(options: argparse.Namespace) -> list[tuple[Suite, list[str]]]:
    """Everything that can be said before anything runs. Raises ConfigError."""
    suites = [suite_of(text) for text in options.suite]
    for suite, _ in suites:
        program(suite)
    if not options.model and not options.endpoint:
        raise ConfigError("--model is missing, e.g. run:demo; or --endpoint URL of a server")
    if options.endpoint and not options.endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--endpoint {options.endpoint}: not a URL, e.g. http://localhost:8265/flotilla/at/demo/v1")
    for flag in ("limit", "concurrency"):
        if (value := getattr(options, flag)) is not None and value < 1:
            raise ConfigError(f"--{flag} {value} is not an integer >= 1")
    if options.tasks_from and not options.tasks_from.exists():
        raise ConfigError(f"--tasks-from {options.tasks_from}: no such file or folder")
    return suites


def main(arguments: list[str]) -> int:
    """Exit code 1 where a suite failed. Raises ConfigError."""
    options = parser().parse_args(arguments)
    suites = checked(options)
    model = model_of(options.model) if options.model else None
    file = options.out or (model.run / FILE if model and model.run else None)
    try:
        with here(options, model) as (url, key):
            name = named(options, model, models_at(url, key), url)
            known = model.name if model and not options.endpoint else name
            for suite, tasks in suites:
                ask = Ask(url, name, key, tuple(tasks), options.limit, options.concurrency, options.tasks_from, options.chat)
                rows = kept(measure(suite, ask), suite, suite.version(program(suite)), model, known)
                if file:
                    append(file, rows)
                for row in rows:
                    print(json.dumps(row))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if file:
        print(f"results: {file}", file=sys.stderr)
    return 0


@contextmanager
def here(options: argparse.Namespace, model: Model | None) -> Iterator[tuple[str, str]]:
    """The server that is asked, and its key."""
    if options.endpoint:
        yield options.endpoint.rstrip("/"), os.environ.get(options.key_env, "")
        return
    assert model is not None, "looked at before"
    with served_here(model, options.gpus) as found:
        yield found


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(sys.argv[1:]))
