"""Shared by the tests that need a model: small, random, with a tokenizer of its own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.configs.sections import ModelConfig

INIT = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,  # sharp enough that distributions are not all alike
}
MANY = 200_000  # objects that make a collection take a tenth of a second
CHARACTERS = "characters:0123456789s="


# Two threads for tensors of a hundred numbers wait for one another, and the longer the busier the machine is: `make test` has two
# processes on two cores. Trainers that tests start say themselves how many they want (placement.threads).
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """A shell starts what it runs in the background with interrupts ignored, and so would be what tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "FLOTILLA_TEST_WARM" not in os.environ and sys.platform == "linux":  # one for all processes of pytest-xdist
        start_warm()


def start_warm() -> None:
    """Trainers and workers of Ray that tests start are forked (tests/warm); NO_WARM=1 starts them anew."""
    if os.environ.get("NO_WARM"):
        return
    folder, path = Path(__file__).parent / "warm", Path(tempfile.mkdtemp(prefix="flotilla-warm-")) / "socket"
    room = "-" * 100  # in /proc for the names that Ray gives processes, and ROOM for the variables of those that are forked
    command = [sys.executable, str(folder / "server.py"), str(path), str(os.getpid()), room]
    env, none = os.environ | {"SPT_NOENV": "1", "ROOM": "-" * 20_000}, subprocess.DEVNULL
    subprocess.Popen(command, env=env, stdin=none, stdout=none, stderr=none)
    os.environ["FLOTILLA_TEST_WARM"] = str(path)
    os.environ["PYTHONPATH"] = ":".join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_collection_finish() -> None:
    """What is there by now is never garbage, and a collection, such as those of DeepSpeed, would look at all of it: for a second."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    """The same of what tests have imported since."""
    if len(gc.get_objects()) > MANY:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen2 with 15,000 random parameters and one token per digit."""
    return _export(INIT, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with heads of 32 dimensions: fewer, and vLLM's attention on CPUs has no kernel for them."""
    return _export(INIT | {"num_attention_heads": 2, "hidden_size": 64}, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the usual small weights: all answers are about as likely, and a few steps teach it something."""
    return _export(INIT | {"hidden_size": 64, "initializer_range": 0.02}, tmp_path_factory.mktemp("untrained"))


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """This process is the one rank of every group: DeepSpeed, once imported, does not take a second group after the first was destroyed."""
    yield
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _export(init: dict[str, Any], folder: Path) -> Path:
    import torch  # only tests that want a model wait for it

    from trainer import models

    config = ModelConfig(init=init, tokenizer=CHARACTERS, dtype="float32")
    lm = models.load_lm(config, 0, torch.device("cpu"))
    models.export(lm, lm.state_dict(), models.load_tokenizer(config), folder)
    return folder
