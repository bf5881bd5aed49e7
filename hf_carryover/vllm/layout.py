# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Where the rows of a round live in a paged KV cache. Pure torch, no vLLM: the reference of everything that runs there.

A request has `seq_len` slots in use after the target's pass; slot `s` holds the row of position `s`. The rows of the
verified window are the last of them, the last `num_rejected` rejected. The drafter writes every window row to its own
slot. Without carry its block takes the slots from the first rejected row on. With carry the rejected rows stay where
they are, with the carry embedding in them, and the block goes behind the whole window; its *positions* are the same
either way. Attention is not causal and reads every slot of a request, so the carried rows are seen, and nothing else
is: the next window overwrites them, slot by slot, before anything reads them again.
"""

from dataclasses import dataclass

import torch


# vLLM's mark for a row that is not stored.
PADDING_SLOT = -1


@dataclass
class BlockLayout:
    """
    Result of [`block_layout`], for `requests` requests, `rows` window rows in all and blocks of `block_rows` rows.

    Args:
        carried (`torch.BoolTensor` of shape `(rows,)`): Window rows that get the carry embedding.
        window_slots (`torch.LongTensor` of shape `(rows,)`): Slots of the window rows.
        positions (`torch.LongTensor` of shape `(requests, block_rows)`): Positions of the block rows.
        slots (`torch.LongTensor` of shape `(requests, block_rows)`): Slots of the block rows.
        seq_lens (`torch.Tensor` of shape `(requests,)`): Slots the block attends to, itself included.
    """

    carried: torch.Tensor
    window_slots: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor


def slots_of(indices: torch.Tensor, requests: torch.Tensor, block_table: torch.Tensor, page_size: int, limit: int):
    """Physical slots of the logical slots `indices` of `requests`; [`PADDING_SLOT`] from `limit` on."""
    pages = (indices // page_size).clamp(0, block_table.shape[1] - 1)
    slots = block_table[requests, pages].long() * page_size + indices % page_size
    return torch.where(indices < limit, slots, PADDING_SLOT)


def block_layout(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    window_positions: torch.Tensor,
    num_rejected: torch.Tensor | None,
    block_table: torch.Tensor,
    *,
    page_size: int,
    block_rows: int,
    carry: bool,
    limit: int,
) -> BlockLayout:
    """
    Lay out the window and the block of every request of a batch.

    Args:
        query_start_loc (`torch.Tensor` of shape `(requests + 1,)`): Where each request's window rows begin.
        seq_lens (`torch.Tensor` of shape `(requests,)`): Slots in use, the whole window included.
        window_positions (`torch.Tensor` of shape `(rows,)`): Positions of the window rows.
        num_rejected (`torch.Tensor` of shape `(requests,)`, *optional*): Rejected rows; `None` when there are none.
        block_table (`torch.Tensor` of shape `(requests, pages)`): Physical page of each logical page.
        page_size (`int`): Slots per page.
        block_rows (`int`): Rows of a block, `B + 1`.
        carry (`bool`): Whether rejected rows are carried.
        limit (`int`):
            Slots a request can have. Block rows from there on are not stored, and not attended to; a request whose
            block would reach so far behind the window is drafted without carry.

    Returns:
        [`BlockLayout`]
    """
    device = seq_lens.device
    starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
    in_use = seq_lens.long()
    rejected = torch.zeros_like(in_use) if num_rejected is None else num_rejected.long()
    # A window keeps at least its first row, the anchor, which was committed before.
    rejected = torch.minimum(rejected, (ends - starts - 1).clamp(min=0))
    rows = torch.arange(window_positions.shape[0], device=device)
    request = torch.searchsorted(ends, rows, right=True).clamp(max=ends.shape[0] - 1)
    # A block that would reach past the end takes the rejected rows' place: those it must not attend to then.
    carries = (in_use + block_rows <= limit) & carry
    carried = (rows >= (ends - rejected)[request]) & carries[request]
    window_slots = slots_of(in_use[request] - (ends[request] - rows), request, block_table, page_size, limit)

    offsets = torch.arange(block_rows, device=device)
    last_committed = window_positions[(ends - rejected - 1).clamp(min=0)].long()
    positions = last_committed.unsqueeze(1) + 1 + offsets
    first = torch.where(carries, in_use, in_use - rejected)
    indices = first.unsqueeze(1) + offsets
    requests = torch.arange(ends.shape[0], device=device).unsqueeze(1).expand_as(indices)
    slots = slots_of(indices, requests, block_table, page_size, limit)
    lengths = (first + block_rows).clamp(max=limit).to(seq_lens.dtype)
    return BlockLayout(carried, window_slots, positions, slots, lengths)


__all__ = ["PADDING_SLOT", "BlockLayout", "block_layout", "slots_of"]
