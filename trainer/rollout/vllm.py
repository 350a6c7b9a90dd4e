"""The one file that knows vLLM's API: a rollout engine around `vllm.LLM`, with weights received inside its workers.

https://docs.vllm.ai/en/latest/training/rlhf.html
"""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

# Read when vLLM is imported. The engine runs inside the actor: one process less to start, watch and kill.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The number of threads is the placement's; vLLM would pin its own to all cores that it sees.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch

if not torch.cuda.is_available():
    # Small functions around the rollout engine are compiled even in eager mode: 20 s at the first batch, and slower than eager afterwards.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")

import vllm
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform

from trainer import placement, weights
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError
from trainer.models import load_tokenizer
from trainer.types import Episode, Prompt, Turn

# vLLM's block size on CPUs is larger than on GPUs; a cache of this many bytes serves small models and keeps the start short.
CPU_CACHE_BYTES = 1 << 28


class WeightReceiver:
    """Mixed into vLLM's worker by `worker_extension_cls`; its methods are reached by `collective_rpc`."""

    device: torch.device
    model_runner: Any
    rank: int

    def connect_weights(self, rendezvous: weights.Rendezvous, first_rank: int, plan: weights.Plan) -> None:
        self.weight_plan = plan
        self.weight_group = weights.join(rendezvous, first_rank + self.rank)

    def receive_weights(self) -> None:
        for bucket in weights.receive(self.weight_group, self.weight_plan, self.device):
            self.model_runner.model.load_weights(bucket)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the buffers may be reused once this returns


class VllmEngine:
    """Implements `rollout.RolloutEngine`. Raises ConfigError for what this build of vLLM cannot run."""

    def __init__(self, config: PpoConfig, model_path: str, seed: int):
        self.config = config.rollout
        self.tokenizer = load_tokenizer(config.model.model_copy(update={"path": model_path}))
        device = placement.device_of(placement.gpus_per_engine(config), "placement.gpus_per_engine")
        _require_build(device)
        if device.type == "cpu":
            _require_head_size(model_path)
            _keep_linear_weights()
        threads = torch.get_num_threads()
        self.llm = vllm.LLM(**arguments(config, model_path, seed, device))
        if device.type == "cpu" and torch.get_num_threads() != threads:
            raise RuntimeError(f"vLLM changed the number of threads from {threads} to {torch.get_num_threads()}")

    def receivers(self) -> int:
        return self.config.tensor_parallel

    def connect(self, rendezvous: weights.Rendezvous, rank: int, plan: weights.Plan) -> None:
        self.llm.collective_rpc("connect_weights", args=(rendezvous, rank, plan))

    def receive(self) -> None:
        self.llm.collective_rpc("receive_weights")
        self.llm.reset_prefix_cache()

    def generate(self, prompts: list[Prompt], groups: list[int], samples: int, seed: int, greedy: bool = False) -> list[Episode]:
        # One seed for the batch: the engine runs in this process and schedules alike each time, so tokens repeat bit for bit on CPUs.
        torch.manual_seed(seed)
        params = vllm.SamplingParams(
            n=samples,
            max_tokens=self.config.max_new_tokens,
            temperature=0.0 if greedy else self.config.temperature,
            top_p=1.0 if greedy else self.config.top_p,
            logprobs=0,
            stop_token_ids=[self.tokenizer.eos_token_id],  # type: ignore[list-item]
            detokenize=False,
        )
        inputs = [TokensPrompt(prompt_token_ids=p.token_ids) for p in prompts]
        outputs = self.llm.generate(inputs, seeded(params, seed, len(prompts), self.config.tensor_parallel), use_tqdm=False)
        episodes = [
            Episode(prompt, group, [_turn(answer)])
            for prompt, group, output in zip(prompts, groups, outputs, strict=True)
            for answer in sorted(output.outputs, key=lambda answer: answer.index)
        ]
        texts = self.tokenizer.batch_decode([e.response_ids for e in episodes], skip_special_tokens=True)
        for episode, text in zip(episodes, texts, strict=True):
            episode.text = text
        return episodes


def _turn(answer: Any) -> Turn:
    ids = list(answer.token_ids)
    logprobs = [float(scores[token].logprob) for scores, token in zip(answer.logprobs, ids, strict=True)]
    return Turn(ids, logprobs, "stop" if answer.finish_reason == "stop" else "length")


def arguments(config: PpoConfig, model_path: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; rollout.options has the last word."""
    rollout = config.rollout
    given: dict[str, Any] = {
        "model": model_path,
        "dtype": config.model.dtype,
        "tensor_parallel_size": rollout.tensor_parallel,
        "max_model_len": config.data.max_prompt_tokens + rollout.max_new_tokens,
        "max_num_seqs": rollout.max_sequences,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: after temperature and top-p
        "worker_extension_cls": f"{__name__}.WeightReceiver",
        "seed": seed,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if rollout.tensor_parallel > 1:
        # One actor holds all GPUs of a rollout engine. Left alone, vLLM would start Ray actors, for which its placement group has no room.
        given["distributed_executor_backend"] = "mp"
    if device.type == "cpu":
        given |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    else:
        given["gpu_memory_utilization"] = rollout.gpu_memory
    return given | rollout.options


def seeded(params: vllm.SamplingParams, seed: int, prompts: int, tensor_parallel: int) -> vllm.SamplingParams | list[vllm.SamplingParams]:
    """What `generate` is given for so many prompts.

    Tensor-parallel workers are processes that this one's seed does not reach: each request brings its own. (vLLM adds the sample's
    number to it.) Otherwise the process's seed does, and sampling stays one call for the whole batch.
    """
    if tensor_parallel == 1:
        return params
    draw = random.Random(seed)
    requests = [params.clone() for _ in range(prompts)]
    for request in requests:
        request.seed = draw.getrandbits(62)
    return requests


def _require_build(device: torch.device) -> None:
    """vLLM is built for CPUs or for GPUs; the other kind would fail late, in words about kernels."""
    for_cpu = current_platform.is_cpu()
    if for_cpu != (device.type == "cpu"):
        found, use = ("CPUs", "0") if for_cpu else ("GPUs", "1 or more")
        raise ConfigError(f"placement.gpus_per_engine: the vLLM installed here is built for {found}; set {use}, or rollout.engine=hf")


def _require_head_size(model_path: str) -> None:
    """With a head size that it has no kernel for, vLLM's attention on CPUs never returns."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = vllm.EngineArgs(model=model_path).create_model_config().get_head_size()
    allowed = CPUAttentionBackend.get_supported_head_sizes()
    if size not in allowed:
        raise ConfigError(
            f"model.path={model_path}: attention heads of {size} dimensions; vLLM on CPUs has {', '.join(map(str, allowed))}; "
            "rollout.engine=hf has any"
        )


def _keep_linear_weights() -> None:
    """Leave Linear weights as they are on CPUs.

    vLLM packs them for its CPU kernels at load and drops the originals; `load_weights` then has nothing to write into, and its
    `reload_weights` misses a tied output head. Without packing both are right.
    """
    import vllm.model_executor.layers.utils as layers
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
