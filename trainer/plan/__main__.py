"""`python -m trainer.plan`."""

import sys

from trainer.plan import command

sys.exit(command.run(sys.argv[1:]))
