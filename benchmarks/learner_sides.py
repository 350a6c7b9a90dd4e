"""The contenders of `benchmarks.learners`: Flotilla's learners from data, TRL's trainers, and a bare packed loop.

All learn the same rows in the same batches from the same model; each is imported in its own process only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from benchmarks.interleaved import Turns

PROGRAM = "benchmarks.learners"


def rows(count: int, longest: int, seed: int = 0, middle: float = 4.2) -> Iterator[dict[str, str]]:
    """Prompts of ten digits; log-normal answers, as `benchmarks.packing` has them, and a worse one of another length. `middle`: the natural
    logarithm of the median length."""
    rng = random.Random(seed)

    def answer() -> str:
        return "".join(rng.choices("0123456789", k=max(1, min(longest, round(rng.lognormvariate(middle, 0.9))))))

    for _ in range(count):
        yield {"prompt": "".join(rng.choices("0123456789", k=10)), "answer": answer(), "chosen": answer() + "=", "rejected": answer()}


def _task(kind: str, settings: list[str]) -> Any:
    from trainer import train_dpo, train_rm, train_sft
    from trainer.cli import parse

    made: Any = {"sft": train_sft.Sft, "rm": train_rm.Rm, "dpo": train_dpo.Dpo}[kind]
    read: Any = {"sft": train_sft.SftConfig, "rm": train_rm.RmConfig, "dpo": train_dpo.DpoConfig}[kind]
    return made(parse(settings, prog=PROGRAM, model=read))


def flotilla(turns: Turns, kind: str, settings: list[str]) -> None:
    """What `trainer.offline` does of a step, on one rank."""
    from trainer.cli.paths import run_folder
    from trainer.cluster.actors import free_port
    from trainer.data.loader import make_loader
    from trainer.offline.loop import optimizer_step
    from trainer.ranks.worker import Worker

    task = _task(kind, settings)
    config, found = task.config, task.rows()
    worker = Worker(config, task.role(), 0, 1, None, config.placement.threads)
    worker.join("127.0.0.1", free_port())
    worker.build()
    (folder := run_folder(config)).mkdir(parents=True, exist_ok=True)
    task.prepare(worker, found, folder, fresh=True)
    loader = make_loader(config.data, found, config.trainer.prompts_per_step, config.run.seed)
    while True:
        turns.begin()
        sequences = [sequence for row in loader.next() for sequence in task.sequences(row)]
        stats = optimizer_step(worker, sequences)
        turns.end(sum(s.length for s in sequences), stats["loss"])


def bare(turns: Turns, kind: str, settings: list[str]) -> None:
    """The same micro-batches, head and objective with torch alone; DPO's reference says nothing."""
    import torch

    from trainer import models
    from trainer.data.loader import make_loader
    from trainer.data.packing import Sequence, attach, pack
    from trainer.objectives.aggregation import denominators

    task = _task(kind, settings)
    config, found, role = task.config, task.rows(), task.role()
    device = _device(config)
    lm = models.load_lm(config.model, 0, device, train=True, classifier=role.classifier)
    model: torch.nn.Module = role.head(lm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, betas=config.optim.betas, weight_decay=0.0, fused=True)
    loader = make_loader(config.data, found, config.trainer.prompts_per_step, config.run.seed)
    while True:
        turns.begin()
        sequences = [sequence for row in loader.next() for sequence in task.sequences(row)]
        if kind == "dpo":
            sequences = [Sequence(s.prompt_ids, s.response_ids, {"reference": [0.0] * len(s.response_ids)}) for s in sequences]
        lengths_E = torch.tensor([len(s.response_ids) for s in sequences])
        mask_N = torch.ones(int(lengths_E.sum()))
        counts = denominators(mask_N, torch.arange(len(sequences)).repeat_interleave(lengths_E), len(sequences))
        batches = pack(sequences, config.trainer.micro_batch_tokens, pad_id=0, together=role.together)
        attach(batches, {"mask": mask_N}, counts)
        total = 0.0
        for there in batches:
            batch = there.to(device)
            loss, _ = role.objective(batch, model(batch))
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        turns.end(sum(s.length for s in sequences), total)


def _device(config: Any) -> Any:
    """Of the one rank; on CPUs with as many threads as it has."""
    import torch

    if config.placement.gpus_per_rank:
        return torch.device("cuda", 0)
    torch.set_num_threads(config.placement.threads)
    return torch.device("cpu")


def trl(turns: Turns, kind: str, settings: list[str], micro_batch: int) -> None:
    """TRL's trainer, `micro_batch` rows at a time as they come, its default; a DPO reference computed beforehand."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from trainer import models
    from trainer.cli.paths import run_folder

    task = _task(kind, settings)
    config, found, role = task.config, task.rows(), task.role()
    device = _device(config)
    lm: Any = models.load_lm(config.model, 0, device, train=True, classifier=role.classifier)
    lm.config.pad_token_id = task.tokenizer.pad_token_id
    each, number = [task.sequences(row) for row in found], config.trainer.prompts_per_step

    tokens: list[int] = []  # of a step's micro-batches

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            tokens.clear()
            turns.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.end(sum(tokens), 0.0)

    shared: dict[str, Any] = {
        "output_dir": str(run_folder(config)),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": number // micro_batch,
        "max_steps": 100_000,
        "learning_rate": config.optim.lr,
        "lr_scheduler_type": "constant",
        "max_length": None,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": device.type == "cpu",
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }
    if kind == "sft":
        from trl.trainer.sft_config import SFTConfig
        from trl.trainer.sft_trainer import SFTTrainer

        data = [
            {"input_ids": [*s.prompt_ids, *s.response_ids], "completion_mask": [0] * len(s.prompt_ids) + [1] * len(s.response_ids)}
            for (s,) in each
        ]
        given = SFTConfig(**shared, completion_only_loss=True)
        trainer: Any = SFTTrainer(lm, given, train_dataset=Dataset.from_list(data), processing_class=task.tokenizer, callbacks=[Steps()])
    elif kind == "rm":
        from trl.trainer.reward_config import RewardConfig
        from trl.trainer.reward_trainer import RewardTrainer

        data = [{"chosen_ids": [*a.prompt_ids], "rejected_ids": [*b.prompt_ids]} for a, b in each]
        trainer = RewardTrainer(
            lm, RewardConfig(**shared), train_dataset=Dataset.from_list(data), processing_class=task.tokenizer, callbacks=[Steps()]
        )
    else:
        from trl.trainer.dpo_config import DPOConfig
        from trl.trainer.dpo_trainer import DPOTrainer

        data = [{name: row.row[name] for name in ("prompt", "chosen", "rejected")} for row in found]
        given = DPOConfig(**shared, precompute_ref_log_probs=True)
        trainer = DPOTrainer(lm, None, given, train_dataset=Dataset.from_list(data), processing_class=task.tokenizer, callbacks=[Steps()])
    of_batch = trainer.training_step

    def training_step(model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        tokens.append(int(inputs["attention_mask"].sum()) - len(inputs["attention_mask"]))  # Sequence.length has not the last one
        return of_batch(model, inputs, *rest)

    trainer.training_step = training_step
    trainer.train()
