"""The node agent without Ray: which torchrun it becomes."""

from __future__ import annotations

import pytest

from cluster_tasks.node.settings import Settings
from cluster_tasks.node.torchrun import run_torchrun


class Became(Exception):
    """What the process would have become: its command and environment."""


def test_each_node_becomes_the_torchrun_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def become(program: str, command: list[str], env: dict[str, str]) -> None:
        raise Became(program, command, env)

    monkeypatch.setattr("os.execvpe", become)
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    settings = Settings(
        rank=1, addresses=["127.0.0.2", "127.0.0.1"], gpus=8, port=6379, torchrun="-m trainer.train_sft 'run name'", stop_timeout=90
    )
    with pytest.raises(Became) as became:
        run_torchrun(settings)
    program, command, env = became.value.args
    assert program == "torchrun"
    assert command == [
        "torchrun",
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=8",
        "--master-addr=127.0.0.2",
        "--master-port=6379",
        "-m",
        "trainer.train_sft",
        "run name",
    ]
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "90"  # as long as the jobs may save
    assert "SIGUSR1" in env["TORCHELASTIC_SIGNALS_TO_HANDLE"]
