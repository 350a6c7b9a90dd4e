"""What a recipe's job does on the cluster, by short processes: checks, exit codes, a stop, two of one run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from cluster_tasks.recipes.job import download, gsm8k, nodes, rewards
from cluster_tasks.recipes.job.__main__ import alone, first_line, mismatches, newest

ROOT = Path(__file__).parents[4]


def job(at: Path, command: list[str], **more: Any) -> list[str]:
    """The words that run it; it writes below `at`."""
    run = {"recipe": "verl/x", "packages": [], "installed": False, "image": None, "folder": str(at / "run"), "nodes": 1, "gpus": 0}
    run |= {"launcher": "ray", "check": [], "steps": [], "env": {}, "resumes": [], "complete": "", "command": command}
    run |= {"stack": "lab", "installable": True} | more
    (at / "run.json").write_text(json.dumps(run))
    return [sys.executable, "-m", "cluster_tasks.recipes.job", str(at / "run.json")]


def ended(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_its_exit_code_is_the_commands_and_its_environment_the_recipes(tmp_path: Path) -> None:
    done = ended(job(tmp_path, ["sh", "-c", "echo $OURS; exit 9"], env={"OURS": "heard"}))
    assert done.returncode == 9 and "heard\n" in done.stdout
    assert json.loads((tmp_path / "run/recipe.json").read_text())["env"] == {"OURS": "heard"}
    assert ended(job(tmp_path, ["no-such-program"])).returncode == 127


def test_a_refusal_comes_before_anything_is_prepared(tmp_path: Path) -> None:
    refusing = ["sh", "-c", "echo some warning; echo \"Could not override 'a.b'.\"; echo Set HYDRA_FULL_ERROR=1; exit 1"]
    step = {"name": "data", "command": ["touch", "{part}"], "creates": str(tmp_path / "made/data"), "timeout": 30}
    done = ended(job(tmp_path, ["true"], check=refusing, steps=[step]))
    assert done.returncode == 2 and not (tmp_path / "made").exists()
    assert done.stderr == "error: verl/x: its trainer refuses the settings (exit code 1): Could not override 'a.b'.\n"


@pytest.mark.parametrize("refused", ["index", "settings"])
def test_what_is_refused_leaves_no_folder(tmp_path: Path, refused: str) -> None:
    """Neither of the run, nor of what other steps would make, nor of the file that is missing."""
    made = {"name": "packages", "command": ["touch", "{part}"], "creates": str(tmp_path / "shared/sources/x"), "timeout": 30}
    index = {"name": "index", "command": [], "creates": str(tmp_path / "own/e5.index"), "timeout": 30}
    if refused == "settings":
        done = ended(job(tmp_path, ["true"], check=["false"], steps=[made]))
        assert done.stderr == "error: verl/x: its trainer refuses the settings (exit code 1): it printed nothing\n"
    else:
        done = ended(job(tmp_path, ["true"], steps=[made, index]))
        said = rf"error: verl/x: index={tmp_path}/own/e5.index does not exist on \S+; it has to lie where all nodes see it\n"
        assert re.fullmatch(said, done.stderr), done.stderr
    assert done.returncode == 2 and [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_check_without_its_packages_is_the_images_fault(tmp_path: Path) -> None:
    done = ended(job(tmp_path, ["true"], check=[sys.executable, "-c", "import no_such_package"], installable=False))
    missing = "ModuleNotFoundError: No module named 'no_such_package'"
    assert done.stderr == f"error: verl/x: the image does not fit: {missing}; build one that has them (docs/other-trainers)\n"


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
    monkeypatch.setattr("cluster_tasks.recipes.job.__main__.version", lambda _: "0.6.3+rocm64")
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
    deadline = time.monotonic() + 120
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
    monkeypatch.setattr(sys, "argv", ["download", "me/name", "/folder", "--revision", "v2", *flags])
    assert download.main() == 0 and asked["revision"] == "v2"
    assert bool(list(filter_repo_objects(["a.h5"], ignore_patterns=asked["ignore_patterns"]))) != left_out


def test_gsm8k_is_made_from_a_folder_as_from_the_hub(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text(json.dumps({"question": "2+2?", "answer": "#### 4"}) + "\n")
    words = [sys.executable, "-m", "cluster_tasks.recipes.job.gsm8k", "verl", str(tmp_path / "made"), "--source", str(source)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    import pyarrow.parquet

    [row] = pyarrow.parquet.read_table(tmp_path / "made/train.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == "4"


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (["gsm8k", "chat", "{folder}", "--source", "nobody/none"], "dataset nobody/none"),
        (["gsm8k", "chat", "{folder}", "--source", "/nowhere/gsm8k"], "dataset /nowhere/gsm8k"),
        (["download", "nobody/none", "{folder}", "--revision", "v9"], "model nobody/none@v9"),
        (["download", "nobody/none", "{folder}", "--dataset"], "dataset nobody/none"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(tmp_path: Path, program: list[str], named: str) -> None:
    words = [word.replace("{folder}", str(tmp_path / "made")) for word in program]
    command = [sys.executable, "-m", f"cluster_tasks.recipes.job.{words[0]}", *words[1:]]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"error: {named}"), done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


def test_the_reward_reads_the_last_number() -> None:
    texts = ["#### 3 no, #### 1,200", "#### 5", "1200", [{"role": "assistant", "content": "#### 1200"}]]
    assert rewards.gsm8k(texts, answer=["1200"] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_a_node_whose_torchrun_was_killed_has_not_ended_well() -> None:
    codes = []
    for end in ("exit 0", "exit 3", "kill -9 $$"):
        node = nodes.Node()
        node.start(["bash", "-c", end])
        assert node.process.wait(60) is not None
        codes.append(node.poll())
    assert codes == [0, 3, 137]
