"""Runs a trainer's command again when its driver died: killed, out of memory, or with an error from which the same command resumes.

    python -m trainer.supervise --retries 3 -- python -m trainer.train_ppo --config run.yaml

Not again after exit code 0, a mistake in settings (2) or a stop (143; SIGTERM, SIGUSR1 and Ctrl-C are passed on), and not where two
deaths in a row left the run at the same step. It works wherever the command does: as a Ray job under dstack and Slurm, and alone.
Exit code: that of the last try, 128 + N where signal N ended it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from itertools import count
from pathlib import Path

from trainer import metrics
from trainer.errors import STOPPED, ConfigError
from trainer.runs import FOLDER_FILE, faults

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds before the next try; each is twice the one before
FINAL = (0, 2, STOPPED, 128 + signal.SIGINT)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Supervisor:
    def __init__(self, command: list[str], retries: int, pause: float = FIRST_PAUSE) -> None:
        self.command, self.retries, self.pause = command, retries, pause
        self.driver: subprocess.Popen[bytes] | None = None
        self.stopped = threading.Event()

    def ask(self, number: int, frame: object) -> None:
        """Handler of signals: asked to stop, the driver saves, and there is no further try."""
        self.stopped.set()
        if self.driver:
            self.driver.send_signal(number)

    def run(self) -> int:
        """The exit code of the last try."""
        before = None
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "folder"
            for tries in count():
                code = self._once(told)
                if code in FINAL or self.stopped.is_set():
                    return code
                step = _step(told)
                why = f"{self.retries} retries are used up" if tries >= self.retries else ""
                why = why or ("as before, so it is not started again" if step is not None and step == before else "")
                pause, before = min(self.pause * 2**tries, LONGEST_PAUSE), step
                next_try = f"started again in {pause:g} s ({tries + 1} of {self.retries}, --retries)"
                what = f"the driver {_ended(code)}{_at(step)}; {why or next_try}"
                print(f"supervise: {what}", file=sys.stderr, flush=True)
                if told.exists():
                    faults.note(Path(told.read_text()), step, what)
                if why:
                    return code
                if self.stopped.wait(pause):
                    return STOPPED
        raise AssertionError("count() has no end")

    def _once(self, told: Path) -> int:
        # A group of its own: a terminal's Ctrl-C comes here alone, and is passed on once; a second one would interrupt the driver.
        self.driver = subprocess.Popen(self.command, env=os.environ | {FOLDER_FILE: str(told)}, process_group=0)
        if self.stopped.is_set():
            self.driver.terminate()
        code = self.driver.wait()
        return code if code >= 0 else 128 - code


def _step(told: Path) -> int | None:
    """The last step of the run whose folder the driver has told; None where there is no such run."""
    try:
        return metrics.read(Path(told.read_text()))[-1]["step"]
    except (OSError, ConfigError, IndexError):
        return None


def _ended(code: int) -> str:
    by = {128 + number: number.name for number in signal.Signals}.get(code)  # 255 is a shell's or ssh's failure, and no signal
    return f"was ended by {by}" if by else f"ended with exit code {code}"


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.supervise", usage="%(prog)s [--retries N] -- COMMAND", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--retries", type=int, default=3, help="how often the command is started again (3)")
    cut = argv.index("--") if "--" in argv else len(argv)
    options, command = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    if not command:
        parser.error("COMMAND is missing; write it after --, e.g. -- python -m trainer.train_ppo --config run.yaml")
    if options.retries < 0:
        parser.error(f"--retries {options.retries}: must be 0 or more")
    supervisor = Supervisor(command, options.retries)
    for number in PASSED_ON:
        signal.signal(number, supervisor.ask)
    try:
        return supervisor.run()
    except OSError as error:
        print(f"error: {shlex.join(command)}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
