"""Programs that a model wrote, run within bounds: time, memory, size of files, an empty environment, no network where it can be cut.

Without an image that is no sandbox against a program that means harm: it runs as the same user and sees the same files. With one each runs
in a container (containers.py).
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.rewards import containers
from trainer.rewards.arguments import Count, Image, Positive

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
NETWORK = 0x40000000 | 0x10000000  # CLONE_NEWNET in a CLONE_NEWUSER, which needs no rights
OUTPUT_BYTES = 1 << 20  # of a program, and of each file that it writes

# Runs in the new process, before the program: limits, then no network.
BOUNDS = """
import resource, sys
seconds, memory, size, network, file = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if int(network):
    import ctypes
    ctypes.CDLL(None).unshare(int(network))
sys.argv = [file]
exec(compile(open(file).read(), file, "exec"), {"__name__": "__main__"})
"""


def code(text: str, row: dict[str, Any], seconds: Positive = 10.0, memory_mb: Count = 1024, image: Image | None = None) -> float:
    """The share of the tests in `row["answer"]` that the last Python block of the text passes; without a block the text is the program.

    The answer is text, Python statements that follow on the program and raise where it is wrong, or a list of tests: such texts, or
    {"input": ..., "output": ...} of the program's standard input and output, compared without white space at the ends of lines.
    Each test has `seconds` and `memory_mb` for itself; with `image`, which has Python and is on this node, also a container of Docker or
    Podman. Raises TypeError for an answer of another kind, RuntimeError where no container starts.
    """
    blocks = BLOCK.findall(text)
    program = blocks[-1] if blocks else text
    answer = row["answer"]
    tests = answer if isinstance(answer, list) else [answer]
    return sum(_passes(program, test, seconds, memory_mb, image) for test in tests) / max(len(tests), 1)


def _passes(program: str, test: Any, seconds: float, memory_mb: int, image: str | None) -> bool:
    if isinstance(test, str):
        end = secrets.token_hex(8)  # exit code 0 alone may be a program that left before its tests
        output = run(f"{program}\n\n{test}\nprint({end!r})\n", "", seconds, memory_mb, image)
        return output is not None and output.endswith(f"{end}\n")
    if not isinstance(test, dict) or not {"input", "output"} <= test.keys():
        raise TypeError(f"row['answer'] has the test {test!r}; a test is Python text, or an object with input and output")
    output = run(program, str(test["input"]), seconds, memory_mb, image)
    return output is not None and _lines(output) == _lines(str(test["output"]))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def run(program: str, given: str, seconds: float, memory_mb: int, image: str | None) -> str | None:
    """What the program prints; None where it fails or takes too long. All that it started has ended when this returns."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as given_file, tempfile.TemporaryFile() as output:
        file = Path(folder) / "answer.py"
        file.write_text(program, errors="replace")
        given_file.write(given.encode(errors="replace"))
        given_file.seek(0)
        limits = [str(int(seconds) + 1), str(memory_mb << 20), str(OUTPUT_BYTES)]
        if image is not None:
            return containers.run(image, file, ["-I", "-c", BOUNDS, *limits, "0"], given_file, seconds, memory_mb, OUTPUT_BYTES)
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", BOUNDS, *limits, str(NETWORK), str(file)],
            stdin=given_file,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            ended = process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read().decode(errors="replace") if ended else None
