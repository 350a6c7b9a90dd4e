"""What a recipe's job does on the cluster, by short processes: what is prepared once, checks, exit codes, a stop."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from cluster_tasks.recipe_job import download, gsm8k, rewards
from cluster_tasks.recipe_job.__main__ import alone, first_line, mismatches, newest
from cluster_tasks.recipe_job.lock import Owner, held
from cluster_tasks.recipe_job.preparation import prepare, rename, telling
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
    assert left(tmp_path) == ["data"] and "node-7, process 12, which holds" in capsys.readouterr().out


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


def test_who_is_at_work_says_so_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    said, deadline = "", time.monotonic() + 30
    with telling("data", 1800, every=0.01):
        while not said:
            assert time.monotonic() < deadline
            said = capsys.readouterr().out
    assert said.startswith("recipe: data: at work for 0 s; at most 1800 s more\n")


def test_a_folder_that_is_half_renamed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mounted bucket renames, which copies file by file, until the node dies or the network does."""
    creates = tmp_path / "made/data"

    def half(part: Path, to: Path) -> None:
        to.mkdir()
        (to / "one-of-two").touch()
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as changed, pytest.raises(OSError, match="Input/output error"):
        changed.setattr(Path, "rename", half)
        prepare(step(tmp_path))
    assert (creates / "one-of-two").exists()
    prepare(step(tmp_path))
    assert creates.read_text() == "made" and left(tmp_path) == ["data"]


def test_who_is_taken_for_dead_keeps_what_another_has_made_meanwhile(tmp_path: Path) -> None:
    part, creates, moving = tmp_path / "part", tmp_path / "data", tmp_path / "moving"
    for folder in (part, creates):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    rename(part, creates, moving)
    assert (creates / "file").read_text() == "data" and not moving.exists()


def test_what_is_there_but_still_being_renamed_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "made/data").mkdir(parents=True)
    with held(tmp_path / "made/.data.lock", beat=0.05), pytest.raises(JobError, match=r"has not made .*made/data in time"):
        prepare(step(tmp_path, timeout=0), dead=60)


def test_a_lock_that_was_taken_is_neither_written_nor_removed_by_its_first_owner(tmp_path: Path) -> None:
    lock, lost = tmp_path / "lock", threading.Event()
    with held(lock, 0.02, lost.set) as ours:
        assert ours
        lock.write_text("another\n")
        assert lost.wait(10)
    assert lock.read_text() == "another\n"


def test_a_lock_is_of_one_owner_and_free_after_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with held(lock) as first, held(lock) as second:
        assert first and not second and Owner(lock).listen()
    assert not Owner(lock).listen()


# The job


def job(at: Path, command: list[str], **more: Any) -> list[str]:
    """The words that run it; it writes below `at`."""
    run = {"recipe": "verl/x", "packages": [], "installed": False, "image": None, "folder": str(at / "run"), "nodes": 1, "gpus": 0}
    run |= {"launcher": "ray", "check": [], "steps": [], "env": {}, "resumes": [], "complete": "", "command": command}
    run |= {"stack": "lab", "installable": True} | more
    (at / "run.json").write_text(json.dumps(run))
    return [sys.executable, "-m", "cluster_tasks.recipe_job", str(at / "run.json")]


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


def test_a_check_without_its_packages_is_the_images_fault(tmp_path: Path) -> None:
    done = ended(job(tmp_path, ["true"], check=[sys.executable, "-c", "import no_such_package"], installable=False))
    missing = "ModuleNotFoundError: No module named 'no_such_package'"
    assert done.stderr == f"error: verl/x: the image does not fit: {missing}; build one that has them (docs/guides)\n"


def test_storage_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = ended(job(tmp_path, ["true"], folder=str(tmp_path / "file/run")))
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: verl/x: [Errno 20] Not a directory")


