# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What the formats have in common: which one a config is of, and how its backbone reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig

from ..configuration_carryover import CarryoverConfig


# The parts that all formats name alike.
BACKBONE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
)


@dataclass
class Reading:
    """
    A checkpoint in our terms.

    Args:
        config (`dict`): Arguments of [`CarryoverConfig`].
        tensors (`dict[str, torch.Tensor]`): The drafter's state.
        notes (`list[str]`): What was left out or can't be known, one sentence each.
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    notes: list[str] = field(default_factory=list)

    def drop(self, prefix: str, why: str) -> None:
        """Leave out the tensors whose names start with `prefix`, and say so."""
        names = sorted(name for name in self.tensors if name.startswith(prefix))
        for name in names:
            del self.tensors[name]
        if names:
            self.notes.append(f"Dropped {', '.join(names)}: {why}.")


def detect_format(config: dict[str, Any]) -> str:
    """
    The format that a `config.json` is of.

    Args:
        config (`dict`): The parsed file.

    Returns:
        `str`: `"carryover"`, `"z-lab"`, `"deepspec"` or `"speculators"`.

    Raises:
        ValueError: If it is none of them, or one of a drafter with other modules.
    """
    if config.get("model_type") == CarryoverConfig.model_type:
        return "carryover"
    kind, architectures = config.get("speculators_model_type"), list(config.get("architectures") or [])
    if kind in ("dflash", "dspark"):
        return "speculators"
    if kind is not None:
        raise ValueError(f"`speculators_model_type` {kind!r} is not supported, only 'dflash' and 'dspark'.")
    known = {"Gemma4DSparkModel": "Gemma 4 layers", "DFlash2DraftModel": "convolutions and a candidate selector"}
    for name in architectures:
        if name in known:
            raise ValueError(f"{name} is not supported: its {known[name]} are not those of a DFlash drafter.")
    if "DFlashDraftModel" in architectures or "dflash_config" in config:
        return "z-lab"
    if "Qwen3DSparkModel" in architectures or {"target_layer_ids", "markov_rank", "num_anchors"} <= set(config):
        return "deepspec"
    raise ValueError(
        f"Not a drafter that can be read: `architectures` {architectures}, `model_type` {config.get('model_type')!r}. "
        "Expected a Carryover, z-lab DFlash, DeepSpec (Qwen3DSparkModel) or speculators (dflash, dspark) folder."
    )


def backbone(values: dict[str, Any], notes: list[str], model_type: str = "qwen3") -> dict[str, Any]:
    """
    Arguments of [`CarryoverConfig`] for the layers, from a config of `model_type` as its own class completes it
    (defaults, old names of RoPE parameters, layer types).
    """
    skipped = ("architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype")
    parsed = AutoConfig.for_model(model_type, **{k: v for k, v in values.items() if k not in skipped})
    result = {name: getattr(parsed, name) for name in BACKBONE_FIELDS if hasattr(parsed, name)}
    rope = dict(parsed.rope_parameters or {})
    if "rope_type" not in rope and "sliding_attention" in rope:  # one set per layer type: the drafters use this one
        rope = dict(rope["sliding_attention"])
    if rope.get("rope_type", "default") == "default" and rope.pop("partial_rotary_factor", 1.0) != 1.0:
        notes.append("Ignored `partial_rotary_factor`, as the original does for plain RoPE.")
    for place in (values, rope):
        if place.get("is_neox_style") is False or place.get("rope_interleaved") or place.get("rope_interleave"):
            raise ValueError(
                "The config asks for RoPE in interleaved pairs, which is not supported: dimension i of a drafter's "
                "key turns with dimension i + half."
            )
    result["rope_parameters"] = rope
    result["layer_types"] = getattr(parsed, "layer_types", None)
    result["sliding_window"] = getattr(parsed, "sliding_window", None)
    if result["layer_types"] is None or "sliding_attention" not in result["layer_types"]:
        result["sliding_window"] = None
    result["target_hidden_size"] = parsed.hidden_size
    result["dtype"] = values.get("dtype") or values.get("torch_dtype")
    return result


def layer_ids(config: dict[str, Any], name: str) -> list[int]:
    """The tapped layers as the key `name` gives them; no formula stands in for a missing list."""
    if not config.get(name):
        raise ValueError(f"The config names no `{name}`, so the target layers the drafter reads are unknown.")
    return list(config[name])


def backbone_config(config: CarryoverConfig) -> dict[str, Any]:
    """The Qwen3 part of a config to write, for the layers of `config`."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default" and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"The layers of other formats turn whole keys, this drafter's a part of them (`partial_rotary_factor` "
            f"{rope['partial_rotary_factor']}): only 'carryover' has a place for it."
        )
    values = {name: getattr(config, name) for name in BACKBONE_FIELDS}
    sliding = "sliding_attention" in config.layer_types
    return {
        "model_type": "qwen3",
        **values,
        "rope_parameters": dict(config.rope_parameters),
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
    }


def require(condition: bool, what: str, value: Any, format_name: str, way_out: str) -> None:
    """Raise a `ValueError` where a drafter has something that a format has no words for."""
    if not condition:
        raise ValueError(f"The format {format_name!r} has no place for {what} ({value}). {way_out}")
