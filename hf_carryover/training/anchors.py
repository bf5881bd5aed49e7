# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Anchors, labels and weights of recorded responses, and the blocks at anchors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Blocks:
    """
    The blocks a loss is taken of: where they start, and what they carry.

    Args:
        sequence_index, positions (`torch.LongTensor` of shape `(num_blocks,)`): Sequence and anchor position.
        counted (`torch.BoolTensor` of shape `(num_blocks,)`): Whether the block takes part in the loss.
        carried (`dict`): `carried_features`, `carried_positions`, `carried_mask` of the drafter's forward, or empty.
        first_accepted (`torch.LongTensor` of shape `(num_blocks,)`, *optional*): `m` of the first draft.
    """

    sequence_index: torch.LongTensor
    positions: torch.LongTensor
    counted: torch.BoolTensor
    carried: dict
    first_accepted: torch.LongTensor | None = None


def response_runs(response_mask: torch.Tensor) -> torch.LongTensor:
    """
    How many response tokens follow each position without a gap.

    Args:
        response_mask (`torch.Tensor` of shape `(num_sequences, length)`): 1 where the target produced the token.

    Returns:
        `torch.LongTensor` of the same shape: `runs[r, t]` = length of the run of ones that starts at `t + 1`. A
        position is a valid anchor iff its run is positive, and label `k` of its block exists iff `k <= run`.

    Example: mask `[0, 1, 1, 0, 1]` gives `[2, 1, 0, 1, 0]`.
    """
    mask = response_mask.long()
    length = mask.shape[1]
    index = torch.arange(length, device=mask.device).expand_as(mask)
    # The next position without a response token, at or behind each position.
    gaps = torch.where(mask == 0, index, length)
    next_gap = torch.flip(torch.cummin(torch.flip(gaps, [1]), dim=1).values, [1])
    starts = torch.cat([next_gap, next_gap.new_full((mask.shape[0], 1), length)], dim=1)[:, 1:]
    return (starts - index - 1).clamp_(min=0)


def sample_anchors(
    response_mask: torch.Tensor, example_index: torch.Tensor, anchors_per_response: int, seed: int, step: int
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """
    Sample anchors per response, without replacement.

    The draw depends on `(seed, step, example index)` alone: not on the batch the example is in, the process, or what
    was drawn before. So accumulation, several processes and resumption see the same anchors.

    Args:
        response_mask (`torch.Tensor` of shape `(num_sequences, length)`): 1 where the target produced the token.
        example_index (`torch.Tensor` of shape `(num_sequences,)`): Number of each example in its dataset.
        anchors_per_response (`int`): Upper limit per sequence.
        seed (`int`), step (`int`): Seed of the run, and number of the optimizer step.

    Returns:
        `tuple[torch.LongTensor, torch.LongTensor]`: sequence of each anchor and its position, both `(num_anchors,)`,
        increasing within a sequence.
    """
    runs = response_runs(response_mask)
    sequences, positions = [], []
    for row, example in enumerate(example_index.tolist()):
        valid = torch.nonzero(runs[row] > 0).flatten().cpu().numpy()
        if len(valid) > anchors_per_response:
            rng = np.random.default_rng([seed, step, example])
            valid = np.sort(rng.choice(valid, size=anchors_per_response, replace=False))
        positions.append(torch.as_tensor(valid, dtype=torch.long))
        sequences.append(torch.full((len(valid),), row, dtype=torch.long))
    device = response_mask.device
    return torch.cat(sequences).to(device), torch.cat(positions).to(device)


def sample_draws(
    sequence_index: torch.LongTensor, example_index: torch.Tensor, width: int, seed: int, step: int
) -> torch.Tensor:
    """
    Uniform numbers in `[0, 1)` for the first draft's proposals, `(num_anchors, width)`, for anchors as
    [`sample_anchors`] returns them. They depend on what the anchors depend on, and on nothing else.
    """
    draws = torch.empty((len(sequence_index), width))
    for row, example in enumerate(example_index.tolist()):
        own = (sequence_index == row).cpu()
        # The fourth entry keeps this stream apart from that of the anchors.
        rng = np.random.default_rng([seed, step, example, 1])
        draws[own] = torch.from_numpy(rng.random((int(own.sum()), width), dtype=np.float32))
    return draws.to(sequence_index.device)


def position_weights(block_size: int, gamma: float, device=None) -> torch.Tensor:
    """`w_k = exp(-(k - 1) / gamma)` for `k = 1 … block_size`, shape `(block_size,)`."""
    return torch.exp(-torch.arange(block_size, dtype=torch.float32, device=device) / gamma)


def block_labels(
    input_ids: torch.LongTensor,
    response_mask: torch.Tensor,
    sequence_index: torch.LongTensor,
    anchor_positions: torch.LongTensor,
    block_size: int,
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    Recorded tokens `x_{a+1} … x_{a+B}` of every block.

    Returns:
        `tuple[torch.LongTensor, torch.BoolTensor]`: labels and whether they exist, both `(num_anchors, block_size)`.
        Labels that don't exist are 0.
    """
    runs = response_runs(response_mask)[sequence_index, anchor_positions]
    offsets = torch.arange(1, block_size + 1, device=input_ids.device)
    valid = offsets <= runs.unsqueeze(1)
    positions = (anchor_positions.unsqueeze(1) + offsets).clamp(max=input_ids.shape[1] - 1)
    labels = input_ids[sequence_index.unsqueeze(1), positions]
    return torch.where(valid, labels, 0), valid


def to_draft_labels(
    labels: torch.LongTensor, valid: torch.BoolTensor, draft_token_ids: torch.LongTensor | None
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """Map target ids to draft ids; a label the draft vocabulary lacks becomes invalid (and 0)."""
    if draft_token_ids is None:
        return labels, valid
    slots = torch.searchsorted(draft_token_ids, labels).clamp(max=len(draft_token_ids) - 1)
    valid = valid & (draft_token_ids[slots] == labels)
    return torch.where(valid, slots, 0), valid


def accepted_prefix(proposals: torch.LongTensor, labels: torch.LongTensor, valid: torch.BoolTensor):
    """`m`, the length of the prefix of proposals `(num_anchors, B)` equal to existing labels, `(num_anchors,)`."""
    return ((proposals == labels) & valid).long().cumprod(dim=1).sum(dim=1)
