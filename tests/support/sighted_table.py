"""The second table of docs/models.md: what the tests of each family that reads pictures hold."""

from __future__ import annotations

from support.sighted_rows import ONE_BY_ONE, RECURRENT, SIGHTED

from trainer.configs.sections import SEEING

IN_VLLM = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "internvl", "mistral3")
VLLM = {"gemma3": "refused: other log-probabilities"}  # than transformers'


def table() -> str:
    lines = [
        "| transformers' `model_type` | `model.vision` | sequences in a micro-batch | adapters | ZeRO-3 | reward model "
        "| `rollout.engine=hf` | vLLM |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in sorted(SIGHTED):
        vision = "auto" if kind in SEEING else "on"
        own = kind in RECURRENT
        rows = "a row each" if own else "packed"
        shards = "refused" if kind in ONE_BY_ONE else "right"
        hf, scores = ("refused", "not run") if own else ("right", "right")
        vllm = "right" if kind in IN_VLLM else VLLM.get(kind, "refused")
        lines.append(f"| `{kind}` | {vision} | {rows} | right | {shards} | {scores} | {hf} | {vllm} |")
    return "\n".join(lines)
