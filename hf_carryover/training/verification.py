# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The frozen target in training: features of recorded sequences, and verification of many branches in one pass."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import DynamicCache

from ..target import gather_features, hidden_state_indices, text_config, unwrap_target
from .files import load_tensors, save_tensors


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
        self._identity: bytes | None = None

    def check_branches(self) -> None:
        """Raise a `ValueError` when [`FrozenTarget.verify`] could not mask branches in this target."""
        name = type(self.model).__name__
        way_out = 'Train with `stage="baseline"`, or without carry.'
        layer_types = set(getattr(self.config, "layer_types", None) or ())
        unknown = layer_types - {"full_attention", "sliding_attention"}
        if unknown or getattr(self.model, "_is_stateful", False):
            found = f"{sorted(unknown)} layers" if unknown else "a recurrent state"
            raise ValueError(
                f"Verifying branches needs a target with full and sliding-window attention alone, {name} has {found}. "
                f"{way_out}"
            )
        backend = self.config._attn_implementation
        if backend not in ("eager", "sdpa"):
            raise ValueError(
                f"Verifying branches needs a mask per branch, which the target's attention backend {backend!r} does "
                f'not take. Load the target with `attn_implementation="sdpa"`. {way_out}'
            )

    @contextmanager
    def _evaluating(self):
        """Dropout and the like are off inside; afterwards every module is in the mode the caller had chosen."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

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
        return self._run(input_ids, attention_mask, keep_cache, keep_logits)

    def _run(self, input_ids, attention_mask, keep_cache: bool = False, keep_logits: bool = False) -> RecordedPass:
        # Without a config every layer of the cache keeps all positions, sliding-window layers too: branches start
        # anywhere in the sequence. The masks apply the window.
        cache = DynamicCache() if keep_cache else None
        model = self.model if keep_logits else self.decoder
        with self._evaluating():
            outputs = model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=keep_cache,
                output_hidden_states=hidden_state_indices(self.layer_ids),
            )
        features = gather_features(outputs.hidden_states, self.layer_ids, input_ids.device)
        return RecordedPass(features, cache, outputs.logits.to(input_ids.device) if keep_logits else None)

    @torch.no_grad()
    def verify(
        self, recorded: RecordedPass, branches: Branches, predict: bool = False
    ) -> tuple[torch.Tensor, torch.LongTensor | None]:
        """
        Features of the wanted branch rows, every anchor an independent branch on top of its recorded sequence.

        Args:
            recorded ([`RecordedPass`]): With its cache, which is left as it was.
            branches ([`Branches`]): The rows.
            predict (`bool`, *optional*, defaults to `False`): Whether the target's predictions are wanted too.

        Returns:
            `tuple[torch.Tensor, torch.LongTensor]`: features `(num_anchors, block_size, feature_size)`, 0 in rows that
            were not wanted; and the target's likeliest next tokens `(num_anchors, block_size)`, or `None`.
        """
        num_sequences, length = recorded.features.shape[:2]
        anchor, row = branches.verify.nonzero(as_tuple=True)
        result = recorded.features.new_zeros((*branches.verify.shape, recorded.features.shape[-1]))
        predictions = torch.zeros_like(branches.tokens) if predict else None
        if anchor.numel() == 0:
            return result, predictions
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
        # Only the whole model has the head and what it does to the logits; without predictions it is left out.
        run = self.model if predict else self.decoder
        with self._evaluating():
            outputs = run(
                input_ids=packed(branches.tokens[anchor, row], 0),
                attention_mask=self._layer_masks(masks),
                position_ids=positions,
                past_key_values=recorded.cache,
                use_cache=True,
                output_hidden_states=hidden_state_indices(self.layer_ids),
            )
        recorded.cache.crop(-width)
        features = gather_features(outputs.hidden_states, self.layer_ids, sequence.device)
        result[anchor, row] = features[sequence, slot]
        if predict:
            predictions[anchor, row] = outputs.logits.argmax(dim=-1).to(sequence.device)[sequence, slot]
        return result, predictions

    def _window(self) -> int | None:
        layer_types = getattr(self.config, "layer_types", None)
        if layer_types is not None and "sliding_attention" not in layer_types:
            return None
        return getattr(self.config, "sliding_window", None)

    def _layer_masks(self, masks: dict[str, torch.Tensor]):
        """What the target's forward takes: one mask, or one per layer type where its layers differ."""
        layer_types = set(getattr(self.config, "layer_types", None) or ())
        if len(layer_types) > 1:
            return masks
        return masks["sliding_attention"] if self._window() is not None else masks["full_attention"]

    def _cached_features(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """
        Features of a batch, from disk and to it. Where one sequence is missing the whole batch is computed: alone it
        would round differently, and a run killed between two files would not go on as if nothing was.
        """
        lengths = attention_mask.sum(dim=1).tolist()
        paths = [self._cache_path(ids[:length]) for ids, length in zip(input_ids, lengths, strict=True)]
        kept = [load_tensors(path, "features") for path in paths]
        if any(tensors is None for tensors in kept):
            new = self._run(input_ids, attention_mask).features
            for i, path in enumerate(paths):
                if kept[i] is None:
                    kept[i] = {"features": new[i, : lengths[i]]}
                    save_tensors(path, kept[i])
        rows = [tensors["features"].to(input_ids.device) for tensors in kept]
        features = rows[0].new_zeros((len(rows), input_ids.shape[1], rows[0].shape[-1]))
        for i, row in enumerate(rows):
            features[i, : row.shape[0]] = row
        return features

    def _cache_path(self, token_ids: torch.LongTensor) -> Path:
        """Name of a sequence's file: a digest of what its features depend on."""
        digest = hashlib.sha256(self.fingerprint() + token_ids.cpu().numpy().tobytes()).hexdigest()
        return self.cache_dir / digest[:2] / f"{digest}.safetensors"

    def fingerprint(self) -> bytes:
        """Of what features depend on, computed once."""
        if self._identity is None:
            self._identity = self._fingerprint()
        return self._identity

    def remember(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor, features: torch.Tensor) -> None:
        """Put features that are known already into the feature cache, if there is one."""
        if self.cache_dir is None:
            return
        for ids, length, rows in zip(input_ids, attention_mask.sum(dim=1).tolist(), features, strict=True):
            path = self._cache_path(ids[:length])
            if not path.exists():
                save_tensors(path, {"features": rows[:length]})

    def _fingerprint(self) -> bytes:
        """
        The target's name, dtype, tapped layers, up to 64 numbers of each of its parameters, and its active adapters: a
        target trained on, or with another adapter, must not read the features of the first.
        """
        name = self.config._name_or_path or type(self.model).__name__
        digest = hashlib.sha256(repr((name, str(self.model.dtype), self.layer_ids)).encode())
        for key, parameter in self.model.named_parameters():
            flat = parameter.detach().flatten()
            numbers = flat[:: max(flat.numel() // 64, 1)].float().cpu().numpy()
            digest.update(f"{key} {tuple(parameter.shape)}".encode() + numbers.tobytes())
        for key, module in self.model.named_modules():
            active = getattr(module, "active_adapters", None)
            if isinstance(active, list):
                digest.update(f"{key} {active} {getattr(module, 'disable_adapters', False)}".encode())
        return digest.digest()


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
