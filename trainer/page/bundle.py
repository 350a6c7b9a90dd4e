"""The page as one file: the same code, with what it would ask for beside it. Opens offline, and asks nobody anything."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from . import episodes, runs
from .answers import Answers

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("uplot.js", "base.js", "charts.js", "runs.js", "run.js", "episodes.js", "lanes.js", "start.js")
STYLES = ("uplot.css", "page.css")
TITLE, HEAD, BODY = "<!--title-->", "<!--head-->", "<!--body-->"
LISTED, WHOLE = 500, 60  # episodes of each run in the file, and those with their tokens
WHOLE_BYTES = 2**20  # of one episode; what is longer is listed only


def served() -> str:
    """The page that asks its server."""
    links = [f'<link rel="stylesheet" href="assets/{name}">' for name in STYLES]
    scripts = [f'<script src="assets/{name}"></script>' for name in SCRIPTS]
    return filled("Flotilla", "\n".join(links), "\n".join(scripts))


def one_file(folders: list[Path]) -> str:
    """The page of some runs, with all that it shows of them. No script but ours runs in it: the policy names each by its digest."""
    names = [folder.resolve().name for folder in folders]
    answers = Answers(folders)
    data = json.dumps({"answers": told(answers, names), "names": names}, default=str).replace("<", "\\u003c")
    scripts = [(ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS]
    scripts.insert(0, f"window.FLOTILLA = {data};")
    digests = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {digests}"
    head = [f'<meta http-equiv="Content-Security-Policy" content="{policy}">']
    head += [f"<style>{(ASSETS / name).read_text(encoding='utf-8')}</style>" for name in STYLES]
    return filled(", ".join(names), "\n".join(head), "\n".join(f"<script>{text}</script>" for text in scripts))


def filled(title: str, head: str, body: str) -> str:
    text = (ASSETS / "index.html").read_text(encoding="utf-8")
    escaped = title.replace("&", "&amp;").replace("<", "&lt;")
    for mark, part in ((TITLE, escaped), (HEAD, head), (BODY, body)):
        text = text.replace(mark, part, 1)
    return text


def told(answers: Answers, names: list[str]) -> dict[str, Any]:
    """What the page asks of these runs, by path and query as it writes them (assets/base.js, `key`)."""
    found: dict[str, Any] = {"runs": answers.ask("runs", {})}
    if len(names) > 1:
        found[key("compare", names=",".join(names))] = answers.ask("compare", {"names": ",".join(names)})
    for name in names:
        run = answers.ask("run", {"name": name})
        found[key("run", name=name)] = run
        found[key("curves", name=name)] = answers.ask("curves", {"name": name, "keys": ",".join(run["keys"])})
        found[key("machines", name=name)] = answers.ask("machines", {"name": name})
        for jump in run["jumps"]:
            found[key("moved", name=name, step=jump["step"])] = answers.ask("moved", {"name": name, "step": str(jump["step"])})
        for step in run["traced"]:
            found[key("lanes", name=name, step=step)] = answers.ask("lanes", {"name": name, "step": str(step)})
        try:
            found |= of_episodes(answers, name)
        except episodes.NoRecord:
            continue
    return found


def of_episodes(answers: Answers, name: str) -> dict[str, Any]:
    """The newest, best, worst episodes, and some of them whole. Raises NoRecord."""
    folder = runs.folder_of(answers.roots, name)
    found: dict[str, Any] = {key("facets", name=name): episodes.facets(folder), key("prompts", name=name): episodes.prompts(folder, {})}
    rows: dict[int, Any] = {}
    for order in ("newest", "worst", "best"):
        for page in range(LISTED // 3 // episodes.PAGE):
            rows |= {row["id"]: row for row in episodes.page(folder, {"order": order, "page": str(page)})["rows"]}
    kept = [number for number, row in rows.items() if row["has_whole"]]
    for number in kept[:: max(1, len(kept) // WHOLE)][:WHOLE]:
        episode = episodes.whole(folder, number)
        if len(json.dumps({**episode, "shown": None})) <= WHOLE_BYTES:
            found[key("episode", name=name, id=number)] = episode
    found[key("episodes", name=name)] = list(rows.values())
    return found


def key(path: str, **query: Any) -> str:
    return path + "?" + "&".join(f"{name}={value}" for name, value in query.items())
