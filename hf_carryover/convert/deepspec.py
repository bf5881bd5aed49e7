# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
DeepSpec DFlash and DSpark (`Qwen3DSparkModel`): anchor-first blocks, layer ids as ours, own copies of the target's
embedding and head, an optional Markov head and an optional confidence head.
"""

from __future__ import annotations

from typing import Any

from .formats import Reading, backbone, layer_ids


NAME = "deepspec"


def check_markov(config: dict[str, Any]) -> int:
    """The rank of the Markov head; a `ValueError` where it is one that depends on more than the previous token."""
    rank, kind = int(config.get("markov_rank") or 0), config.get("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise ValueError(f"`markov_head_type` {kind!r} is not supported, only 'vanilla' (`W2 · W1[y_(k-1)]`).")
    return rank


def read(config: dict[str, Any], tensors: dict) -> Reading:
    """A DeepSpec checkpoint in our terms."""
    reading = Reading({}, dict(tensors))
    layers = backbone(config, reading.notes)
    if "sliding_attention" in layers["layer_types"]:
        raise ValueError("DeepSpec drafters have full attention only, this config names sliding layers.")
    ids = layer_ids(config, "target_layer_ids")
    if -1 in ids:
        raise ValueError(f"`target_layer_ids` {ids} taps the embedding (-1), which is not supported.")
    reading.config = {
        **layers,
        "anchor_first": True,
        "block_size": int(config["block_size"]),
        "num_target_layers": config.get("num_target_layers"),
        "target_layer_ids": ids,
        "mask_token_id": config.get("mask_token_id"),
        "markov_rank": check_markov(config),
        "embedding_scale": 1.0,
    }
    reading.drop("confidence_head.", "its verification is not scheduled by confidence")
    reading.drop("embed_tokens.", "a copy of the target's embedding")
    reading.drop("lm_head.", "a copy of the target's head")
    return reading
