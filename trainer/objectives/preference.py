"""Learning from preferences without a reward model: DPO and its relatives.

Of each answer its log-probability under the policy and under the reference model is known; h is what the policy has gained on the
reference for the better answer, less what it has gained for the worse one.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from trainer.configs.preferences import PreferenceConfig
from trainer.episodes import Batch
from trainer.objectives import Stats
from trainer.objectives.pairwise import preferred


def preference(algorithm: PreferenceConfig, batch: Batch, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Stats]:
    """`output` are the log-probabilities [N] and entropies [N] of answers' tokens; better and worse answer in turn, or, where `tokens_N`
    has label, answers by themselves.

    `tokens_N` has mask and, but for simpo, reference: the reference model's log-probabilities. label is 1 of good answers, -1 of bad ones.
    `numbers` has kl for kto. Statistics are sums over pairs: those of `preferred` over beta * h, and the implicit rewards
    beta * (policy - reference) of both; over answers by themselves those of `preferred`, whether a gain is above kl where it should be.
    """
    assert batch.counts is not None, "a batch to learn from has counts"
    t, (logp_N, _) = batch.tokens_N, output
    if "label" in t:
        return _alone(algorithm, batch, logp_N)
    pairs = max(batch.counts.sequences / 2, 1.0)
    gained_N = logp_N - t["reference"] if "reference" in t else logp_N
    averaged = algorithm.loss == "simpo" or algorithm.length_normalized
    gained_S = per_sequence(gained_N * t["mask"], batch)
    if averaged:
        gained_S = gained_S / per_sequence(t["mask"], batch).clamp(min=1)
    better_P, worse_P = gained_S[0::2], gained_S[1::2]
    if algorithm.loss == "kto":
        kl = batch.numbers["kl"]
        loss_P = (kto(algorithm, better_P, 1.0, kl) + kto(algorithm, worse_P, -1.0, kl)) / 2
    else:
        loss_P = paired(algorithm, better_P - worse_P)
    loss = loss_P.sum() / pairs
    if algorithm.sft_coef:
        likely_S = per_sequence(logp_N * t["mask"], batch) / per_sequence(t["mask"], batch).clamp(min=1)
        loss = loss - algorithm.sft_coef * likely_S[0::2].sum() / pairs
    with torch.no_grad():
        scores = {"score_chosen": algorithm.beta * better_P.sum(), "score_rejected": algorithm.beta * worse_P.sum()}
        stats = scores | preferred(algorithm.beta * (better_P - worse_P))
    return loss, stats


def _alone(algorithm: PreferenceConfig, batch: Batch, logp_N: torch.Tensor) -> tuple[torch.Tensor, Stats]:
    """Of answers that have a label each."""
    assert batch.counts is not None, "a batch to learn from has counts"
    t, answers = batch.tokens_N, max(batch.counts.sequences, 1.0)
    gained_S = per_sequence((logp_N - t["reference"]) * t["mask"], batch)
    good_S = per_sequence(t["label"], batch).sign()
    loss = kto(algorithm, gained_S, good_S, batch.numbers["kl"]).sum() / answers
    if algorithm.sft_coef:
        likely_S = per_sequence(logp_N * t["mask"], batch) / per_sequence(t["mask"], batch).clamp(min=1)
        loss = loss - algorithm.sft_coef * likely_S[good_S > 0].sum() / answers
    with torch.no_grad():
        return loss, preferred(algorithm.beta * good_S * (gained_S - batch.numbers["kl"]))


def paired(algorithm: PreferenceConfig, h_P: torch.Tensor) -> torch.Tensor:
    """The loss per pair [P].

    sigmoid: -log sigmoid(beta h) (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. 7), with label_smoothing e the mean of both
    orders, weighed 1 - e and e (cDPO, https://ericmitchell.ai/cdpo.pdf, eq. 3);
    robust: their difference, without bias where a share e of the orders is wrong (https://arxiv.org/abs/2403.00409, eq. 12);
    ipo: (h - 1 / (2 beta))^2 (https://arxiv.org/abs/2310.12036, eq. 17);
    simpo: -log sigmoid(beta h - gamma), h of mean log-probabilities without a reference (https://arxiv.org/abs/2405.14734, eq. 6).
    """
    beta, e = algorithm.beta, algorithm.label_smoothing
    if algorithm.loss == "ipo":
        return (h_P - 1 / (2 * beta)).square()
    if algorithm.loss == "simpo":
        return -logsigmoid(beta * h_P - algorithm.gamma)
    right_P, wrong_P = -logsigmoid(beta * h_P), -logsigmoid(-beta * h_P)
    if algorithm.loss == "robust":
        return ((1 - e) * right_P - e * wrong_P) / (1 - 2 * e)
    return (1 - e) * right_P + e * wrong_P


def kto(algorithm: PreferenceConfig, gained_S: torch.Tensor, good_S: torch.Tensor | float, kl: float) -> torch.Tensor:
    """KTO's loss of answers by themselves [S] (https://arxiv.org/abs/2402.01306, eq. 8); `good_S` is 1 for good ones, -1 for bad ones.

    `kl` is how far the policy has gone from the reference, of answers to other prompts: what a gain is measured from.
    """
    good_S = torch.as_tensor(good_S, device=gained_S.device)
    weight_S = torch.where(good_S > 0, algorithm.desirable, algorithm.undesirable)
    return weight_S * (1 - (algorithm.beta * good_S * (gained_S - kl)).sigmoid())


def per_sequence(x_N: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sums over the tokens of each of the micro-batch's sequences [S], in their order."""
    _, which_N = torch.unique_consecutive(batch.episode_N, return_inverse=True)
    count = int(which_N[-1]) + 1 if len(which_N) else 0
    return x_N.new_zeros(count).index_add(0, which_N, x_N)
