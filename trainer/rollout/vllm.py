"""A rollout engine around `vllm.LLM`. This file and receiver.py, which gives its workers weights, know vLLM's API.

https://docs.vllm.ai/en/latest/training/rlhf.html
"""

from __future__ import annotations

import logging
import os
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Read when vLLM is imported. The engine runs inside the actor: one process less to start, watch and kill.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The number of threads is the placement's; vLLM would pin its own to all cores that it sees.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

# It sets its logger up when it first needs to, and warns before that.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])

import torch

if not torch.cuda.is_available():
    # Small functions around the rollout engine are compiled even in eager mode: 20 s at the first batch, and slower than eager afterwards.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")

import vllm
from transformers import AutoConfig
from vllm.distributed import destroy_model_parallel
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.engine import core
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from trainer import weights
from trainer.chat.pictures import Opened
from trainer.chat.processor import processor_of
from trainer.chat.template import stops
from trainer.chat.tokenizer import sees
from trainer.cluster import actors, placement
from trainer.cluster.spans import ended, recording
from trainer.configs.ppo import PpoConfig
from trainer.configs.ppo_rules import RANKS
from trainer.configs.sections import LoraConfig, ModelConfig
from trainer.episodes import Turn
from trainer.errors import ConfigError
from trainer.metrics.gauges import engine_gauges
from trainer.models import load_tokenizer, lora, unsampled
from trainer.rollout import Sampling, receiver
from trainer.rollout.admission import Admission
from trainer.rollout.routed import Experts
from trainer.rollout.stepped import SteppedEngine

# vLLM's block size on CPUs is larger than on GPUs; a cache of this many bytes serves small models and keeps the start short.
CPU_CACHE_BYTES = 1 << 28
# Tested. Of Gemma 3's pictures it says otherwise than transformers on CPUs; it asks for names of Llava's weights that ranks do not have.
SIGHTED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "internvl", "mistral3")
AS_IT_IS: dict[str, Any] = {"init": None, "lora": LoraConfig(), "freeze": []}
ALL = {"weights", "kv_cache"}  # that vLLM puts to sleep


@dataclass(slots=True)
class _Request:
    sampling: Sampling
    prompt_ids: list[int]
    turns: dict[int, Turn] = field(default_factory=dict)  # complete ones, by the number of the sample


