"""Plays `aws` and `gcloud` on a laptop: looks a control node up by its name, and forwards a port to a server of the test."""

from __future__ import annotations

import sys
from pathlib import Path

# PLAYED_SERVER is the port of the server; each forward that is opened leaves its process's id in PLAYED_PIDS.
SCRIPT = r"""
import os, re, socket, sys, threading

words = " ".join(sys.argv[1:])
if "describe-instances" in words:
    print("i-0abc")
    sys.exit()
with open(os.environ["PLAYED_PIDS"], "a") as pids:
    pids.write(f"{os.getpid()}\n")
port = int(re.search(r"localPortNumber=(\d+)|-L (\d+):127", words).expand(r"\1\2"))


def copy(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


server = socket.create_server(("127.0.0.1", port))
while True:
    here, _ = server.accept()
    try:
        there = socket.create_connection(("127.0.0.1", int(os.environ["PLAYED_SERVER"])))
    except OSError:
        here.close()
        continue
    for ends in ((here, there), (there, here)):
        threading.Thread(target=copy, args=ends, daemon=True).start()
"""


def install(folder: Path) -> Path:
    """Makes both programs in `folder`, which is put on PATH."""
    folder.mkdir()
    for name in ("aws", "gcloud"):
        (folder / name).write_text(f"#!{sys.executable}\n{SCRIPT}")
        (folder / name).chmod(0o755)
    return folder


def living(pids: Path) -> list[int]:
    """The forwards that are still open."""

    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in map(int, pids.read_text().split()) if lives(pid)]
