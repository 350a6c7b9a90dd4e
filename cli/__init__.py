"""`flotilla`: the same verbs with the same meaning in every place, over the commands of the other packages, which it prints."""

import os
import signal
import sys
from pathlib import Path


def _interrupted(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


# While the program is being read Ctrl-C would be a traceback out of the middle of an import; main.py takes over.
if Path(sys.argv[0]).name in ("flotilla", "-m"):
    signal.signal(signal.SIGINT, _interrupted)
