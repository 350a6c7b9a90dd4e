"""episodes.db of a run, asked: pages of a list, prompts by what they teach, one episode whole. Opened for each question, never written."""

from __future__ import annotations

import base64
import json
import re
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .record import COLUMNS, FILE

PAGE = 50  # rows of a list
WAIT = 3.0  # seconds for a writer
LISTED = ("id", *(name for name in COLUMNS if name != "terms"), "has_whole")
ORDERS = {
    "newest": "step DESC, id DESC",
    "oldest": "step, id",
    "best": "reward DESC, id",
    "worst": "reward, id",
    "longest": "tokens DESC, id",
    "difference": "difference DESC, id",
}
NUMBERS = {"step": "step", "prompt": "prompt", "id": "id"}
RANGES = {"reward": "reward", "tokens": "tokens", "difference": "difference", "staleness": "staleness", "turns": "turns", "step": "step"}
PICTURES = "pictures"  # a folder beside the record (trainer/metrics/pictures.py)
HASH = re.compile(r"[0-9a-f]{32}")
MOST_PICTURES, PICTURE_BYTES = 32, 2**19  # of an episode, and of one
COUNTED = 10_000  # matches beyond which they are not counted any more


class NoRecord(Exception):
    """The run has no readable record of episodes; its text is for people."""


class BadQuestion(Exception):
    """A filter that there is not; its text names it and what is allowed."""


@contextmanager
def opened(folder: Path) -> Iterator[sqlite3.Connection]:
    """Raises NoRecord."""
    file = folder / FILE
    if not file.exists():
        raise NoRecord(f"{file} is not there: this run recorded no episodes (offline trainers have none)")
    try:
        database = sqlite3.connect(f"file:{quote(str(file.resolve()))}?mode=ro", uri=True, timeout=WAIT)
        database.row_factory = sqlite3.Row
        try:
            yield database
        finally:
            database.close()
    except sqlite3.Error as error:
        raise NoRecord(f"{file}: {error}") from None


