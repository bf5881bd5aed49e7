# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Verified first drafts on disk: what carryover training computes without gradient, computed once.

Two thirds of a carryover step go into the first draft and its verification. Where the first draft is that of the
drafter a run *starts* from, at the same anchors in every epoch, they can be kept, and runs that start from the same
drafter (a control, other seeds of the order, other learning rates) share them, anchor by anchor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..configuration_carryover import CarryoverConfig
from .files import load_tensors, save_tensors


@dataclass
class FirstDrafts:
    """
    The verified first drafts of one recording.

    Args:
        positions, accepted (`torch.LongTensor` of shape `(num_anchors,)`): `a` and `m`.
        proposals, predictions (`torch.LongTensor` of shape `(num_anchors, block_size)`):
            `y_1 … y_B`, and the target's likeliest next token behind each rejected one.
        features (`torch.Tensor` of shape `(num_rejected, feature_size)`, *optional*):
            Verified states of the rejected rows, anchor by anchor.
    """

    positions: torch.LongTensor
    accepted: torch.LongTensor
    proposals: torch.LongTensor
    predictions: torch.LongTensor
    features: torch.Tensor | None = None

    def dense_features(self) -> torch.Tensor:
        """`(num_anchors, block_size, feature_size)`, 0 in rows that were accepted."""
        rows = torch.arange(1, self.proposals.shape[1] + 1)
        dense = self.features.new_zeros((*self.proposals.shape, self.features.shape[-1]))
        dense[rows > self.accepted.unsqueeze(1)] = self.features
        return dense


class DraftBank:
    """
    A folder of first drafts, one safetensors file per recording.

    Args:
        folder (`str` or `Path`): Where they are.
        identity (`bytes`): Of everything they depend on beside the recording; see [`fingerprint`].
    """

    def __init__(self, folder: str | Path, identity: bytes):
        self.folder, self.identity = Path(folder), identity

    def path(self, token_ids: torch.LongTensor, example: int) -> Path:
        """The file of a recording, which is known by its tokens and its number (anchors depend on it)."""
        digest = hashlib.sha256(self.identity + token_ids.cpu().numpy().tobytes() + str(example).encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest}.safetensors"

    def load(self, path: Path, with_features: bool) -> FirstDrafts | None:
        """What `save` wrote; `None` where nothing is, or what is there is damaged."""
        names = () if with_features else ("positions", "accepted", "proposals", "predictions")
        tensors = load_tensors(path, *names)
        return None if tensors is None else FirstDrafts(**tensors)

    def save(self, path: Path, drafts: FirstDrafts) -> None:
        """Write one recording's drafts; the file is there as a whole or not at all."""
        save_tensors(path, vars(drafts))


# What of a configuration a first draft depends on beside the weights and their shapes.
_DRAFTING = (
    "block_size",
    "anchor_first",
    "block_attention",
    "layer_types",
    "sliding_window",
    "sliding_window_from",
    "rope_parameters",
    "num_attention_heads",
    "hidden_act",
    "rms_norm_eps",
    "mask_token_id",
    "target_layer_ids",
    "logit_scale",
    "logit_softcapping",
    "embedding_scale",
)


def drafting_settings(config: CarryoverConfig) -> dict[str, Any]:
    """What of a configuration two drafters must share to make the same first drafts from the same weights."""
    return {name: getattr(config, name) for name in _DRAFTING}


def fingerprint(drafter: nn.Module, *others) -> bytes:
    """A digest of all weights of a drafter and of `others`, by their `repr`."""
    digest = hashlib.sha256(repr(others).encode())
    for name, tensor in sorted(drafter.state_dict().items()):
        if not name.startswith("carry_"):  # what a first draft without carry does not use
            digest.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
