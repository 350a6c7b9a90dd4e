"""Pictures of the documentation: what of a run they show, and that they load nothing from another host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.pictures import NODES, PICTURES, demo_lines, nodes, terminal

PAGES = (Path("README.md"), Path("docs/local.md"), Path("docs/plan.md"), Path("docs/training/placement.md"))
ROOT = Path(__file__).parents[3]


def test_a_recording_keeps_commands_and_some_steps():
    steps = [f"step {step:2}/60  reward  0.5" for step in range(61)]
    assert demo_lines("\n".join(["noise", "$ flotilla up local", "step 1/100", *steps])) == [
        "$ flotilla up local",
        *steps[:3],
        "...",
        steps[20],
        "...",
        steps[40],
        "...",
        steps[60],
    ]


def test_a_terminal_has_its_text_and_no_fonts_of_another_host():
    drawn = terminal(["$ flotilla plan", "model: 1"], "flotilla plan")
    assert "plan" in drawn and "@font-face" not in drawn and "url(http" not in drawn


@pytest.mark.parametrize("name", NODES)
def test_pictures_of_nodes_are_as_the_script_draws_them(name):
    assert (PICTURES / f"{name}.svg").read_text() == nodes(NODES[name]), "run python -m lab.pictures"


@pytest.mark.parametrize("name", ["demo", "plan", *NODES])
def test_every_picture_has_a_page_and_words_for_those_who_cannot_see_it(name):
    assert any(re.search(rf"!\[[^\]]{{20,}}\]\([^)]*pictures/{name}\.svg\)", (ROOT / page).read_text()) for page in PAGES)
