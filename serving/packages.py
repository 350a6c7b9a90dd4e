"""The suites that are known: how each is installed, asked and read. Commands never hold the server's key."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

NO_KEY = "none"  # clients refuse to start without one


@dataclass(frozen=True)
class Ask:
    """What is measured, and where."""

    url: str  # that ends with /v1
    model: str
    key: str
    tasks: tuple[str, ...]
    limit: int | None = None
    concurrency: int = 16
    own: Path | None = None
    chat: bool = False


Command = tuple[list[str], dict[str, str]]


@dataclass(frozen=True)
class Suite:
    """A package, in `.venv-NAME` of the project or wherever its program is found."""

    name: str
    package: str
    program: str
    install: str  # after pip install
    example: str
    unknown: tuple[str, ...]  # how it says that it does not know a task
    listing: str  # how its tasks are listed
    command: Callable[[str, Ask, str], Command]
    results: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]
    pattern: str  # of the files with results

    def version(self, found: Path) -> str:
        ask = f"from importlib.metadata import version; print(version({self.package!r}))"
        python = found.parent / "python"
        words = [str(python if python.exists() else sys.executable), "-c", ask]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip() or "unknown"


def program(suite: Suite) -> Path:
    """Where it is installed. Raises ConfigError with the line that installs it."""
    own = f".venv-{suite.name}"
    beside = [Path(own) / "bin" / suite.program, Path(__file__).parents[1] / own / "bin" / suite.program]
    found = next((path for path in [*beside, Path(sys.executable).with_name(suite.program)] if path.is_file()), None)
    found = found or (Path(path) if (path := shutil.which(suite.program)) else None)
    if found is None:
        how = f"python3 -m venv {own} && {own}/bin/pip install {suite.install}"
        raise ConfigError(f"--suite {suite.name}: {suite.package} is not installed: {how}")
    return found.absolute()


def read(suite: Suite, folder: Path) -> list[dict[str, Any]]:
    """Results of all files that it wrote."""
    return [row for file in sorted(folder.rglob(suite.pattern)) for row in suite.results(json.loads(file.read_text()))]


def lm_eval(found: str, ask: Ask, folder: str) -> Command:
    kind, path = ("local-chat-completions", "chat/completions") if ask.chat else ("local-completions", "completions")
    given = f"model={ask.model},base_url={ask.url}/{path},tokenizer_backend=None,tokenized_requests=False,num_concurrent={ask.concurrency}"
    words = [found, "run", "--model", kind, "--model_args", given, "--tasks", ",".join(ask.tasks), "--output_path", folder]
    words += [*(["--limit", str(ask.limit)] if ask.limit else []), *(["--include_path", str(ask.own)] if ask.own else [])]
    return [*words, *(["--apply_chat_template"] if ask.chat else [])], {"OPENAI_API_KEY": ask.key or NO_KEY}


def of_lm_eval(said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`exact_match,none` beside `exact_match_stderr,none`: metric and filter."""
    for task, numbers in said["results"].items():
        for key, value in numbers.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = numbers.get(f"{metric}_stderr,{chosen}")
            samples = (said.get("n-samples", {}).get(task) or {}).get("effective", numbers.get("sample_len"))
            named = metric if chosen == "none" else key
            yield {"task": task, "metric": named, "value": value, "stderr": number(error), "samples": samples}


def inspect(found: str, ask: Ask, folder: str) -> Command:
    words = [found, "eval", *ask.tasks, "--model", f"openai-api/flotilla/{ask.model}", "--log-dir", folder, "--log-format", "json"]
    words += ["--display", "plain", "--max-connections", str(ask.concurrency), *(["--limit", str(ask.limit)] if ask.limit else [])]
    return words, {"FLOTILLA_API_KEY": ask.key or NO_KEY, "FLOTILLA_BASE_URL": ask.url}


def of_inspect(said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One log per task; a score has its standard error as a metric."""
    results = said.get("results") or {}
    for score in results.get("scores") or () if said.get("status") == "success" else ():
        values = {name: each["value"] for name, each in score["metrics"].items()}
        several = len(results["scores"]) > 1
        for name, value in values.items():
            if name != "stderr":
                metric = f"{score['name']}/{name}" if several else name
                error = number(values.get("stderr"))
                yield {
                    "task": said["eval"]["task"],
                    "metric": metric,
                    "value": value,
                    "stderr": error,
                    "samples": results["completed_samples"],
                }


def lighteval(found: str, ask: Ask, folder: str) -> Command:
    given = f"model_name=openai/{ask.model},base_url={ask.url},provider=openai,concurrent_requests={ask.concurrency}"
    tasks = ",".join(task if "|" in task else f"{task}|0" for task in ask.tasks)
    words = [found, "endpoint", "litellm", given, tasks, "--output-dir", folder]
    words += [*(["--max-samples", str(ask.limit)] if ask.limit else []), *(["--custom-tasks", str(ask.own)] if ask.own else [])]
    return words, {"OPENAI_API_KEY": ask.key or NO_KEY}


def of_lighteval(said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`all` is the mean over tasks, which says nothing of one."""
    details = said.get("config_tasks") or {}
    for task, numbers in said["results"].items():
        for metric, value in numbers.items() if task != "all" else ():
            if not metric.endswith("_stderr") and isinstance(value, int | float):
                counted = (details.get(task) or {}).get("effective_num_docs") or 0
                samples = counted if counted > 0 else None  # a server's answers are not counted
                error = number(numbers.get(f"{metric}_stderr"))
                yield {"task": task.rpartition("|")[0] or task, "metric": metric, "value": value, "stderr": error, "samples": samples}


def number(value: Any) -> float | None:
    """lm-eval writes N/A where it knows none."""
    return float(value) if isinstance(value, int | float) else None


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "lm-eval",
            "lm_eval",
            "lm_eval",
            "'lm-eval[api]==0.4.13'",
            "lm-eval:gsm8k,ifeval",
            ("Tasks not found", "Tasks were not found"),
            "lm_eval ls tasks lists them",
            lm_eval,
            of_lm_eval,
            "results_*.json",
        ),
        Suite(
            "inspect",
            "inspect_ai",
            "inspect",
            "inspect-ai==0.3.285 openai",
            "inspect:inspect_evals/gsm8k",
            (" not found.", "No inspect tasks were found"),
            "inspect list tasks lists those of a folder; others are packages, e.g. pip install inspect-evals",
            inspect,
            of_inspect,
            "*.json",
        ),
        Suite(
            "lighteval",
            "lighteval",
            "lighteval",
            "'lighteval[litellm]==0.13.0' 'litellm[caching]==1.75.8' diskcache 'huggingface_hub<1' 'transformers<5' 'xxhash<4'",
            "lighteval:gsm8k,ifeval",
            ("Cannot find task", "not found in"),
            "lighteval tasks list lists them",
            lighteval,
            of_lighteval,
            "results_*.json",
        ),
    )
}
