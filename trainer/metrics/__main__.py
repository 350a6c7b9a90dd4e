"""`python -m trainer.metrics FOLDER` draws the plot of a run."""

import sys

from trainer.metrics import main

sys.exit(main(sys.argv[1:]))
