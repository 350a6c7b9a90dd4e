"""TRL's defaults and names, and those of its settings that have no counterpart, or need none, and why."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": True,
    "save_steps": 500,
    "seed": 42,
}
ONLINE: dict[str, Any] = {
    "learning_rate": 1e-6,
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "epsilon": 0.2,
    "num_iterations": 1,
    "use_vllm": False,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "mask_truncated_completions": False,
    "shuffle_dataset": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": COMMON
    | ONLINE
    | {
        "num_generations": 8,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "entropy_coef": 0.0,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
    },
    "rloo": COMMON | ONLINE | {"num_generations": 2, "beta": 0.05},
    "sft": COMMON | {"learning_rate": 2e-5, "max_length": 1024, "assistant_only_loss": False, "shuffle_dataset": False},
    "reward": COMMON | {"learning_rate": 1e-4, "max_length": 1024},
    "dpo": COMMON | {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "label_smoothing": 0.0, "loss_type": "sigmoid"},
    "kto": COMMON
    | {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "loss_type": "kto"},
}
NOT_NEEDED = {
    "output_dir": "runs are below FLOTILLA_RUNS, by run.name",
    "bf16": "model.dtype=bfloat16 is the default",
    "dtype": "model.dtype=bfloat16 is the default",
    "logging_steps": "every step is logged",
    "logging_strategy": "every step is logged",
    "save_strategy": "checkpoints are written by steps",
    "eval_strategy": "evaluations are by steps: trainer.eval_every",
    "gradient_checkpointing_kwargs": "",
    "use_peft": "model.lora is written",
    "lora_task_type": "",
    "use_vllm": "rollout.engine",
    "vllm_mode": "placement.colocate, or GPUs for rollout.engines",
    "vllm_enable_sleep_mode": "colocated engines always sleep while the ranks train",
    "vllm_server_base_url": "rollout engines are started by the run",
    "vllm_server_host": "rollout engines are started by the run",
    "vllm_server_port": "rollout engines are started by the run",
    "packing": "sequences are always packed, and never cut",
    "padding_free": "sequences are always packed",
    "precompute_ref_log_probs": "the reference's are always computed once",
    "log_completions": "flotilla ui shows answers",
    "num_completions_to_print": "flotilla ui shows answers",
    "remove_unused_columns": "",
    "dataloader_num_workers": "",
    "dataset_num_proc": "",
    "attn_implementation": "model.attention=auto takes the fastest kernel that is exact",
    "push_to_hub": "models are exported to the run's folder",
    "num_processes": "placement.ranks, or torchrun's processes",
    "config_file": "accelerate is not needed; trainer.zero_stage",
    "deepspeed": "trainer.zero_stage, trainer.offload_optimizer",
    "processing_class": "model.tokenizer",
    "max_length": "sequences are never cut: a longer one ends a start, with its row",
    "per_device_eval_batch_size": "",
    "ddp_timeout": "trainer.timeout",
    "optim": "AdamW",
    "tf32": "",
    "do_eval": "",
}
NO_COUNTERPART = {
    "lora_dropout": "adapters have no dropout",
    "trust_remote_code": "code of a hub is not run",
    "fp16": "model.dtype is bfloat16 or float32",
    "top_k": "the policy's log-probabilities are of all tokens",
    "min_p": "the policy's log-probabilities are of all tokens",
    "repetition_penalty": "the policy's log-probabilities are of all tokens",
}
