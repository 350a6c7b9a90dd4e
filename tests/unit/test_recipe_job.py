"""What a recipe's job does on the cluster, by short processes: what is prepared once, checks, exit codes, a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.recipe_job import gsm8k, rewards
from cluster_tasks.recipe_job.__main__ import first_line, mismatches, newest
from cluster_tasks.recipe_job.preparation import prepare
from cluster_tasks.recipe_job.process import JobError

ROOT = Path(__file__).parents[2]
# Writes its argument's file in two halves and counts itself.
MAKER = "import sys, pathlib; open(sys.argv[2], 'a').write('x'); pathlib.Path(sys.argv[1]).write_text('made')"


def step(folder: Path, program: str = MAKER, timeout: float = 30) -> dict[str, Any]:
    command = [sys.executable, "-c", program, "{part}", str(folder / "count")]
    return {"name": "data", "command": command, "creates": str(folder / "made/data"), "timeout": timeout}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "made").iterdir())


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    prepare(step(tmp_path))
    prepare(step(tmp_path))
    assert (tmp_path / "made/data").read_text() == "made" and (tmp_path / "count").read_text() == "x" and left(tmp_path) == ["data"]


def test_of_many_one_makes_it(tmp_path: Path) -> None:
    slow = MAKER + "; import time; time.sleep(1)"
    threads = [threading.Thread(target=prepare, args=(step(tmp_path, slow),)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "count").read_text() == "x" and left(tmp_path) == ["data"]


def test_one_that_fails_leaves_nothing_and_says_its_last_line(tmp_path: Path) -> None:
    failing = "import sys, pathlib; pathlib.Path(sys.argv[1]).mkdir(); sys.exit('error: no such repository')"
    with pytest.raises(JobError, match=r"^data failed with exit code 1: no such repository$"):
        prepare(step(tmp_path, failing))
    assert left(tmp_path) == []
    with pytest.raises(JobError, match=r"ended well, but made no .*made/data"):
        prepare(step(tmp_path, "pass"))
    with pytest.raises(JobError, match=r"has not ended within 0.5 s"):
        prepare(step(tmp_path, "import time; time.sleep(60)", timeout=0.5))


def test_waiting_for_another_has_a_deadline_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/.data.lock").write_text("node-7, process 12\n0\n")
    with pytest.raises(JobError, match=r"data: node-7, process 12 has not made .*made/data in time; .* remove .*\.data\.lock"):
        prepare(step(tmp_path, timeout=0), dead=60)


def test_an_owner_that_is_silent_is_dead_and_its_half_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/.data.lock").write_text("node-7, process 12\n0\n")
    (tmp_path / "made/.part-0-data").mkdir()
    prepare(step(tmp_path), dead=0.2)
    assert left(tmp_path) == ["data"] and "node-7, process 12, which was at work" in capsys.readouterr().out


def test_an_owner_that_beats_is_waited_for(tmp_path: Path) -> None:
    """Longer than one is dead that does not."""
    slow = MAKER + "; import time; time.sleep(2)"
    first = threading.Thread(target=prepare, args=(step(tmp_path, slow),), kwargs={"beat": 0.05})
    first.start()
    while not (tmp_path / "made/.data.lock").exists():
        assert first.is_alive()
    prepare(step(tmp_path), dead=1)
    first.join()
    assert (tmp_path / "count").read_text() == "x"


# The job


def job(folder: Path, command: list[str], **more: Any) -> list[str]:
    """The words that run it; it writes below `folder`."""
    run = {"recipe": "verl/x", "packages": [], "installed": False, "image": None, "folder": str(folder / "run"), "nodes": 1, "gpus": 0}
    run |= {"launcher": "ray", "check": [], "steps": [], "env": {}, "resumes": [], "command": command} | more
    (folder / "run.json").write_text(json.dumps(run))
    return [sys.executable, "-m", "cluster_tasks.recipe_job", str(folder / "run.json")]


def ended(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_its_exit_code_is_the_commands_and_its_environment_the_recipes(tmp_path: Path) -> None:
    done = ended(job(tmp_path, ["sh", "-c", "echo $OURS; exit 9"], env={"OURS": "heard"}))
    assert done.returncode == 9 and "heard\n" in done.stdout
    assert json.loads((tmp_path / "run/recipe.json").read_text())["env"] == {"OURS": "heard"}
    assert ended(job(tmp_path, ["no-such-program"])).returncode == 127


def test_a_refusal_comes_before_anything_is_prepared(tmp_path: Path) -> None:
    refusing = ["sh", "-c", "echo some warning; echo \"Could not override 'a.b'.\"; echo Set HYDRA_FULL_ERROR=1; exit 1"]
    done = ended(job(tmp_path, ["true"], check=refusing, steps=[step(tmp_path)]))
    assert done.returncode == 2 and not (tmp_path / "made").exists()
    assert done.stderr == "error: verl/x: its trainer refuses the settings (exit code 1): Could not override 'a.b'.\n"


def test_packages_of_the_image_are_compared(tmp_path: Path) -> None:
    done = ended(job(tmp_path, ["true"], packages=["pytest==0.1", "no-such-package[x]==1"], installed=True, image="verl:1"))
    assert done.returncode == 2
    wrong = f"pytest==0.1 (it has {pytest.__version__}), no-such-package[x]==1 (it has none)"
    assert done.stderr == f"error: verl/x needs {wrong}; set flotilla:task.image: verl:1, or let Ray install them: packages=install\n"
    assert mismatches([f"pytest=={pytest.__version__}"]) == []


def test_what_was_saved_is_resumed_from_the_newest(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "runs/events"):
        (tmp_path / "run" / name).mkdir(parents=True)
    done = ended(job(tmp_path, ["echo", "START"], resumes=["--from", "{last}"]))
    assert done.stdout.splitlines()[-1] == f"START --from {tmp_path}/run/checkpoint-10"
    assert newest(tmp_path / "nothing") is None
    (tmp_path / "other/actor/global_step_3").mkdir(parents=True)
    assert newest(tmp_path / "other") == tmp_path / "other/actor/global_step_3"


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stop_reaches_the_command_which_may_save(tmp_path: Path) -> None:
    saving = f"trap 'echo saved > {tmp_path}/saved; exit 0' TERM; touch {tmp_path}/begun; while :; do sleep 0.05; done"
    process = subprocess.Popen(job(tmp_path, ["bash", "-c", saving]), cwd=ROOT)
    wait_for(tmp_path / "begun")
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == 143 and (tmp_path / "saved").read_text() == "saved\n"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux' kernel")
def test_the_command_does_not_survive_a_job_that_is_killed(tmp_path: Path) -> None:
    saving = f"trap 'echo saved > {tmp_path}/saved; exit 0' TERM; touch {tmp_path}/begun; while :; do sleep 0.05; done"
    process = subprocess.Popen(job(tmp_path, ["bash", "-c", saving]), cwd=ROOT)
    wait_for(tmp_path / "begun")
    process.kill()
    process.wait()
    wait_for(tmp_path / "saved")


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Traceback (most recent call last):\n  File x\nValueError: no GPU\n", "ValueError: no GPU"),
        ("usage: train [-h]\ntrain: error: unrecognized arguments: --x\n", "train: error: unrecognized arguments: --x"),
        ("a warning\nthe reason\n", "the reason"),
        ("", "it printed nothing"),
    ],
)
def test_a_trainers_own_words(output: str, line: str) -> None:
    assert first_line(output) == line


# Data


def test_gsm8k_has_the_columns_that_trainers_read() -> None:
    example = {"question": "How many?", "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200"}
    row = gsm8k.verl_row(example, "train", 4)
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1200"} and row["data_source"] == "openai/gsm8k"
    assert row["prompt"][0]["content"].startswith("How many? Let's think") and row["extra_info"]["index"] == 4
    assert gsm8k.chat_row(example, "train", 0)["answer"] == "1200"


def test_gsm8k_is_made_from_a_folder_as_from_the_hub(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text(json.dumps({"question": "2+2?", "answer": "#### 4"}) + "\n")
    words = [sys.executable, "-m", "cluster_tasks.recipe_job.gsm8k", "verl", str(tmp_path / "made"), "--source", str(source)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    import pyarrow.parquet

    [row] = pyarrow.parquet.read_table(tmp_path / "made/train.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == "4"


def test_the_reward_reads_the_last_number() -> None:
    texts = ["#### 3 no, #### 1,200", "#### 5", "1200", [{"role": "assistant", "content": "#### 1200"}]]
    assert rewards.gsm8k(texts, answer=["1200"] * 4) == [1.0, 0.0, 0.0, 1.0]
