"""How much longer a step is for a hundred rewards that a service computes in 200 ms each: against one of them by itself.

The service is a process of this machine that sleeps. A request for each answer, as many at once as there are answers.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.report import Ratio, Report
from trainer.cluster.actors import free_port
from trainer.configs.reward import RewardConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.rewards.scorer import Scorer

ANSWERS, SECONDS, ROUNDS, WARM_UP = 100, 0.2, 7, 1
LONGER = 0.3  # seconds that the step may be longer by
SERVICE = """
import asyncio, sys
from aiohttp import web

async def score(request):
    answers = (await request.json())["answers"]
    await asyncio.sleep(float(sys.argv[2]))
    return web.json_response({"rewards": [1.0] * len(answers)})

app = web.Application()
app.router.add_post("/", score)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=lambda _: print("ready", flush=True))
"""


def run() -> Report:
    port = free_port()
    service = subprocess.Popen([sys.executable, "-c", SERVICE, str(port), str(SECONDS)], stdout=subprocess.PIPE, text=True)
    assert service.stdout and service.stdout.readline() == "ready\n"
    seconds: dict[str, list[float]] = {"hundred": [], "one": []}
    args = {"url": f"http://127.0.0.1:{port}/", "batch_size": 1, "concurrency": ANSWERS}
    episodes = [Episode(Prompt(i, [1], {}), i, [Turn([1], [0.0], "stop")], text=str(i)) for i in range(ANSWERS)]
    try:
        with Scorer(RewardConfig(function="http", args=args)) as rewards:
            for _ in range(ROUNDS):
                for name, some in (("hundred", episodes), ("one", episodes[:1])):
                    began = time.perf_counter()
                    rewards.score(some)
                    seconds[name].append(time.perf_counter() - began)
    finally:
        service.terminate()
        service.wait()
    medians = {name: statistics.median(values[WARM_UP:]) for name, values in seconds.items()}
    return Report(
        "rewards",
        [Ratio(f"seconds of {ANSWERS} HTTP rewards / one", medians["hundred"] / medians["one"], LONGER / SECONDS)],
        facts={"seconds": "  ".join(f"{name} {value:.3f}" for name, value in medians.items())},
        samples=dict(seconds),
    )
