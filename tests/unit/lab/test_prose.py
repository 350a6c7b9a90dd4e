"""The linter of the pages' language finds what its table names, and nothing in the pages."""

from __future__ import annotations

import pytest

from lab import prose

RULES = prose.rules()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern.pattern)
def test_each_rule_finds_its_wrong_example_and_not_its_right_one(rule: prose.Rule):
    assert any(rule.found(rule.wrong)), rule.wrong
    assert not any(rule.found(rule.right)), rule.right
    assert not prose.findings(rule.right), "another rule refuses it"


def test_the_words_of_contributing_are_in_the_table():
    table = prose.TABLE_OF_WORDS.search((prose.ROOT / "CONTRIBUTING.md").read_text())
    assert table
    words = ("goes on", "mend", "whole", "lacks", "told", "sampler", "fault", "trouble")
    assert all(word in table[0] and prose.findings(f"It {word}s it is {word} of that.") for word in words)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A run\ngoes on.\n", 2),
        ("A run goes\non.\n", 1),  # a paragraph's lines are one
        ("```\nit goes on\n```\n\nIt goes on.\n", 5),
        ("| a | b |\n|---|---|\n| x | goes on |\n", 3),
    ],
)
def test_a_finding_has_its_line(text: str, line: int):
    assert [found[0] for found in prose.findings(text)] == [line]


@pytest.mark.parametrize(
    "text", ["`goes on`\n", "[it](goes-on.md)\n", '"goes on" is quoted\n', "``a `goes on` b``\n", "- a run goes\n- on\n"]
)
def test_code_links_and_quotations_are_no_prose(text: str):
    assert not prose.findings(text)


def test_pages_named_on_the_command_line_are_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("The run goes on.\n")
    assert prose.main([str(page)]) == 1
    assert capsys.readouterr().out == "page.md:1: 'goes on'; write: continues, resumes\n"


def test_the_pages_have_no_findings():
    assert prose.main([]) == 0
