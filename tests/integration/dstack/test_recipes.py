"""What `flotilla recipe show --as dstack` writes, applied to a real dstack server with two hosts."""

from __future__ import annotations

import json

import pytest
from support import recipe_stand_ins

from lab.dstack.lab import Lab

pytestmark = pytest.mark.hosts

SHOW = "python -m cli recipe show trl/sft lab model=/checkpoints/mine run=as-file packages=image --as dstack"


@pytest.mark.usefixtures("tidy")
def test_the_task_prepares_runs_on_both_hosts_resumes_and_ends_with_the_trainers_code(lab: Lab) -> None:
    recipe_stand_ins.trl_in(lab.shared / "as-file-standins")
    recipe_stand_ins.hub_in(lab.shared / "as-file-standins")
    (lab.shared / "answer").touch()
    (lab.shared / "mine").mkdir(exist_ok=True)
    saved = lab.shared / "as-file/checkpoint-3"
    saved.mkdir(parents=True)
    (saved / "trainer_state.json").touch()
    lab.stack(task={"env": {"PYTHONPATH": "/checkpoints/as-file-standins"}})
    assert ". build/lab/env.sh && dstack apply -f build/lab/recipe-as-file.dstack.yml" in lab.must(SHOW)
    lab.must(". build/lab/env.sh && dstack apply -y -d -f build/lab/recipe-as-file.dstack.yml")
    lab.wait_run("recipe-as-file", "failed")
    assert lab.jobs("recipe-as-file")[0]["exit_status"] == 1, lab.logs("recipe-as-file")
    for rank in (0, 1):
        said = json.loads((lab.shared / f"as-file/said-{rank}.json").read_text())
        assert (said["world"], said["given"]["--resume_from_checkpoint"]) == ("2", "/checkpoints/as-file/checkpoint-3")
    assert "the run has saved /checkpoints/as-file/checkpoint-3; it resumes" in lab.logs("recipe-as-file")
