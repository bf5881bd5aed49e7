# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The frozen target in training: features of recorded sequences, and verification of many branches in one pass."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache

from ..target import gather_features, hidden_state_indices, text_config, unwrap_target


@dataclass
class RecordedPass:
    """
    The target's pass over recorded sequences.

    Args:
        features (`torch.Tensor` of shape `(num_sequences, length, feature_size)`): Tapped layers.
        cache (`DynamicCache`, *optional*): The target's keys and values, all positions of all layers.
        logits (`torch.Tensor` of shape `(num_sequences, length, vocab_size)`, *optional*): The target's own.
    """

    features: torch.Tensor
    cache: DynamicCache | None = None
    logits: torch.Tensor | None = None


@dataclass
class Branches:
    """
    The rejected rows of the first drafts, to be verified: row `j` of anchor `a`, `m < j <= B`, at position `a + j`.

    Rows up to `m` equal the recording, so their states are known; they are read from the recorded pass. That leaves
    the same numbers as a branch of all `B + 1` rows, for less work.

    Args:
        tokens (`torch.LongTensor` of shape `(num_anchors, block_size)`): Proposals `y_1 … y_B`.
        sequence_index, anchor_positions, accepted (`torch.LongTensor` of shape `(num_anchors,)`):
            The sequence, `a` and `m` of each anchor.
        verify (`torch.BoolTensor` of shape `(num_anchors, block_size)`): Rows whose states are wanted.
    """

    tokens: torch.LongTensor
    sequence_index: torch.LongTensor
    anchor_positions: torch.LongTensor
    accepted: torch.LongTensor
    verify: torch.BoolTensor


class FrozenTarget:
    """
    The target as drafter training uses it: no gradient, its own dtype, its parameters untouched.

    Args:
        target (`PreTrainedModel`): The target, PEFT-wrapped or not.
        target_layer_ids (`list[int]`): Tapped decoder layers.
        feature_cache_dir (`str`, *optional*): Folder of cached features.
    """

    def __init__(self, target: nn.Module, target_layer_ids: list[int], feature_cache_dir: str | None = None):
        self.model = unwrap_target(target)
        self.layer_ids = target_layer_ids
        self.cache_dir = None if feature_cache_dir is None else Path(feature_cache_dir)
        self.config = text_config(self.model)
        self.decoder = self.model.get_decoder()

    @torch.no_grad()
    def record(
        self, input_ids: torch.LongTensor, attention_mask: torch.Tensor, keep_cache: bool, keep_logits: bool
    ) -> RecordedPass:
        """
        One pass over right-padded sequences `(num_sequences, length)`. Reads or fills the feature cache when neither
        keys nor logits are wanted.
        """
        if self.cache_dir is not None and not keep_cache and not keep_logits:
            return RecordedPass(self._cached_features(input_ids, attention_mask))
        # Without a config every layer of the cache keeps all positions, sliding-window layers too: branches start
        # anywhere in the sequence. The masks apply the window.
        cache = DynamicCache() if keep_cache else None
        model = self.model if keep_logits else self.decoder
        was_training = self.model.training
        self.model.eval()
        outputs = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=keep_cache,
            output_hidden_states=hidden_state_indices(self.layer_ids),
        )
        self.model.train(was_training)
        features = gather_features(outputs.hidden_states, self.layer_ids)
        return RecordedPass(features, cache, outputs.logits if keep_logits else None)

    @torch.no_grad()
    def verify(self, recorded: RecordedPass, branches: Branches) -> torch.Tensor:
        """
        Features of the wanted branch rows, every anchor an independent branch on top of its recorded sequence.

        Args:
            recorded ([`RecordedPass`]): With its cache, which is left as it was.
            branches ([`Branches`]): The rows.

        Returns:
            `torch.Tensor` of shape `(num_anchors, block_size, feature_size)`, 0 in rows that were not wanted.
        """
        num_sequences, length = recorded.features.shape[:2]
        anchor, row = branches.verify.nonzero(as_tuple=True)
        result = recorded.features.new_zeros((*branches.verify.shape, recorded.features.shape[-1]))
        if anchor.numel() == 0:
            return result
        sequence = branches.sequence_index[anchor]
        counts = torch.bincount(sequence, minlength=num_sequences)
        width = int(counts.max())
        # Anchors are grouped by sequence, so a row's place in its sequence is its rank less the rows before it.
        slot = torch.arange(len(sequence), device=sequence.device) - (counts.cumsum(0) - counts)[sequence]

        def packed(values: torch.Tensor, fill: int) -> torch.Tensor:
            table = values.new_full((num_sequences, width), fill)
            table[sequence, slot] = values
            return table

        owner, order = packed(anchor, -1), packed(row, 0)
        positions = packed(branches.anchor_positions[anchor] + row + 1, 0)
        first = packed((branches.anchor_positions + branches.accepted + 1)[anchor], 0)
        masks = branch_masks(owner, order, positions, first, length, self._window())
        dtype = self.decoder.dtype
        masks = {name: additive_mask(mask, dtype) for name, mask in masks.items()}
        outputs = self.decoder(
            input_ids=packed(branches.tokens[anchor, row], 0),
            attention_mask=self._layer_masks(masks),
            position_ids=positions,
            past_key_values=recorded.cache,
            use_cache=True,
            output_hidden_states=hidden_state_indices(self.layer_ids),
        )
        recorded.cache.crop(-width)
        features = gather_features(outputs.hidden_states, self.layer_ids)
        result[anchor, row] = features[sequence, slot]
        return result

    def _window(self) -> int | None:
        layer_types = getattr(self.config, "layer_types", None)
        if layer_types is not None and "sliding_attention" not in layer_types:
            return None
        return getattr(self.config, "sliding_window", None)

    def _layer_masks(self, masks: dict[str, torch.Tensor]):
        """What the target's forward takes: one mask, or one per layer type where its layers differ."""
        layer_types = set(getattr(self.config, "layer_types", None) or ())
        unknown = layer_types - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(
                f"Draft–verify–draft training supports targets with full and sliding-window attention, "
                f"{type(self.model).__name__} has {sorted(unknown)} layers. Use `stage='baseline'`."
            )
        if len(layer_types) > 1:
            return masks
        return masks["sliding_attention"] if self._window() is not None else masks["full_attention"]

    def _cached_features(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor) -> torch.Tensor:
        lengths = attention_mask.sum(dim=1).tolist()
        paths = [self._cache_path(ids[:length]) for ids, length in zip(input_ids, lengths, strict=True)]
        missing = [i for i, path in enumerate(paths) if not path.exists()]
        if missing:
            width = max(lengths[i] for i in missing)
            cache_dir, self.cache_dir = self.cache_dir, None
            try:
                new = self.record(input_ids[missing, :width], attention_mask[missing, :width], False, False).features
            finally:
                self.cache_dir = cache_dir
            for i, features in zip(missing, new, strict=True):
                _save_atomically(paths[i], features[: lengths[i]].contiguous())
        rows = [load_file(path, device=str(input_ids.device))["features"] for path in paths]
        features = rows[0].new_zeros((len(rows), input_ids.shape[1], rows[0].shape[-1]))
        for i, row in enumerate(rows):
            features[i, : row.shape[0]] = row
        return features

    def _cache_path(self, token_ids: torch.LongTensor) -> Path:
        """Name of a sequence's file: a digest of everything its features depend on that we can name."""
        identity = (self.config._name_or_path or type(self.model).__name__, str(self.model.dtype), self.layer_ids)
        digest = hashlib.sha256(repr(identity).encode() + token_ids.cpu().numpy().tobytes()).hexdigest()
        return self.cache_dir / digest[:2] / f"{digest}.safetensors"


