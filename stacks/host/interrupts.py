"""How Ctrl-C ends a command."""

import os
import signal


def end_on_interrupt() -> None:
    """From now on Ctrl-C ends this process at once, with one line and exit code 130.

    For commands that leave nothing half done, as files are written in one step each. Pulumi's threads and event loop would print
    that they were stopped.
    """

    def end(*_: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, end)
