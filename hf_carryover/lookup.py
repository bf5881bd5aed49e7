# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
What the text itself says comes next: the continuation of the last place where its ending stood before.

A target that copies from its prompt, or goes on in a pattern, says what stands in the text already. A small drafter
learns to copy late or never. With `config.lookup_ngram_size` it is told instead: the tokens that followed the last
earlier occurrence of the text's longest suffix come into its block as embeddings, one for every position it predicts,
and it learns when to follow them. They are a function of the committed text alone, so nothing of them is stored and
the output stays the target's.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from .modeling_carryover import CarryoverDrafter
from .target import TargetHead


def look_up(text: np.ndarray, ngram_size: int, count: int) -> tuple[np.ndarray | None, int]:
    """
    The tokens behind the last earlier occurrence of the longest suffix of a text.

    Args:
        text (`np.ndarray` of shape `(length,)`): Committed tokens, the anchor last.
        ngram_size (`int`): Longest suffix that is looked for, in tokens.
        count (`int`): Tokens wanted.

    Returns:
        `tuple[np.ndarray | None, int]`: `count` tokens and the length `1 … ngram_size` of the suffix that was found,
        or `None` and 0. Where the text ends before `count` tokens it is taken to go on with the same period.

    Example: `look_up([1, 2, 3, 1, 2], 4, 4)` finds the suffix `1, 2` and gives `3, 1, 2, 3`.
    """
    anchor = len(text) - 1
    ends = np.flatnonzero(text[:anchor] == text[anchor])
    if not len(ends):
        return None, 0
    size = 1
    while size < ngram_size:
        # Before the first token stands nothing that could match.
        longer = ends[ends >= size]
        longer = longer[text[longer - size] == text[anchor - size]] if anchor >= size else longer[:0]
        if not len(longer):
            break
        ends, size = longer, size + 1
    end = int(ends[-1])
    return text[end + 1 + np.arange(count) % (anchor - end)], size


def lookup_hints(head: TargetHead, drafter: CarryoverDrafter, texts: Iterable[np.ndarray]) -> dict:
    """
    What [`CarryoverDrafter.block_states`] and [`CarryoverDrafter.point`] take of texts, one for each block.

    Args:
        head ([`~hf_carryover.target.TargetHead`]): For embeddings and rows of the head.
        drafter ([`CarryoverDrafter`]): The drafter.
        texts (`Iterable[np.ndarray]`): Committed tokens of each block, the anchor last.

    Returns:
        `dict`: `lookup_embeds` and `lookup_rows` of shape `(num_blocks, block_size, target_hidden_size)` and
        `lookup_sizes` of shape `(num_blocks,)`; empty for a drafter that looks nothing up.
    """
    config, device = drafter.config, drafter.device
    if not config.lookup_ngram_size:
        return {}
    found = [look_up(text, config.lookup_ngram_size, config.block_size) for text in texts]
    nothing = np.zeros(config.block_size, dtype=np.int64)
    tokens = torch.from_numpy(np.stack([nothing if ids is None else ids for ids, _ in found]))
    sizes = torch.tensor([size for _, size in found], device=device)
    return {
        "lookup_embeds": head.embed(tokens, device).detach(),
        "lookup_rows": head.rows(tokens, device) * (sizes > 0)[:, None, None].to(head.weight.dtype),
        "lookup_sizes": sizes,
    }


def block_hints(head: TargetHead, drafter: CarryoverDrafter, input_ids, sequence_index, anchor_positions) -> dict:
    """[`lookup_hints`] of the blocks at `anchor_positions` of recorded `input_ids` `(num_sequences, length)`."""
    if not drafter.config.lookup_ngram_size:
        return {}
    recorded = input_ids.cpu().numpy()
    places = zip(sequence_index.tolist(), anchor_positions.tolist(), strict=True)
    return lookup_hints(head, drafter, (recorded[row, : anchor + 1] for row, anchor in places))


def carried_hints(head: TargetHead, drafter: CarryoverDrafter, tokens: torch.LongTensor, first, last) -> dict:
    """
    What [`CarryoverDrafter.point`] takes of the target's predictions behind rejected rows.

    Args:
        head ([`~hf_carryover.target.TargetHead`]): For rows of the head.
        drafter ([`CarryoverDrafter`]): The drafter.
        tokens (`torch.LongTensor` of shape `(num_blocks, rows)`): Likeliest next tokens behind the verified rows.
        first, last (`torch.LongTensor` of shape `(num_blocks,)`):
            The rejected rows of each block are `first … last - 1`; the first of them stands where the anchor is now,
            so that its prediction is for `a + 1`.

    Returns:
        `dict`: `carry_rows` of shape `(num_blocks, block_size, target_hidden_size)`; empty for a drafter that does not
        point at them.
    """
    if not drafter.config.points_at_carried:
        return {}
    places = first.unsqueeze(1) + torch.arange(drafter.config.block_size, device=tokens.device)
    exist = places < last.unsqueeze(1)
    aligned = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))
    rows = head.rows(aligned, drafter.device)
    return {"carry_rows": rows * exist.unsqueeze(-1).to(rows)}


__all__ = ["block_hints", "carried_hints", "look_up", "lookup_hints"]
