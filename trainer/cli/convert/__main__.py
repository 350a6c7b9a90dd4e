"""python -m trainer.cli.convert, which `flotilla convert` runs."""

import sys

from trainer.cli import exits_cleanly
from trainer.cli.convert.command import main

if __name__ == "__main__":
    with exits_cleanly():
        main(sys.argv[1:])
