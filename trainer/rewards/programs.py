"""Programs that a model wrote, run within bounds: time, memory, size of files, an empty environment, no network where it can be cut.

Without an image that is no sandbox against a program that means harm: it runs as the same user and sees the same files. With one each runs
in a container (containers.py).
"""

from __future__ import annotations

import json
import math
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
from trainer.rewards.code_tests import InputOutput, Statements, Test, parse

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
NETWORK = 0x40000000 | 0x10000000  # CLONE_NEWNET in a CLONE_NEWUSER, which needs no rights
END_SECONDS = 10.0  # for what a program started to be ended
AS_MODULE = "import sys, types; sys.modules['solution'] = types.ModuleType('solution'); sys.modules['solution'].__dict__.update(globals())"
OUTPUT_BYTES = 1 << 20  # of a program, and of each file that it writes

# Runs in the new process: limits and no network for a child, which becomes the program. All that it leaves behind, whatever session it is
# in, becomes this process's own once its parent is gone, and is ended.
BOUNDS = """
import os, resource, signal, sys, time
seconds, memory, size, network, parent, file = sys.argv[1:]
sys.argv = [file]
libc = None
if sys.platform == "linux":
    import ctypes
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if int(parent) and os.getppid() != int(parent):  # it was gone before that
        sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
program = os.fork()
if program == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if libc and int(network):
        libc.unshare(int(network))
    exec(compile(open(file).read(), file, "exec"), {"__name__": "__main__"})
    sys.exit()
def children():
    found = []
    for name in os.listdir("/proc") if libc else ():
        try:
            if name.isdigit() and int(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
        except OSError:
            pass
    return found
code = 1
try:
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
finally:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until = time.monotonic() + 5
    while (left := children()) and time.monotonic() < until:
        for each in left:
            os.kill(each, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
    os._exit(code & 255)
"""


def code(text: str, row: dict[str, Any], seconds: Positive = 10.0, memory_mb: Count = 1024, image: Image | None = None) -> float:
    """The share of the tests in `row["answer"]` that the last Python block of the text passes; without a block the text is the program.

    The answer is text, Python statements that follow on the program and raise where it is wrong, or a list of tests: such texts, or
    {"input": ..., "output": ...} of the program's standard input and output, compared without white space at the ends of lines, or of a
    call of the function fn_name; or all of that as JSON text (code_tests.py). Each test has `seconds` and `memory_mb` for itself; with
    `image`, which has Python and is on this node, also a container of Docker or Podman. Raises ValueError for an answer without tests or
    of another kind, RuntimeError where no container starts.
    """
    blocks = BLOCK.findall(text)
    program = blocks[-1] if blocks else text
    tests = parse(row["answer"])
    return sum(_passes(program, test, seconds, memory_mb, image) for test in tests) / len(tests)


def _passes(program: str, test: Test, seconds: float, memory_mb: int, image: str | None) -> bool:
    if isinstance(test, InputOutput):
        output = run(program, test.given, seconds, memory_mb, image)
        return output is not None and _lines(output) == _lines(test.printed)
    end = secrets.token_hex(8)  # exit code 0 alone may be a program that left before its tests
    if isinstance(test, Statements):
        output = run(f"{program}\n{AS_MODULE}\n{test.text}\nprint({end!r})\n", "", seconds, memory_mb, image)
        return output is not None and output.endswith(f"{end}\n")
    call = f"(Solution().{test.name} if 'Solution' in globals() else {test.name})(*json.loads({json.dumps(test.arguments)!r}))"
    output = run(f"{program}\nimport json\nprint({end!r} + json.dumps({call}))\n", "", seconds, memory_mb, image)
    try:
        returned = json.loads((output or "").rpartition(end)[2])
    except ValueError:
        return False
    return any(_equal(returned, wanted) for wanted in (test.returned, *_alone(test.returned)))


def _alone(wanted: Any) -> list[Any]:
    """APPS has what a function returns in a list of one."""
    return wanted if isinstance(wanted, list) and len(wanted) == 1 else []


def _equal(returned: Any, wanted: Any) -> bool:
    """As JSON has them: a tuple is a list. Floats within a millionth."""
    if isinstance(returned, list) and isinstance(wanted, list | tuple):
        return len(returned) == len(wanted) and all(map(_equal, returned, wanted))
    if isinstance(returned, dict) and isinstance(wanted, dict):
        return returned.keys() == {str(key) for key in wanted} and all(_equal(returned[str(key)], wanted[key]) for key in wanted)
    if isinstance(returned, float) or isinstance(wanted, float):
        return isinstance(returned, int | float) and isinstance(wanted, int | float) and math.isclose(returned, wanted, rel_tol=1e-6)
    return type(returned) is type(wanted) and returned == wanted


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
            return containers.run(image, file, ["-I", "-c", BOUNDS, *limits, "0", "0"], given_file, seconds, memory_mb, OUTPUT_BYTES)
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", BOUNDS, *limits, str(NETWORK), str(os.getpid()), str(file)],
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
            process.terminate()  # it ends all that the program started
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read().decode(errors="replace") if ended else None
