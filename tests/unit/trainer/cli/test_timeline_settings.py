"""log.trace: which steps are traced, and mistakes in a line each, before anything starts."""

from __future__ import annotations

import pytest
from support.configs import BASE, errors, ok, recipe, unplaced

from trainer.configs.sft import SftConfig
from trainer.configs.timeline import TraceConfig

FORM = "steps such as 20, 20..22 or 3,20..22, or off"


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("20", [20]),
        ("20..22", [20, 21, 22]),
        ("3,20..22", [3, 20, 21, 22]),
        ("3, 20..21", [3, 20, 21]),
        ("off", []),
        ("none", []),
        ("5..5", [5]),
    ],
)
def test_steps_are_traced_as_they_are_written(text, steps):
    trace = TraceConfig(steps=text)
    assert [step for step in range(1, 40) if trace.traced(step)] == steps


def test_the_third_step_is_traced_unless_something_else_is_said():
    assert ok().log.trace == TraceConfig(steps="3") and ok().log.trace.parts == ["spans"]
    assert ok("log.trace.steps=20").log.trace.traced(20) and ok("log.trace={steps: off}").log.trace.ranges() == []
    assert ok("trainer.steps=1").log.trace.steps == "3", "a short run is no mistake of a person who said nothing"


def test_a_file_may_say_off_without_quotes(tmp_path):
    file = recipe(tmp_path, "log: {trace: {steps: off, with: [spans, torch]}}\n")
    found = ok("--config", file).log.trace
    assert (found.steps, found.parts) == ("off", ["spans", "torch"])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("log.trace.steps=22..20", f"log.trace.steps: '22..20' is not {FORM}"),
        ("log.trace.steps=20-22", f"log.trace.steps: '20-22' is not {FORM}"),
        ("log.trace.steps=0", f"log.trace.steps: '0' is not {FORM}"),
        ("log.trace.steps=-1", f"log.trace.steps: '-1' is not {FORM}"),
        ("log.trace.steps=3..", f"log.trace.steps: '3..' is not {FORM}"),
        ("log.trace.steps=3,,4", f"log.trace.steps: '3,,4' is not {FORM}"),
        ("log.trace.steps=all", f"log.trace.steps: 'all' is not {FORM}"),
        ("log.trace.steps=1.5", f"log.trace.steps: '1.5' is not {FORM}"),
        ("log.trace.steps=3,200", "log.trace.steps=3,200, trainer.steps=100: the run ends before that step"),
        ("log.trace.with=[cuda]", "log.trace.with[0]: 'cuda' is not one of spans, torch, nsys"),
        ("log.trace.with=torch", "log.trace.with: 'torch' is not a list of one of spans, torch, nsys"),
        ("log.trace.stpes=3", "log.trace.stpes: unknown key; did you mean log.trace.steps?"),
        ("log.trace=on", "log.trace: True is not a map of settings"),
    ],
)
def test_a_mistake_is_one_line(setting, said):
    [line] = errors(*BASE, setting)
    assert unplaced(line) == said and line.startswith("command line")


def test_a_mistake_in_a_file_has_its_line(tmp_path):
    file = recipe(tmp_path, "log:\n  trace:\n    steps: 22..20\n    with: [spans, perf]\n")
    assert errors(*BASE, "--config", file) == [
        f"{file}:3: log.trace.steps: '22..20' is not {FORM}",
        f"{file}:4: log.trace.with[1]: 'perf' is not one of spans, torch, nsys",
    ]


@pytest.mark.parametrize("places", [("placement.processes=one", "placement.ranks=1"), ("placement.gpus_per_rank=0",)])
def test_nsys_needs_processes_of_ray_with_gpus(places):
    [line] = errors(*BASE, *places, "log.trace.with=[nsys]")
    assert "Ray starts the processes of GPUs under nsys; this run has none" in line and "log.trace.with=" in line


def test_trainers_without_ray_have_no_nsys():
    [line] = errors(*BASE, "log.trace.with=[nsys]", model=SftConfig)
    assert "Ray starts the processes of GPUs under nsys; this run has none" in line
