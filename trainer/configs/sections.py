"""The sections of settings that entry points share. pydantic only; no torch, no Ray.

trainer/configs/ppo.py, sft.py, offline.py and preferences.py choose from them, trainer/cli reads them from a file and the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trainer.configs.base import Only, Section
from trainer.configs.data import DataConfig
from trainer.configs.timeline import TraceConfig

Beta = Annotated[float, Field(ge=0, lt=1)]
FLASH = ("varlen", "flash_attention_2")  # kernels that know borders of sequences by their places, without a mask
WITH_LORA = Only("model.lora.rank", why="without a rank all weights are trained")


class RunConfig(Section):
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Folder of the run under the runs root. Default: derived from recipe and settings.",
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed for initial weights, data order and sampling.")
    resume: Literal["auto", "never", "must"] = Field(
        default="auto",
        description="auto resumes from the last complete checkpoint if there is one; must fails without one; never moves an old run aside.",
    )
    pause_at: int | None = Field(
        default=None,
        ge=1,
        description="Save and end with exit code 143 after this step, as if asked to stop; the resumed run continues exactly.",
    )
    allow: list[str] = Field(
        default_factory=list, description="Settings or sections that may differ from the run's first start, such as [optim.lr]."
    )


class LoraConfig(Section):
    rank: int | None = Field(default=None, ge=1, description="Rank of the LoRA adapters; null trains all weights.")
    alpha: Annotated[float, WITH_LORA] = Field(default=32.0, gt=0, description="The adapters' output is scaled by alpha / rank.")
    targets: Annotated[list[str] | None, WITH_LORA] = Field(
        default=None,
        min_length=1,
        description="Layers to adapt, such as [q_proj, v_proj]. Default: all linear layers except the output head.",
    )
    quantize: Annotated[Literal["nf4"] | None, WITH_LORA] = Field(
        default=None, description="nf4 stores the linear layers under the adapters in 4 bits with bitsandbytes (QLoRA)."
    )


# Families of models that read pictures, by transformers' name, which pass this trainer's tests.
SEEING = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4", "glm4v", "idefics3", "internvl", "mistral3"),
    *("llava", "llava_next", "vipllava", "ovis2", "video_llama_3", "deepseek_vl", "janus", "glm46v", "glm4v_moe", "lighton_ocr"),
    *("paddleocr_vl", "smolvlm", "glm_ocr", "exaone4_5", "kimi_k25", "qianfan_ocr", "hyperclovax_vision_v2", "deepseek_vl_hybrid"),
    "llava_next_video",
)
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # one of which is in a folder of a model that does


class ModelConfig(Section):
    path: str | None = Field(default=None, description="Folder or hub name of the weights; run:NAME is the model that run NAME exported.")
    init: dict[str, Any] | None = Field(
        default=None,
        description="Instead of path: a transformers configuration (model_type, hidden_size, ...) for random weights; with tokenizer.",
    )
    tokenizer: str | None = Field(
        default=None, description="Folder or hub name; characters:ABC makes one token per character. Default: path."
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="Type of weights and activations.")
    attention: Literal["auto", "sdpa", "varlen", "eager", "flash_attention_2"] = Field(
        default="auto",
        description="Attention kernel. varlen is torch's own flash attention; auto takes it if GPU, dtype and model allow, else sdpa. "
        "flash_attention_2 needs the package flash-attn.",
    )
    vision: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether the model reads pictures. auto: if its family passes this trainer's tests and its folder has a processor; "
        "on: whatever the family, which is tried on pictures at start; off: it is trained on text only.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass: slower, less memory.")
    freeze: list[str] = Field(
        default_factory=list, description="Freezes parameters whose name contains one of these, such as [mlp.gate, embed_tokens]."
    )
    lora: LoraConfig = Field(default=LoraConfig(), description="LoRA adapters instead of full fine-tuning.")

    @field_validator("lora", mode="before")
    @classmethod
    def _null_is_full_fine_tuning(cls, value: Any) -> Any:
        return {} if value is None else value

    def beside(self, path: str | None) -> ModelConfig:
        """A model that is read as this one is, and learns nothing."""
        return ModelConfig(path=path, dtype=self.dtype, attention=self.attention, vision=self.vision)


class OtherModel(NamedTuple):
    role: str  # teacher, critic, reference
    setting: str  # that names it
    model: ModelConfig


class OptimConfig(Section):
    lr: float = Field(default=1e-6, gt=0, description="AdamW's learning rate after warm-up.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's decay rates of the two moments.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    grad_clip: float = Field(default=1.0, gt=0, description="Largest norm of the gradient.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning-rate schedule, down to 0 at the last step."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps over which the learning rate rises from 0.")


class TrainerConfig(Section):
    steps: int = Field(default=100, ge=1, description="Total steps, including those before a resume.")
    prompts_per_step: int = Field(default=64, ge=1, description="Rows of the dataset per step.")
    micro_batch_tokens: int = Field(default=16_384, ge=1, description="Tokens, padding included, per forward pass and rank.")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0, description="What DeepSpeed shards over the ranks: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too."
    )
    sequence_parallel: int = Field(
        default=1,
        ge=1,
        description="Consecutive ranks that share each sequence, for long sequences. Must divide the ranks and the attention heads.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Consecutive ranks that share each layer's matrices, by DeepSpeed's AutoTP. Must divide the ranks and all heads.",
    )
    expert_parallel: int = Field(
        default=1,
        ge=1,
        description="Ranks over which the experts of a layer lie, by DeepSpeed's AutoEP. Must divide the ranks and the experts.",
    )
    offload_optimizer: bool = Field(default=False, description="Keep optimizer state in CPU memory; needs zero_stage 1 or more.")
    checkpoint_every: int = Field(default=10, ge=1, description="Steps between checkpoints.")
    checkpoint_async: bool = Field(default=True, description="Write checkpoints from a copy in CPU memory while the next steps run.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Number of newest checkpoints to keep.")
    export_every: int | None = Field(
        default=None, ge=1, description="Steps between exports to models/step_N; the final model is always exported."
    )
    timeout: int = Field(default=1800, ge=1, description="Seconds within which an optimizer step or a start must end.")

    @property
    def shared(self) -> int:
        """So many consecutive ranks have the same sequences, and say the same of them."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def cut(self) -> str:
        """The settings by which ranks have parts of matrices, or some of the experts; empty where each has the whole model."""
        ways = {way: getattr(self, way) for way in ("tensor_parallel", "expert_parallel")}
        return ", ".join(f"trainer.{way}={size}" for way, size in ways.items() if size > 1)

    @property
    def mesh(self) -> dict[str, int]:
        """What, besides the number of ranks, says which part of a checkpoint each of them has."""
        return {way: getattr(self, way) for way in ("tensor_parallel", "expert_parallel", "zero_stage")}


