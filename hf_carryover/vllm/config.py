# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What vLLM has to know about a drafter's `config.json`, and what it can't serve. Needs no vLLM."""

from __future__ import annotations

from typing import Any

from hf_carryover.configuration_carryover import CarryoverConfig
from hf_carryover.target import check_shapes


# vLLM wraps a DFlash drafter's config and puts "DFlash" before the name of the architecture.
ARCHITECTURE = "CarryoverDrafter"
ARCHITECTURES = (ARCHITECTURE, f"DFlash{ARCHITECTURE}")

# What converted drafters may have and the plugin does not compute.
_AS_USUAL = ("anchor_first", "own_head", "logit_scale", "logit_softcapping", "embedding_scale", "block_attention")

# RoPE types whose table of cosines may simply be made longer.
_EXTENDABLE_ROPE = ("default", "linear", "llama3")


def is_carryover_config(config: Any) -> bool:
    """Whether a draft config, wrapped by vLLM or not, is that of a Carryover drafter."""
    names = getattr(config, "architectures", None) or []
    return getattr(config, "model_type", None) == CarryoverConfig.model_type or any(n in ARCHITECTURES for n in names)


def is_carryover(speculative_config: Any) -> bool:
    """Whether a `SpeculativeConfig` (or `None`) uses a Carryover drafter."""
    draft = getattr(speculative_config, "draft_model_config", None)
    return draft is not None and is_carryover_config(getattr(draft, "hf_config", None))


def points_at_carried(config: Any) -> bool:
    """`config.points_at_carried`, which vLLM's copy of a config does not have."""
    return bool(config.carry and config.carry_pointer)


def refuse_unsupported(config: CarryoverConfig) -> None:
    """
    Refuse what vLLM's DFlash layers can't compute.

    Raises:
        ValueError: With the value, what is supported and the way out.
    """
    if config.carry and config.carry_from != "states":
        raise ValueError(
            f'`carry_from` is "{config.carry_from}"; in vLLM only "states" is supported. Load the drafter with '
            "transformers, or serve it without carry (`carry=False`)."
        )
    last = None if config.num_target_layers is None else config.num_target_layers - 1
    if config.points_at_carried and config.target_layer_ids[-1] != last:
        # The drafter is not shown the target's logits there; they can be had of its last layer alone.
        raise ValueError(
            f"`carry_pointer` is True and `target_layer_ids` is {config.target_layer_ids}; in vLLM a pointer needs "
            f"the target's last layer ({last}). Load the drafter with transformers, or serve it without "
            "(`carry_pointer=False`)."
        )
    if set(config.layer_types) != {"full_attention"}:
        raise ValueError(
            f"`layer_types` is {config.layer_types}; in vLLM only full attention is supported, since a sliding window "
            "there counts slots and not positions. Load the drafter with transformers."
        )
    usual = CarryoverConfig()
    for name in _AS_USUAL:
        if getattr(config, name) != getattr(usual, name):
            raise ValueError(
                f"`{name}` is {getattr(config, name)!r}; in vLLM only {getattr(usual, name)!r} is supported. Load the "
                "drafter with transformers, or serve the checkpoint it was converted from with vLLM's own drafter."
            )
    if config.hidden_act != "silu":
        raise ValueError(f'`hidden_act` is "{config.hidden_act}"; in vLLM only "silu" is supported.')


def adapt_config(config: CarryoverConfig) -> CarryoverConfig:
    """
    Add to a drafter's config, in place, the keys that vLLM reads from a DFlash drafter.

    Args:
        config ([`CarryoverConfig`]): As read from the folder.

    Raises:
        ValueError: If vLLM can't serve this drafter.
    """
    refuse_unsupported(config)
    config.architectures = [ARCHITECTURE]
    # The mask rows are embedded by their place in the block, so the token is a name only.
    config.dflash_config = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id or 0,
        "causal": False,
    }
    return config


def check_serving(config: Any, num_speculative_tokens: int, target: Any, max_model_len: int) -> None:
    """
    Check that a drafter was made for a target and that the requested block fits, before any weights are read.

    Args:
        config (`PreTrainedConfig`): The adapted draft config. `max_position_embeddings` is raised to `max_model_len`
            where the RoPE type allows it: drafter and target share positions, as in `generate`.
        num_speculative_tokens (`int`): Proposals per round that vLLM is asked for.
        target (`PreTrainedConfig`): Config of the target's language model.
        max_model_len (`int`): Of the target, in tokens.

    Raises:
        ValueError: With both values.
    """
    if not 1 <= num_speculative_tokens <= config.block_size:
        raise ValueError(
            f"`num_speculative_tokens` must lie in 1 ... {config.block_size} (the drafter's `block_size`), got "
            f"{num_speculative_tokens}."
        )
    check_shapes(config, target)
    least = 2 * (config.block_size + 1)
    if max_model_len < least:
        raise ValueError(
            f"`max_model_len` must be at least {least}, twice the rows of a block (`block_size` is "
            f"{config.block_size}), got {max_model_len}."
        )
    if config.max_position_embeddings < max_model_len:
        if config.rope_parameters["rope_type"] not in _EXTENDABLE_ROPE:
            raise ValueError(
                f"The drafter's RoPE type {config.rope_parameters['rope_type']!r} is defined up to "
                f"`max_position_embeddings` {config.max_position_embeddings}, `max_model_len` is {max_model_len}. "
                f"Serve with `--max-model-len {config.max_position_embeddings}`."
            )
        config.max_position_embeddings = max_model_len


def expected_tensors(config: Any) -> set[str]:
    """Names of all tensors that a drafter's checkpoint has to hold."""
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    linear = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    plain = ["self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    plain += ["input_layernorm", "post_attention_layernorm"]
    for i in range(config.num_hidden_layers):
        names |= {f"layers.{i}.{name}.weight" for name in linear + plain}
        if config.attention_bias:
            names |= {f"layers.{i}.{name}.bias" for name in linear}
    if config.hidden_size != config.target_hidden_size:
        names |= {"embed_proj.weight", "head_proj.weight"}
    if config.markov_rank:
        names |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    if config.carry:
        names.add("carry_embedding")
    if points_at_carried(config):
        names.add("carry_gate")
    if config.mask_token_id is None:
        names.add("mask_embedding")
    if config.lookup_ngram_size:
        names |= {"lookup_embedding", "lookup_gate", "lookup_scale"}
    if config.draft_vocab_size is not None and config.draft_vocab_size:
        names |= {"d2t", "t2d"}
    return names


__all__ = [
    "ARCHITECTURE",
    "ARCHITECTURES",
    "adapt_config",
    "check_serving",
    "expected_tensors",
    "is_carryover",
    "is_carryover_config",
    "refuse_unsupported",
]
