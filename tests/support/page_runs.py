"""Runs to look at on the page of runs, as the trainer would have written them."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import yaml

from trainer.page.record import Record

AT = "/flotilla/at/runs/"  # of the page, at the front that asks for the token
EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'
WORDS = ("Let", " me", " think", " <b>", "so", "</b>", "\n", "42", "é", "漢")


def episode(draw: random.Random, prompt: int, group: int, reward: float, **more: Any) -> dict[str, Any]:
    row = {"prompt": prompt, "grp": group, "reward": reward, "advantage": reward - 0.5, "tokens": 30 + draw.randrange(200), "turns": 1}
    row |= {"finish": "stop", "failed": 0, "learned": 1, "difference": draw.random() / 100, "staleness": 0.0, "engine": "rollout-0"}
    return row | {"terms": {"exact": reward}, "start": f"answer to {prompt}"} | more


def whole(draw: random.Random, tokens: int = 40, prompt: str = "What is 2+2?", version: int = 0) -> dict[str, Any]:
    """Two turns of the policy with an environment's in between."""
    said = {"sampled": True, "finish": "stop", "pieces": [WORDS[i % len(WORDS)] for i in range(tokens)], "versions": [[0, version]]}
    said |= {name: [-draw.random() for _ in range(tokens)] for name in ("logprobs", "policy")}
    said |= {"advantages": [0.5] * tokens, "learned": [1] * tokens}
    return {
        "prompt": prompt,
        "turns": [said, {"sampled": False, "text": "tool: 17"}, said | {"finish": "length"}],
        "metrics": {"calls": 1},
        "text": "",
    }


def run(
    root: Path, name: str, steps: int = 60, *, fall: int | None = None, lr: float = 1e-6, cost: float = 2.0, begin: float = 0.0, **more: Any
) -> Path:
    """`fall`: the step from which on answers are cut off and earn less. Prompts 3 and 9 never earn anything."""
    folder, draw = root / name, random.Random(name)
    folder.mkdir(parents=True)
    settings = {"run": {"name": name}, "model": {"path": "/models/q"}, "algorithm": {"name": "grpo"}, "optim": {"lr": lr}}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings | {"trainer": {"steps": steps}}, allow_unicode=True), encoding="utf-8")
    began = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - 90_000 + begin))
    (folder / "starts.jsonl").write_text(json.dumps({"time": began, "host": "gpu1", "owner": "alice", "commit": "0123456789ab"}) + "\n")
    with Record(folder) as record, (folder / "metrics.jsonl").open("w") as out:
        for step in range(1, steps + 1):
            fallen = fall is not None and step >= fall
            base = 0.3 if fallen else min(0.9, 0.2 + step / 80)
            row = {"step": step, "reward": base + draw.gauss(0, 0.02), "truncated": (0.4 if fallen else 0.02) + draw.gauss(0, 0.005)}
            row |= {
                "loss": draw.gauss(0, 0.01),
                "seconds": 2.0,
                "seconds_generate": 1.4,
                "seconds_train": 0.5,
                "cost_usd": cost * step / steps,
            }
            out.write(json.dumps(row | ({"eval_reward": base} if step % 10 == 0 else {})) + "\n")
            prompts = [(step * 4 + group) % 20 for group in range(4)]
            rows = [
                episode(draw, prompt, group, 0.0 if prompt in (3, 9) else float(draw.random() < base), engine=f"rollout-{answer % 2}")
                for group, prompt in enumerate(prompts)
                for answer in range(4)
            ]
            rows[0]["whole"] = whole(draw, prompt=f"prompt {prompts[0]}")
            record.add(step, rows)
    for file, text in more.items():
        (folder / file.replace("__", ".")).write_text(text if isinstance(text, str) else json.dumps(text))
    return folder
