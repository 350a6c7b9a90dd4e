"""Programs of a model: which tests they pass, and the bounds that they run in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.rewards import resolve
from trainer.rewards.programs import BOUNDS, code

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
RUNS = "assert True"  # a test that every program passes which ends
ECHO = "```py\nimport sys\nfor line in sys.stdin:\n    print(int(line) * 2, end='  \\n')\n```"


@pytest.mark.parametrize(
    ("text", "answer", "worth"),
    [
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD, "assert add(1, 2) == 4", 0.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(2, 2) == 5", "assert add(0, 0) == 0", "add()"], 0.5),
        ("```python\nx = 1\n```\nno, rather\n```python\nx = 2\n```", "assert x == 2", 1.0),
        ("x = 3", "assert x == 3", 1.0),
        ("```python\nx = 4", "assert x == 4", 1.0),
        ("```python\nthis is no Python\n```", RUNS, 0.0),
        (ECHO, [{"input": "1\n2\n", "output": "2\n4"}, {"input": "3", "output": "7"}], 0.5),
        ("```\nimport sys; sys.exit(3)\n```", RUNS, 0.0),
        ("x = '\ud800'", "assert len(x) == 1", 1.0),
        ("import sys\nsys.exit(0)", "assert False", 0.0),
        ("import os\nos._exit(0)", "assert False", 0.0),
    ],
)
def test_the_share_of_tests_that_pass(text, answer, worth):
    assert code(text, {"answer": answer}) == worth


def test_a_program_that_never_ends_is_ended_with_all_that_it_started(tmp_path):
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    file = tmp_path / "pid"
    text = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}, {str(file)!r}])\ntime.sleep(600)"
    begun = time.monotonic()
    assert code(text, {"answer": RUNS}, seconds=5) == 0.0
    assert time.monotonic() - begun < 60
    pid = int(file.read_text())
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "its child lives on"
        time.sleep(0.05)


def test_memory_files_and_output_are_bounded(tmp_path):
    assert code("x = bytearray(800 << 20)", {"answer": RUNS}, memory_mb=400) == 0.0
    assert code("x = bytearray(100 << 20)", {"answer": RUNS}, memory_mb=400) == 1.0
    large = tmp_path / "large"
    assert code(f"open({str(large)!r}, 'wb').write(bytes(8 << 20))", {"answer": RUNS}) == 0.0
    assert large.stat().st_size <= 1 << 20


def test_it_sees_neither_the_environment_nor_the_working_directory(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    program = "import os, json; print(json.dumps([sorted(os.environ), os.listdir('.')]))"
    expected = '[["HOME", "LANG", "LC_CTYPE", "PATH"], ["answer.py"]]'
    shorter = expected.replace('"LC_CTYPE", ', "")
    found = [code(program, {"answer": [{"input": "", "output": output}]}) for output in (expected, shorter)]
    assert sum(found) == 1.0


def test_it_reaches_no_network_where_the_kernel_lets_that_be_cut():
    cut = "import ctypes, os; os._exit(ctypes.CDLL(None).unshare(0x50000000) != 0)"
    if os.spawnlp(os.P_WAIT, "python3", "python3", "-c", cut) != 0:
        pytest.skip("this kernel gives no network namespaces to users")
    program = "import socket; print(len(socket.if_nameindex()), socket.socket().connect_ex(('127.0.0.1', 9)))"
    assert code(program, {"answer": [{"input": "", "output": "1 101"}]}) == 1.0  # loopback alone, and that is down: ENETUNREACH


@pytest.mark.skipif(sys.platform != "linux", reason="no child of another learns there that it is gone")
def test_it_leaves_where_its_reward_process_was_gone_before_it_looked(tmp_path: Path):
    (tmp_path / "answer.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, "-I", "-c", BOUNDS, "9", str(1 << 30), str(1 << 20), "0", str(gone.pid), str(tmp_path / "answer.py")]
    assert subprocess.run(command, cwd=tmp_path, timeout=300, check=False).returncode == 1
    assert not (tmp_path / "ran").exists()


def test_it_is_a_reward_by_name():
    assert resolve("code", {"seconds": 5}).name == "code"


DOCKER = """\
#!/bin/sh
echo "$@" >> {folder}/calls
case "$1" in kill) exit;; esac
case "$*" in *missing:1*) echo "Error: missing:1: image not known" >&2; exit 125;; esac
for word; do case "$word" in --cidfile=*) echo 1 > "${{word#--cidfile=}}";; --volume=*) file=${{word#--volume=}};; esac; done
while [ "$1" != python:1 ]; do shift; done
shift
exec {python} "$1" "$2" "$3" "$4" "$5" "$6" "$7" "$8" "${{file%%:*}}"
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that runs the program as it is. The file with its calls."""
    command = tmp_path / "bin" / "docker"
    command.parent.mkdir()
    command.write_text(DOCKER.format(folder=tmp_path, python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")
    return tmp_path / "calls"


def test_in_a_container_it_has_no_network_no_rights_and_nothing_to_write_to(docker):
    assert resolve("code", {"image": "python:1"}).name == "code"
    assert code(ADD, {"answer": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}, memory_mb=300, image="python:1") == 0.5
    assert code(ECHO, {"answer": [{"input": "1\n2\n", "output": "2\n4"}]}, image="python:1") == 1.0
    first = docker.read_text().splitlines()[0].split()
    for option in ("--network=none", "--read-only", "--cap-drop=ALL", "--user=65534:65534", "--memory=300m", "--pids-limit=64"):
        assert option in first
    assert not any("=/" in word and not word.startswith(("--cidfile", "--volume", "--workdir", "--tmpfs", "--env=HOME")) for word in first)


def test_a_container_that_takes_too_long_or_prints_too_much_is_ended(docker, monkeypatch):
    monkeypatch.setattr("trainer.rewards.containers.START_SECONDS", 2)
    for program in ("import time; time.sleep(600)", "while True: print('x' * 1000)"):
        assert code(program, {"answer": RUNS}, seconds=1, image="python:1") == 0.0
    assert re.findall("^(run|kill) ", docker.read_text(), re.MULTILINE) == ["run", "kill"] * 2


def test_an_image_or_engine_that_is_not_there_is_an_error_not_a_wrong_answer(docker, monkeypatch):
    with pytest.raises(RuntimeError, match="no container of missing:1: Error: missing:1: image not known"):
        code("x = 1", {"answer": RUNS}, image="missing:1")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"^reward\.args\.image='python:1': .* neither docker nor podman on PATH; install one, or leave"):
        resolve("code", {"image": "python:1"})