class DivergenceConfig(Section):
    grad_norm: float | None = Field(
        default=None, gt=0, description="Skip optimizer steps with a larger gradient norm; non-finite gradients are always skipped."
    )
    patience: int = Field(default=5, ge=1, description="Consecutive skipped steps after which the run rolls back to a good checkpoint.")
    rollbacks: int = Field(default=2, ge=0, description="Rollbacks allowed before the run ends.")
    lr_factor: float = Field(default=0.5, gt=0, le=1, description="Factor on learning rates at each rollback.")


class PlacementConfig(Section):
    gpus_per_rank: float = Field(default=1, ge=0, le=1, description="0 trains on CPUs.")
    threads: int | None = Field(default=None, ge=1, description="torch threads per process. Default: its number of CPUs.")


class LogConfig(Section):
    tensorboard: bool = Field(default=True, description="Write TensorBoard events next to metrics.jsonl.")
    wandb: str | None = Field(
        default=None, min_length=1, description="Weights & Biases project; offline without WANDB_API_KEY. Needs pip install wandb."
    )
    mlflow: str | None = Field(
        default=None, min_length=1, description="MLflow experiment; in the run's folder without MLFLOW_TRACKING_URI."
    )
    plot: bool = Field(default=True, description="Draw reward and throughput when the run ends.")
    trace: TraceConfig = Field(default=TraceConfig(), description="The timeline of some steps (flotilla trace).")


