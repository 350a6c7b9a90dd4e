"""`python3 -I -B .../node/job_queue`, wherever the folder lies."""

import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).absolute().parent
if not __package__:  # run by its path
    sys.path[0:0] = [str(FOLDER.parent.parent)]
package = __package__ or f"{FOLDER.parent.name}.{FOLDER.name}"
import_module(f"{package}.service").main(sys.argv[1:])
