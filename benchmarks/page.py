"""The run page on a run of 10,000 steps and a million episodes: first answers, live lag, memory; and what recording costs a step."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import trainer.page
from benchmarks.report import Ratio, Report
from benchmarks.step import SORT, prepare
from trainer import train_ppo
from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.metrics.episodes import Episodes
from trainer.online.roles import RoleGroup
from trainer.page.record import Record

STEPS, EACH = 10_000, 100  # episodes of a step
FIRST, LAG, MEMORY, SHARE = 1.0, 2.0, 150e6, 0.01  # seconds, seconds, bytes, of a step
POLL = 1.0  # seconds between two questions of the page (assets/start.js)
KEYS = ("reward", "loss", "kl", "response_tokens", "entropy", "grad_norm", "tokens_per_second", "seconds", "truncated", "clipped")
TRAINED = 12  # steps of a real run


def seeded(root: Path) -> Path:
    """A run as the trainer would have written it."""
    folder, draw = root / "long", random.Random(1)
    folder.mkdir()
    (folder / "run.yaml").write_text(f"run: {{name: long}}\ntrainer: {{steps: {STEPS}}}\n")
    with (folder / "metrics.jsonl").open("w") as out:
        out.writelines(row(step, draw) for step in range(1, STEPS + 1))
    with Record(folder) as record:
        assert record.database
        record.database.execute("PRAGMA synchronous = OFF")
        for step in range(1, STEPS + 1):
            record.add(step, (episode(step, place, draw) for place in range(EACH)))
    return folder


def row(step: int, draw: random.Random) -> str:
    return json.dumps({"step": step, **{key: draw.random() for key in KEYS}, **{f"seconds_{i}": draw.random() for i in range(8)}}) + "\n"


def episode(step: int, place: int, draw: random.Random) -> dict[str, Any]:
    found = {
        "prompt": (step * 13 + place // 8) % 5000,
        "grp": place // 8,
        "reward": float(draw.random() < 0.5),
        "tokens": draw.randrange(900),
    }
    return found | {
        "turns": 1,
        "finish": "stop",
        "failed": 0,
        "learned": 1,
        "difference": draw.random(),
        "start": "an answer of some words",
    }


class Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("page", timeout=120)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


def ask(path: Path, question: str) -> Any:
    connection = Unix(path)
    connection.request("GET", f"/api/{question}")
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return json.loads(content)


@contextmanager
def served(root: Path, socket_file: Path) -> Iterator[psutil.Process]:
    program = str(Path(trainer.page.__file__).parent)
    with subprocess.Popen([sys.executable, program, "--socket", str(socket_file), str(root)]) as process:
        try:
            while not socket_file.exists():
                time.sleep(0.01)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def run() -> Report:
    with tempfile.TemporaryDirectory() as place:
        root, socket_file = Path(place) / "runs", Path(place) / "page.sock"
        root.mkdir()
        folder = seeded(root)
        keys = ",".join(KEYS)
        with served(root, socket_file) as process:
            first = seconds(lambda: [ask(socket_file, "run?name=long"), ask(socket_file, f"curves?name=long&keys={keys}")])
            again = seconds(lambda: [ask(socket_file, "run?name=long"), ask(socket_file, f"curves?name=long&keys={keys}")])
            with (folder / "metrics.jsonl").open("a") as out:
                out.write(row(STEPS + 1, random.Random(2)))
            lag = (
                POLL
                + seconds(lambda: ask(socket_file, "run?name=long"))
                + seconds(lambda: ask(socket_file, f"curves?name=long&keys={keys}"))
            )
            questions = {
                "newest episodes": "episodes?name=long",
                "worst of a step": "episodes?name=long&step=4000&order=worst",
                "by reward and length": "episodes?name=long&reward_min=1&tokens_min=890&order=longest",
                "prompts without a signal": "prompts?name=long",
            }
            times = {name: seconds(lambda question=question: ask(socket_file, question)) for name, question in questions.items()}
            memory = process.memory_info().rss
        size = (folder / "episodes.db").stat().st_size
    share = recording()
    facts = {
        "run": f"{STEPS:,} steps, {STEPS * EACH:,} episodes, episodes.db of {size / 1e6:,.0f} MB",
        "first answers": f"{first:.2f} s, again {again:.2f} s",
        **{name: f"{spent:.2f} s" for name, spent in times.items()},
        "memory of the server": f"{memory / 1e6:.0f} MB",
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    ratios = [
        Ratio("first answers of a run of 10,000 steps / 1 s", first / FIRST, 1.0),
        Ratio("live lag, with a poll a second / 2 s", lag / LAG, 1.0),
        Ratio("memory with a million episodes / 150 MB", memory / MEMORY, 1.0),
        Ratio("recording / a step", share, SHARE),
    ]
    return Report("page", ratios, facts, {"seconds": times})


def recording() -> float:
    """Share of a real run's steps that go into episodes.db."""
    prepare()
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **more)
            finally:
                spent.append(time.perf_counter() - begin)

        return call

    words = [f"trainer.steps={TRAINED}", "run.resume=never", "run.name=page", "log.trace.steps=off", "trainer.eval_every=null"]
    config: Any = parse([*SORT, *words], prog="python -m trainer.train_ppo", model=PpoConfig)
    before = Episodes.log, RoleGroup.said
    Episodes.log, RoleGroup.said = timed(Episodes.log), timed(RoleGroup.said)  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as place:
            os.environ["RAY_TMPDIR"] = place  # a Ray of its own
            if train_ppo.train(config, Path(place) / "page"):
                sys.exit("error: benchmarks page: the run did not end well")
            rows = [json.loads(line) for line in (Path(place) / "page/metrics.jsonl").read_text().splitlines()]
    finally:
        Episodes.log, RoleGroup.said = before  # type: ignore[method-assign]
    return sum(spent) / sum(row.get("seconds", 0.0) for row in rows)
