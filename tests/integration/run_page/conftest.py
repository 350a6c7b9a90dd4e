"""The page of some runs behind the front that asks for the token, and a real browser that is logged in to it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import page_runs
from support.browser import Tab, browser

from cli import ui
from cli.project import CODE
from cluster_tasks.node import identity
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.ports import free_port

AT = page_runs.AT
EVIL = page_runs.EVIL


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Dashboard, Path]]:
    """The page of some runs, and their folder."""
    root = tmp_path_factory.mktemp("runs")
    page_runs.run(root, "steady", steps=30)
    falls = page_runs.run(root, "falls", fall=40, lr=3e-6, cost=5.5, begin=100)
    (falls / "alive.json").write_text(json.dumps({"pid": 7, "host": "gpu1", "time": time.time() + 1e6, "doing": "step 61: learning"}))
    (falls / "faults.jsonl").write_text(json.dumps({"time": "T", "step": 40, "what": "rollout-1 died"}) + "\n")
    odd = page_runs.run(root, f"ünï {EVIL.replace('/', '')}", steps=1, begin=50)
    with page_runs.Record(odd, done=1) as record:
        draw = page_runs.random.Random(0)
        long = "x" * 10_000_000
        content: dict[str, Any] = page_runs.whole(draw, prompt=EVIL) | {"metrics": {EVIL: 1.0}}
        content["turns"] = [content["turns"][0] | {"pieces": [EVIL] * 40}, {"sampled": False, "text": EVIL + long}]
        record.add(2, [page_runs.episode(draw, 1, 0, 1.0, start=EVIL, source=EVIL, engine=EVIL, whole=content, terms={EVIL: 1.0})])
    (root / "empty").mkdir()
    (root / "empty/run.yaml").write_text("run: {name: empty}\n")
    nothing = root / "none finite"
    nothing.mkdir()
    (nothing / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": None, "reward": None}) + "\n" for step in range(1, 9)))
    private = tmp_path_factory.mktemp("private")
    with ui.serving(private, [root], free_port(), CODE) as asked:
        yield asked, root


@pytest.fixture(scope="module")
def tab(served: tuple[Dashboard, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Logged in by a ticket, as `flotilla ui` does it."""
    asked, _ = served
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        fields = json.dumps({"ticket": asked.ask(identity.TICKET, {})["ticket"], "to": AT})
        form = "const form = document.createElement('form'); form.method = 'post'; document.body.append(form);"
        form += f"for (const [name, value] of Object.entries({fields}))"
        form += " form.append(Object.assign(document.createElement('input'), {name, value}));"
        opened.run(f"{form} form.action = '{asked.url}{identity.OPEN}'; form.submit()")
        opened.until("document.querySelector('table') !== null")
        opened.said.clear()
        yield opened
