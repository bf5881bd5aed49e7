# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
z-lab DFlash (`DFlashDraftModel`): Qwen3 layers, the target's embedding and head, row 0 of a block the anchor.

`block_size` counts the anchor's row. Layer ids are ours: `k` is the output of decoder layer `k`. Embeddings are rows
of the target's weight, whatever its module does to them. A head, where a folder has one, is the drafter's own. Sliding
layers are causal unless `is_causal` says otherwise.
"""

from __future__ import annotations

from typing import Any

from ..configuration_carryover import CarryoverConfig
from .formats import Reading, backbone, backbone_config, require


NAME = "z-lab"
# Keys of `dflash_config` that are read, or known to change nothing when drafting.
_READ = {
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "causal",
}


def read(config: dict[str, Any], tensors: dict) -> Reading:
    """A z-lab checkpoint in our terms."""
    dflash = config.get("dflash_config") or {}
    unknown = sorted(set(dflash) - _READ)
    if unknown:
        raise ValueError(f"`dflash_config` has {unknown}, whose meaning is not known here. Known: {sorted(_READ)}.")

    def value(name: str, default=None):
        inner, beside = dflash.get(name), config.get(name)
        if inner is not None and beside is not None and inner != beside:
            raise ValueError(
                f"The config names two values of `{name}`: {inner} in `dflash_config` and {beside} beside it. Remove "
                "the one that the drafter was not trained with."
            )
        return next((given for given in (inner, beside) if given is not None), default)

    reading = Reading({}, dict(tensors))
    layers = backbone(config, reading.notes)
    rows = value("block_size", 16)
    if rows < 2:
        raise ValueError(f"`block_size` {rows} leaves no row behind the anchor; expected at least 2.")
    for name in ("mask_token_id", "target_layer_ids"):
        if value(name) is None:
            raise ValueError(f"The config names no `{name}`, neither in `dflash_config` nor beside it.")
    softcap = value("final_logit_softcapping")
    reading.config = {
        **layers,
        **_attention(config, dflash, layers, rows),
        "block_size": rows - 1,
        "num_target_layers": config.get("num_target_layers"),
        "target_layer_ids": list(value("target_layer_ids")),
        "mask_token_id": value("mask_token_id"),
        "embedding_scale": float(value("input_embedding_scale", 1.0)),
        "logit_scale": float(value("output_multiplier", 1.0)),
        "logit_softcapping": float(softcap) if softcap else None,
    }
    reading.drop("embed_tokens.", "the embedding is the target's")
    if "lm_head.weight" in reading.tensors:  # the format has none: it was put there to be used
        reading.config["own_head"] = True
        reading.tensors["head_weight"] = reading.tensors.pop("lm_head.weight")
    return reading


def _attention(config: dict, dflash: dict, layers: dict, rows: int) -> dict[str, Any]:
    """Who sees whom in a block. A sliding layer without a window is one with a window that holds everything."""
    causal = config.get("is_causal", dflash.get("causal"))
    if "sliding_attention" not in layers["layer_types"]:
        return {"block_attention": "causal" if causal else "bidirectional"}
    window = layers["sliding_window"] or layers["max_position_embeddings"]
    if window < rows:
        raise ValueError(f"`sliding_window` {window} is shorter than a block of {rows} rows, which is not supported.")
    attention = {None: "causal_sliding", True: "causal", False: "bidirectional"}[causal]
    return {"sliding_window": window, "block_attention": attention}


def write(config: CarryoverConfig, tensors: dict, target=None) -> tuple[dict[str, Any], dict]:
    """Config and tensors of a drafter without carry, as z-lab writes them."""
    spec = "Write 'speculators', which has one."
    require(not config.anchor_first, "anchor-first blocks", "`anchor_first`", NAME, spec)
    require(config.markov_rank == 0, "a Markov head", f"`markov_rank` {config.markov_rank}", NAME, spec)
    size = config.draft_vocab_size
    require(size is None and not config.own_head, "a vocabulary or head of its own", f"{size} tokens", NAME, spec)
    layers = backbone_config(config)
    attention = {"causal_sliding": None, "causal": True, "bidirectional": False}[config.block_attention]
    sliding = "sliding_attention" in config.layer_types
    if sliding and config.sliding_window_from == "anchor":
        raise ValueError("The format 'z-lab' counts windows from each row, this drafter's from the anchor.")
    dflash = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    optional = {
        "input_embedding_scale": (config.embedding_scale, 1.0),
        "output_multiplier": (config.logit_scale, 1.0),
        "final_logit_softcapping": (config.logit_softcapping, None),
    }
    dflash.update({name: value for name, (value, default) in optional.items() if value != default})
    values = {
        "architectures": ["DFlashDraftModel"],
        **layers,
        "block_size": config.block_size + 1,
        "num_target_layers": config.num_target_layers,
        "dflash_config": dflash,
    }
    if sliding or attention:
        values["is_causal"] = attention
    return values, tensors
