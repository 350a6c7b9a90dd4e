"""Post-training of language models on a Ray cluster, or on this machine. See docs/training/README.md."""

import sys

from trainer.errors import said

if sys.argv[:1] == ["-m"]:  # `python -m trainer.NAME` is looking for that module; its imports take seconds
    sys.excepthook = said
