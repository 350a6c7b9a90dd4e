import sys

from sweeps.command import main
from trainer.cli import exits_cleanly

if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(sys.argv[1:]))
