"""`python -m trainer.environments.sandboxes.tasks check TASKS`, as `flotilla env` runs it."""

import sys

from trainer.environments.sandboxes.tasks.check import main

sys.exit(main())
