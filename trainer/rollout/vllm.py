"""The one file that knows vLLM's API: a sampler around `vllm.LLM`, with weights received inside its workers.

https://docs.vllm.ai/en/latest/training/rlhf.html
"""

from __future__ import annotations

import os
import warnings
from typing import Any

# Read when vLLM is imported. The engine runs inside the actor: one process less to start, watch and kill.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The number of threads is the placement's; vLLM would pin its own to all cores that it sees.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Small functions around the sampler are compiled even in eager mode: 20 s at the first batch, and slower than eager afterwards.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")

import vllm
from vllm.inputs import TokensPrompt

from trainer import weights
from trainer.config import TrainConfig
from trainer.models import load_tokenizer
from trainer.types import Episode, Prompt

# vLLM's block size on CPUs is larger than on GPUs; a cache of this many bytes serves small models and keeps the start short.
CPU_CACHE_BYTES = 1 << 28


class WeightReceiver:
    """Mixed into vLLM's worker by `worker_extension_cls`; its methods are reached by `collective_rpc`."""

    device: torch.device
    model_runner: Any
    rank: int

    def connect_weights(self, link: weights.Link, first_rank: int, plan: weights.Plan) -> None:
        self.weight_plan = plan
        self.weight_group = weights.join(link, first_rank + self.rank)

    def receive_weights(self) -> None:
        for bucket in weights.receive(self.weight_group, self.weight_plan, self.device):
            self.model_runner.model.load_weights(bucket)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the buffers may be reused once this returns


class VllmSampler:
    """Implements `rollout.Sampler`."""

    def __init__(self, config: TrainConfig, model_path: str, seed: int):
        self.config = config.rollout
        self.tokenizer = load_tokenizer(config.model.model_copy(update={"path": model_path}))
        arguments: dict[str, Any] = {
            "model": model_path,
            "dtype": config.model.dtype,
            "tensor_parallel_size": self.config.tensor_parallel,
            "max_model_len": config.data.max_prompt_tokens + self.config.max_new_tokens,
            "max_num_seqs": self.config.max_sequences,
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: after temperature and top-p
            "worker_extension_cls": f"{__name__}.WeightReceiver",
            "seed": seed,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if ON_GPU:
            arguments |= {"gpu_memory_utilization": self.config.gpu_memory, "enable_sleep_mode": config.placement.colocate}
        else:
            _keep_linear_weights()
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        threads = torch.get_num_threads()
        self.llm = vllm.LLM(**arguments | self.config.options)
        self.asleep = False
        if not ON_GPU and torch.get_num_threads() != threads:
            raise RuntimeError(f"vLLM changed the number of threads from {threads} to {torch.get_num_threads()}")

    def receivers(self) -> int:
        return self.config.tensor_parallel

    def connect(self, link: weights.Link, rank: int, plan: weights.Plan) -> None:
        self.llm.collective_rpc("connect_weights", args=(link, rank, plan))

    def receive(self) -> None:
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("receive_weights")
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        if ON_GPU and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep = True

    def generate(self, prompts: list[Prompt], groups: list[int], samples: int, seed: int, greedy: bool = False) -> list[Episode]:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False
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
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=p.token_ids) for p in prompts], params, use_tqdm=False)
        episodes = [
            Episode(
                prompt,
                group,
                list(answer.token_ids),
                [float(scores[token].logprob) for scores, token in zip(answer.logprobs, answer.token_ids, strict=True)],  # type: ignore
                answer.finish_reason == "stop",
            )
            for prompt, group, output in zip(prompts, groups, outputs, strict=True)
            for answer in sorted(output.outputs, key=lambda answer: answer.index)
        ]
        texts = self.tokenizer.batch_decode([e.response_ids for e in episodes], skip_special_tokens=True)
        for episode, text in zip(episodes, texts, strict=True):
            episode.text = text
        return episodes


def _keep_linear_weights() -> None:
    """Leave Linear weights as they are on CPUs.

    vLLM packs them for its CPU kernels at load and drops the originals; `load_weights` then has nothing to write into, and its
    `reload_weights` misses a tied output head. Without packing both are right.
    """
    import vllm.model_executor.layers.utils as layers
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
