"""Objects of one process in place of Ray's actors: calls, errors, and what they do not share. What they compute: test_launchers.py."""

import os
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.configs import errors, here, ok, settings

from trainer.cluster import placement
from trainer.cluster.launcher import Launcher, launcher
from trainer.episodes import Episode, Prompt
from trainer.errors import ConfigError
from trainer.rewards.here import scorer_of
from trainer.weights import Parameter, Rendezvous, join, plan, receive, send
from trainer.weights.here import Handover

SPOILS = """
import trainer.rewards

def plain(text, row):
    return 1 / len(text)

@trainer.rewards.batched
def batched(episodes):
    return [float(len(e.text + str(e.turns.append(0)))) for e in episodes]
"""
ONE = "placement.processes=one"


class Draws:
    """As a rank or an engine: seeded once, it draws whenever it is asked."""

    def __init__(self, seed: int, threads: int = 1):
        torch.set_num_threads(threads)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def draw(self) -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    def threads(self) -> int:
        return torch.get_num_threads()

    def refuse(self, error: Exception) -> None:
        raise error

    def nest(self, other: Any) -> list[float]:
        return other.draw.remote().result()


@pytest.fixture
def starts(tmp_path):
    with launcher(here(settings(tmp_path))) as found:
        yield found


def drawn(starts: Launcher, actor: Any) -> list[float]:
    return starts.wait(actor.draw.remote(), 1, "a draw")


def test_objects_have_random_states_of_their_own_and_leave_the_process_its_own(starts):
    """As processes have: who draws in between changes nobody's next number."""
    torch.manual_seed(5)
    random.seed(5)
    outside = torch.get_rng_state(), random.getstate()
    alone = starts.start(Draws, 1, share={}, threads=1)
    expected = [drawn(starts, alone) for _ in range(3)]
    one, two = (starts.start(Draws, seed, share={}, threads=1) for seed in (1, 2))
    mixed = []
    for _ in range(3):
        mixed.append(drawn(starts, one))
        assert drawn(starts, two) not in expected
        starts.wait(two.nest.remote(two), 1, "a call in a call")
    assert mixed == expected
    assert torch.equal(torch.get_rng_state(), outside[0]) and random.getstate() == outside[1]


def test_objects_have_as_many_torch_threads_as_they_set(starts):
    before = torch.get_num_threads()
    one, two = (starts.start(Draws, 0, threads, share={}, threads=9) for threads in (1, 2))
    assert starts.wait([actor.threads.remote() for actor in (one, two, one)], 1, "threads") == [1, 2, 1]
    assert torch.get_num_threads() == before


def test_what_a_call_raises_comes_with_its_result_as_it_was_raised(starts):
    actor, error = starts.start(Draws, 0, share={}, threads=1), ConfigError("model.path: none")
    ref = actor.refuse.remote(error)
    assert starts.done([ref]) == ([ref], []) and not starts.died(ref)
    with pytest.raises(ConfigError) as raised:
        starts.wait([ref], 1, "a call")
    assert raised.value is error


def test_calls_of_several_threads_run_one_at_a_time(starts):
    at_work, most, lock = [0], [0], threading.Lock()

    class Busy:
        def work(self) -> None:
            with lock:
                at_work[0] += 1
                most[0] = max(most[0], at_work[0])
            torch.ones(200, 200).matmul(torch.ones(200, 200))
            with lock:
                at_work[0] -= 1

    actors = [starts.start(Busy, share={}, threads=1) for _ in range(4)]
    threads = [threading.Thread(target=lambda a=a: [a.work.remote() for _ in range(20)]) for a in actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_the_environment_is_as_before_once_a_run_has_ended(tmp_path, monkeypatch):
    """Ranks tell DeepSpeed there who they are; a process that is started next would take it for torchrun's word."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with launcher(here(settings(tmp_path))):
        os.environ["WORLD_SIZE"] = "1"
    assert "WORLD_SIZE" not in os.environ


def test_weights_are_handed_over_to_every_receiver(tmp_path):
    config = here(settings(tmp_path))
    assert placement.sync_backend(config) == "local"
    meeting = Rendezvous("here", 0, 3, 1, "local", handover=Handover(3))
    sender, *receivers = (join(meeting, rank) for rank in range(3))
    sent = {"a": torch.rand(3, 2), "b": torch.rand(5), "c": torch.rand(2)}
    buckets = plan([Parameter(name, tuple(t.shape), "float32") for name, t in sent.items()], 24)
    assert len(buckets) == 3
    for _ in range(2):
        send(sender, buckets, lambda names: [sent[name] for name in names])
        for group in receivers:
            for bucket in receive(group, buckets, torch.device("cpu")):
                for name, tensor in bucket:
                    assert torch.equal(tensor, sent[name]) and tensor.data_ptr() != sent[name].data_ptr()
        for tensor in sent.values():
            tensor.add_(1)
    with pytest.raises(RuntimeError, match="weight sync"):
        list(receive(receivers[0], buckets, torch.device("cpu")))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["placement.ranks=2"], "placement.ranks"),
        (["rollout.engine=vllm", "rollout.tensor_parallel=2"], "rollout.tensor_parallel"),
        (["rollout.mode=async", "rollout.elastic=true"], "rollout.elastic"),
        (['placement.reference_resources={"v100": 1}', "algorithm.kl.coef=0.1"], "placement.reference_resources"),
    ],
)
def test_what_needs_more_processes_is_refused_in_one_line(words, said):
    [line] = errors("model.path=gpt2", "data.path=package.module:rows", "placement.gpus_per_rank=0", ONE, *words)
    assert "placement.processes" in line and said in line


def test_rewards_get_episodes_of_their_own_and_fail_as_in_a_process(tmp_path, monkeypatch):
    (tmp_path / "spoils.py").write_text(SPOILS)
    monkeypatch.syspath_prepend(str(tmp_path))
    episodes = [Episode(Prompt(7, [1], {}), 0, [], text="ab") for _ in range(2)]
    with scorer_of(ok("reward.function=spoils:batched", ONE)) as scorer:
        assert scorer is not None and scorer.score(episodes) == [6, 6]
    assert all(episode.turns == [] for episode in episodes)
    episodes[1].text = ""
    with scorer_of(ok("reward.function=spoils:plain", ONE)) as scorer:
        said = r"reward.function: plain on row 7 with the text '' raised ZeroDivisionError.*spoils.py:5"
        assert scorer is not None
        with pytest.raises(ConfigError, match=said):
            scorer.score(episodes)
