"""Ranks' sums of an optimizer step as means over the global batch. Runs in the driver, or in the ranks of torchrun."""

from __future__ import annotations

# Sums over tokens that a rank returns, shown as means over the global batch.
PER_TOKEN = ("kl", "kl_old", "divergence", "logprob_diff", "dropped", "clipped", "ratio", "entropy")
# Sums over what is compared: pairs of answers, or answers with a label.
PER_UNIT = ("accuracy", "margin", "score_chosen", "score_rejected")
SUMS = ("pictures", "pictures/encoded")  # that are shown as they are
BIN = "bin/"  # before the number of a bin of confidence: sums of (right - confidence)


def combine(parts: list[dict[str, float]], tokens: float, units: float = 1.0) -> dict[str, float]:
    """Ranks' results of an optimizer step as one: `means`, and what all ranks agree on, taken from the first."""
    same = {name: parts[0][name] for name in ("grad_norm", "lr", "skipped")}
    padded = sum(p["padded_tokens"] for p in parts)
    return {**means(parts, tokens, units), **same, "packing": sum(p["real_tokens"] for p in parts) / max(padded, 1)}


def means(parts: list[dict[str, float]], tokens: float, units: float = 1.0) -> dict[str, float]:
    """Of ranks' sums: those over `tokens`, and over `units` of what is compared, become means; `loss` adds up.

    `rerouted` is a share of `routed`, tokens in each of several layers.
    `calibration` is the expected calibration error (Guo et al. 2017, https://arxiv.org/abs/1706.04599, eq. 3), of sums by bin.
    """
    total = {name: sum(p.get(name, 0.0) for p in parts) for name in {n: None for p in parts for n in p}}
    found = {"loss": total["loss"]} | {name: total[name] / max(tokens, 1.0) for name in PER_TOKEN if name in total}
    found |= {name: total[name] / max(units, 1.0) for name in PER_UNIT if name in total}
    found |= {name: total[name] for name in SUMS if name in total}
    if routed := total.get("routed"):
        found["rerouted"] = total["rerouted"] / routed
    bins = [abs(value) for name, value in total.items() if name.startswith(BIN)]
    return found | ({"calibration": sum(bins) / max(units, 1.0)} if bins else {})