class Rule(NamedTuple):
    """Settings that are fine alone but not together, and why."""

    broken: bool
    keys: tuple[str, ...]
    text: str


class Config(Section):
    """What every entry point reads; each has a type of its own over it."""

    ENTRY: ClassVar[str] = ""  # the module that has this type
    READS_NOT: ClassVar[dict[str, str]] = {}  # settings and sections of other entry points, and why this one does not read them

    run: RunConfig = Field(default=RunConfig(), description="Name, seed and resuming.")
    model: ModelConfig = Field(default=ModelConfig(), description="The model to train.")
    data: DataConfig = Field(description="Prompts and answers.")
    optim: OptimConfig = Field(default=OptimConfig(), description="Optimizer.")
    trainer: TrainerConfig = Field(default=TrainerConfig(), description="Batches, memory, checkpoints.")
    divergence: DivergenceConfig = Field(default=DivergenceConfig(), description="Skipped steps and rollbacks when training diverges.")
    placement: PlacementConfig = Field(default=PlacementConfig(), description="CPUs and GPUs.")
    log: LogConfig = Field(default=LogConfig(), description="Metrics, plots and trackers.")

    @model_validator(mode="after")
    def _rules_hold(self, info: ValidationInfo) -> Self:
        """With the context {"rules": False} the caller judges by itself."""
        broken = [] if (info.context or {}).get("rules") is False else broken_rules(self)
        if broken:
            text = "; ".join(f"{', '.join(rule.keys)}: {rule.text}" for rule in broken)
            raise PydanticCustomError("rules", "{text}", {"text": text})  # as a value: braces in a template would be read as fields
        return self

    def flash_attention(self) -> bool:
        """Whether sequences are packed for a flash kernel, which needs no mask; of auto as far as settings say (`attention.settle`)."""
        model, gpus = self.model, self.placement.gpus_per_rank
        return model.attention in FLASH or (model.attention == "auto" and model.dtype == "bfloat16" and gpus > 0)

    def other_models(self) -> list[OtherModel]:
        """Besides the one that is trained."""
        return []

    def updates(self) -> int:
        """Optimizer steps of the run, over which the learning rate's schedule spans."""
        return self.trainer.steps

    def rules(self) -> list[Rule]:
        """What spans settings; an entry point adds its own."""
        model, optim, step, data = self.model, self.optim, self.trainer, self.data
        return [
            Rule(model.path is None and model.init is None, ("model.path", "model.init"), "one of them must be set"),
            Rule(
                model.path is not None and model.init is not None,
                ("model.path", "model.init"),
                "only one may be set; set the other to null",
            ),
            Rule(
                model.init is not None and model.tokenizer is None,
                ("model.init", "model.tokenizer"),
                "random weights need model.tokenizer",
            ),
            Rule(
                bool(model.freeze) and model.lora.rank is not None,
                ("model.freeze", "model.lora.rank"),
                "adapters alone are trained; leave out what is frozen, or the adapters",
            ),
            Rule(
                model.lora.quantize is not None and model.init is not None,
                ("model.lora.quantize", "model.init"),
                "only weights that are read are quantized; set model.path",
            ),
            Rule(
                model.lora.quantize is not None and step.zero_stage == 3,
                ("model.lora.quantize", "trainer.zero_stage"),
                "DeepSpeed cannot shard quantized weights; use zero_stage 2 or lower",
            ),
            Rule(
                model.attention in FLASH and (model.dtype == "float32" or self.placement.gpus_per_rank == 0),
                ("model.attention", "model.dtype", "placement.gpus_per_rank"),
                "flash attention needs bfloat16 and a GPU; sdpa runs everywhere",
            ),
            Rule(
                model.attention == "eager" and self.trainer.sequence_parallel > 1,
                ("model.attention", "trainer.sequence_parallel"),
                "ranks that share sequences need sdpa, varlen or flash_attention_2",
            ),
            *self._cut_rules(),
            Rule(
                bool(data.path and data.mix),
                ("data.path", "data.mix"),
                "only one may be set; each source of data.mix has a path of its own",
            ),
            *(Rule(True, (*(f"data.{key}" for key in keys), "data.path"), why) for why, keys in data.in_vain().items()),
            *self._trace_rules(),
            Rule(
                step.offload_optimizer and step.zero_stage == 0,
                ("trainer.offload_optimizer", "trainer.zero_stage"),
                "offloading needs zero_stage 1, 2 or 3",
            ),
            Rule(
                optim.schedule != "constant" and optim.warmup_steps >= self.updates(),
                ("optim.warmup_steps", "optim.schedule", "trainer.steps"),
                "the warm-up must end before the run does",
            ),
        ]

    def _cut_rules(self) -> list[Rule]:
        """Of matrices and experts over ranks."""
        step, model = self.trainer, self.model
        ways = [way for way in ("tensor_parallel", "expert_parallel") if getattr(step, way) > 1]
        names = tuple(f"trainer.{way}" for way in ways)
        return [
            Rule(
                bool(step.cut) and model.lora.rank is not None,
                ("model.lora.rank", *names),
                "DeepSpeed cuts no layers that have adapters; train them with zero_stage 3, or the whole model",
            ),
            Rule(
                bool(step.cut and model.freeze),
                ("model.freeze", *names),
                "what is frozen is in no checkpoint, which ranks with parts of a model need whole; leave it out",
            ),
            Rule(
                bool(step.cut) and step.offload_optimizer,
                ("trainer.offload_optimizer", *names),
                "DeepSpeed's optimizer on CPUs was not tried with parts of a model; set it to false",
            ),
            Rule(
                len(ways) == 2 and step.zero_stage != 3,
                (*names, "trainer.zero_stage"),
                "in stages 0 to 2 DeepSpeed's norm of the gradient leaves experts out where matrices are cut too; use zero_stage 3",
            ),
        ]

    def _trace_rules(self) -> list[Rule]:
        trace, one = self.log.trace, getattr(self.placement, "processes", "one") == "one"
        wished = trace.steps != TraceConfig.model_fields["steps"].default  # run.yaml of a short run has the default too
        beyond = wished and any(steps[-1] > self.trainer.steps for steps in trace.ranges())
        return [
            Rule(beyond, ("log.trace.steps", "trainer.steps"), "the run ends before that step"),
            Rule(
                "nsys" in trace.parts and (one or not self.placement.gpus_per_rank),
                ("log.trace.with", *(["placement.processes"] if hasattr(self.placement, "processes") else []), "placement.gpus_per_rank"),
                "Ray starts the processes of GPUs under nsys; this run has none",
            ),
        ]


