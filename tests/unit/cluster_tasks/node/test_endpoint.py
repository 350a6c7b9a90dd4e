"""Tokens of served models."""

from __future__ import annotations

import re

from cluster_tasks.node.endpoint import NAME, token, token_of


def test_each_name_and_each_start_has_a_token_of_its_own_that_both_sides_make(tmp_path):
    (tmp_path / "ray.token").write_text("secret\n")
    mine = token("secret", "a", "1")
    assert re.fullmatch("[0-9a-f]{64}", mine) and "secret" not in mine
    assert len({mine, token("secret", "b", "1"), token("secret", "a", "2"), token("other", "a", "1")}) == 4
    assert token_of({"RAY_AUTH_TOKEN": "secret"}, "a", "1") == mine == token_of({"RAY_AUTH_TOKEN_PATH": f"{tmp_path}/ray.token"}, "a", "1")
    assert token_of({}, "a", "1") == "" == token_of({"RAY_AUTH_TOKEN_PATH": f"{tmp_path}/none"}, "a", "1")


def test_a_name_is_a_part_of_an_address():
    assert all(re.fullmatch(NAME, name) for name in ("a", "demo_1-x", "runs-2", "a" * 60))
    assert not any(re.fullmatch(NAME, name) for name in ("", "a/b", "..", "a b", "-a", "A", "runs", "a" * 61))