def conditions(query: Mapping[str, str]) -> tuple[str, list[Any]]:
    """SQL of a question's filters, and its values. Raises BadQuestion."""
    words = ["kind = ?"]
    values: list[Any] = [query.get("kind", "")]
    for name, column in NUMBERS.items():
        if query.get(name):
            words.append(f"{column} = ?")
            values.append(as_number(name, query[name]))
    for name, column in RANGES.items():
        for end, sign in (("min", ">="), ("max", "<=")):
            if query.get(f"{name}_{end}"):
                words.append(f"{column} {sign} ?")
                values.append(as_number(f"{name}_{end}", query[f"{name}_{end}"]))
    for name, column in (("finish", "finish"), ("engine", "engine"), ("source", "source")):
        if query.get(name):
            words.append(f"{column} = ?")
            values.append(query[name])
    if query.get("failed"):
        words.append("failed = 1")
    if query.get("whole"):
        words.append("has_whole = 1")
    if query.get("text"):
        words.append("start LIKE ? ESCAPE '\\'")
        values.append("%" + query["text"].replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%")
    return " AND ".join(words), values


def as_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadQuestion(f"{name}={text}: not a number") from None


def page(folder: Path, query: Mapping[str, str]) -> dict[str, Any]:
    """Rows of a list, `page` from 0, by `order`; how many there are in all, up to COUNTED. Raises NoRecord, BadQuestion."""
    where, values = conditions(query)
    order = query.get("order") or "newest"
    if order not in ORDERS:
        raise BadQuestion(f"order={order}: one of {', '.join(ORDERS)}")
    begin = int(as_number("page", query.get("page") or "0")) * PAGE
    with opened(folder) as database:
        total = database.execute(f"SELECT COUNT(*) FROM (SELECT 1 FROM episodes WHERE {where} LIMIT {COUNTED})", values).fetchone()[0]
        chosen = f"SELECT {', '.join(LISTED)} FROM episodes WHERE {where}"
        rows = database.execute(f"{chosen} ORDER BY {ORDERS[order]} LIMIT {PAGE} OFFSET ?", [*values, max(0, begin)]).fetchall()
    return {"rows": [dict(row) for row in rows], "total": total, "more": total == COUNTED, "page": begin // PAGE, "size": PAGE}


def facets(folder: Path) -> dict[str, Any]:
    """What there is to choose from: kinds, endings, engines, sources, first and last step. Raises NoRecord."""
    with opened(folder) as database:
        first, last = database.execute("SELECT MIN(step), MAX(step) FROM episodes WHERE kind = ''").fetchone()
        kinds = sorted(row[0] for row in database.execute("SELECT DISTINCT kind FROM episodes"))
        recent = (last or 0) - 20  # what runs now is what there is to choose from
        some = {
            name: [row[0] for row in database.execute(f"SELECT DISTINCT {name} FROM episodes WHERE kind = '' AND step > ?", (recent,))]
            for name in ("finish", "engine", "source")
        }
    return {"kinds": kinds, "first": first, "last": last} | {name: sorted(filter(None, found)) for name, found in some.items()}


def whole(folder: Path, number: int) -> dict[str, Any]:
    """One episode, with its tokens where they were kept. Raises NoRecord, BadQuestion."""
    with opened(folder) as database:
        row = database.execute("SELECT * FROM episodes WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise BadQuestion(f"episode {number}: there is none of this number")
        content = database.execute("SELECT content FROM wholes WHERE id = ?", (number,)).fetchone()
        others = database.execute(
            "SELECT id, step, reward FROM episodes WHERE kind = ? AND prompt = ? ORDER BY step, id LIMIT 2000",
            (row["kind"], row["prompt"]),
        ).fetchall()
    found = dict(row) | {"terms": json.loads(row["terms"]), "same_prompt": [dict(other) for other in others]}
    kept = json.loads(zlib.decompress(content[0])) if content else None
    return found | {"whole": kept} | ({"shown": shown} if kept and (shown := _pictures(folder, kept)) else {})


def _pictures(folder: Path, kept: Mapping[str, Any]) -> dict[str, str]:
    """Small copies of what the episode shows, by hash, as data: URLs; without those that made room for newer ones."""
    listed = [kept, *kept.get("turns", ())]
    hashes = dict.fromkeys(str(each.get("hash")) for part in listed for each in part.get("pictures", ()))
    found: dict[str, str] = {}
    for name in [name for name in hashes if HASH.fullmatch(name)][:MOST_PICTURES]:
        file = folder / PICTURES / f"{name}.png"
        try:
            if file.stat().st_size <= PICTURE_BYTES:
                found[name] = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
        except OSError:
            continue
    return found


def prompts(folder: Path, query: Mapping[str, str]) -> dict[str, Any]:
    """Prompts by what they taught: how often asked, mean reward, and in how many of their groups all rewards were equal.

    `order`: no_signal (prompts that never had two different rewards in a group, the most asked first), hardest, easiest, most.
    Raises NoRecord, BadQuestion.
    """
    orders = {
        "no_signal": "signal, groups DESC, reward",
        "hardest": "reward, groups DESC",
        "easiest": "reward DESC, groups DESC",
        "most": "groups DESC, prompt",
    }
    order = query.get("order") or "no_signal"
    if order not in orders:
        raise BadQuestion(f"order={order}: one of {', '.join(orders)}")
    begin = int(as_number("page", query.get("page") or "0")) * PAGE
    groups = (
        "SELECT prompt, step, AVG(reward) AS reward, MAX(reward) - MIN(reward) > 1e-6 AS differs, COUNT(*) AS answers "
        "FROM episodes INDEXED BY by_prompt WHERE kind = '' AND reward IS NOT NULL GROUP BY prompt, step, grp"
    )
    each = (
        "SELECT prompt, COUNT(*) AS groups, SUM(answers) AS answers, AVG(reward) AS reward, SUM(differs) AS signal, "
        f"MAX(step) AS last FROM ({groups}) GROUP BY prompt"
    )
    with opened(folder) as database:
        database.execute(f"CREATE TEMP TABLE each AS {each}")
        total, never = database.execute("SELECT COUNT(*), SUM(signal = 0) FROM each").fetchone()
        rows = database.execute(f"SELECT * FROM each ORDER BY {orders[order]} LIMIT {PAGE} OFFSET ?", (max(0, begin),)).fetchall()
        found = [dict(row) | {"start": _asked(database, row["prompt"])} for row in rows]
    return {"rows": found, "total": total, "never": never or 0, "page": begin // PAGE, "size": PAGE}


def _asked(database: sqlite3.Connection, prompt: int) -> str:
    """The prompt's own beginning, from an episode that was kept whole, else nothing."""
    kept = "SELECT id FROM episodes WHERE kind = '' AND prompt = ? AND has_whole = 1 LIMIT 1"
    row = database.execute(
        f"SELECT content FROM wholes WHERE id = ({kept})",
        (prompt,),
    ).fetchone()
    return str(json.loads(zlib.decompress(row[0])).get("prompt", ""))[:200] if row else ""


def engines(folder: Path, steps: int = 20) -> list[dict[str, Any]]:
    """Of the last steps: each engine's episodes, tokens, and how far its log-probabilities are from the policy's. Raises NoRecord."""
    with opened(folder) as database:
        last = database.execute("SELECT MAX(step) FROM episodes WHERE kind = ''").fetchone()[0] or 0
        rows = database.execute(
            "SELECT engine, COUNT(*) AS episodes, SUM(tokens) AS tokens, AVG(difference) AS difference, AVG(staleness) AS staleness "
            "FROM episodes WHERE kind = '' AND step > ? AND engine IS NOT NULL GROUP BY engine ORDER BY engine",
            (last - steps,),
        ).fetchall()
    return [dict(row) for row in rows]
