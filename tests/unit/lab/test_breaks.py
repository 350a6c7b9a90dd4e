"""The table of lab/breaks.py, and the program on a project of two files: a break that no test notices, and one that one does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lab import breaks
from lab.breaks import Break, BreakError

ROOT = Path(__file__).parents[3]


def test_every_break_fits_the_code_and_names_tests_that_are_there() -> None:
    """Those of `make test` that are neither slow nor need hosts; `make breaks` sees that they pass and then fail."""
    wrong = []
    for each in breaks.read():
        try:
            assert each.broken(ROOT) != (ROOT / each.file).read_text(), f"{each.name} changes nothing"
        except BreakError as error:
            wrong.append(str(error))
        for test in each.tests:
            file, *names = test.split("::")
            there = (ROOT / file).is_file() and all(f"def {name.partition('[')[0]}(" in (ROOT / file).read_text() for name in names)
            wrong += [] if there and "integration" not in file else [f"{each.name}: {test} is no unit or contract test"]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code.py").write_text("def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n")
    (tmp_path / "test_code.py").write_text("from code_ import double\n\n\ndef test_double():\n    assert double(3) == 6\n")
    (tmp_path / "code.py").rename(tmp_path / "code_.py")  # `code` is a module of Python's
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow', 'hosts']\n")
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.setattr(breaks, "ROOT", tmp_path)
    return tmp_path


def test_a_break_is_killed_by_a_test_that_fails_and_survives_where_none_does(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = ["test_code.py"]
    table = [Break("noticed", "code_.py", "2 * x", "3 * x", tests), Break("missed", "code_.py", "x / 2", "x / 3", tests)]
    monkeypatch.setattr(breaks, "read", lambda: table)
    assert breaks.main([]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("noticed: killed by test_code.py::test_double (")
    assert said[1].startswith("missed: SURVIVED test_code.py (") and said[2:] == ["1 of 2 killed"]
    assert breaks.main(["noticed"]) == 0
    assert (project / "code_.py").read_text().count("2 * x") == 1, "the tree itself stays whole"


@pytest.mark.parametrize(("old", "found"), [("4 * x", 0), ("return", 2)])
def test_what_does_not_apply_exactly_once_is_an_error(project: Path, old: str, found: int) -> None:
    with pytest.raises(BreakError, match=f"x: code_.py has its `old` {found} times, not once"):
        Break("x", "code_.py", old, "", []).broken(project)


def test_tests_that_fail_unbroken_say_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "test_code.py").write_text("def test_double():\n    assert False\n")
    monkeypatch.setattr(breaks, "read", lambda: [Break("x", "code_.py", "2 * x", "3 * x", ["test_code.py"])])
    with pytest.raises(BreakError, match=r"the tests do not pass unbroken: test_code\.py::test_double"):
        breaks.main([])


def test_a_name_that_is_no_break_is_an_error() -> None:
    with pytest.raises(BreakError, match=r"no breaks with the names nothing in lab/breaks\.toml"):
        breaks.main(["nothing"])
