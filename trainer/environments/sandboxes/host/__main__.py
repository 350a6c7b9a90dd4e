"""`python3 host`, wherever the folder lies: a warden; `python3 host pool`: a pool; `python3 host summary`: of pools."""

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
name = __package__ or "host"
if sys.argv[1:2] in (["pool"], ["summary"]):
    sys.exit(import_module(f"{name}.{sys.argv[1]}").main(sys.argv[2:]))
sys.exit(import_module(f"{name}.warden").main())
