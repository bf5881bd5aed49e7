# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The block loss, a plain function of tensors."""

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
) -> torch.Tensor:
    """
    `α_ce · CE(q, x) + α_tv · TV(p, q)` of every label, times its weight.

    Args:
        logits (`torch.Tensor` of shape `(num_anchors, block_size, draft_vocab)`): Draft logits.
        labels (`torch.LongTensor` of shape `(num_anchors, block_size)`): Recorded tokens as draft ids.
        weights (`torch.Tensor` of shape `(num_anchors, block_size)`): `w_k`, and 0 where no label exists.
        target_probs (`torch.Tensor` of shape `(num_anchors, block_size, draft_vocab)`, *optional*):
            The target's probabilities of the draft tokens; needed with `alpha_tv`. What they lack to 1 is outside
            the draft vocabulary, where `q` is 0.

    Returns:
        `torch.Tensor` of shape `(num_anchors, block_size)`: weighted losses in nats, not yet summed.
    """
    scores = logits.float().flatten(0, 1)
    loss = alpha_ce * F.cross_entropy(scores, labels.flatten(), reduction="none")
    if alpha_tv:
        p, q = target_probs.float().flatten(0, 1), scores.softmax(dim=-1)
        outside = (1.0 - p.sum(dim=-1)).clamp(min=0.0)
        loss = loss + alpha_tv * 0.5 * ((p - q).abs().sum(dim=-1) + outside)
    # where, not a product: an ignored row may hold infinities.
    weights = weights.flatten()
    return torch.where(weights > 0, loss * weights, torch.zeros_like(loss)).view(labels.shape)
