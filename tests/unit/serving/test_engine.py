"""vLLM's command, whether it fits, and what its last words were."""

from __future__ import annotations

import time

import pytest

from serving import serve
from serving.engine import GIB, Engine, Room, command, lacking, reason, sized, waiting
from serving.models import Load
from trainer.errors import ConfigError

ROOM = Room("10.0.0.2", 41234, 8 * GIB)


class Heavy(Load):
    size = 100 * GIB  # type: ignore[assignment]


def test_the_command_has_no_token_and_a_persons_flags_have_the_last_word():
    words = command(Load("/models/a", ("a", "a@2")), ROOM, 2, ["--max-model-len", "64"])
    line = " ".join(words)
    assert "--model /models/a --host 10.0.0.2 --port 41234 --served-model-name a a@2 --middleware serving.guard.Guard" in line
    assert line.endswith("--tensor-parallel-size 2 --max-model-len 64") and "enforce-eager" not in line and "api-key" not in line
    assert "--enforce-eager" in command(Load("/models/a", ("a",)), ROOM, 0, [])


def test_adapters_are_models_of_their_own():
    load = Load("org/base", ("x-base",), (("a@1", "/a/adapter"), ("b@2", "/b/adapter")), 16)
    line = " ".join(command(load, ROOM, 1, []))
    assert "--enable-lora --max-loras 2 --max-lora-rank 16 --lora-modules a@1=/a/adapter b@2=/b/adapter" in line


def test_what_does_not_fit_is_said_with_the_numbers():
    heavy = Heavy("/models/70b", ("a",))
    assert lacking(heavy, ROOM, 0) == (
        "/models/70b: an engine needs 104.0 GiB (100.0 weights, 1 cache, 3 vLLM), 8.0 GiB are free on 10.0.0.2"
    )
    gpus = Room("10.0.0.2", 1, 8 * GIB, 80 * GIB)
    assert lacking(heavy, gpus, 1) == "/models/70b: 100.0 GiB of weights, 1 GPUs have 72.0 GiB for them; give more --gpus"
    assert lacking(heavy, Room("10.0.0.2", 1, 8 * GIB, 160 * GIB), 2) is None
    assert lacking(Load("org/hub", ("a",)), ROOM, 0) is None


def test_the_reason_is_the_last_error_that_names_something():
    said = [
        "INFO ...",
        "(EngineCore pid=7) ValueError: heads of 8",
        "(APIServer pid=3) RuntimeError: Engine core initialization failed. See",
    ]
    assert reason(said) == "heads of 8"
    assert reason(["Killed", ""]) == "Killed" and reason([]) == "it printed nothing"


def test_an_engine_that_ends_says_why(capfd):
    engine = Engine()
    engine.start(["python", "-c", "import os; raise ValueError(os.environ['VLLM_API_KEY'][:3] + ' is wrong')"], "abcdef", True)
    deadline = time.monotonic() + 120
    while (why := engine.ended()) is None or "is wrong" not in why:
        assert time.monotonic() < deadline, why
        time.sleep(0.02)
    assert why == "exit code 1: abc is wrong"
    engine.stop(1)


NODES = [{"Alive": True, "Resources": {"GPU": 8.0}}, {"Alive": False, "Resources": {"GPU": 16.0}}, {"Alive": True, "Resources": {}}]


@pytest.mark.parametrize(("asked", "nodes", "found"), [(None, NODES, 1), (None, NODES[2:], 0), (8, NODES, 8), (0, NODES, 0)])
def test_an_engine_has_one_gpu_where_there_are_some(asked, nodes, found):
    assert sized(asked, nodes) == found


def test_more_gpus_than_a_node_has_is_one_line():
    with pytest.raises(ConfigError, match=r"^--gpus 9: the largest node has 8; an engine is on one node$"):
        sized(9, NODES)


def test_a_wait_says_what_for():
    free = {"GPU": 1.0, "CPU": 30.0}
    said = waiting({"GPU": 8.0, "CPU": 32.0}, free, 2, 1)
    assert said == "waiting for 2 GPUs on one node (1 of 8 are free) and 1 CPUs on one node (30 of 32 are free)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "a/b"], "--name a/b: must be lower-case letters, digits, - or _, up to 60, and not runs"),
        (["--name", "a", "--gpus", "-1"], "--gpus -1 is not an integer >= 0"),
        (["--name", "a", "--port", "70000"], "--port 70000 is not a port (0 to 65535)"),
    ],
)
def test_mistakes_are_one_line(words, said):
    with pytest.raises(ConfigError) as caught:
        serve.arguments(["model", *words])
    assert str(caught.value) == said


def test_a_port_that_is_taken_is_one_line():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: another program of this machine has it"):
            serve.arguments(["model", "--name", "a", "--port", str(port)])


def test_flags_behind_two_dashes_are_vllms():
    options, more = serve.arguments(["run:a", "run:b", "--name", "x", "--", "--max-model-len", "64", "--name", "y"])
    assert (options.models, options.name, more) == (["run:a", "run:b"], "x", ["--max-model-len", "64", "--name", "y"])
