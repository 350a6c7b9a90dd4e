"""`python3 host`, wherever the folder lies."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if not __package__:  # run by its path: a package of this folder alone, as what lies beside it must not be found by names of libraries
    here = Path(__file__).absolute().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != here]
    spec = spec_from_file_location("host", here / "__init__.py", submodule_search_locations=[str(here)])
    assert spec and spec.loader
    sys.modules["host"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["host"])
sys.exit(import_module(f"{__package__ or 'host'}.warden").main())
