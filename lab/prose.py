"""Whether pages keep to the words of CONTRIBUTING.md, as prose.toml lists them: `make check` runs it.

python -m lab.prose [PAGE ...]      prints FILE:LINE: what stands there; what to write
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
TABLE_OF_WORDS = re.compile(r"^\| Write \| Not \|\n(?:\|.*\n)+", re.MULTILINE)  # CONTRIBUTING's own, which has to name the words
NOT_PROSE = (
    TABLE_OF_WORDS,
    re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"``.+?``|`[^`\n]+`"),
    re.compile(r'(?<=\]\()[^)\s]+(?=\))|https?://\S+|<a id="[\w.]+"></a>|"[^"\n]{1,60}"'),
)


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    write: str
    wrong: str
    right: str

    def found(self, text: str) -> Iterator[re.Match[str]]:
        return self.pattern.finditer(text)


def rules() -> list[Rule]:
    return [
        Rule(re.compile(entry["pattern"], re.MULTILINE | (re.IGNORECASE if "i" in entry.get("flags", "") else 0)), **_texts(entry))
        for entry in tomllib.loads(TABLE.read_text())["rule"]
    ]


def _texts(entry: dict[str, str]) -> dict[str, str]:
    return {key: entry[key] for key in ("write", "wrong", "right")}


def pages() -> list[Path]:
    """All but the tables of other trainers' words."""
    docs = (page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.name.startswith("from-"))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs]


def prose(text: str) -> str:
    """A page with all that is no prose blanked; each character keeps its place. Lines of a paragraph become one."""
    for pattern in NOT_PROSE:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
    return re.sub(r"(?<=[^\n|])\n(?=[^\n|#\s*-])", " ", text).replace("\0", "`")


def findings(text: str) -> list[tuple[int, str, str]]:
    """Line, what stands there and what to write, in the order of the page."""
    plain = prose(text)
    found = [(match.start(), match[0], rule.write) for rule in rules() for match in rule.found(plain)]
    return [(text.count("\n", 0, at) + 1, " ".join(words.split())[:60], write) for at, words, write in sorted(found)]


def main(names: list[str]) -> int:
    lines = [
        f"{page.relative_to(ROOT)}:{line}: {words!r}; write: {write}"
        for page in ([Path(name).resolve() for name in names] or pages())
        for line, words, write in findings(page.read_text())
    ]
    print("\n".join(lines) or "prose: nothing to change")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
