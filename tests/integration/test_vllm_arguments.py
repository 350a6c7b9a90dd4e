"""What vLLM is told, and what is refused before it is told anything."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed (make install)")

from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError
from trainer.rollout.vllm import VllmEngine, arguments, request_seeds

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def config(path: str = "m", **sections: Any) -> PpoConfig:
    return PpoConfig.model_validate({"model": {"path": path, "dtype": "float32"}, "data": {"path": "a:b"}} | sections)


def test_a_split_rollout_engine_starts_its_processes_itself(tiny_model):
    """In a placement group vLLM would take Ray's, whose one bundle the rollout engine fills already."""
    split = arguments(config(rollout={"tensor_parallel": 2}), str(tiny_model), 0, GPU)
    assert (split["tensor_parallel_size"], split["distributed_executor_backend"]) == (2, "mp")
    assert "distributed_executor_backend" not in arguments(config(), str(tiny_model), 0, GPU)


def test_memory_is_shared_out_on_gpus_and_fixed_on_cpus(tiny_model):
    rollout = {"gpu_memory": 0.4, "options": {"max_num_seqs": 7}}
    on_gpu, on_cpu = (arguments(config(rollout=rollout), str(tiny_model), 0, device) for device in (GPU, CPU))
    assert on_gpu["gpu_memory_utilization"] == 0.4
    assert "enforce_eager" not in on_gpu
    assert on_cpu["enforce_eager"]
    assert "gpu_memory_utilization" not in on_cpu
    assert on_gpu["max_num_seqs"] == 7, "rollout.options has the last word"


def test_only_a_colocated_rollout_engine_is_able_to_sleep(tiny_model):
    colocated = config(placement={"colocate": True})
    assert (
        arguments(colocated, str(tiny_model), 0, GPU)["enable_sleep_mode"]
        and not arguments(config(), str(tiny_model), 0, GPU)["enable_sleep_mode"]
    )
    assert "enable_sleep_mode" not in arguments(colocated, str(tiny_model), 0, CPU)


def test_requests_of_a_split_rollout_engine_bring_seeds_that_the_batchs_seed_decides():
    def seeds(seed: int) -> list[int | None]:
        return list(islice(request_seeds(seed, processes=2), 8))

    assert list(islice(request_seeds(3, processes=1), 2)) == [None, None]
    first, again, other = seeds(3), seeds(3), seeds(4)
    assert first == again
    assert len({*first, *other}) == 16
    assert all(seed is not None and 0 <= seed < 2**62 for seed in first)


def test_a_head_size_that_vllm_would_hang_on_is_refused(tiny_model):
    with pytest.raises(ConfigError, match=rf"model\.path={tiny_model}: attention heads of 8 dimensions; .* 32, 64, .*rollout\.engine=hf"):
        VllmEngine(config(str(tiny_model), placement={"gpus_per_rank": 0}), str(tiny_model), 0)


def test_a_build_for_cpus_is_not_given_a_gpu(tiny_model, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"placement\.gpus_per_engine: the vLLM installed here is built for CPUs; set 0"):
        VllmEngine(config(str(tiny_model)), str(tiny_model), 0)
