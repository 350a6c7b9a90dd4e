"""Where a command finds its project."""

from __future__ import annotations

import pytest

from stacks.errors import UserError
from stacks.host.project import project_root


def test_the_nearest_folder_with_a_project_is_found_from_below(tmp_path, monkeypatch):
    (tmp_path / "Pulumi.yaml").touch()
    below = tmp_path / "stacks" / "deeper"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert project_root() == tmp_path


def test_outside_of_a_project_it_is_said_where_was_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"no Pulumi.yaml in {tmp_path} or above"):
        project_root()
