"""Read where a Python starts below tests: what tests/warm/server.py has imported the modules of is forked there.

This process waits for that one, passes signals on to it and ends as it does; that one is killed where this one is.
"""

import contextlib
import os
import sys

SOCKET = os.environ.get("FLOTILLA_TEST_WARM")
FORKED = ("trainer.", "torch.distributed.run", "deepspeed.")
LIGHT = ("trainer.supervise",)  # starts at once by itself, whether or not the server is there yet
WORDS = [word for word in sys.orig_argv[1:4] if word != "-u"]


def is_forked() -> bool:
    if len(WORDS) > 1 and WORDS[0] == "-m":
        return WORDS[1].startswith(FORKED) and WORDS[1] not in LIGHT
    if len(WORDS) > 1 and WORDS[0] == "-c":  # a test's own few lines; what says which modules there are starts by itself
        return "import torch" in WORDS[1].replace(", torch", "import torch") and "sys.modules" not in WORDS[1]
    return WORDS != [] and WORDS[0].endswith("/ray/_private/workers/setup_worker.py")


def be_forked(path: str) -> None:
    """Returns where that process has other variables than this one should have."""
    import json
    import signal
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        words = sys.orig_argv[2 if sys.orig_argv[1] == "-u" else 1 :]
        asked = {"argv": words, "env": dict(os.environ), "cwd": os.getcwd()}  # noqa: PTH109 - starts quickly
        wanted = json.dumps(asked).encode()
        socket.send_fds(server, [len(wanted).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(wanted)
        lines = server.makefile()
        if (line := lines.readline()) in ("cold\n", ""):  # it cannot, or has ended
            return
        child = int(line)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: os.kill(child, number))
        code = int(lines.readline() or -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if SOCKET and is_forked():
    with contextlib.suppress(OSError, ValueError):  # its test run has ended
        be_forked(SOCKET)
