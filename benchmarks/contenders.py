"""The contenders of `benchmarks.step`: Flotilla's actors, a bare loop in one process, and TRL's GRPOTrainer.

All start from the same model and read the same prompts in the same order; group size, learning rate, AdamW's betas, clipping, dtype
and limits come from one `PpoConfig`. Each is imported in its own process only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.interleaved import Turns

if TYPE_CHECKING:
    from trainer.online.processes import WorkerGroups

# What trainer.rollout.vllm sets, so that both sides run the same engine.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
PROGRAM = "benchmarks.step"


def flotilla(turns: Turns, settings: list[str]) -> None:
    """`train_ppo.train` as it is, without evaluation and checkpoints; where it logs a step, the next one begins."""
    from trainer import metrics, train_ppo
    from trainer.cli import parse
    from trainer.cli.paths import run_folder
    from trainer.cluster.on_ray import wait
    from trainer.configs.ppo import PpoConfig

    class Metrics(metrics.Metrics):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            super().log(step, values)
            turns.end(round(values["response_tokens"] * episodes), values["reward"])
            turns.begin(settle=idle)

    def loop(run: train_ppo.Run, *rest: Any) -> int:
        nonlocal workers
        workers = run.workers
        turns.begin()
        return loop_of_trainer(run, *rest)

    def idle() -> None:
        """Samples that were begun for the next turn have come."""
        assert workers is not None
        wait(workers.engines.ready(), config.rollout.timeout, "sampling")

    workers: WorkerGroups | None = None
    config = parse(settings, prog=PROGRAM, model=PpoConfig)
    episodes = config.trainer.prompts_per_step * config.algorithm.group_size
    loop_of_trainer, train_ppo.loop, train_ppo.Metrics = train_ppo.loop, loop, Metrics
    train_ppo.train(config, run_folder(config))


def bare(turns: Turns, settings: list[str]) -> None:
    """The same work in one process: one batch, torch's AdamW, no Ray, no DeepSpeed."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.bare import HfEngine, VllmEngine, grpo_step
    from trainer.chat.tokenizer import load_tokenizer
    from trainer.cli import parse
    from trainer.configs.ppo import PpoConfig
    from trainer.data.loader import Loader
    from trainer.data.prompts import load_prompts
    from trainer.rewards import resolve

    config = parse(settings, prog=PROGRAM, model=PpoConfig)
    torch.set_num_threads(config.placement.threads or 1)
    torch.manual_seed(config.run.seed)
    tokenizer = load_tokenizer(config.model)
    loader = Loader(load_prompts(config.data, tokenizer).prompts, config.trainer.prompts_per_step, config.run.seed, config.data.shuffle)
    reward = resolve(config.reward.function, config.reward.args).function
    assert config.model.path
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, betas=config.optim.betas, weight_decay=config.optim.weight_decay)
    engine = (VllmEngine if config.rollout.engine == "vllm" else HfEngine)(config, model, tokenizer)
    while True:
        turns.begin()
        turns.end(*grpo_step(model, optimizer, engine, loader.next(), tokenizer, reward, config))


def trl(turns: Turns, settings: list[str], micro_batch: int | None = None) -> None:
    """TRL's GRPOTrainer; `micro_batch` sequences at a time, or the whole batch."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from trainer.chat.tokenizer import load_tokenizer
    from trainer.cli import parse
    from trainer.cli.paths import run_folder
    from trainer.configs.ppo import PpoConfig
    from trainer.data.loader import Loader
    from trainer.data.prompts import load_prompts
    from trainer.rewards import resolve

    config = parse(settings, prog=PROGRAM, model=PpoConfig)
    torch.set_num_threads(config.placement.threads or 1)
    loader = Loader(
        load_prompts(config.data, load_tokenizer(config.model)).prompts,
        config.trainer.prompts_per_step,
        config.run.seed,
        config.data.shuffle,
    )
    function = resolve(config.reward.function, config.reward.args).function
    lengths: list[int] = []
    means: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: list[Any]) -> list[float]:
        rows = [{name: column[i] for name, column in columns.items() if isinstance(column, list)} for i in range(len(completions))]
        scores = [function(text, row) for text, row in zip(completions, rows, strict=True)]
        lengths.append(sum(map(len, completion_ids)))
        means.append(sum(scores) / len(scores))
        return scores

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.end(lengths[-1], means[-1])

    if config.rollout.engine == "vllm":
        _make_trl_run_on_cpus(config)
    sequences = config.trainer.prompts_per_step * config.algorithm.group_size
    micro_batch = micro_batch or sequences
    arguments = GRPOConfig(
        output_dir=str(run_folder(config)),
        max_steps=config.trainer.steps,
        learning_rate=config.optim.lr,
        lr_scheduler_type="constant",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=sequences // micro_batch,
        num_generations=config.algorithm.group_size,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        beta=0.0,
        epsilon=config.algorithm.clip_low,
        loss_type="dapo",  # the mean over the tokens of the whole batch, as algorithm.aggregation=token
        adam_beta1=config.optim.betas[0],
        adam_beta2=config.optim.betas[1],
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.grad_clip,
        warmup_steps=0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=10**6,
        disable_tqdm=True,
        seed=config.run.seed,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        use_vllm=config.rollout.engine == "vllm",
        vllm_mode="colocate",
        vllm_max_model_length=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
    )
    assert config.model.path
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype)),
        reward_funcs=reward,  # type: ignore[arg-type]
        args=arguments,
        train_dataset=Dataset.from_list([p.row for _ in range(config.trainer.steps) for p in loader.next()]),
        processing_class=AutoTokenizer.from_pretrained(config.model.path, padding_side="left"),
        callbacks=[Steps()],
    )
    trainer.train()


def _make_trl_run_on_cpus(config: Any) -> None:
    """TRL's colocated vLLM as it must be on CPUs: Linear weights unpacked, as `trainer.rollout.vllm` has them, and eager."""
    import trl.generation.vllm_generation as generation
    import vllm

    from trainer.rollout.receiver import keep_linear_weights
    from trainer.rollout.vllm import CPU_CACHE_BYTES

    keep_linear_weights()
    ours = {
        "enforce_eager": True,
        "dtype": config.model.dtype,
        "kv_cache_memory_bytes": CPU_CACHE_BYTES,
        "max_num_seqs": config.rollout.max_sequences,
    }
    generation.LLM = lambda **arguments: vllm.LLM(**arguments | ours)  # type: ignore[assignment]
