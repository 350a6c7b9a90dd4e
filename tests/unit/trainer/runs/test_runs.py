"""Runs: what makes a run the same run, what it keeps of its settings, and that it has one writer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from trainer import preflight
from trainer.cli import parse
from trainer.cli.changes import differences
from trainer.cli.paths import run_folder
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError
from trainer.runs import dated, held, save_resolved

ROOT = Path(__file__).parents[4]
PROG = "python -m trainer.train_ppo"


def ok(*argv: str) -> PpoConfig:
    return parse(["model.path=gpt2", "data.path=package.module:rows", *argv], prog=PROG, model=PpoConfig)


def first_step(folder: Path) -> None:
    """Until there is one, a folder holds no run."""
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 1, "reward": 0.5}\n')


def test_the_same_submit_is_the_same_run_and_another_config_is_another(tmp_path, runs):
    file = tmp_path / "demo.yaml"
    file.write_text("model: {path: gpt2}\ndata: {path: a.b:rows}\n")

    def name(*argv: str) -> str | None:
        return parse(["--config", str(file), *argv], prog=PROG, model=PpoConfig).run.name

    first = name()
    assert first is not None and re.fullmatch(r"demo-[0-9a-f]{8}", first)
    assert name() == name("log.plot=false") == name("run.resume=never") == name("optim.lr=0.000001") == first
    assert len({first, name("optim.lr=2e-6"), name("run.seed=1"), name("rollout.options={a: 1}")}) == 4
    assert name("trainer.steps=5") == name("trainer.steps=10") == first, "more steps go on"
    assert name("trainer.steps=5", "optim.schedule=cosine") != name("trainer.steps=10", "optim.schedule=cosine")
    assert name("run.name=mine") == "mine"
    assert run_folder(parse(["--config", str(file)], prog=PROG, model=PpoConfig)) == runs / first
    assert (ok().run.name or "").startswith("train_ppo-")


def test_a_run_keeps_its_settings_command_and_versions_beside_it(runs):
    config = ok("run.name=mine", "optim.lr=5e-4")
    save_resolved(config, runs / "mine", ["python", "-m", "trainer.train_ppo", "model.init={a: 1}"])
    save_resolved(config, runs / "mine", ["again"])
    assert PpoConfig.model_validate(yaml.safe_load((runs / "mine" / "run.yaml").read_text())) == config
    first, second = (json.loads(line) for line in (runs / "mine" / "starts.jsonl").read_text().splitlines())
    assert first["command"] == "python -m trainer.train_ppo 'model.init={a: 1}'"
    assert second["command"] == "again"
    assert first["packages"]["pydantic"] and first["time"]


def test_a_run_keeps_the_day_of_its_first_start(runs, monkeypatch):
    days = iter([date(2026, 11, 27), date(2026, 11, 28), date(2026, 11, 29)])
    monkeypatch.setattr("trainer.runs.date", SimpleNamespace(today=lambda: next(days)))
    folder, config = runs / "mine", ok("run.name=mine")
    save_resolved(dated(config, folder), folder, [])
    assert dated(config, folder).data.day == date(2026, 11, 28), "a start without steps is no run"
    first_step(folder)
    resumed = dated(config, folder)
    assert resumed.data.day == date(2026, 11, 27)
    save_resolved(resumed, folder, [])
    with pytest.raises(
        ConfigError, match=r"data\.day=2026-12-01: this run was started with 2026-11-27 .*; the checkpoint's position is in"
    ):
        save_resolved(dated(ok("run.name=mine", "data.day=2026-12-01"), folder), folder, [])
    assert dated(ok("run.name=mine", "run.resume=never"), folder).data.day == date(2026, 11, 29)


def test_a_run_of_before_days_were_kept_is_resumed(runs):
    folder, config = runs / "mine", ok("run.name=mine")
    save_resolved(config, folder, [])
    first_step(folder)
    save_resolved(dated(config, folder), folder, [])
    assert dated(config, folder).data.day is None


def test_other_settings_under_the_same_name_are_refused(runs):
    save_resolved(ok("run.name=mine", "rollout.options={a: 1}"), runs / "mine", [])
    first_step(runs / "mine")
    with pytest.raises(ConfigError) as caught:
        save_resolved(ok("run.name=mine", "optim.lr=0.1", "rollout.options={b: 1}", "log.plot=false"), runs / "mine", [])
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["optim.lr=0.1", "rollout.options.a=null", "rollout.options.b=1", "run.name=mine"]
    assert lines[0] == (f"optim.lr=0.1: this run was started with 1e-06 ({runs}/mine/run.yaml); run.allow=[optim.lr] takes it from here on")
    assert lines[-1] == "run.name=mine: choose another run.name, or run.resume=never to start over"


def test_a_mapping_that_was_empty_is_one_change_as_a_whole(runs):
    save_resolved(ok("run.name=mine"), runs / "mine", [])
    first_step(runs / "mine")
    with pytest.raises(ConfigError) as caught:
        save_resolved(ok("run.name=mine", "reward.weights={a: 1, b: 2}", "data.mix.a.path=x.jsonl", "data.path=null"), runs / "mine", [])
    first, second, *_ = sorted(line for line in str(caught.value).splitlines() if line.startswith(("data.mix", "reward.weights")))
    assert first.startswith('data.mix={"a": {"path": "x.jsonl"') and ": this run was started with {} (" in first
    assert second.startswith('reward.weights={"a": 1.0, "b": 2.0}: this run was started with {} (')


@pytest.mark.parametrize("text", ["trainer: {steps_of_old: 5}\n", "trainer: [", "5\n"])
def test_settings_of_another_version_are_refused_with_the_way_out(runs, text):
    (runs / "mine").mkdir(parents=True)
    (runs / "mine" / "run.yaml").write_text(text)
    first_step(runs / "mine")
    with pytest.raises(ConfigError, match=r"run\.yaml: not the settings of this version; choose another run\.name, or run\.resume=never"):
        save_resolved(ok("run.name=mine"), runs / "mine", [])


@pytest.mark.parametrize("resume", ["auto", "never", "must"])
def test_a_start_that_failed_before_its_first_step_leaves_the_name_and_nothing_of_its_settings(runs, resume):
    init = ["run.name=mine", "model.path=null", "model.tokenizer=characters:01"]
    save_resolved(ok(*init, "model.init={model_type: qwen2, hiden_size: 32}"), runs / "mine", ["first"])
    (runs / "mine" / "initial").mkdir()
    (runs / "mine" / "initial" / "config.json").write_text("of other settings")
    (runs / "mine" / "metrics.jsonl").write_text('{"step": 0, "eval_reward": 0.5}\n')
    (runs / "mine" / "notes.txt").write_text("a person's")
    corrected = ok(*init, "model.init={model_type: qwen2, hidden_size: 32}", f"run.resume={resume}")
    save_resolved(corrected, runs / "mine", ["second"])
    assert PpoConfig.model_validate(yaml.safe_load((runs / "mine" / "run.yaml").read_text())) == corrected
    assert {path.name for path in (runs / "mine").iterdir()} == {"run.yaml", "starts.jsonl", "notes.txt"}
    assert len((runs / "mine" / "starts.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("path", ["checkpoints/step_2/manifest.json", "model/config.json"])
def test_a_run_without_metrics_is_one_if_it_was_saved(runs, path):
    save_resolved(ok("run.name=mine"), runs / "mine", [])
    (runs / "mine" / path).parent.mkdir(parents=True)
    (runs / "mine" / path).write_text("{}")
    with pytest.raises(ConfigError, match=r"optim\.lr=0\.1: this run was started with"):
        save_resolved(ok("run.name=mine", "optim.lr=0.1"), runs / "mine", [])


def test_what_run_allow_names_may_change_and_is_recorded(runs, capsys):
    save_resolved(ok("run.name=mine", "rollout.options={a: 1}", "algorithm.kl.coef=0.1"), runs / "mine", [])
    first_step(runs / "mine")
    changed = ["run.name=mine", "optim.lr=1e-7", "rollout.options={b: 1}", "algorithm.kl.coef=0.2"]
    with pytest.raises(ConfigError, match=r"^algorithm\.kl\.coef=0\.2: [^\n]*\nrun\.name"):
        save_resolved(ok(*changed, "run.allow=[optim, rollout.options]"), runs / "mine", [])
    save_resolved(ok(*changed, "run.allow=[optim.lr, rollout.options, algorithm.kl]"), runs / "mine", [])
    assert "resumed with optim.lr=1e-07, which was 1e-06" in capsys.readouterr().out
    last = json.loads((runs / "mine" / "starts.jsonl").read_text().splitlines()[-1])
    assert last["changed"]["optim.lr"] == [1e-6, 1e-7] and last["changed"]["rollout.options.a"] == [1, None]
    save_resolved(ok(*changed), runs / "mine", [])  # as it has become


@pytest.mark.parametrize(
    "change",
    [
        "trainer.micro_batch_tokens=4096",
        "model.gradient_checkpointing=true",
        "model.attention=eager",
        "trainer.eval_every=3",
        "evals.more.rows=3",
        "placement.ranks=2",
    ],
)
def test_less_memory_other_ranks_and_more_evaluations_need_nobodys_word_and_are_the_same_run(runs, change):
    save_resolved(ok("run.name=mine"), runs / "mine", [])
    first_step(runs / "mine")
    save_resolved(ok("run.name=mine", change), runs / "mine", [])
    assert ok(change).run.name == ok().run.name


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("model.dtype=float32", "weights are of the other model"),
        ("data.shuffle=false", "position is in the other data"),
        ("run.seed=1", "an order of the data drawn from the other seed"),
        ("trainer.eval_prompts=3", "rows that are held out"),
        ("trainer.zero_stage=2", "shards are cut for the other stage"),
        ("algorithm.name=ppo", "ppo's critic is in the checkpoint, or is not"),
    ],
)
def test_what_a_checkpoint_is_of_changes_at_nobodys_word(runs, change, why):
    save_resolved(ok("run.name=mine"), runs / "mine", [])
    first_step(runs / "mine")
    key = change.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{re.escape(change)}: [^\n]*{why}"):
        save_resolved(ok("run.name=mine", change, f"run.allow=[{key}]"), runs / "mine", [])


@pytest.mark.parametrize(
    ("key", "near"), [("optim.lrr", "did you mean optim.lr"), ("xyz", "--help lists them"), ("optim.lr.x", "optim.lr")]
)
def test_run_allow_names_settings(key, near):
    with pytest.raises(ConfigError, match=rf"^command line: run\.allow: {key} is no setting; .*{near}"):
        parse(["model.path=gpt2", "data.path=a:b", f"run.allow=[{key}]"], prog=PROG, model=PpoConfig, checks=[preflight.allowed])


def test_steps_may_grow_unless_the_schedule_depends_on_them():
    assert differences(ok("trainer.steps=5"), ok("trainer.steps=9", "run.name=x", "run.resume=must", "placement.wait=9")) == {
        "run.name": (ok("trainer.steps=5").run.name, "x")
    }
    assert differences(ok("run.name=x", "trainer.steps=9"), ok("run.name=x", "trainer.steps=5")) == {"trainer.steps": (9, 5)}
    cosine = ["run.name=x", "optim.schedule=cosine"]
    assert differences(ok(*cosine, "trainer.steps=5"), ok(*cosine, "trainer.steps=9")) == {"trainer.steps": (5, 9)}


def test_resume_never_moves_the_old_run_aside(runs):
    save_resolved(ok("run.name=mine"), runs / "mine", [])
    (runs / "mine" / "metrics.jsonl").write_text("old")  # damaged, but not of step 0
    save_resolved(ok("run.name=mine", "optim.lr=0.1", "run.resume=never"), runs / "mine", [])
    assert not (runs / "mine" / "metrics.jsonl").exists()
    assert (runs / "mine.old1" / "metrics.jsonl").read_text() == "old"


def test_a_run_has_one_writer_until_that_process_dies(runs):
    code = (
        "import sys; from pathlib import Path; from trainer.runs import held\n"
        "with held(Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(runs / "mine")], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout and child.stdout.readline() == b"in\n"
        with pytest.raises(ConfigError, match=rf"run.name=mine: process {child.pid} on .* is writing"), held(runs / "mine"):
            pass
    finally:
        child.kill()
        child.communicate()
    with held(runs / "mine"):
        save_resolved(ok("run.name=mine"), runs / "mine", [])
        save_resolved(ok("run.name=mine", "run.resume=never"), runs / "mine", [])
        with pytest.raises(ConfigError, match="is writing"), held(runs / "mine"):
            pass
