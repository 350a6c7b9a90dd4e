"""`flotilla trace RUN`: what it writes and says, and its mistakes in a line each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.page import lanes
from trainer.page.answers import Answers
from trainer.runs import timeline


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    (folder / "traces").mkdir(parents=True)
    (folder / "run.yaml").write_text("trainer: {steps: 40}\n")
    for step, reward in ((20, 0.1), (21, 5.0)):
        spans = [["reward", 0.0, reward, {}], ["train", reward, 6.0, {}]]
        rows = [
            {"step": step, "time": 1000.0 + step},
            {"lane": "driver", "kind": "driver", "node": "", "error": 0, "spans": spans},
            {"end": 6.0},
        ]
        (folder / f"traces/step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[: 3 if step == 20 else 2]))
    return folder


def test_all_traced_steps_are_in_the_file_and_in_words(run, capsys):
    assert timeline.main([str(run)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["step 20: 6.00 s; nothing stands out", "step 21: 6.00 s, which a kill cut short"]
    assert out[2].startswith("  rewards took 83% of the step: raise reward.workers")
    assert out[3:] == [f"timeline: {run / 'trace.json.gz'} (open it at https://ui.perfetto.dev)"]
    events = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))["traceEvents"]
    assert [event["name"] for event in events if event["name"].startswith("step")] == ["step 20", "step 21"]
    assert [file.name for file in run.glob(".*")] == []


def test_the_page_takes_steps_as_a_person_writes_them_and_tells_the_same(run, capsys):
    timeline.main([str(run), "--steps", "20..21"])
    asked = Answers([run])
    assert [*asked.ask("told", {"name": "demo", "steps": "20..21"}), ""] == capsys.readouterr().out.partition("timeline:")[0].split("\n")
    with pytest.raises(lanes.NoTimeline, match=r"^--steps 22\.\.20: "):
        asked.ask("told", {"name": "demo", "steps": "22..20"})


def test_steps_and_file_can_be_chosen(run, tmp_path, capsys):
    assert timeline.main([str(run), "--steps", "21", "--output", str(tmp_path / "one.json.gz")]) == 0
    assert "step 20" not in capsys.readouterr().out and not (run / "trace.json.gz").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "22..20"], "--steps 22..20: '22..20' is not a step or a range such as 20..22 of at most 1000"),
        (["--steps", "20,x"], "--steps 20,x: 'x' is not a step or a range such as 20..22 of at most 1000"),
        (["--steps", "1..100000"], "--steps 1..100000: '1..100000' is not a step or a range such as 20..22 of at most 1000"),
        (["--steps", "20,"], "--steps 20,: '' is not a step or a range such as 20..22 of at most 1000"),
        (["--steps", "20..23"], "{run}: no timeline of step 22; it has those of 20, 21"),
        (["--output", "{run}"], "--output {run} is a folder; name a file"),
        (["--output", "{run}/no/file"], "--output {run}/no/file: the folder {run}/no does not exist"),
    ],
)
def test_a_mistake_is_one_line(run, words, said):
    with pytest.raises(ConfigError) as caught:
        timeline.main([str(run), *(word.replace("{run}", str(run)) for word in words)])
    assert str(caught.value) == said.replace("{run}", str(run))


def test_a_run_without_traces_a_damaged_file_and_a_run_that_there_is_not(run):
    file = run / "traces/step_20.jsonl"
    file.write_text("\x00\x00\n" + file.read_text())
    with pytest.raises(ConfigError, match=r"step_20\.jsonl:1: not a line of a timeline; trace the step again, or remove the file"):
        timeline.main([str(run)])
    for each in run.glob("traces/*"):
        each.unlink()
    with pytest.raises(ConfigError, match=r"demo: no step was traced; log\.trace\.steps says which are"):
        timeline.main([str(run)])
    with pytest.raises(ConfigError, match="RUN=nosuch: no run of that name"):
        timeline.main(["nosuch"])


def test_a_file_that_cannot_be_written_leaves_nothing(run, monkeypatch):
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        timeline.main([str(run)])
    assert [*run.glob("*trace.json*")] == [*run.glob(".*tmp")] == []


@pytest.mark.parametrize(("text", "steps"), [("20", [20]), ("20..22", [20, 21, 22]), ("3, 20..21,3", [3, 20, 21])])
def test_steps_are_chosen_as_in_the_settings(text, steps):
    assert lanes.chosen(Path("/nowhere"), text) == steps
