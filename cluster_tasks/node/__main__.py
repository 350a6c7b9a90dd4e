"""`python3 node`, wherever the folder lies, and `python -m cluster_tasks.node`."""

import sys
from importlib import import_module
from pathlib import Path

if not __package__:  # run by its path: the folder itself is where Python looks for modules, not the one that it lies in
    sys.path[0] = str(Path(__file__).absolute().parent.parent)
sys.exit(import_module(f"{__package__ or 'node'}.agent").main())
