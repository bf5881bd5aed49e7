# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The draft step under `torch.compile`, behind [`~CarryoverDrafter.compile_draft`].

From the second round on a draft step always does the same to tensors of the same shapes: fuse the verified window,
write its keys and the block's, run the layers, the head and the draw. That is one function here, [`DraftStep`]; where
its rows go and which of them may be seen are numbers in a tensor. The only size that changes is the number of keys. It
is a symbolic dimension of one compiled graph; or, with fixed shapes, all allocated slots are read and those not in use
are masked, so that CUDA graphs can be recorded.

A compiled step rounds differently. It only proposes: the target verifies every proposal, so the output stays what it
is. Whatever it can't do (the first window, which is the whole prompt; batches; drafters that carry tokens; a head on
another device), and everything after a compilation that failed, runs as it did.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable

import torch
from packaging.version import Version
from torch import nn

from .modeling_carryover import CarryoverCache, CarryoverDrafter
from .proposals import argmax_proposals
from .target import TargetHead


# Modes of `torch.compile` that record CUDA graphs.
_GRAPH_MODES = ("reduce-overhead", "max-autotune")

# By itself torch counts the graphs of all drafters of a process together, and stops compiling at the eighth. Older
# versions have no way out; this can go when 2.13 is the oldest.
_ISOLATED = {"isolate_recompiles": True} if Version(torch.__version__).release >= (2, 13) else {}


class _StepMemory:
    """Storage as the layers see it inside a step: writes by slot number, and returns all keys and values given."""

    def __init__(self, window: torch.Tensor, rope, slots: torch.LongTensor, keys: list, values: list):
        self.window, self.rope, self.slots, self.keys, self.values = window, rope, slots, keys, values

    def keys_and_values(self, attention, hidden_states: torch.Tensor, rope):
        key, value = attention.project_kv(torch.cat([self.window, hidden_states], dim=1), self.rope)
        keys, values = self.keys[attention.layer_idx], self.values[attention.layer_idx]
        keys.index_copy_(2, self.slots, key)
        values.index_copy_(2, self.slots, value)
        return keys, values


class DraftStep(nn.Module):
    """
    Fusing a window, the block, the head and the draw, as one function of tensors.

    Args:
        drafter ([`CarryoverDrafter`]): The drafter.
    """

    def __init__(self, drafter: CarryoverDrafter):
        super().__init__()
        self.drafter = drafter

    def forward(
        self,
        features,
        places,
        anchor_embeds,
        mask_embeds,
        keys,
        values,
        head,
        anchor_id,
        limit: int,
        fixed: bool,
        hints: dict,
    ):
        """
        Args:
            features (`torch.Tensor` of shape `(1, rows, feature_size)`): Of the window; with `fixed` padded.
            places (`torch.LongTensor` of shape `(4,)`):
                Slot of the window's first row, its committed rows, its rows that exist, position of slot 0.
            anchor_embeds (`torch.Tensor` of shape `(1, target_hidden_size)`): Of the anchor.
            mask_embeds (`torch.Tensor` of shape `(target_hidden_size,)`, *optional*): Of the mask token.
            keys, values (`list[torch.Tensor]`): Of each layer `(1, kv_heads, slots, head_dim)`, written in place.
            head (`tuple`): The head's weight, its bias and the target ids of its rows; the last two may be `None`.
            anchor_id (`torch.LongTensor` of shape `(1,)`, *optional*): Draw the likeliest proposals, behind this one.
            limit (`int`): Proposals wanted.
            fixed (`bool`): `keys` are all slots, not just those in use.
            hints (`dict`): Of [`~hf_carryover.lookup.lookup_hints`].

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: float32 logits without Markov bias
            `(limit, output_vocab_size)`, and the proposals `(limit,)` as target ids.
        """
        drafter = self.drafter
        start, committed, existing, first_position = places.unbind()
        window = torch.arange(features.shape[1], device=features.device)
        states = drafter.fuse(features, (window >= committed).unsqueeze(0))
        block = drafter.block_states(anchor_embeds, mask_embeds, hints)
        rows = torch.arange(block.shape[1], device=features.device)
        block_start = start + features.shape[1]
        slots = torch.cat([start + window, block_start + rows])
        queries = (first_position + start + committed + rows).unsqueeze(0)
        positions = torch.cat([first_position + start + window.unsqueeze(0), queries], dim=1)
        rope = drafter.rotary_emb(block, positions)
        block_rope = tuple(part[:, -block.shape[1] :] for part in rope)

        stored = torch.arange(keys[0].shape[2], device=features.device)
        in_block = (stored >= block_start) & (stored < block_start + block.shape[1])
        key_positions = first_position + torch.where(in_block, stored - features.shape[1] + committed, stored)
        visible = None
        if fixed:
            past = stored < start + (existing if drafter.config.carry else committed)
            visible = (past | in_block).view(1, 1, -1)
        masks = drafter.additive_masks(visible, queries, key_positions.unsqueeze(0), block.dtype, in_block)

        memory = _StepMemory(states, rope, slots, keys, values)
        hidden = drafter.run_layers(block, block_rope, memory, masks, hints)[0, :limit]
        weight, bias, token_ids = head
        base = drafter.logits(hidden, weight, bias).float()
        return base, None if anchor_id is None else argmax_proposals(drafter, base[None], anchor_id, token_ids)[0]


