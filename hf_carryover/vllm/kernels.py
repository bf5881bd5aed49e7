# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The Triton kernel of the V2 runner: what [`block_layout`] says, for a batch on the device, without a synchronisation.

It runs after vLLM's own `prepare_dflash_inputs`, which lays a round out without carry, and moves what carry moves. Its
outputs are the fixed buffers that captured graphs read, so a replayed graph sees the carried rows through nothing but
slots and lengths. Needs Triton, not vLLM.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def place_carried_kernel(
    # Outputs
    query_slots_ptr,
    seq_lens_ptr,
    context_positions_ptr,
    context_slots_ptr,
    carried_ptr,
    # Inputs
    positions_ptr,
    query_start_loc_ptr,
    num_rejected_ptr,
    block_table_ptr,
    block_table_stride,
    page_size,
    block_rows,
    limit,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + request)
    end = tl.load(query_start_loc_ptr + request + 1)
    rejected = tl.minimum(tl.load(num_rejected_ptr + request), end - start - 1)
    in_use = tl.load(positions_ptr + end - 1) + 1
    carries = in_use + block_rows <= limit
    pages = block_table_ptr + request * block_table_stride
    j = tl.arange(0, BLOCK)

    # Rejected rows go to their own slots.
    row = end - rejected + j
    is_carried = j < tl.where(carries, rejected, 0)
    position = tl.load(positions_ptr + row, mask=is_carried, other=0)
    page = tl.load(pages + position // page_size, mask=is_carried, other=0).to(tl.int64)
    slot = tl.where(page != 0, page * page_size + position % page_size, PADDING)  # page 0 is never written
    tl.store(context_positions_ptr + row, position, mask=is_carried)
    tl.store(context_slots_ptr + row, slot, mask=is_carried)
    tl.store(carried_ptr + row, j >= 0, mask=is_carried)

    # The block goes behind the window.
    is_block = j < tl.where(carries, block_rows, 0)
    index = in_use + j
    page = tl.load(pages + index // page_size, mask=is_block, other=0).to(tl.int64)
    slot = tl.where(page != 0, page * page_size + index % page_size, PADDING)
    tl.store(query_slots_ptr + request * block_rows + j, slot, mask=is_block)
    tl.store(seq_lens_ptr + request, (in_use + block_rows).to(tl.int32), mask=carries)


def place_carried(
    query_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    context_positions: torch.Tensor,
    context_slots: torch.Tensor,
    carried: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor,
    block_table: torch.Tensor,
    *,
    requests: int,
    page_size: int,
    block_rows: int,
    limit: int,
    padding: int,
) -> None:
    """
    Move the rejected rows and the blocks of a batch to where carry has them; see [`block_layout`] for the arguments.

    Args:
        query_slots (`torch.Tensor` of shape `(rows,)`): Slots of the block rows; written.
        seq_lens (`torch.Tensor` of shape `(requests,)`): Slots each block attends to; written.
        context_positions, context_slots (`torch.Tensor` of shape `(rows,)`): Of the window rows; rejected rows are
            written, the others left.
        carried (`torch.BoolTensor` of shape `(rows,)`): Which window rows are carried; written as a whole.
        positions (`torch.Tensor` of shape `(rows,)`): Positions of the window rows, which are their logical slots.
        query_start_loc, num_rejected, block_table (`torch.Tensor`): Of the batch.
        requests (`int`): Requests in the batch.
    """
    carried.zero_()
    place_carried_kernel[(requests,)](
        query_slots,
        seq_lens,
        context_positions,
        context_slots,
        carried,
        positions,
        query_start_loc,
        num_rejected,
        block_table,
        block_table.stride(0),
        page_size,
        block_rows,
        limit,
        PADDING=padding,
        BLOCK=triton.next_power_of_2(block_rows),
    )


__all__ = ["place_carried"]
