"""A task folder of Harbor that is good, for tests that change its files."""

from __future__ import annotations

from pathlib import Path

TOML = '[verifier]\ntimeout_sec = 20.0\n[agent]\ntimeout_sec = 20.0\n[environment]\ncpus = 1\nmemory = "256M"\n'
TESTS = 'mkdir -p /logs/verifier\nif [ "$(cat /app/sum.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
DOCKERFILE = "FROM debian\nWORKDIR /app\nENV LEFT=20 \\\n    MORE=1\nCOPY b.txt .\nRUN test $LEFT = 20 && echo made > made\n"
SOLUTION = "cd /app\nsum=$((20 + $(cat b.txt)))\ntrue\necho $sum > sum.txt\n"


def harbor(folder: Path, **changes: str | None) -> Path:
    """A task that is good, with files changed; None leaves one out."""
    files: dict[str, str | None] = {
        "task.toml": TOML,
        "instruction.md": "Write the sum of 20 and b.txt to sum.txt.",
        "environment/Dockerfile": DOCKERFILE,
        "environment/b.txt": "22\n",
        "tests/test.sh": TESTS,
        "solution/solve.sh": SOLUTION,
    }
    for name, text in {**files, **changes}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder
