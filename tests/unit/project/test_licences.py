"""docs/licences.md, against the metadata of what is installed."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/licences.md").read_text()
PERMISSIVE = re.compile(r"\b(MIT|MIT-CMU|0?BSD|Apache|ISC|PSF|Python Software Foundation|Unlicense|CC0)\b", re.IGNORECASE)
OTHERS = re.compile(r"GPL|MPL|Mozilla|proprietary|EUPL|CDDL", re.IGNORECASE)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(which: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+)==", (ROOT / f"requirements/{which}.txt").read_text(), re.MULTILINE))


def licence(package: Distribution) -> str:
    """As the package says it: an expression, else its classifiers, else its own words, else the licence's text."""
    about = package.metadata
    classifiers = [line.rpartition("::")[2].strip() for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
    texts = [file.read_text() for file in package.files or [] if re.match(r"(?i)licen[sc]e", file.name)]
    classified = " ".join(line for line in classifiers if line != "OSI Approved")
    named = [*(about.get_all("License-Expression") or []), classified, *(about.get_all("License") or [])]
    if any(named):
        return next(filter(None, named)).strip().splitlines()[0]
    head = " ".join(" ".join(texts).split())[:400]
    known = {"Permission is hereby granted, free of charge": "MIT", "Redistribution and use": "BSD", "All rights reserved.": "BSD"}
    return next((name for words, name in known.items() if words in head), head)


def test_whatever_is_not_permissive_is_in_the_table():
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(rows) >= 10
    installed = {normal(package.metadata["Name"]): package for package in distributions()}
    found = set()
    for name in sorted(locked("dev") & installed.keys()):
        said = licence(installed[name])
        if OTHERS.search(said) or not PERMISSIVE.search(said):
            [row] = [row for row in rows if re.fullmatch(row.replace("*", ".*"), name)] or [None]
            assert row, f"docs/licences.md has no row for {name}: {said[:100]}"
            found.add(row)
    assert found == set(rows), "rows of packages that are not installed, or are permissive"


def test_the_sets_of_the_table_are_those_of_the_locks():
    others = {"client", "server", "aws", "gcp", "clouds", "base", "cpu", "gpu"}
    for row, _, _, sets in re.findall(r"^\| `([^`]+)` \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE):
        within = {which for which in others if any(re.fullmatch(row.replace("*", ".*"), name) for name in locked(which))}
        said = set(re.findall(r"`(\w+)`", sets))
        assert within == (others - said if sets.startswith("all") else said), row


def test_a_laptop_that_submits_installs_neither_dstack_nor_a_clouds_libraries_nor_torch():
    assert not locked("client") & {"dstack", "boto3", "pulumi-aws", "pulumi-gcp", "google-auth", "torch", "opencensus"}
    assert len(locked("client")) < 60 < len(locked("base"))
    for part in ("client", "server", "aws", "gcp", "base", "cpu"):
        assert locked(part) <= locked("dev"), f"tests do not run with what {part}.txt installs"
