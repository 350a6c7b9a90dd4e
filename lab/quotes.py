"""Code that pages quote, taken from its source by name: between `<!-- code: FILE NAME -->` and `<!-- end -->`.

NAME is a function, a class, or CLASS.METHOD, shown without its docstring. `from "..."` and `to "..."` behind it choose lines of it:
from the first that has one text to the first after that which has the other.

    python -m lab.quotes      writes the pages again
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = re.compile(r'<!-- code: (\S+) (\S+)(?: from "([^"]*)")?(?: to "([^"]*)")? -->\n(?:.*?\n)??<!-- end -->', re.DOTALL)


class QuoteError(Exception):
    """A mark names what its source does not have."""


def pages() -> list[Path]:
    return [page for page in sorted((ROOT / "docs").rglob("*.md")) if "<!-- code: " in page.read_text()]


def written(page: Path) -> str:
    """The page as it has to be. Raises QuoteError."""

    def made(mark: re.Match[str]) -> str:
        file, name, begin, end = mark.groups()
        source = ROOT / file
        try:
            code = quote(source.read_text(), name, begin, end)
        except (OSError, QuoteError) as error:
            raise QuoteError(f"{page.name}: {mark[0].partition(chr(10))[0]}: {error}") from None
        link = f"[`{file}`]({os.path.relpath(source, page.parent)}), `{name}`"
        return f"{mark[0].partition(chr(10))[0]}\n{link}:\n\n```python\n{code}\n```\n<!-- end -->"

    text = MARK.sub(made, page.read_text())
    if text.count("<!-- code: ") != len(MARK.findall(text)):
        raise QuoteError(f"{page.name}: a mark that is not <!-- code: FILE NAME -->, or without <!-- end -->")
    return text


def quote(source: str, name: str, begin: str | None = None, end: str | None = None) -> str:
    """Lines of a definition without its docstring, or those of it from `begin` to `end`. Raises QuoteError."""
    node = _definition(ast.parse(source), name)
    lines = source.splitlines()
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    chosen = list(range(first - 1, node.end_lineno or node.lineno))
    if ast.get_docstring(node, clean=False) is not None:
        text = node.body[0]
        chosen = [at for at in chosen if not text.lineno - 1 <= at < (text.end_lineno or text.lineno)]
    if begin is not None or end is not None:
        start = _place(lines, chosen, begin, name) if begin is not None else chosen[0]
        stop = _place(lines, [at for at in chosen if at >= start], end, name) if end is not None else chosen[-1]
        chosen = [at for at in chosen if start <= at <= stop]
    return textwrap.dedent("\n".join(lines[at] for at in chosen)).strip("\n")


def _definition(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
    body: list[ast.stmt] = tree.body
    found: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
        if found is None:
            raise QuoteError(f"no {name}")
        body = found.body
    assert found is not None, "a name has a part"
    return found


def _place(lines: list[str], among: list[int], text: str, name: str) -> int:
    at = next((at for at in among if text in lines[at]), None)
    if at is None:
        raise QuoteError(f"no line of {name} with {text!r}")
    return at


def main() -> None:
    for page in pages():
        page.write_text(written(page))


if __name__ == "__main__":
    main()