class FixedCache(CarryoverCache):
    """
    [`~hf_carryover.modeling_carryover.CarryoverCache`] whose buffers a recorded graph can be used with again: their
    size is a power of two, and when the generation ends they go back to `pool` for the next one.
    """

    def __init__(self, config, dtype, device, first_position: int, capacity: int, pool: _Pool):
        super().__init__(config, dtype, device, first_position, capacity=0)
        self._make = lambda slots: pool.take((1, config.num_key_value_heads, slots, config.head_dim), dtype, device)
        self._lent = pool.lend(self)
        self.reserve(capacity)

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots; the contents are kept."""
        if slots <= self.capacity:
            return
        wanted = max(256, 1 << (slots - 1).bit_length())
        for buffers in (self.keys, self.values):
            for i, old in enumerate(buffers):
                buffers[i] = self._make(wanted)
                buffers[i][:, :, : self.length] = old[:, :, : self.length]
        self._lent[:] = [*self.keys, *self.values]


class _Pool:
    """Buffers of ended generations."""

    def __init__(self):
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple, dtype: torch.dtype, device) -> torch.Tensor:
        """A buffer of this shape, new or used before."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if (tuple(buffer.shape), buffer.dtype, buffer.device) == (shape, dtype, torch.device(device)):
                    # Emptied: of one text nothing may reach the next, least of all a NaN, which no mask hides.
                    return self._free.pop(i).zero_()
        buffer = torch.zeros(shape, dtype=dtype, device=device)
        torch._dynamo.mark_static_address(buffer)
        return buffer

    def lend(self, borrower) -> list[torch.Tensor]:
        """A list whose buffers come back when `borrower` is no more."""
        lent: list[torch.Tensor] = []
        weakref.finalize(borrower, self._take_back, lent)
        return lent

    def _take_back(self, lent: list[torch.Tensor]) -> None:
        with self._lock:
            self._free.extend(lent)


