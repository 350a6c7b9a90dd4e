"""Which code a start ran: of a repository, or of a job that was uploaded from one."""

from __future__ import annotations

import json
import subprocess

import pytest

from cluster_tasks.client.submit import Job, commit_of
from trainer.runs import provenance

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@pytest.fixture
def repository(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "file").write_text("2")
    return tmp_path


def test_a_job_knows_the_commit_of_the_folder_that_was_uploaded(repository, tmp_path_factory, monkeypatch):
    flags = Job("a", ["x"], repository).flags
    known = json.loads(flags[flags.index("--metadata-json") + 1])
    monkeypatch.chdir(tmp_path_factory.mktemp("job"))
    assert (provenance([])["commit"], provenance([])["changed_files"]) == (None, 0)
    monkeypatch.setenv(JOB, json.dumps({"metadata": known}))
    found = provenance([])
    monkeypatch.chdir(repository)
    assert len(found["commit"]) == 40 and found["commit"] == provenance([])["commit"] and found["changed_files"] == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"metadata": {}}', '{"metadata": {"commit": "a"}}'])
def test_a_job_that_says_nothing_has_none(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(JOB, text)
    assert provenance([])["commit"] is None


@pytest.mark.parametrize("folder", [None, "https://example.com/a.zip", "/no/such"])
def test_what_is_no_folder_has_no_commit(folder):
    flags = Job("a", ["x"], folder).flags
    assert commit_of(folder) == {} and json.loads(flags[flags.index("--metadata-json") + 1]).keys() == {"owner"}
