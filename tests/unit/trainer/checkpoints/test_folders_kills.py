"""Checkpoints whose writer is killed at a random moment."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from support.checkpoints import names, write

from trainer.checkpoints.folders import Checkpoints

ROOT = Path(__file__).parents[4]

# One fork per line of input, so that a round costs no start of Python. The child writes until it is killed. Lines leave by
# one write(2) each: print() makes several where PYTHONUNBUFFERED is set, and a kill between them would tear a line.
WRITER = """
    import os, random, sys
    from pathlib import Path
    from trainer.checkpoints.folders import Checkpoints

    def say(*words):
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())

    def write_on():
        checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
        last = checkpoints.latest()
        step = last.step if last else 0
        say("pid", os.getpid())
        while True:
            step += 1
            with checkpoints.writing(step, {"step": step}) as folder:
                for rank in range(4):
                    (folder / f"rank_{rank}").mkdir()
                    (folder / f"rank_{rank}" / "shard").write_bytes(step.to_bytes(8, "big") * random.randint(1, 20_000))
            say("wrote", step)

    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            write_on()
        os.waitpid(pid, 0)
        say("dead", 0)
"""


def test_killed_at_any_moment_the_newest_is_whole(tmp_path, capsys):
    """Each round kills the writer after a random time, looks, and lets the next writer go on from what is there.

    In every second round the time begins after a whole checkpoint, so that the writers get on however slow the disk is.
    """
    draw = random.Random(0)
    checkpoints = Checkpoints(tmp_path, keep=1)
    last, kills_while_writing = 0, 0
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin and parent.stdout
        for kill in range(60):
            print(file=parent.stdin, flush=True)
            word, pid = parent.stdout.readline().split()
            assert word == "pid"
            if kill % 2:
                assert parent.stdout.readline() == f"wrote {last + 1}\n"
                last += 1
            time.sleep(draw.uniform(0, 0.06))  # the random moment
            os.kill(int(pid), signal.SIGKILL)
            while (line := parent.stdout.readline()) != "dead 0\n":
                match = re.fullmatch(r"wrote (\d+)\n", line)
                assert match, f"the writers ended with {line!r}"
                last = int(match[1])
            kills_while_writing += any(tmp_path.glob("tmp_*"))
            found = checkpoints.latest()
            assert (found.step if found else 0) >= last, "a checkpoint that was complete is gone"
            if found:
                last = found.step
                shards = [path.read_bytes() for path in sorted(found.folder.glob("rank_*/shard"))]
                assert shards == [last.to_bytes(8, "big") * (len(shard) // 8) for shard in shards] and len(shards) == 4
                assert found.state == {"step": last}
        parent.stdin.close()
    assert capsys.readouterr().err == "", "nothing that looks like a checkpoint is ever broken"
    assert last >= 30 and kills_while_writing > 20
    write(checkpoints, last + 1)
    assert names(tmp_path) == [f"step_{last + 1}"]
