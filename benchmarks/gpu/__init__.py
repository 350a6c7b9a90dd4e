"""Measurements for a machine with a GPU; `python -m benchmarks` runs without one and leaves them out."""