class CompiledDraft:
    """
    The compiled draft step of one drafter. A copy of it, or one that was pickled, compiles anew.

    Args:
        fixed_shapes (`bool`, *optional*):
            Read all allocated slots and mask those not in use, instead of as many as there are. By default with a
            `mode` that records CUDA graphs, on such a device.
        options: Of `torch.compile`.
    """

    def __init__(self, fixed_shapes: bool | None = None, **options):
        self.fixed_shapes, self.options = fixed_shapes, options
        self.failure: str | None = None
        self._step: Callable | None = None
        self._pool = _Pool()

    def __reduce__(self):
        return _compiled_draft, (self.fixed_shapes, self.options)

    def fixed(self, device: torch.device) -> bool:
        """Whether shapes are fixed on this device."""
        if self.fixed_shapes is not None:
            return self.fixed_shapes
        return device.type == "cuda" and self.options.get("mode") in _GRAPH_MODES

    def new_cache(self, drafter: CarryoverDrafter, first_position: int, capacity: int) -> CarryoverCache:
        """Storage of a generation with room for `capacity` slots."""
        where = (drafter.config, drafter.fc.weight.dtype, drafter.device)
        if self.fixed(drafter.device):
            return FixedCache(*where, first_position, capacity, self._pool)
        return CarryoverCache(*where, first_position=first_position, capacity=capacity)

    def takes(self, drafter: CarryoverDrafter, head: TargetHead, cache: CarryoverCache, rows: int, full: int) -> bool:
        """
        Whether the draft after a window of `rows` rows can be compiled, `full` being how many a whole round has. With
        carry others are not: each number would be compiled for itself, and only a last round or two have one.
        """
        usual = drafter.config.carry and not self.fixed(drafter.device)
        return (
            self.failure is None
            and (rows == full if usual else 0 < rows <= full)
            and cache.window is None
            and drafter.config.carried_token is None
            and head.weight.device == drafter.device
        )

    def __call__(
        self, drafter: CarryoverDrafter, head: TargetHead, cache: CarryoverCache, anchor_id, limit, draw, hints
    ):
        """
        Draft behind a window that [`~CarryoverDrafter.commit_window`] left unfused.

        Args:
            drafter ([`CarryoverDrafter`]): The drafter.
            head ([`~hf_carryover.target.TargetHead`]): Embedding and head.
            cache ([`~hf_carryover.modeling_carryover.CarryoverCache`]): Storage of this generation.
            anchor_id (`torch.LongTensor` of shape `(1,)`): The anchor.
            limit (`int`): Proposals wanted: the same in every call, since each number is compiled for itself.
            draw (`bool`): Draw the likeliest proposals.
            hints (`dict`): Of [`~hf_carryover.lookup.lookup_hints`].

        Returns:
            As [`DraftStep.forward`], or `None` if it could not be compiled; then the window is still unfused.
        """
        features, device = cache.unfused, drafter.device
        fixed, config = isinstance(cache, FixedCache), drafter.config
        rows, committed = features.shape[1], cache.committed - cache.window_start
        if fixed:
            features = nn.functional.pad(features, (0, 0, 0, config.block_size + 1 - rows))
        end = cache.window_start + features.shape[1] + config.block_rows
        cache.reserve(end)
        keys, values = cache.keys, cache.values
        if not fixed:
            keys, values = ([buffer[:, :, :end] for buffer in buffers] for buffers in (keys, values))
            for view in (*keys, *values):
                torch._dynamo.maybe_mark_dynamic(view, 2)
            if not config.carry:  # then as many rows as are committed
                torch._dynamo.maybe_mark_dynamic(features, 1)
        places = torch.tensor([cache.window_start, committed, rows, cache.first_position], device=device)
        anchor = head.embed(anchor_id, device)
        anchor_id = anchor_id.to(device) if draw else None
        weights = (head.weight, head.bias, head.token_ids)
        try:
            if self._step is None:
                self._step = torch.compile(DraftStep(drafter), **{**_ISOLATED, **self.options})
            if fixed and device.type == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                base, tokens = self._step(
                    features, places, anchor, head.mask_embeds, keys, values, weights, anchor_id, limit, fixed, hints
                )
        except Exception as error:  # a compiler can fail in any way, and none of them may end a generation
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
            warnings.warn(
                f"The draft step could not be compiled and runs without ({self.failure[:500]}). Compiling for a CPU "
                "needs a C++ compiler.",
                stacklevel=2,
            )
            return None
        cache.unfused = None
        return base, tokens


def _compiled_draft(fixed_shapes: bool | None, options: dict) -> CompiledDraft:
    return CompiledDraft(fixed_shapes, **options)


__all__ = ["CompiledDraft", "DraftStep", "FixedCache"]
