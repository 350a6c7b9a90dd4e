"""Tasks that wait for a debugger: which they are by Ray's lists, how to reach them, and what a job needs to wait."""

from __future__ import annotations

from pathlib import Path

import yaml

from cluster_tasks.debug.post_mortem import Paused, found, runtime_env, shown

WORKERS = [
    {"worker_id": "b", "ip": "10.0.0.2", "pid": 22, "debugger_port": 4002, "num_paused_threads": 1},
    {"worker_id": "a", "ip": "10.0.0.1", "pid": 11, "debugger_port": 4001, "num_paused_threads": 2},
    {"worker_id": "c", "ip": "10.0.0.1", "pid": 12, "debugger_port": 4003, "num_paused_threads": 0},  # a client has come and gone
    {"worker_id": "d", "ip": "10.0.0.1", "pid": 13, "debugger_port": None, "num_paused_threads": None},
]


def test_workers_that_wait_are_listed_by_the_task_that_they_run() -> None:
    assert found(WORKERS, {"a": "reward", "d": "other"}) == [
        Paused("reward", "10.0.0.1", 11, 4001),
        Paused("worker b", "10.0.0.2", 22, 4002),
    ]


def test_a_remote_port_is_forwarded_and_one_here_is_not() -> None:
    held = [Paused("reward", "10.0.0.2", 22, 4002)]
    assert shown(held, "ray")[1:] == [
        "  forward  ssh -N -L 127.0.0.1:4002:10.0.0.2:4002 ray",
        '  attach   in VS Code by a launch configuration of type debugpy: "connect": {"host": "127.0.0.1", "port": 4002}',
    ]
    [_, attach] = shown(held, None)
    assert '"host": "10.0.0.2"' in attach


def test_nothing_paused_is_one_line_that_says_what_it_takes() -> None:
    [line] = shown([], None)
    assert line.startswith("no task is paused; ")
    assert "--post-mortem" in line
    assert "debugpy>=1.8" in line


def test_the_jobs_environment_is_kept_and_the_stacks_file_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "runtime-env.yaml"
    file.write_text("env_vars: {A: '1'}\nexcludes: [x]\n")
    before = file.read_text()
    made = yaml.safe_load(runtime_env(file).read_text())
    assert made == {"env_vars": {"A": "1", "RAY_DEBUG_POST_MORTEM": "1"}, "excludes": ["x"]}
    assert file.read_text() == before
