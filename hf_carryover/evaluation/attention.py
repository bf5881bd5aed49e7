# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""How much of a block's attention goes to carried rows: an observer of a [`Replay`]."""

from __future__ import annotations

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..modeling_carryover import CarryoverDrafter
from .replay import ReplayedRound


_RECORDING = "hf_carryover_recorded_eager"


class AttentionShare:
    """
    Share of the attention of the rows that predict that falls on carried rows, per layer and head, by the
    number of carried rows.

    Args:
        drafter ([`CarryoverDrafter`]): The drafter that is replayed.

    Attributes:
        sums (`torch.Tensor` of shape `(block_size + 1, num_layers, num_heads)`):
            Shares summed over blocks; first index: the number of carried rows.
        uniform (`torch.Tensor` of shape `(block_size + 1,)`):
            The same for attention that is spread evenly over all that a block sees.
        blocks (`torch.Tensor` of shape `(block_size + 1,)`): How many blocks.
    """

    def __init__(self, drafter: CarryoverDrafter):
        config = drafter.config
        self.drafter = drafter
        self.size = config.block_size
        self.sums = torch.zeros(self.size + 1, config.num_hidden_layers, config.num_attention_heads)
        self.uniform = torch.zeros(self.size + 1)
        self.blocks = torch.zeros(self.size + 1)

    def __call__(self, seen: ReplayedRound) -> None:
        """Add the blocks of a round that carry something."""
        if not seen.carried:
            return
        count = seen.carried["carried_mask"].sum(dim=1).cpu()
        if not count.any():
            return
        shares = torch.stack([self._share(w, seen) for w in self._weights(seen)], dim=1).cpu()
        visible = seen.anchors.cpu() + count + self.drafter.config.block_rows
        chosen = count > 0
        self.sums.index_add_(0, count[chosen], shares[chosen])
        self.uniform.index_add_(0, count[chosen], (count / visible)[chosen])
        self.blocks.index_add_(0, count[chosen], torch.ones(int(chosen.sum())))

    def _weights(self, seen: ReplayedRound) -> list[torch.Tensor]:
        """Attention weights of each layer, `(num_streams, kv_heads, groups * block_rows, keys)`."""
        config, recorded = self.drafter.config, []

        def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
            scores = query.float() @ key.float().transpose(2, 3) * scaling
            if attention_mask is not None:
                scores = scores + attention_mask
            weights = scores.softmax(dim=-1)
            recorded.append(weights)
            return (weights.to(value.dtype) @ value).transpose(1, 2), weights

        before = config._attn_implementation
        ALL_ATTENTION_FUNCTIONS[_RECORDING] = attention
        config._attn_implementation = _RECORDING
        try:
            seen.draft(seen.carried)
        finally:
            config._attn_implementation = before
            del ALL_ATTENTION_FUNCTIONS[_RECORDING]
        return recorded

    def _share(self, weights: torch.Tensor, seen: ReplayedRound) -> torch.Tensor:
        """`(num_streams, num_heads)`: a layer's weights on carried rows, averaged over the predicting rows."""
        rows = self.drafter.config.block_rows
        carried = weights.shape[-1] - rows - seen.carried["carried_mask"].shape[1]  # where they begin
        on_carried = weights[..., carried : weights.shape[-1] - rows].sum(dim=-1)
        by_row = on_carried.view(weights.shape[0], -1, rows)  # kv heads and groups, in the order of the heads
        return by_row[..., -self.size :].mean(dim=-1)

    def summary(self) -> dict:
        """
        `share`, `uniform` (means over blocks that carry); `by_layer_and_head`, a list of lists; `by_carried`, for each
        number of carried rows `carried`, `blocks`, `share`, `uniform`, `by_layer`.
        """
        total = self.blocks.sum().clamp(min=1)
        mean = self.sums.sum(dim=0) / total
        by_carried = [
            {
                "carried": count,
                "blocks": int(self.blocks[count]),
                "share": float(self.sums[count].mean() / self.blocks[count]),
                "uniform": float(self.uniform[count] / self.blocks[count]),
                "by_layer": (self.sums[count].mean(dim=1) / self.blocks[count]).tolist(),
            }
            for count in range(self.size + 1)
            if self.blocks[count]
        ]
        return {
            "blocks": int(self.blocks.sum()),
            "share": float(mean.mean()),
            "uniform": float(self.uniform.sum() / total),
            "by_layer_and_head": mean.tolist(),
            "by_carried": by_carried,
        }


__all__ = ["AttentionShare"]
