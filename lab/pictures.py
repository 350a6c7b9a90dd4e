"""Pictures of the documentation that are made from real output and from settings.

python -m lab.pictures                 runs `make demo` and `flotilla plan`; writes docs/pictures/{demo,plan,nodes-1x8,nodes-2x8}.svg
python -m lab.pictures --demo FILE     takes the demo's output from a file: make demo > FILE 2>&1
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
WIDTH = 100
PLAN = ("plan", "trainer/recipes/grpo-8b.yaml", "onprem")
KEPT = re.compile(  # of the demo: its commands, the cluster, some steps, the result
    r"\$ (?!python|flotilla preview)|(?:ready|dashboard  |reward  |checkpoint  |plot  |peak memory)|step +(?:0|1|2|20|40|60)/60|prompt "
)
COLOURS = {"policy": "#4c78a8", "critic": "#c8690a", "reference": "#3a8580", "engine": "#3f7f3c"}
RANK = ("policy", "critic", "reference")  # of one rank: they share its GPU, as trainer/cluster/placement.py lays them out
# Roles on each GPU, node by node.
NODES = {
    "nodes-1x8": [[("policy", "reference")] * 4 + [("engine",)] * 4],
    "nodes-2x8": [[RANK] * 8, [("engine",)] * 8],
}
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # rich's are fetched from another host


def demo_lines(output: str) -> list[str]:
    """Commands, numbers and result of a demo's output; `...` replaces what is left out between two steps."""
    kept: list[str] = []
    for line in output.splitlines():
        if KEPT.match(line):
            kept.append(line.replace(f"{ROOT}/", "").rstrip())
        elif line.startswith("step ") and kept and kept[-1].startswith("step "):
            kept.append("...")
    return kept


def terminal(lines: Iterable[str], title: str) -> str:
    """An SVG of a terminal that shows them."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_terminal=True)
    for line in lines:
        text = Text(line)
        text.highlight_regex(r"^\$ .*", "bold green")
        text.highlight_regex(r"^[a-z0-9, ]+:|^(?:ready|dashboard|reward|checkpoint|plot|peak memory)\b", "cyan")
        text.highlight_regex(r"(?:eval )?reward +[\d.]+", "bold")
        console.print(text)
    return FONT.sub("", console.export_svg(title=title, unique_id=title.replace(" ", "-")))


def nodes(layout: list[list[tuple[str, ...]]]) -> str:
    """An SVG of nodes as rows of GPUs, each with its roles."""
    height = 12 + 108 * len(layout)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="760" height="{height}" fill="#ffffff"/>',
    ]
    for row, gpus in enumerate(layout):
        top = 10 + 108 * row
        parts.append(f'<rect x="10" y="{top}" width="740" height="98" rx="6" fill="#f4f4f4" stroke="#888"/>')
        parts.append(f'<text x="22" y="{top + 54}" fill="#222">node {row}</text>')
        for gpu, roles in enumerate(gpus):
            left, each = 82 + 82 * gpu, 66 / len(roles)
            parts.append(f'<text x="{left + 37}" y="{top + 18}" text-anchor="middle" fill="#222">GPU {gpu}</text>')
            for number, role in enumerate(roles):
                y = top + 25 + each * number
                parts.append(f'<rect x="{left}" y="{y:g}" width="74" height="{each - 2:g}" rx="3" fill="{COLOURS[role]}"/>')
                parts.append(f'<text x="{left + 37}" y="{y + each / 2 + 3:g}" text-anchor="middle" fill="#fff">{role}</text>')
    return "\n".join([*parts, "</svg>", ""])


def output(command: list[str]) -> str:
    """What a command prints. Raises CalledProcessError."""
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, timeout=1800).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the documentation's pictures.")
    parser.add_argument("--demo", type=Path, metavar="FILE", help="output of make demo (default: run it)")
    given = parser.parse_args()
    shown = given.demo.read_text() if given.demo else output([sys.executable, "-m", "lab.demo"])
    (PICTURES / "demo.svg").write_text(terminal(["$ make demo", *demo_lines(shown)], "make demo"))
    plan = output([sys.executable, "-m", "cli", *PLAN]).splitlines()
    (PICTURES / "plan.svg").write_text(terminal([f"$ flotilla {' '.join(PLAN)}", *plan], "flotilla plan"))
    for name, layout in NODES.items():
        (PICTURES / f"{name}.svg").write_text(nodes(layout))


if __name__ == "__main__":
    main()
