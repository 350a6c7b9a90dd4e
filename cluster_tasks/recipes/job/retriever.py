"""`python retriever.py PORT SERVER FLAGS...`: Search-R1's server on this port of the node's address.

The server itself has neither as a flag: port 8000 on every address stands in its code.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any


def main() -> None:
    import uvicorn  # pyright: ignore[reportMissingImports]

    port, server, *flags = sys.argv[1:]
    serve: Any = uvicorn.run
    uvicorn.run = lambda app, **_: serve(app, host=os.environ["FLOTILLA_NODE_IP"], port=int(port))
    sys.argv = [server, *flags]
    runpy.run_path(server, run_name="__main__")


if __name__ == "__main__":
    main()
