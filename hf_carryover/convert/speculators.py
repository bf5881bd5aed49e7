# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
speculators `dflash` and `dspark`: either layout (`sample_from_anchor`), an optional reduced vocabulary with its own
head, which must not be replaced by the target's, and for `dspark` a Markov and a confidence head.

`aux_hidden_state_layer_ids` count the embedding: id `k + 1` is our `k`. `block_size` counts rows. Sliding layers are
causal inside a block unless `sliding_window_non_causal`, and their window is counted from the anchor.
"""

from __future__ import annotations

from typing import Any

from ..configuration_carryover import CarryoverConfig
from .deepspec import check_markov
from .formats import Reading, backbone, backbone_config, layer_ids, require


NAME = "speculators"
# The release whose files this was written for.
VERSION = "0.9.0"


def read(config: dict[str, Any], tensors: dict) -> Reading:
    """A speculators checkpoint in our terms."""
    kind, inner = config["speculators_model_type"], dict(config["transformer_layer_config"])
    reading = Reading({}, dict(tensors))
    layers = backbone(inner, reading.notes, inner.get("model_type", "qwen3"))
    layers["dtype"] = config.get("dtype") or layers["dtype"]
    target_width = config.get("target_hidden_size")
    if target_width not in (None, layers["hidden_size"]):
        raise ValueError(f"`target_hidden_size` {target_width} differs from `hidden_size` {layers['hidden_size']}.")
    if layers["sliding_window"] is None:  # sliding layers without a window see everything
        layers["layer_types"] = None
    ids = [k - 1 for k in layer_ids(config, "aux_hidden_state_layer_ids")]
    if -1 in ids:
        raise ValueError("`aux_hidden_state_layer_ids` taps the embedding (0), which is not supported.")
    if config.get("mask_token_id") is None:
        raise ValueError("The config names no `mask_token_id`.")
    anchor_first = bool(config.get("sample_from_anchor", kind == "dspark"))
    rows, reduced = int(config["block_size"]), config["draft_vocab_size"] != layers["vocab_size"]
    reading.config = {
        **layers,
        "anchor_first": anchor_first,
        "block_size": rows if anchor_first else rows - 1,
        "num_target_layers": None,
        "target_layer_ids": ids,
        "mask_token_id": config["mask_token_id"],
        "markov_rank": check_markov({"markov_rank": 256, **config}) if kind == "dspark" else 0,
        "draft_vocab_size": config["draft_vocab_size"] if reduced else None,
        "own_head": reduced and "lm_head.weight" in tensors,
        "embedding_scale": 1.0,
    }
    if layers["sliding_window"] is not None:
        free = config.get("sliding_window_non_causal", False)
        reading.config["block_attention"] = "bidirectional" if free else "causal_sliding"
        reading.config["sliding_window_from"] = "anchor"
    _read_heads(reading, reduced)
    return reading


def _read_heads(reading: Reading, reduced: bool) -> None:
    """Keep a head with rows for a reduced vocabulary; drop what is the target's."""
    if reading.config["own_head"]:
        reading.tensors["head_weight"] = reading.tensors.pop("lm_head.weight")
    if reduced:
        missing = sorted({"d2t", "t2d"} - set(reading.tensors))
        if missing:
            raise ValueError(
                f"The tensors have no {missing}: the draft vocabulary is reduced, and its tokens unknown."
            )
        ids = reading.tensors["d2t"]
        if not bool((ids.diff() >= 0).all()):
            raise ValueError(
                "The draft vocabulary `d2t` is not in the order of the target's ids, as speculators has it."
            )
        reading.tensors["d2t"], reading.tensors["t2d"] = ids.long(), reading.tensors["t2d"].bool()
    else:
        reading.drop("d2t", "the draft vocabulary is the target's")
        reading.drop("t2d", "the draft vocabulary is the target's")
    reading.drop("confidence_head.", "verification is not scheduled by confidence")
    reading.drop("embed_tokens.", "the embedding is the target's")
    reading.drop("lm_head.", "the head is the target's")
    for name in ("verifier_lm_head.", "verifier_norm."):
        reading.drop(name, "the target's, for training only")


def write(config: CarryoverConfig, tensors: dict, target=None) -> tuple[dict[str, Any], dict]:
    """Config and tensors of a drafter without carry, as speculators writes them."""
    sliding = "sliding_attention" in config.layer_types
    causal, zlab = config.block_attention, "Write 'z-lab', which has one."
    capped = (config.logit_scale, config.logit_softcapping, config.embedding_scale)
    require(capped == (1.0, None, 1.0), "scaled logits or embeddings", capped, NAME, zlab)
    require(causal != "causal", "causal attention in full layers", "`block_attention`", NAME, zlab)
    if sliding:
        counted = config.sliding_window_from
        require(counted == "anchor", "windows counted from each row", "`sliding_window_from`", NAME, zlab)
    full = config.own_head and config.draft_vocab_size is None
    require(not full, "a head of its own over the whole vocabulary", "`own_head`", NAME, "Drop it first.")
    tensors = dict(tensors)
    if config.own_head:
        tensors["lm_head.weight"] = tensors.pop("head_weight")
    elif config.draft_vocab_size is not None:
        tensors["lm_head.weight"] = target.head_rows(tensors["d2t"]).to(tensors["fc.weight"].dtype)
    kind = "dspark" if config.markov_rank else "dflash"
    values: dict[str, Any] = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.name, "architectures": target.architectures},
        },
        "transformer_layer_config": backbone_config(config),
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_rows,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [k + 1 for k in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": sliding and causal == "bidirectional",
        "sample_from_anchor": config.anchor_first,
        "tie_word_embeddings": False,
    }
    if kind == "dspark":
        values.update(
            markov_rank=config.markov_rank,
            markov_head_type="vanilla",
            enable_confidence_head=False,
            confidence_head_with_markov=False,
        )
    return values, tensors
