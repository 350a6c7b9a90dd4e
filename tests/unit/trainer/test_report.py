"""The page of runs as one file: what it holds, that it needs no network, and one error for each mistake."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import report
from trainer.errors import ConfigError
from trainer.page.record import Record
from trainer.runs import faults, run_of


class Page(HTMLParser):
    """Tags, what they refer to, the texts of scripts, the policy."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href")]
        self.policy = dict(attrs).get("content") or "" if dict(attrs).get("http-equiv") else self.policy

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and data.strip():
            self.scripts.append(data)

    @property
    def told(self) -> dict[str, Any]:
        """What the page would ask for."""
        [data] = [text for text in self.scripts if text.startswith("window.FLOTILLA = ")]
        return json.loads(data.removeprefix("window.FLOTILLA = ").removesuffix(";"))


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
    folder = run_of(name)
    return Page(((folder.parent if others else folder) / "report.html").read_text())


def test_the_file_of_a_run_tells_steps_curves_phases_answers_and_starts(runs, capsys):
    folder = run(runs, "a")
    with Record(folder) as record:
        record.add(4, [{"prompt": 1, "reward": 0.5, "start": "x", "whole": {"prompt": "2<i>3", "turns": [], "metrics": {}}}])
    told = page_of("a").told["answers"]
    assert capsys.readouterr().out == f"report: {folder / 'report.html'}\n"
    page = told["run?name=a"]
    assert (page["step"], page["steps"], page["cost_usd"], page["eval_reward"]) == (4, 4, 2.0, None)
    assert {phase["name"]: round(phase["share"], 3) for phase in page["phases"]} == {"generate": 0.75, "train": 0.125, "other": 0.125}
    assert [event["text"] for event in page["events"]] == ["started on h1", "started on h2; optim.lr: 1 to 0.001"]
    assert told["curves?name=a"]["curves"]["reward"] == {"step": [1, 2, 3, 4], "value": [0.1, 0.2, 0.3, 0.4]}
    assert page["keys"][:2] == ["reward", "eval_reward"] and "clipped" not in page["keys"], "zero throughout"
    assert told["episode?name=a&id=1"]["whole"]["prompt"] == "2<i>3"
    assert [row["start"] for row in told["episodes?name=a"]] == ["x"]


def test_a_file_needs_no_network_and_runs_no_script_but_its_own(runs):
    folder = run(runs, "a")
    with Record(folder) as record:
        record.add(1, [{"prompt": 1, "start": "</script><script>alert(1)</script>"}])
    page, text = page_of("a"), (runs / "a/report.html").read_text()
    assert not {"img", "iframe"} & set(page.tags)
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert "@import" not in text and "url(http" not in text
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts}
    assert set(re.findall(r"'sha256-([^']+)'", page.policy)) == digests
    assert "default-src 'none'" in page.policy and "</script><script>alert" not in text


def test_several_runs_are_told_apart_and_their_settings_compared(runs):
    run(runs, "a")
    run(runs, "b", lr=5e-4)
    told = page_of("a", "b").told
    assert told["names"] == ["a", "b"]
    assert told["answers"]["compare?names=a,b"]["settings"] == [{"name": "optim.lr", "values": ["0.001", "0.0005"]}]
    run(runs, "c")
    assert page_of("a", "c").told["answers"]["compare?names=a,c"]["settings"] == []


def test_a_run_that_went_back_says_when_and_why(runs):
    folder = run(runs, "wild")
    row = {"time": "2026-01-02", "step": 3, "why": "no numbers", "to": 2, "lr": 0.5, "factor": 0.25}
    (folder / "rollbacks.jsonl").write_text(json.dumps(row) + "\n")
    faults.note(folder, 2, "rollout-0 died")
    events = page_of("wild").told["answers"]["run?name=wild"]["events"]
    assert {"went back: why no numbers, to 2, lr 0.5, factor 0.25", "rollout-0 died"} <= {event["text"] for event in events}


def test_a_run_that_has_only_begun_has_a_page(runs):
    run(runs, "a", steps=0)
    (runs / "a/metrics.jsonl").unlink()
    page = page_of("a").told["answers"]["run?name=a"]
    assert (page["step"], page["keys"], page["phases"]) == (0, [], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["b"], "RUN=b: no run of that name in "),
        (["a", "--output", "{runs}"], "--output {runs} is a folder; name a file"),
        (["a", "--output", "{runs}/no/x.html"], "--output {runs}/no/x.html: the folder {runs}/no does not exist"),
        (["damaged"], "damaged/metrics.jsonl:1: not JSON"),
    ],
)
def test_mistakes_are_one_error(runs, arguments, message):
    run(runs, "a")
    (run(runs, "damaged") / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.raises(ConfigError) as error:
        report.main([word.format(runs=runs) for word in arguments])
    assert message.format(runs=runs) in str(error.value)
    assert not (runs / "a/report.html").exists()