def broken_rules(config: Config) -> list[Rule]:
    """What is not right between settings, each of which is right alone."""
    in_vain = [
        Rule(True, tuple(filter(None, (key, only.setting, only.other))), f"not read; {only.why}")
        for key, only, named in unread(config)
        if named
    ]
    return [*(rule for rule in config.rules() if rule.broken), *in_vain]


def unread(config: Config) -> list[tuple[str, Only, bool]]:
    """Settings that nothing reads beside the others' values: name, the mark that says so, and whether a person named it."""
    return list(_unread(config, config, "", None, named=True))


def _unread(config: Config, section: Section, prefix: str, around: Only | None, *, named: bool) -> Iterator[tuple[str, Only, bool]]:
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{name}", getattr(section, name)
        only = next((mark for mark in field.metadata if isinstance(mark, Only)), around)
        taken_back = value is None and field.default is None  # as `key=null` does with what a file sets
        given = named and name in section.model_fields_set and not taken_back
        if isinstance(value, Section):
            yield from _unread(config, value, f"{key}.", only, named=given)
        elif only is not None and not any(only.holds(value_of(config, name)) for name in (only.setting, only.other) if name):
            yield key, only, given


def values_read(config: Config) -> dict[str, Any]:
    """The settings as JSON values, without those that nothing reads: --config would refuse them."""
    values = config.model_dump(mode="json")
    for key, *_ in unread(config):
        *parents, last = key.split(".")
        del reduce(dict.__getitem__, parents, values)[last]
    return {name: value for name, value in values.items() if value != {}}


def value_of(config: Section, key: str) -> Any:
    """The value at a dotted key."""
    return reduce(getattr, key.split("."), config)
