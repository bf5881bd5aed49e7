# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The block loss and the acceptance metrics, plain functions of tensors."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def block_loss(
    logits: torch.Tensor,
    labels: torch.LongTensor,
    weights: torch.Tensor,
    target_probs: torch.Tensor | None = None,
    alpha_ce: float = 1.0,
    alpha_tv: float = 0.0,
    alpha_kl: float = 0.0,
) -> torch.Tensor:
    """
    `α_ce · CE(q, x) + α_tv · TV(p, q) + α_kl · CE(q, p)` of every label, times its weight.

    Args:
        logits (`torch.Tensor` of shape `(num_anchors, block_size, draft_vocab)`): Draft logits.
        labels (`torch.LongTensor` of shape `(num_anchors, block_size)`): Recorded tokens as draft ids.
        weights (`torch.Tensor` of shape `(num_anchors, block_size)`): `w_k`, and 0 where no label exists.
        target_probs (`torch.Tensor` of shape `(num_anchors, block_size, draft_vocab)`, *optional*):
            The target's probabilities of the draft tokens; needed with `alpha_tv` or `alpha_kl`. What they lack to 1
            is outside the draft vocabulary, where `q` is 0.

    Returns:
        `torch.Tensor` of shape `(num_anchors, block_size)`: weighted losses in nats, not yet summed.
    """
    scores = logits.float().flatten(0, 1)
    loss = alpha_ce * F.cross_entropy(scores, labels.flatten(), reduction="none")
    p = None if target_probs is None else target_probs.float().flatten(0, 1)
    if alpha_kl:
        # -Σ p log q, without a second tensor of the size of the logits.
        loss = loss + alpha_kl * (p.sum(dim=-1) * scores.logsumexp(dim=-1) - (p * scores).sum(dim=-1))
    if alpha_tv:
        q = scores.softmax(dim=-1)
        outside = (1.0 - p.sum(dim=-1)).clamp(min=0.0)
        loss = loss + alpha_tv * 0.5 * ((p - q).abs().sum(dim=-1) + outside)
    # where, not a product: an ignored row may hold infinities.
    weights = weights.flatten()
    return torch.where(weights > 0, loss * weights, torch.zeros_like(loss)).view(labels.shape)


def acceptance_counts(accepted: torch.LongTensor, runs: torch.LongTensor, block_size: int) -> torch.LongTensor:
    """
    What the blocks of anchors with `runs` recorded response tokens behind them count for, once verified.

    Args:
        accepted (`torch.LongTensor` of shape `(num_anchors,)`): Accepted proposals, none behind the response's end.
        runs (`torch.LongTensor` of shape `(num_anchors,)`): Recorded tokens from `a + 1` to the response's end.
        block_size (`int`): `B`.

    Returns:
        `torch.LongTensor` of shape `(num_anchors, 2 + 2 B)`: 1 (the block); tokens committed; for each `k` whether
        `y_k` was accepted; and for each `k` whether it was judged, that is, whether `y_1 … y_{k-1}` were accepted and
        the response has a token there.

    Example: of 2 accepted proposals with 5 tokens to come, 3 tokens are committed, the target's own included; with 2
    to come the response ends with the second, and 2 are committed.
    """
    accepted, runs = accepted.unsqueeze(1), runs.unsqueeze(1)
    rows = torch.arange(1, block_size + 1, device=accepted.device)
    judged = (accepted >= rows - 1) & (runs >= rows)
    return torch.cat([torch.ones_like(runs), torch.minimum(accepted + 1, runs), accepted >= rows, judged], dim=1)


def acceptance_metrics(totals: list[float]) -> dict[str, float]:
    """
    `tau`, `blocks` and `acceptance_k` from sums of [`acceptance_counts`] over any set of blocks (micro-average); `nan`
    where nothing was judged.
    """
    blocks, committed, *positions = totals
    metrics = {"tau": committed / blocks if blocks else float("nan"), "blocks": int(blocks)}
    half = len(positions) // 2
    for k, (passed, judged) in enumerate(zip(positions[:half], positions[half:], strict=True), start=1):
        metrics[f"acceptance_{k}"] = passed / judged if judged else float("nan")
    return metrics
