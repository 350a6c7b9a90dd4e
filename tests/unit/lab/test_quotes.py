"""Pages quote code as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import quotes

SOURCE = '''\
def first(a):
    """Says what."""
    b = a + 1
    if b:
        c = b
    return c


@decorated
class Second:
    """Text."""

    def method(self):
        return 1
'''


@pytest.mark.parametrize("page", quotes.pages(), ids=lambda page: page.name)
def test_a_page_shows_the_code_that_it_names(page: Path):
    assert page.read_text() == quotes.written(page), "run python -m lab.quotes"


@pytest.mark.parametrize(
    ("name", "begin", "end", "shown"),
    [
        ("first", None, None, "def first(a):\n    b = a + 1\n    if b:\n        c = b\n    return c"),
        ("first", "if b", "c = b", "if b:\n    c = b"),
        ("first", "return", None, "return c"),
        ("first", None, "b = a", "def first(a):\n    b = a + 1"),
        ("Second.method", None, None, "def method(self):\n    return 1"),
        ("Second", None, None, "@decorated\nclass Second:\n\n    def method(self):\n        return 1"),
    ],
)
def test_a_definition_is_shown_without_its_docstring_or_in_part(name, begin, end, shown):
    assert quotes.quote(SOURCE, name, begin, end) == shown


@pytest.mark.parametrize(
    ("name", "begin", "end", "said"),
    [
        ("third", None, None, "no third"),
        ("Second.other", None, None, r"no Second\.other"),
        ("first", "d =", None, "no line of first with 'd ='"),
        ("first", "return", "b = a", "no line of first with 'b = a'"),
    ],
)
def test_a_name_or_line_that_is_gone_is_an_error(name, begin, end, said):
    with pytest.raises(quotes.QuoteError, match=said):
        quotes.quote(SOURCE, name, begin, end)


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(quotes, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "docs").mkdir()
    return tmp_path / "docs/page.md"


def test_marks_are_filled_and_filled_again_the_same(page):
    mark = '<!-- code: a.py first from "return" -->\n<!-- end -->\n'
    page.write_text(f"Text.\n\n{mark}\nMore.\n\n{mark}\n")
    quotes.main()
    filled = page.read_text()
    assert filled.count("[`a.py`](../a.py), `first`:\n\n```python\nreturn c\n```\n<!-- end -->\n") == 2 and "\nMore.\n" in filled
    quotes.main()
    assert page.read_text() == filled


@pytest.mark.parametrize(
    "text", ["<!-- code: a.py -->\n<!-- end -->\n", "<!-- code: a.py first -->\n", "<!-- code: b.py first -->\n<!-- end -->\n"]
)
def test_a_mark_that_cannot_be_filled_is_an_error(page, text):
    page.write_text(text)
    with pytest.raises(quotes.QuoteError, match=r"page\.md"):
        quotes.main()
