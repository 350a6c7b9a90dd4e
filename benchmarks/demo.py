"""`make demo` from an empty clone, in wall clock, against the sum of what it cannot do without.

The sum: installing the same lock, starting vLLM, and a bare loop in one process that does the demo's 100 supervised steps and its 60
steps of GRPO with vLLM. What the demo does beyond that (rendering, a Ray cluster of two nodes, a job, evaluation, checkpoints, a plot)
is what the ratio weighs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.contenders import VLLM_ENVIRONMENT
from benchmarks.report import RESULTS, Ratio, Report

ROOT = Path(__file__).resolve().parents[1]
DEMO_SECONDS = 1200
BARE = "import sys; from benchmarks.demo import bare; bare(sys.argv[1])"


def run() -> Report:
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flotilla-demo-") as folder:
        clone = Path(folder) / "flotilla"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        # A venv that is active here would be the demo's too.
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")}
        began = time.perf_counter()
        demo = subprocess.run(
            ["make", "demo"],
            check=False,
            cwd=clone,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEMO_SECONDS,
        )
        whole = time.perf_counter() - began
        (RESULTS / "demo.log").write_text(demo.stdout)
        if demo.returncode:
            raise RuntimeError(f"make demo ended with exit code {demo.returncode}; see {RESULTS / 'demo.log'}")
        install = float((clone / ".venv" / "install-seconds").read_text())
        # The clone's environment, so that what the demo met cold is warm for neither or both: its first vLLM start was the demo's.
        result = Path(folder) / "bare.json"
        with (RESULTS / "demo-bare.log").open("w") as log:
            subprocess.run(
                [clone / ".venv" / "bin" / "python", "-c", BARE, result],
                cwd=clone,
                env=environment | VLLM_ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=DEMO_SECONDS,
                check=True,
            )
        parts = {"install": install, **json.loads(result.read_text())}
    floor = sum(parts.values())
    memory = float(re.search(r"peak memory\s+([\d.]+) GiB", demo.stdout)[1])  # type: ignore[index]
    return Report(
        "demo",
        [
            Ratio("make demo / (install + vLLM start + bare loops)", whole / floor, 1.3),
            Ratio("minutes", whole / 60, 5),
            Ratio("peak memory, GiB", memory, 8),
        ],
        facts={
            "make demo": f"{whole:.1f} s",
            "its stages": "  ".join(f"{name.strip()} {seconds}" for name, seconds in stages(demo.stdout)),
            "the sum": f"{floor:.1f} s = " + " + ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items()),
        },
        samples={"demo": whole, "parts": parts},
    )


def stages(text: str) -> list[tuple[str, str]]:
    """The table that the demo prints at its end."""
    return re.findall(r"^\s*(\S.*?)\s{2,}([\d.]+)\s*$", text.partition("stage")[2], re.MULTILINE)


def bare(result: str) -> None:
    """Imports and vLLM's start, then both loops; writes their seconds to the file `result`."""
    began = time.perf_counter()
    import torch

    from benchmarks.bare import VllmEngine, grpo_step, supervised_step
    from trainer import models
    from trainer.cli import parse
    from trainer.configs.ppo import PpoConfig
    from trainer.configs.sft import SftConfig
    from trainer.data.loader import Loader
    from trainer.data.prompts import load_prompts
    from trainer.rewards import resolve

    with tempfile.TemporaryDirectory() as folder:
        config = parse(["--config", "trainer/recipes/demo-sft.yaml"], prog="benchmarks.demo", model=SftConfig)
        torch.set_num_threads(config.placement.threads or 1)
        lm, tokenizer = models.load_lm(config.model, config.run.seed, torch.device("cpu")), models.load_tokenizer(config.model)
        models.export(lm, lm.state_dict(), tokenizer, Path(folder))
        after = parse(["--config", "trainer/recipes/demo.yaml", f"model.path={folder}"], prog="benchmarks.demo", model=PpoConfig)
        engine = VllmEngine(after, lm, tokenizer)
        seconds = {"vLLM start": time.perf_counter() - began}
        began = time.perf_counter()
        loader = Loader(load_prompts(config.data, tokenizer).prompts, config.trainer.prompts_per_step, config.run.seed, config.data.shuffle)
        optimizer = torch.optim.AdamW(lm.parameters(), lr=config.optim.lr, betas=config.optim.betas)
        for step in range(config.trainer.steps):
            for group in optimizer.param_groups:
                group["lr"] = config.optim.lr * min(1.0, (step + 1) / config.optim.warmup_steps)
            supervised_step(lm, optimizer, loader.next(), tokenizer)
        seconds["supervised loop"] = time.perf_counter() - began
        began = time.perf_counter()
        loader = Loader(load_prompts(after.data, tokenizer).prompts, after.trainer.prompts_per_step, after.run.seed, after.data.shuffle)
        optimizer = torch.optim.AdamW(lm.parameters(), lr=after.optim.lr, betas=after.optim.betas)
        reward = resolve(after.reward.function, after.reward.args).function
        mean = 0.0
        for _ in range(after.trainer.steps):
            _, mean = grpo_step(lm, optimizer, engine, loader.next(), tokenizer, reward, after)
        seconds["GRPO loop"] = time.perf_counter() - began
        print(f"mean reward of the last step {mean:.2f}", file=sys.stderr)
    Path(result).write_text(json.dumps(seconds))
