# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The drafter's keys and values for several generations at once, each at a length of its own."""

from __future__ import annotations

import torch

from .modeling_carryover import CarryoverAttention, CarryoverDrafter


class BatchCache:
    """
    [`~hf_carryover.modeling_carryover.CarryoverCache`] for a batch: committed rows, carried rows and block of every
    sequence, in place.

    Slot `s` of a sequence holds position `s`; its verified window is written at slot `committed`, the block behind the
    carried rows. Sequences advance by different numbers of tokens, so every write says its slots; one slot behind the
    last takes what belongs nowhere (padding).

    Args:
        drafter ([`CarryoverDrafter`]): The drafter.
        batch_size (`int`): Sequences.
        capacity (`int`): Slots allocated at first; they grow by doubling.

    Attributes:
        committed, carried (`torch.LongTensor` of shape `(batch_size,)`): Rows of each kind.
    """

    def __init__(self, drafter: CarryoverDrafter, batch_size: int, capacity: int):
        config, device = drafter.config, drafter.device
        self.drafter = drafter
        self.committed = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.carried = torch.zeros_like(self.committed)
        shape = (batch_size, config.num_key_value_heads, capacity + 1, config.head_dim)
        layers = range(config.num_hidden_layers)
        # Zeros: a slot that was never written is masked, but masked NaN would still be NaN.
        self.keys = [torch.zeros(shape, dtype=drafter.fc.weight.dtype, device=device) for _ in layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self._window: torch.Tensor | None = None
        self._window_places: torch.LongTensor | None = None  # slots, which are positions too
        self._window_valid: torch.BoolTensor | None = None
        self._slots: torch.LongTensor | None = None
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None
        self._end = 0

    @property
    def capacity(self) -> int:
        """Slots per sequence."""
        return self.keys[0].shape[2] - 1

    def _reserve(self, slots: int) -> None:
        if slots <= self.capacity:
            return
        extra = max(slots, 2 * self.capacity) - self.capacity
        for buffers in (self.keys, self.values):
            for i, old in enumerate(buffers):
                buffers[i] = torch.cat([old, old.new_zeros((*old.shape[:2], extra, old.shape[3]))], dim=2)

    def select(self, rows: torch.LongTensor) -> None:
        """Keep the sequences `rows`."""
        self.committed, self.carried = self.committed[rows], self.carried[rows]
        if self._window is not None:
            self._window, self._window_places = self._window[rows], self._window_places[rows]
            self._window_valid = self._window_valid[rows]
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]

    @torch.no_grad()
    def commit_window(
        self,
        features: torch.Tensor,
        first: torch.LongTensor,
        rows: torch.LongTensor,
        num_committed: torch.LongTensor,
        carried_embeds: torch.Tensor | None = None,
    ) -> None:
        """
        Fuse the verified windows; their keys are written together with the next blocks.

        Args:
            features (`torch.Tensor` of shape `(batch_size, length, feature_size)`): Target features.
            first (`torch.LongTensor` of shape `(batch_size,)`): Where each window begins in them (left padding).
            rows (`torch.LongTensor` of shape `(batch_size,)`): Verified rows of each.
            num_committed (`torch.LongTensor` of shape `(batch_size,)`):
                How many of these are committed; the others are carried if the drafter carries.
            carried_embeds (`torch.Tensor` of shape `(batch_size, length, target_hidden_size)`, *optional*):
                Target embeddings of the tokens in carried rows.
        """
        if not self.drafter.config.carry:
            rows = num_committed
        place = torch.arange(features.shape[1], device=features.device) - first.unsqueeze(1)
        valid = (place >= 0) & (place < rows.unsqueeze(1))
        rejected = valid & (place >= num_committed.unsqueeze(1))
        carries = (self.drafter.config.carry and carried_embeds is not None) or bool(rejected.any())
        self._window = self.drafter.fuse(features, rejected if carries else None, carried_embeds)
        self._window_places, self._window_valid = place + self.committed.unsqueeze(1), valid
        self.committed = self.committed + num_committed
        self.carried = rows - num_committed

    @torch.no_grad()
    def draft(self, anchor_embeds: torch.Tensor, mask_embeds: torch.Tensor | None, **hints) -> torch.Tensor:
        """
        Write the open windows and draft every sequence's next block.

        Args:
            anchor_embeds (`torch.Tensor` of shape `(batch_size, target_hidden_size)`): Of the anchors.
            mask_embeds (`torch.Tensor` of shape `(target_hidden_size,)`, *optional*): Of the mask token.
            hints: Of [`~hf_carryover.lookup.lookup_hints`].

        Returns:
            `torch.Tensor` of shape `(batch_size, block_size, target_hidden_size)`: states of the predicting rows.
        """
        drafter = self.drafter
        block = drafter.block_states(anchor_embeds, mask_embeds, hints)
        offsets = torch.arange(block.shape[1], device=block.device)
        length = self.committed + self.carried
        positions, slots = self.committed.unsqueeze(1) + offsets, length.unsqueeze(1) + offsets
        self._end = int(slots.max()) + 1
        self._reserve(self._end)
        if self._window is not None:
            nowhere = torch.full_like(self._window_places, self.capacity)
            window_slots = torch.where(self._window_valid, self._window_places, nowhere)
            # Padding rows get any position: what they write is never read.
            window_positions = self._window_places.clamp(min=0)
            self._slots = torch.cat([window_slots, slots], dim=1)
            rope_positions = torch.cat([window_positions, positions], dim=1)
        else:
            self._slots, rope_positions = slots, positions
        self._rope = drafter.rotary_emb(block, rope_positions)
        rope = tuple(part[:, -block.shape[1] :] for part in self._rope)
        hidden = drafter.run_layers(block, rope, self, self._masks(length, positions, block.dtype), hints)
        self._window = None
        return hidden

    def _masks(self, length: torch.LongTensor, positions: torch.LongTensor, dtype: torch.dtype) -> dict:
        """Additive masks of the layer types over the slots in use."""
        slots = torch.arange(self._end, device=length.device).unsqueeze(0)
        behind = slots - length.unsqueeze(1)  # place in the block, negative before it
        in_block = behind >= 0
        key_positions = torch.where(in_block, slots - self.carried.unsqueeze(1), slots)
        visible = (behind < positions.shape[1]).unsqueeze(1)
        return self.drafter.additive_masks(visible, positions, key_positions, dtype, in_block.unsqueeze(1))

    def keys_and_values(self, attention: CarryoverAttention, hidden_states: torch.Tensor, rope):
        """Project windows and blocks in one product, write them to their slots, return all slots in use as views."""
        if self._window is not None:
            hidden_states = torch.cat([self._window, hidden_states], dim=1)
        key, value = attention.project_kv(hidden_states, self._rope)
        keys, values = self.keys[attention.layer_idx], self.values[attention.layer_idx]
        index = self._slots[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        return keys[:, :, : self._end], values[:, :, : self._end]


__all__ = ["BatchCache"]
