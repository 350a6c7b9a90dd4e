"""Profilers of a traced step besides its spans: torch's, and Nsight Systems'. Runs in ranks, rollout engines and the driver."""

from __future__ import annotations

import gzip
import tempfile
import time
from pathlib import Path
from typing import Any

MARK = "flotilla clock"  # an event in torch's trace whose time is known by our clock too

_running: dict[str, Any] = {}  # torch's profiler has one user per process: its lane, and the profiler


def switch(on: bool, parts: set[str], lane: str) -> bytes | None:
    """Begin to profile, or end; what torch's profiler saw since it was begun, as Chrome trace in gzip. In the thread that is profiled."""
    import torch

    if "nsys" in parts and torch.cuda.is_available():
        (torch.cuda.profiler.start if on else torch.cuda.profiler.stop)()
    if "torch" not in parts:
        return None
    if on:
        if not _running:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            profiler = torch.profiler.profile(activities=kinds, acc_events=True)
            profiler.start()
            at = time.perf_counter()
            with torch.profiler.record_function(f"{MARK} {at!r}"):
                pass
            _running[lane] = profiler
        return None
    profiler = _running.pop(lane, None)
    if profiler is None:
        return None
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return gzip.compress(file.read_bytes(), 1)
