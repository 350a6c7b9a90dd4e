"""The reward model's objective: the better of two answers gets the higher score (Bradley-Terry)."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from trainer.configs.preferences import RmLossConfig
from trainer.episodes import Batch
from trainer.objectives import Stats

BINS = 10


def pairwise(algorithm: RmLossConfig, batch: Batch, output: tuple[torch.Tensor]) -> tuple[torch.Tensor, Stats]:
    """`output` are the scores [S] of S sequences of one response token each; better and worse answer in turn.

    The loss of a pair is -log sigmoid(better - worse - margin) (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. 1; the margin as
    in Llama 2, https://arxiv.org/abs/2307.09288, eq. 2), plus `center` * (better + worse)^2 (https://arxiv.org/abs/2312.09244, section 4);
    the batch's is the mean over pairs. `tokens_N` may have margin. Statistics are sums over pairs, and those of `confidence`.
    """
    assert batch.counts is not None, "a batch to learn from has counts"
    (scores_S,) = output
    better_P, worse_P = scores_S[0::2], scores_S[1::2]
    margin_P = batch.tokens_N["margin"][0::2] if "margin" in batch.tokens_N else 0.0
    loss_P = -logsigmoid(better_P - worse_P - margin_P)
    if algorithm.center:
        loss_P = loss_P + algorithm.center * (better_P + worse_P).square()
    with torch.no_grad():
        stats = {"score_chosen": better_P.sum(), "score_rejected": worse_P.sum()} | preferred(better_P - worse_P)
    return loss_P.sum() / max(batch.counts.sequences / 2, 1.0), stats


def preferred(difference_P: torch.Tensor) -> Stats:
    """Of differences of scores: how many are right, their sum, and per bin of confidence in the order given the sum of right - confidence.

    A model that is right as often as sigmoid(|difference|) says is calibrated; `reduction.means` makes the calibration error of the bins.
    """
    right_P = (difference_P > 0).float()
    confidence_P = difference_P.abs().sigmoid()  # from 0.5 to 1
    bin_P = ((confidence_P - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, device=difference_P.device).index_add_(0, bin_P, right_P - confidence_P)
    return {"accuracy": right_P.sum(), "margin": difference_P.sum(), **{f"bin/{i}": gap for i, gap in enumerate(gaps)}}
