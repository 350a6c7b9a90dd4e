"""The page of a run and of several: what it holds, that it needs no network, and one error for each mistake."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import report
from trainer.configs.ppo_sections import PpoLogConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.metrics.samples import Samples, read
from trainer.runs import faults


class Page(HTMLParser):
    """Tags, what they refer to, and the words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.words += filter(None, (part.strip() for part in data.split("\n")))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    return tmp_path


def run(runs: Path, name: str, lr: float = 1e-3, steps: int = 4) -> Path:
    folder = runs / name
    folder.mkdir()
    settings = {"run": {"name": name}, "algorithm": {"name": "grpo"}, "optim": {"lr": lr}, "trainer": {"steps": 4}}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    rows: list[dict[str, Any]] = [{"step": 0, "eval_reward": 0.25}] if steps else []
    for step in range(1, steps + 1):
        spent = {"seconds": 4.0, "seconds_generate": 3.0, "seconds_train": 0.5}
        rows.append({"step": step, "reward": step / 10, "clipped": 0.0, "loss": None, "cost_usd": step / 2, **spent})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts = [
        {"time": "T1", "host": "h1", "commit": None, "changed_files": 0},
        {"time": "T2", "host": "h2", "changed": {"optim.lr": [1, lr]}},
    ]
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    return folder


def page_of(name: str, *others: str) -> Page:
    assert report.main([name, *others]) == 0
    folder = report.run_of(name)
    return Page(((folder.parent if others else folder) / "report.html").read_text())


def test_the_page_of_a_run_tells_steps_curves_phases_answers_and_starts(runs, capsys):
    folder = run(runs, "a")
    (folder / "samples.jsonl").write_text(
        json.dumps({"step": 4, "prompt": "2<i>3", "answer": "x", "reward": 0.5, "finished": False}) + "\n"
    )
    page = page_of("a")
    assert capsys.readouterr().out == f"report: {folder / 'report.html'}\n"
    for words in ("4 of 4", "0:00:16", "0.25 (step 0)", "2.00 USD", "75.0 %", "12.5 %", "2<i>3", "(cut off)", "T1", "h2"):
        assert words in page.words, words
    assert "optim.lr: 1 → 0.001" in page.words
    curves = [word for word in page.words if word in ("reward", "eval reward", "cost usd", "clipped", "loss", "seconds generate")]
    assert curves.count("eval reward") == 1 and curves.count("cost usd") == 1
    assert not {"clipped", "loss", "seconds generate"} & set(curves), "zero or never finite, or in the table of phases"
    assert page.tags.count("svg") == 4  # reward, evaluation, cost, seconds


def test_a_page_needs_no_network_and_runs_no_script(runs):
    run(runs, "a")
    page = page_of("a")
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert "@import" not in (runs / "a/report.html").read_text() and "url(http" not in (runs / "a/report.html").read_text()


def test_several_runs_are_told_apart_and_their_settings_compared(runs):
    run(runs, "a")
    run(runs, "b", lr=5e-4)
    page = page_of("a", "b")
    at = page.words.index("where they differ")
    assert page.words[at + 1 : at + 6] == ["a", "b", "optim.lr", "0.001", "0.0005"]
    assert "trainer.steps" not in page.words
    run(runs, "c")
    assert "The runs have the same settings." in page_of("a", "c").words


def test_a_run_that_went_back_says_when_and_why(runs):
    folder = run(runs, "wild")
    assert "Where training diverged" not in Page(report.render([report.Story.of(folder)])).words
    row = {"time": "2026-01-02", "step": 3, "why": "no numbers", "to": 2, "lr": 0.5, "factor": 0.25}
    (folder / "rollbacks.jsonl").write_text(json.dumps(row) + "\n")
    words = Page(report.render([report.Story.of(folder)])).words
    assert {"Where training diverged", "no numbers", "0.125"} <= set(words)


def test_a_run_that_has_only_begun_has_a_page(runs):
    run(runs, "a", steps=0)
    (runs / "a/metrics.jsonl").unlink()
    page = page_of("a")
    assert "No step was logged." in page.words and "0 of 4" in page.words


def test_a_metric_with_a_dollar_is_no_formula(runs):
    folder = run(runs, "a")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/$a_{$": 1.0}\n')
    assert "reward/$a {$" in page_of("a").words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["b"], "RUN=b: no run of that name in "),
        (["a", "--output", "{runs}"], "--output {runs} is a folder; name a file"),
        (["a", "--output", "{runs}/no/x.html"], "--output {runs}/no/x.html: the folder {runs}/no does not exist"),
        (["damaged"], "damaged/metrics.jsonl:1: not JSON"),
        (["unread"], "unread/run.yaml: "),
    ],
)
def test_mistakes_are_one_error(runs, arguments, message):
    run(runs, "a")
    (run(runs, "damaged") / "metrics.jsonl").write_text("{\n{}\n")
    (run(runs, "unread") / "run.yaml").write_text("a: [")
    with pytest.raises(ConfigError) as error:
        report.main([word.format(runs=runs) for word in arguments])
    assert message.format(runs=runs) in str(error.value)
    assert not (runs / "a/report.html").exists()


def episode(group: int, text: str) -> Episode:
    return Episode(Prompt(0, [1], {"prompt": f"p{group}"}), group, [Turn([2], [-0.5], "stop")], text, 0.5)


def test_samples_are_of_different_prompts_first_and_of_some_steps(tmp_path):
    kept = Samples(tmp_path, PpoLogConfig(samples=3, samples_every=2), "prompt")
    for step in (1, 2, 3, 4):
        kept.log(step, [episode(0, "a"), episode(0, "b"), episode(1, "c"), episode(1, "d")])
    assert [(row["step"], row["prompt"], row["answer"]) for row in read(tmp_path)] == [
        *[(2, "p0", "a"), (2, "p1", "c"), (2, "p0", "b")],
        *[(4, "p0", "a"), (4, "p1", "c"), (4, "p0", "b")],
    ]
    assert read(tmp_path)[0] == {"step": 2, "prompt": "p0", "answer": "a", "reward": 0.5, "finished": True}


def test_samples_of_steps_that_are_computed_again_are_written_once(tmp_path):
    config = PpoLogConfig(samples=1, samples_every=1)
    before = Samples(tmp_path, config, "prompt")
    for step in (1, 2, 3):
        before.log(step, [episode(0, "a")])
    after = Samples(tmp_path, config, "prompt", done=1)
    assert [row["step"] for row in read(tmp_path)] == [1]
    after.log(2, [episode(0, "a")])
    assert [row["step"] for row in read(tmp_path)] == [1, 2]


def test_no_samples_are_kept_where_none_are_asked_for(tmp_path):
    Samples(tmp_path, PpoLogConfig(samples_every=0), "prompt").log(10, [episode(0, "a")])
    assert read(tmp_path) == []


def test_faults_are_told_with_their_steps(runs):
    folder = run(runs, "night")
    faults.note(folder, 3, "rollout-0: the process died")
    faults.note(folder, None, "<b>an error</b>")
    page = Page(report.render([report.Story.of(folder)]))
    at = page.words.index("rollout-0: the process died")
    assert page.words[at - 1] == "3"
    assert page.words[page.words.index("<b>an error</b>") - 1] == "-"
    assert "Faults" not in Page(report.render([report.Story.of(run(runs, "calm"))])).words