class VllmEngine(SteppedEngine):
    """Implements `rollout.RolloutEngine`. Raises ConfigError for what this build of vLLM cannot run."""

    def __init__(self, config: PpoConfig, model_path: str, seed: int, meet: tuple[str, int] | None = None):
        """`meet`: address and port of this process, where the engine's other nodes find it (`Part`)."""
        super().__init__()
        self.config = config.rollout
        self.tokenizer = load_tokenizer(config.model.model_copy(update={"path": model_path}))
        self.ends = stops(self.tokenizer)
        self.processor, self.opened = processor_of(self.tokenizer), Opened()
        self.never = unsampled(config.model.model_copy(update=AS_IT_IS | {"path": model_path}))
        self.device = placement.device_of(placement.gpus_per_engine(config), "placement.gpus_per_engine")
        _require_build(self.device)
        _require_whole_sync(model_path)
        if self.device.type == "cpu":
            _require_head_size(model_path)
        self.adapters = (
            lora.peft_config(config.model.lora, config.model.lora.targets or "all-linear", model_path).to_dict()
            if config.model.lora.rank
            else None
        )
        self.processes = self.config.tensor_parallel * self.config.pipeline_parallel
        threads, set_threads = torch.get_num_threads(), torch.set_num_threads
        if config.placement.processes == "one":  # torch's default group, which vLLM would destroy with the engine, is also the ranks'
            setattr(core, "cleanup_dist_env_and_memory", destroy_model_parallel)  # noqa: B010 - which it does not export
        given = arguments(config, model_path, seed, self.device) | across_nodes(config, meet, 0)
        self.experts, on_cpu = Experts(self.config.router_replay, model_path), self.device.type == "cpu"
        more = self.experts.arguments(given, on_cpu)
        with self.experts.starting():
            self.llm = vllm.LLM(**given, **more)
        if config.placement.processes == "one":
            self.llm.collective_rpc("spare_transformers")
        setattr(torch, "set_num_threads", set_threads)  # noqa: B010 - which vLLM on CPUs makes do nothing, for others in this process too
        if self.device.type == "cpu" and self.processes == 1 and torch.get_num_threads() != threads:
            raise RuntimeError(f"vLLM changed the number of threads from {threads} to {torch.get_num_threads()}")
        self.awake = set(ALL)
        self.requests: dict[int, _Request] = {}
        self.admission = Admission(self.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens)
        # In this process, by VLLM_ENABLE_V1_MULTIPROCESSING.
        self.scheduler: SchedulerInterface = self.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        self.experts.started(self.llm, self.scheduler, on_cpu)
        self.gauges = engine_gauges(config.run.name or "run")
        self.llm.llm_engine.set_weight_version(str(self.version))
        self.seed(seed)

    def unrecorded(self) -> str:
        return self.experts.why

    def receivers(self) -> int:
        return self.processes

    def connect(self, rendezvous: weights.Rendezvous, rank: int, plan: weights.Plan) -> None:
        self.llm.collective_rpc("connect_weights", args=(rendezvous, rank, plan))

    def receive(self, version: int) -> None:
        self.llm.collective_rpc("receive_weights")
        self.loaded(version)

    def load(self, bucket: weights.Named) -> None:
        self.llm.collective_rpc("load_bucket", args=(bucket,))

    def loaded(self, version: int) -> None:
        self.llm.collective_rpc("finish", args=(self.adapters,))
        self.llm.reset_prefix_cache()  # refused while requests are at work; `step` keeps what older weights computed from later prompts
        self.llm.llm_engine.set_weight_version(str(version))
        self.version = version

    def sleep(self) -> None:
        if self.awake == ALL:  # with weights alone it is on its way to wake up; vLLM does not put a part to sleep
            self.llm.sleep(self.config.sleep_level)
            self.awake = set()

    def wake(self, memory: str) -> None:
        if memory not in self.awake:
            self.llm.wake_up([memory])
            self.awake.add(memory)

    def seed(self, value: int) -> None:
        # The engine runs in this process and schedules alike each time, so on CPUs the process's seed makes a batch repeat bit for bit.
        torch.manual_seed(value)
        self.seeds = request_seeds(value, self.processes)

    def decode(self, answers: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(answers, skip_special_tokens=True)

    def add(self, number: int, prompt_ids: list[int], sampling: Sampling) -> None:
        seed = next(self.seeds) if sampling.seed is None else sampling.seed
        longest = self.llm.llm_engine.model_config.max_model_len
        if not 0 < len(prompt_ids) < longest:  # vLLM says so too, but of a request that waits only once it is let in
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens; allowed are 1 to {longest - 1} (max_model_len)")
        self.requests[number] = _Request(sampling, prompt_ids)
        whole_prompt = seed is not None and self.device.type == "cpu"
        parts = [(i, 1) for i in range(sampling.samples)] if whole_prompt else [(0, sampling.samples)]
        for first, samples in parts:
            params = self._parameters(sampling, samples, None if seed is None else seed + first)
            tokens = samples * (len(prompt_ids) + sampling.max_tokens)
            self.admission.queue(f"{number}:{first}", tokens, whole_prompt, (prompt_ids, sampling.pictures, params))

    def _parameters(self, sampling: Sampling, samples: int, seed: int | None) -> vllm.SamplingParams:
        return vllm.SamplingParams(
            n=samples,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.temperature else 1.0,
            seed=seed,  # of its first sample; vLLM adds the sample's number to it
            logprobs=0,
            logit_bias=dict.fromkeys(self.never, -100.0) or None,  # tokens that stand for pictures, in runs on text alone too
            stop_token_ids=self.ends,  # beside those that the model lists
            stop=list(sampling.stop) or None,
            detokenize=bool(sampling.stop),
            routed_experts_prompt_start=sampling.experts or 0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def step(self) -> dict[int, list[Turn]]:
        """One step of vLLM's scheduler: prompts that found room are read, and each answer at work gets a token."""
        for name, (prompt_ids, pictures, params) in self.admission.admit():
            prompt: Any = tokens_input(prompt_ids, cache_salt=str(self.version))
            if pictures:
                prompt = self._shown(prompt_ids, pictures)
            self.llm.llm_engine.add_request(name, prompt, params, lora_request=receiver.ADAPTERS if self.adapters else None)
        complete: dict[int, list[Turn]] = {}
        for output in self._work():
            self.admission.release(output.request_id)
            number, first = map(int, output.request_id.split(":"))
            request = self.requests[number]
            if request.sampling.pictures and output.prompt_token_ids != request.prompt_ids:
                read, ours = len(output.prompt_token_ids), len(request.prompt_ids)
                raise ValueError(f"vLLM read a prompt with pictures as {read} other tokens than the {ours} that ranks would; use engine=hf")
            turns = {first + answer.index: _turn(answer) for answer in output.outputs}
            if request.sampling.experts is not None:
                for answer in output.outputs:
                    turns[first + answer.index].experts = self.experts.of(answer)
            request.turns |= turns
            if self.gauges:
                self.gauges.count(len(output.prompt_token_ids), sum(len(answer.token_ids) for answer in output.outputs))
            if len(request.turns) == request.sampling.samples:
                del self.requests[number]
                complete[number] = [request.turns[i] for i in range(request.sampling.samples)]
        if self.gauges:
            running, waiting = self.scheduler.get_request_counts()
            self.gauges.show(running, waiting + len(self.admission.waiting), self.scheduler.get_kv_cache_usage())
        return complete

    def _shown(self, prompt_ids: list[int], pictures: tuple[Any, ...]) -> dict[str, Any]:
        """A prompt whose pictures vLLM expands itself. Its caches know them by hash and version of the weights."""
        assert self.processor is not None
        return {
            "prompt_token_ids": self.processor.collapsed(prompt_ids, pictures),
            "multi_modal_data": {"image": [self.opened.image(picture) for picture in pictures]},
            "multi_modal_uuids": {"image": [f"{picture.hash}-{self.version}" for picture in pictures]},
            "cache_salt": str(self.version),
        }

    def _work(self) -> list[Any]:
        """A step of vLLM's own: RequestOutputs, as no pooling is asked for. As a span it is a prefill where it read of a prompt."""
        if not recording():
            return self.llm.llm_engine.step()
        scheduler: Any = self.scheduler
        answering = {request.request_id for request in scheduler.running if request.num_computed_tokens >= request.num_prompt_tokens}
        begin, outputs = time.perf_counter(), self.llm.llm_engine.step()
        reads = any(request.request_id not in answering for request in scheduler.running)
        running, waiting = scheduler.get_request_counts()
        ended("prefill" if reads else "decode", begin, running=running, waiting=waiting + len(self.admission.waiting), count=1)
        return outputs


class Part:
    """What a rollout engine has on a node other than its first: processes of vLLM that the first node's engine calls."""

    def __init__(self, config: PpoConfig, model_path: str, seed: int, meet: tuple[str, int], node: int):
        device = placement.device_of(placement.gpus_per_engine(config), "placement.gpus_per_engine")
        _require_build(device)
        given = arguments(config, model_path, seed, device) | across_nodes(config, meet, node)
        given |= Experts(config.rollout.router_replay, model_path).arguments(given, on_cpu=device.type == "cpu")
        self.executor = MultiprocExecutor(vllm.EngineArgs(**given).create_engine_config(headless=True))


def across_nodes(config: PpoConfig, meet: tuple[str, int] | None, node: int) -> dict[str, Any]:
    """Keyword arguments by which the parts of a rollout engine find each other; none on one node.

    https://docs.vllm.ai/en/latest/serving/parallelism_scaling.html
    """
    if meet is None:
        return {}
    os.environ["VLLM_HOST_IP"] = actors.address()  # left alone, vLLM guesses from a route to the internet
    return {"nnodes": config.rollout.nodes_per_engine, "node_rank": node, "master_addr": meet[0], "master_port": meet[1]}


def _turn(answer: Any) -> Turn:
    ids = list(answer.token_ids)
    logprobs = [float(scores[token].logprob) for scores, token in zip(answer.logprobs, ids, strict=True)]
    first, *later = answer.weight_versions  # spans of tokens
    finish = "stop" if answer.finish_reason == "stop" else "length"
    return Turn(ids, logprobs, finish, int(first.version), [(span.start, int(span.version)) for span in later])


def arguments(config: PpoConfig, model_path: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; rollout.options has the last word."""
    rollout = config.rollout
    given: dict[str, Any] = {
        "model": model_path,
        "dtype": config.model.dtype,
        "tensor_parallel_size": rollout.tensor_parallel,
        "pipeline_parallel_size": rollout.pipeline_parallel,
        "enable_expert_parallel": rollout.expert_parallel,
        "max_model_len": config.data.max_prompt_tokens + config.max_response_tokens(),
        "max_num_seqs": rollout.max_sequences,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: after temperature and top-p
        "worker_extension_cls": f"{receiver.__name__}.WeightReceiver",
        "seed": seed,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if rollout.tensor_parallel * rollout.pipeline_parallel > 1:
        # One actor holds all GPUs that a rollout engine has on a node.
        # Left alone, vLLM would start Ray actors, for which its placement group has no room.
        given["distributed_executor_backend"] = "mp"
    if sees(config.model.model_copy(update={"path": model_path, "init": None})):
        given["limit_mm_per_prompt"] = {"image": config.data.max_images, "video": 0}
    if rank := config.model.lora.rank:
        given |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(known for known in RANKS if known >= rank)}
    if device.type == "cpu":
        given |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    else:
        given |= {"gpu_memory_utilization": rollout.gpu_memory, "enable_sleep_mode": config.placement.colocate}
    return given | rollout.options


def request_seeds(seed: int, processes: int) -> Iterator[int | None]:
    """Seeds of a batch's requests, in their order; forever.

    The workers of a split rollout engine are processes that this one's seed does not reach, so each request brings its own.
    Otherwise the process's seed does, and none brings one.
    """
    draw = random.Random(seed)
    while True:
        yield draw.getrandbits(62) if processes > 1 else None


def _require_build(device: torch.device) -> None:
    """vLLM is built for CPUs or for GPUs; the other kind would fail late, in words about kernels."""
    for_cpu = current_platform.is_cpu()
    if for_cpu != (device.type == "cpu"):
        found, use = ("CPUs", "0") if for_cpu else ("GPUs", "1 or more")
        raise ConfigError(f"placement.gpus_per_engine: the vLLM installed here is built for {found}; set {use}, or rollout.engine=hf")


def _require_whole_sync(model_path: str) -> None:
    """Raises ConfigError for a family of whose weights vLLM takes a part only where it loads them from a folder."""
    kind = AutoConfig.from_pretrained(model_path).get_text_config().model_type
    if kind == "gemma3n_text":
        raise ConfigError(f"rollout.engine=vllm: {kind}: vLLM takes no altup.correct_output_scale in a weight sync; use hf")
    own = AutoConfig.from_pretrained(model_path)
    kind = own.model_type
    rope = getattr(own.get_text_config(), "rope_parameters", None) or {}
    if kind == "qwen3_vl" and not rope.get("mrope_interleaved"):
        text = f"{model_path}/config.json has no rope_parameters.mrope_interleaved=true in text_config, without which it"
        raise ConfigError(f"rollout.engine=vllm: {text} places pictures otherwise than transformers; set it, as the published models do")
    if sees(ModelConfig(path=model_path)) and kind not in SIGHTED:
        raise ConfigError(f"rollout.engine=vllm: {kind}: of models that see vLLM computes {', '.join(SIGHTED)} as ranks do; use hf")


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