def branch_masks(
    owner: torch.LongTensor,
    order: torch.LongTensor,
    positions: torch.LongTensor,
    first: torch.LongTensor,
    recorded_length: int,
    window: int | None,
) -> dict[str, torch.BoolTensor]:
    """
    Who sees whom in the verification pass. A branch row sees the recorded positions before its branch's first row,
    and the rows of its own branch up to itself. Nothing of another branch, and no padding.

    Args:
        owner (`torch.LongTensor` of shape `(num_sequences, rows)`): Branch of each row, -1 for padding.
        order (`torch.LongTensor` of shape `(num_sequences, rows)`): Number of the row in its branch.
        positions (`torch.LongTensor` of shape `(num_sequences, rows)`): Position in the text.
        first (`torch.LongTensor` of shape `(num_sequences, rows)`): Position of the branch's first row.
        recorded_length (`int`): Recorded keys, in front of the branch keys.
        window (`int`, *optional*): Sliding window of the target's sliding layers.

    Returns:
        `dict[str, torch.BoolTensor]`: `"full_attention"`, and `"sliding_attention"` when there is a window; each
        `(num_sequences, rows, recorded_length + rows)`, true where the key is visible.
    """
    recorded = torch.arange(recorded_length, device=owner.device)
    sees_recorded = (recorded < first.unsqueeze(-1)) & (owner >= 0).unsqueeze(-1)
    sees_branch = (owner.unsqueeze(2) == owner.unsqueeze(1)) & (order.unsqueeze(2) >= order.unsqueeze(1))
    # A padding row sees itself alone: an empty row would be NaN.
    eye = torch.eye(owner.shape[1], dtype=torch.bool, device=owner.device)
    sees_branch = torch.where((owner < 0).unsqueeze(2), eye, sees_branch)
    masks = {"full_attention": torch.cat([sees_recorded, sees_branch], dim=2)}
    if window is not None:
        key_positions = torch.cat([recorded.expand(owner.shape[0], -1), positions], dim=1)
        near = key_positions.unsqueeze(1) > positions.unsqueeze(2) - window
        masks["sliding_attention"] = masks["full_attention"] & near
    return masks


def additive_mask(visible: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """`(batch, 1, rows, keys)` scores to add: 0 where visible, the least finite number elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


def _save_atomically(path: Path, features: torch.Tensor) -> None:
    """Two processes may write the same file: each writes its own and renames it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file({"features": features}, temporary)
    os.replace(temporary, path)
