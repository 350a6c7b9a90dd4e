"""Two commands at once, as two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stacks.errors import UserError
from stacks.host.locks import one_at_a_time

HOLD = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


def test_a_second_command_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another is at work"), one_at_a_time(file, UserError("another is at work")):
            raise AssertionError("both got the lock")
        first.kill()
        first.wait(10)
    with one_at_a_time(file, UserError("another is at work")):
        pass
