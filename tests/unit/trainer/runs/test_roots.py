"""A run by its name: where it is looked for, and what is said where there are several or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import compare
from trainer.cli import paths
from trainer.configs.sections import ModelConfig
from trainer.errors import ConfigError
from trainer.runs import run_of

LOCAL_ROOT = "build/local/runs"
HERE, LOCAL, OTHER = "runs/a", f"{LOCAL_ROOT}/a", "build/other/runs/a"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOTILLA_RUNS", raising=False)
    return tmp_path


def make(*folders: str) -> None:
    for folder in folders:
        (Path(folder) / "model").mkdir(parents=True)
        (Path(folder) / "model/config.json").write_text("{}")
        (Path(folder) / "run.yaml").write_text("{}")


@pytest.mark.parametrize(
    ("there", "variable", "name", "found"),
    [
        ([HERE], None, "a", HERE),
        ([LOCAL], None, "a", LOCAL),
        ([OTHER], None, "a", OTHER),
        ([HERE, LOCAL], None, "a", f"RUN=a: {HERE} and {LOCAL} are runs of that name"),
        ([LOCAL, OTHER], None, "a", f"RUN=a: {LOCAL} and {OTHER} are runs of that name"),
        ([HERE, "a"], None, "a", f"RUN=a: {HERE} and a are runs of that name"),
        ([HERE, LOCAL], None, LOCAL, LOCAL),
        ([HERE, LOCAL], None, "./runs/a", HERE),
        ([HERE, LOCAL], LOCAL_ROOT, "a", LOCAL),  # said, so there is one root
        ([HERE, LOCAL], "runs", "a", HERE),
        ([HERE], LOCAL_ROOT, "a", f"RUN=a: no run of that name in {LOCAL_ROOT} ($FLOTILLA_RUNS), nor a run's folder; there is {HERE}"),
        ([LOCAL], None, "b", "RUN=b: no run of that name in runs and build/local/runs ($FLOTILLA_RUNS), nor a run's folder; near it: a"),
        ([], None, "a", "RUN=a: no run of that name in runs ($FLOTILLA_RUNS), nor a run's folder; there is none"),
    ],
)
def test_a_run_is_found_by_one_rule(there, variable, name, found, monkeypatch):
    make(*there)
    if variable:
        monkeypatch.setenv("FLOTILLA_RUNS", variable)
    if found.startswith("RUN="):
        with pytest.raises(ConfigError) as error:
            run_of(name)
        assert str(error.value).startswith(found)
    else:
        assert run_of(name) == Path(found)


def test_a_link_to_the_same_folder_is_no_second_run(project):
    make("build/local/volumes/checkpoints/a")
    (project / "build/local/runs").symlink_to("volumes/checkpoints")
    (project / "runs").symlink_to("build/local/runs")
    assert run_of("a").resolve() == project / "build/local/volumes/checkpoints/a"


@pytest.mark.parametrize(
    ("there", "variable", "says"),
    [
        ([HERE], None, ""),
        ([LOCAL], None, ""),
        ([], None, "that run has exported no model to runs/a/model; let it train to its end first"),
        ([HERE], "build/local/runs", f"that run has exported no model to build/local/runs/a/model; there is {HERE}: give that folder"),
    ],
)
def test_run_name_is_found_by_the_same_rule(there, variable, says, monkeypatch):
    make(*there)
    if variable:
        monkeypatch.setenv("FLOTILLA_RUNS", variable)
    errors = [line for line in paths.check_model(ModelConfig(path="run:a")) if "tokenizer" not in line]
    assert [line.startswith(f"model.path=run:a: {says}") for line in errors] == ([True] if says else [])


def test_run_name_of_two_runs_is_refused_before_anything_starts():
    from trainer.cli import parse
    from trainer.configs.sft import SftConfig

    make(HERE, LOCAL)
    with pytest.raises(ConfigError, match=f"command line: model.path=run:a: {HERE} and {LOCAL} are runs of that name; give the folder"):
        parse(["model.path=run:a", "data.path=x"], prog="x", model=SftConfig)


def test_runs_that_are_compared_are_found_by_it_too():
    make(HERE, LOCAL)
    with pytest.raises(ConfigError, match=f"RUN=a: {HERE} and {LOCAL}"):
        compare.main(["a", "b"])