def test_packages_of_the_image_are_compared(tmp_path: Path) -> None:
    done = ended(job(tmp_path, ["true"], packages=["pytest==0.1", "no-such-package[x]==1"], installed=True, image="verl:1"))
    assert done.returncode == 2
    wrong = f"pytest==0.1 (it has {pytest.__version__}), no-such-package[x]==1 (it has none)"
    assert done.stderr == f"error: verl/x needs {wrong}; set flotilla:task.image: verl:1, or let Ray install them: packages=install\n"
    assert mismatches([f"pytest=={pytest.__version__}"]) == []


def test_a_local_build_of_a_version_is_that_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster_tasks.recipe_job.__main__.version", lambda _: "0.6.3+rocm64")
    assert mismatches(["vllm==0.6.3"]) == [] and mismatches(["vllm==0.6.3+rocm64"]) == []
    assert mismatches(["vllm==0.6"]) == ["vllm==0.6 (it has 0.6.3+rocm64)"]


def test_what_was_saved_is_resumed_from_the_newest(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "runs/events"):
        (tmp_path / "run" / name).mkdir(parents=True)
    done = ended(job(tmp_path, ["echo", "START"], resumes=["--from", "{last}"]))
    assert done.stdout.splitlines()[-1] == f"START --from {tmp_path}/run/checkpoint-10"
    assert newest(tmp_path / "nothing") is None
    (tmp_path / "other/actor/global_step_3").mkdir(parents=True)
    assert newest(tmp_path / "other") == tmp_path / "other/actor/global_step_3"


def test_a_checkpoint_that_a_kill_left_half_written_is_passed_over(tmp_path: Path) -> None:
    for number in (8, 9):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / "checkpoint-8/trainer_state.json").touch()
    assert newest(tmp_path, "trainer_state.json") == tmp_path / "checkpoint-8"
    assert newest(tmp_path) == tmp_path / "checkpoint-9"


@pytest.mark.parametrize(
    ("resumes", "says"), [([], "the trainer looks for it itself"), (None, "verl/x cannot resume, and begins with step 1")]
)
def test_who_resumes_is_said_as_it_is(tmp_path: Path, resumes: list[str] | None, says: str) -> None:
    (tmp_path / "run/global_step_4").mkdir(parents=True)
    done = ended(job(tmp_path, ["true"], resumes=resumes))
    assert f"recipe: the run has saved {tmp_path}/run/global_step_4; {says}\n" in done.stdout and "it resumes" not in done.stdout


def test_a_second_job_of_the_same_run_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    words, config = job(tmp_path, ["bash", "-c", f"touch {tmp_path}/begun; sleep 60"]), {"metadata": {"job_submission_id": "first-1"}}
    first = subprocess.Popen(words, cwd=ROOT, env=os.environ | {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(config)})
    try:
        wait_for(tmp_path / "begun")
        done = ended(words)
    finally:
        first.terminate()
        first.wait(30)
    assert done.returncode == 2
    said = rf"error: verl/x: {tmp_path}/run is in use by job first-1 on \S+, process {first.pid}; wait for its end, .* --job JOB\), or .*\n"
    assert re.fullmatch(said, done.stderr), done.stderr
    assert ended(job(tmp_path, ["true"])).returncode == 0  # it has given the folder up


def test_the_folder_of_a_job_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".run.lock").write_text("job gone on node-7, process 12\nid\n000000003\n")
    with alone({"recipe": "verl/x", "stack": "lab", "folder": str(tmp_path / "run")}, beat=0.05, dead=0.2):
        assert "gone" not in (tmp_path / ".run.lock").read_text()
    assert not (tmp_path / ".run.lock").exists()


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


@pytest.mark.parametrize(("flags", "left_out"), [([], True), (["--dataset"], False)])
def test_weights_in_other_formats_are_left_out_of_models_alone(monkeypatch: pytest.MonkeyPatch, flags: list[str], left_out: bool) -> None:
    """A data set may be of any format."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _, **more: asked.update(more))
    monkeypatch.setattr(sys, "argv", ["download", "me/name", "/folder", *flags])
    assert download.main() == 0 and bool(list(filter_repo_objects(["a.h5"], ignore_patterns=asked["ignore_patterns"]))) != left_out


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
