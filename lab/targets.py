"""Waits until Prometheus on this machine's loopback finds each of its targets up, Ray's on so many nodes; prints their addresses.

python lab/targets.py NODES [PORT]
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request

SECONDS = 90


def look(port: int) -> tuple[set[str], list[str]]:
    """Addresses of Ray's nodes, and what is not up."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/targets", timeout=5) as answer:
        found = json.load(answer)["data"]["activeTargets"]
    nodes = {each["discoveredLabels"]["__address__"].rpartition(":")[0] for each in found if each["labels"]["job"] == "ray"}
    return nodes, [f"{each['scrapeUrl']} {each['health']} {each['lastError']}" for each in found if each["health"] != "up"]


def main(count: int, port: int = 9090) -> int:
    missing, deadline = "", time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            nodes, down = look(port)
            if len(nodes) == count and not down:
                print(*sorted(nodes))
                return 0
            missing = f"nodes: {nodes}; not up: {down}"
        except OSError as error:
            missing = str(error)
        time.sleep(0.5)
    print(f"not within {SECONDS} s: {missing}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
