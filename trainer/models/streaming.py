"""A model's folder from weights that come one after another: no process holds all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from trainer import models
from trainer.models.checkpoint_names import CheckpointNames

SHARD_BYTES = 512 << 20  # of a file, all of which is in memory while it is filled


def write(
    lm: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    names: CheckpointNames,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """What `models.export` writes, with as many files of weights as they fill. `names` are of the model as transformers has it."""
    with models.drafted(lm, tokenizer, folder, files) as draft:
        lm.save_pretrained(draft, state_dict={}, safe_serialization=True)  # all but weights
        (draft / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
        shards: list[list[str]] = []
        shard: dict[str, torch.Tensor] = {}
        size = total = 0

        def end() -> None:
            save_file(shard, draft / f"{len(shards)}.safetensors", {"format": "pt"})
            shards.append([*shard])
            shard.clear()

        for name, tensor in weights:
            for known, part in names.restore([(name, tensor)]):
                if shard and size + part.nbytes > SHARD_BYTES:
                    end()
                    size = 0
                shard[known] = part.to("cpu", copy=True).contiguous()
                size, total = size + part.nbytes, total + part.nbytes
        end()
        _name(draft, shards, total)


def _name(draft: Path, shards: list[list[str]], total: int) -> None:
    """As transformers names them, with the index that says where each tensor is."""
    if len(shards) == 1:
        (draft / "0.safetensors").rename(draft / SAFE_WEIGHTS_NAME)
        return
    stem, suffix = SAFE_WEIGHTS_NAME.rsplit(".", 1)
    where = {}
    for number, names in enumerate(shards):
        file = f"{stem}-{number + 1:05d}-of-{len(shards):05d}.{suffix}"
        (draft / f"{number}.safetensors").rename(draft / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (draft / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
