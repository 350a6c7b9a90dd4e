"""What a name stands for, and what an engine loads for several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving.models import exports, load_of, model_of
from trainer.errors import ConfigError


def made(folder: Path, *, adapter_of: str | None = None, rank: int = 8) -> Path:
    """A folder with the names of a model's files."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    if adapter_of is not None:
        (folder / "adapter").mkdir()
        (folder / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": adapter_of, "r": rank}))
        (folder / "adapter/adapter_model.safetensors").write_bytes(b"12345")
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    root = tmp_path / "runs"
    monkeypatch.setenv("FLOTILLA_RUNS", str(root))
    for step in (2, 10):
        made(root / f"demo/models/step_{step}")
    (root / "demo/run.yaml").write_text("")
    return root


def test_the_newest_export_is_that_of_the_highest_step(runs):
    model = model_of("run:demo")
    assert (model.name, model.step, Path(model.path)) == ("demo", 10, runs / "demo/models/step_10")
    assert model_of("run:demo@2").step == 2
    assert load_of([model], "demo").names == ("demo", "demo@10")


def test_the_final_model_stands_for_the_last_step_and_drafts_for_nothing(runs):
    made(runs / "demo/model")
    (runs / "demo/models/tmp_step_30").mkdir()
    (runs / "demo/models/step_40").mkdir()  # without a config: being written on a file system without renames
    (runs / "demo/metrics.jsonl").write_text('{"step": 9}\n{"step": 20}\n')
    assert [step for step, _ in exports(runs / "demo")] == [2, 10, 20]
    assert Path(model_of("run:demo").path) == runs / "demo/model"
    (runs / "demo/metrics.jsonl").write_text('{"step": 10}\n')
    assert [folder.name for _, folder in exports(runs / "demo")] == ["step_2", "model"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run:demo@3", "run:demo@3: not exported; steps that are: 2, 10. flotilla export demo --step 3 writes it"),
        ("run:demo@x", "run:demo@x: must be run:NAME or run:NAME@STEP, e.g. run:demo@20"),
        ("run:", "run:: must be run:NAME or run:NAME@STEP, e.g. run:demo@20"),
        ("run:nothing", "RUN=nothing: no run of that name in "),
        ("run:new", "new has exported no model yet; trainer.export_every=N exports while it trains"),
        ("run:saved", "saved has exported no model yet; flotilla export saved writes one of a checkpoint"),
        ("./nowhere", "./nowhere: no such folder here; must be run:NAME[@STEP], a model's folder or a hub name"),
        ("a/b/c", "a/b/c: no such folder here"),
    ],
)
def test_what_cannot_be_loaded_is_one_line_that_says_what_can(runs, text, said):
    (runs / "new").mkdir()
    (runs / "new/run.yaml").write_text("")
    (runs / "saved/checkpoints/step_5").mkdir(parents=True)
    (runs / "saved/run.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        model_of(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="the folder has no weights and no tokenizer; give one that save_pretrained"):
        model_of(str(tmp_path))


def test_adapters_of_one_base_are_models_of_one_engine(runs):
    made(runs / "a/model", adapter_of="org/base", rank=9)
    made(runs / "b/models/step_4", adapter_of="org/base", rank=4)
    for name in "ab":
        (runs / name / "run.yaml").write_text("")
    load = load_of([model_of("run:a"), model_of("run:b")], "both")
    assert (load.path, load.names, load.rank) == ("org/base", ("both-base",), 16)
    assert [name for name, _ in load.adapters] == ["a@0", "b@4"] and load.size == 10
    alone = load_of([model_of("run:a")], "a")
    assert (alone.path, alone.adapters) == (str(runs / "a/model"), ())  # the merged model


@pytest.mark.parametrize(
    ("bases", "said"),
    [
        (("org/base", None), "demo: has no adapter/ (model.lora); one engine serves one model, or several adapters of one base"),
        (("org/base", "org/other"), "adapters of different models: a of org/base, b of org/other; serve each by itself"),
        (("/gone", "/gone"), "a: its base model /gone is neither a folder here nor a hub name"),
    ],
)
def test_what_one_engine_cannot_serve_together(runs, bases, said):
    made(runs / "a/model", adapter_of=bases[0])
    (runs / "a/run.yaml").write_text("")
    other = "run:demo"
    if bases[1]:
        made(runs / "b/model", adapter_of=bases[1])
        (runs / "b/run.yaml").write_text("")
        other = "run:b"
    with pytest.raises(ConfigError) as caught:
        load_of([model_of("run:a"), model_of(other)], "both")
    assert str(caught.value) == said
    with pytest.raises(ConfigError, match="a@0, a@0: one of them twice"):
        made(runs / "c/base")
        load_of([model_of("run:a"), model_of("run:a")], "both")
