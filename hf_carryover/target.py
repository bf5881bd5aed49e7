# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What a drafter needs from its target: fit, features, embedding, head, and layers to start from."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from .configuration_carryover import CarryoverConfig, default_target_layer_ids
from .modeling_carryover import CarryoverDrafter


# Up to transformers 5.22 a list in `output_hidden_states` counts decoder layers (and the embedding is left out of the
# tuple that comes back), from 5.23 on it counts the entries of the full tuple. Can go when 5.23 is the oldest version.
_LIST_COUNTS_LAYERS = Version(transformers.__version__).release < (5, 23)


def hidden_state_indices(target_layer_ids: list[int]) -> list[int]:
    """
    What to pass as `output_hidden_states`, so that the target keeps no other layers than these: the output of decoder
    layer `k` is entry `k + 1` of the full tuple, since entry 0 is the embedding. Read the result with
    [`gather_features`]; the two are the only places that know the offset.
    """
    return [k if _LIST_COUNTS_LAYERS else k + 1 for k in target_layer_ids]


def gather_features(hidden_states: tuple[torch.Tensor, ...], target_layer_ids: list[int], device=None) -> torch.Tensor:
    """
    Concatenate the tapped layers.

    Args:
        hidden_states (`tuple[torch.Tensor]`):
            As the target returned them, all or those of [`hidden_state_indices`], each
            `(batch, rows, target_hidden_size)`.
        target_layer_ids (`list[int]`): 0-based decoder layers, increasing.
        device (`torch.device`, *optional*): Where the result is wanted.

    Returns:
        `torch.Tensor` of shape `(batch, rows, len(target_layer_ids) * target_hidden_size)`.

    Raises:
        ValueError: If the target did not return one of the layers.
    """
    # The full tuple has no holes, and reaches one entry past the last layer's id.
    selected = any(states is None for states in hidden_states) or len(hidden_states) == target_layer_ids[-1] + 1
    offset = 0 if selected and _LIST_COUNTS_LAYERS else 1
    places = [k + offset for k in target_layer_ids]
    parts = [hidden_states[i] if i < len(hidden_states) else None for i in places]
    if any(part is None for part in parts):
        raise ValueError(
            f"The target returned {len(hidden_states)} hidden states, and not all of the layers {target_layer_ids} "
            "(`target_layer_ids`) among them. A drafter needs a target whose forward supports `output_hidden_states`."
        )
    return torch.cat([part.to(device or part.device) for part in parts], dim=-1)


def unwrap_target(target: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper (its adapters stay active), or `target` itself."""
    base = getattr(target, "get_base_model", None)
    return base() if callable(base) else target


def text_config(target: PreTrainedModel):
    """Configuration of the target's language model."""
    return target.config.get_text_config()


def head_parameters(target: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight `(vocab_size, target_hidden_size)` and bias of the target's output head."""
    head = target.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise ValueError(
            f"{type(target).__name__} has no output head with a weight (`get_output_embeddings()` gave {head!r}); a "
            "drafter needs a causal language model as target."
        )
    return head.weight, getattr(head, "bias", None)


def check_shapes(config: CarryoverConfig, target: Any, name: str = "") -> None:
    """
    Check that a drafter has the shapes of a target.

    Args:
        config ([`CarryoverConfig`]): Of the drafter.
        target (`PreTrainedConfig`): Config of the target's language model.
        name (`str`, *optional*): What to call the target, with a space before.

    Raises:
        ValueError: With both values, when vocabulary, hidden size, depth or layer ids do not fit.
    """
    pairs = (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("num_target_layers", config.num_target_layers, target.num_hidden_layers),
    )
    for key, ours, theirs in pairs:
        if ours is not None and ours != theirs:
            raise ValueError(
                f"The drafter does not fit the target{name}: drafter `{key}` is {ours}, the target has {theirs}. Use "
                "a drafter trained for this target."
            )
    if config.target_layer_ids[-1] >= target.num_hidden_layers:  # a converted drafter may not know the depth
        raise ValueError(
            f"The drafter does not fit the target{name}: it reads layers {config.target_layer_ids} "
            f"(`target_layer_ids`), the target has {target.num_hidden_layers}. Use one trained for this target."
        )


def check_fit(drafter: CarryoverDrafter, target: nn.Module, tokenizer=None) -> None:
    """
    Check that a drafter was made for a target, before any forward pass.

    Args:
        drafter ([`CarryoverDrafter`]): The drafter.
        target (`PreTrainedModel`): The target, PEFT-wrapped or not.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer, to check the mask token too.

    Raises:
        ValueError: With both values, when vocabulary, hidden size, depth, layer ids or the mask token do not fit.
    """
    config, target = drafter.config, unwrap_target(target)
    expected = text_config(target)
    if getattr(target.config, "is_encoder_decoder", False):
        raise ValueError(f"A Carryover drafter needs a decoder-only target, got {type(target).__name__}.")
    check_shapes(config, expected, f" {type(target).__name__}")
    weight, _ = head_parameters(target)
    if weight.shape[-1] != config.target_hidden_size:
        raise ValueError(
            f"The target's head reads states of width {weight.shape[-1]}, the drafter produces "
            f"{config.target_hidden_size} (`target_hidden_size`)."
        )
    if weight.shape[0] != config.vocab_size:
        raise ValueError(
            f"The target's head has {weight.shape[0]} rows, drafter and target configuration say `vocab_size` is "
            f"{config.vocab_size}. Use `resize_token_embeddings`, which keeps the two equal."
        )
    embedded = getattr(target.get_input_embeddings(), "num_embeddings", config.vocab_size)
    if config.mask_token_id is not None:
        known = embedded if tokenizer is None else max(embedded, len(tokenizer))
        if config.mask_token_id >= embedded:
            raise ValueError(
                f"`mask_token_id` {config.mask_token_id} is outside the target's embedding of {embedded} rows "
                f"(tokenizer: {known}). Resize the target's embedding, or train with a learned mask embedding."
            )
        ends = {*_token_ids(target.generation_config), *_token_ids(expected)}
        if config.mask_token_id in ends:
            raise ValueError(
                f"`mask_token_id` {config.mask_token_id} is an end token of the target (`eos_token_id`), and its "
                "embedding means something else. Use an unused token, or `mask_token_id=None` for a learned embedding."
            )


def _token_ids(config) -> list[int]:
    """The end tokens of a configuration."""
    ids = getattr(config, "eos_token_id", None)
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


class PositionLimit:
    """
    How far a block may reach into positions the text itself may never reach.

    A row of a block must be computed as it would be alone. Two kinds of target make that depend on the last position
    of the pass: those with a table of positions, where a row behind its end fails, and those whose RoPE frequencies
    follow the length, where one row changes all others (`dynamic`: past the trained length, `longrope`: when the
    block straddles the original length).

    Args:
        target (`PreTrainedModel`): The target, unwrapped.
    """

    def __init__(self, target: PreTrainedModel):
        config = text_config(target)
        rope = getattr(config, "rope_parameters", None) or {}
        sets = [rope] if "rope_type" in rope else [values for values in rope.values() if isinstance(values, dict)]
        trained = getattr(config, "max_position_embeddings", None)
        # Targets without RoPE may have a position table; that they have none (ALiBi, NoPE) can't be told apart.
        self.hard = [trained] if not sets and trained is not None else []
        self.straddle: list[int] = []
        for values in sets:
            if "dynamic" in values.get("rope_type", "default"):
                self.hard.append(values.get("original_max_position_embeddings") or trained)
            elif values.get("rope_type") == "longrope":
                self.straddle.append(values["original_max_position_embeddings"])

    def clip(self, count: int, anchor: int) -> int:
        """At most `count` proposals behind an anchor at position `anchor`, so that no limit is passed."""
        limits = self.hard + [limit for limit in self.straddle if anchor < limit]
        return min([count, *(limit - 1 - anchor for limit in limits)])


class TargetHead:
    """
    The target's embedding and head as the drafter uses them: gathered to the draft vocabulary, on their own devices.
    A drafter with a head of its own uses that one.

    Args:
        target (`PreTrainedModel`): The target, unwrapped.
        drafter ([`CarryoverDrafter`]): The drafter.
    """

    def __init__(self, target: PreTrainedModel, drafter: CarryoverDrafter):
        self.embed_tokens = target.get_input_embeddings()
        self.scale = drafter.config.embedding_scale
        self.weight, self.bias = head_parameters(target)
        self.token_ids = drafter.draft_token_ids()
        if self.token_ids is not None:
            self.token_ids = self.token_ids.to(self.weight.device)
        if drafter.head_weight is not None:  # its own, which the target's must not replace
            self.weight, self.bias = drafter.head_weight, None
        elif self.token_ids is not None:
            self.weight = self.weight[self.token_ids]
            self.bias = None if self.bias is None else self.bias[self.token_ids]
        mask_id = drafter.config.mask_token_id
        self.mask_embeds = None
        if mask_id is not None:
            self.mask_embeds = self.embed(torch.tensor([mask_id]), drafter.device)[0]

    @torch.no_grad()
    def embed(self, token_ids: torch.LongTensor, device) -> torch.Tensor:
        """
        Target embeddings `(..., target_hidden_size)` of `token_ids` `(...)`, on `device`: those of the embedding
        module, or with `config.embedding_scale` the scaled rows of its weight.
        """
        weight = getattr(self.embed_tokens, "weight", None)
        token_ids = token_ids.to(token_ids.device if weight is None else weight.device)
        if self.scale is None:
            return self.embed_tokens(token_ids).to(device)
        return (nn.functional.embedding(token_ids, weight) * self.scale).to(device)

    @torch.no_grad()
    def rows(self, token_ids: torch.LongTensor, device) -> torch.Tensor:
        """
        `w / |w|²` for the head's rows `w` of `token_ids` `(...)`, of shape `(..., target_hidden_size)`, on `device`;
        0 for tokens that are not drafted.
        """
        slots = token_ids.to(self.weight.device)
        if self.token_ids is None:
            rows = self.weight[slots]
        else:
            wanted = slots
            slots = torch.searchsorted(self.token_ids, wanted).clamp(max=len(self.token_ids) - 1)
            rows = self.weight[slots] * (self.token_ids[slots] == wanted).unsqueeze(-1)
        rows = rows.float()
        return (rows / rows.square().sum(dim=-1, keepdim=True).clamp(min=1e-12)).to(self.weight.dtype).to(device)


def drafter_from_target(
    target: nn.Module,
    *,
    num_hidden_layers: int = 5,
    init_from_target: bool = True,
    draft_token_ids: torch.LongTensor | None = None,
    **config_kwargs: Any,
) -> CarryoverDrafter:
    """
    A new drafter with the target's shapes.

    Args:
        target (`PreTrainedModel`): The target.
        num_hidden_layers (`int`, *optional*, defaults to 5): Drafter layers.
        init_from_target (`bool`, *optional*, defaults to `True`):
            Copy weights of the target's layers (the last ones tapped or near them), its final norm, and for a learned
            mask embedding the mean of its embedding. Every weight whose shape differs keeps its random start.
        draft_token_ids (`torch.LongTensor`, *optional*): Increasing target ids of a reduced draft vocabulary.
        config_kwargs: Further [`CarryoverConfig`] arguments; they win over what the target suggests.

    Returns:
        [`CarryoverDrafter`] in float32 on the target's device, its seed the global one.
    """
    target = unwrap_target(target)
    source = text_config(target)
    heads = source.num_attention_heads
    suggested = {
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "target_hidden_size": source.hidden_size,
        "intermediate_size": getattr(source, "intermediate_size", 4 * source.hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(source, "num_key_value_heads", None) or heads,
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // heads,
        "rms_norm_eps": getattr(source, "rms_norm_eps", 1e-6),
        "max_position_embeddings": source.max_position_embeddings,
        "num_target_layers": source.num_hidden_layers,
        "target_layer_ids": default_target_layer_ids(source.num_hidden_layers),
    }
    rope = getattr(source, "rope_parameters", None)
    # Gemma-like targets hold one set per layer type: then ours are the defaults. Frequencies that follow the length
    # ("dynamic", "longrope") are not taken over: the committed keys would keep those of an earlier length.
    if rope and "rope_type" in rope:
        follows_length = "dynamic" in rope["rope_type"] or rope["rope_type"] == "longrope"
        kept = {"rope_theta": rope["rope_theta"], "rope_type": "default"} if follows_length else dict(rope)
        suggested["rope_parameters"] = kept
    if draft_token_ids is not None:
        suggested["draft_vocab_size"] = len(draft_token_ids)
    config = CarryoverConfig(**{**suggested, "num_hidden_layers": num_hidden_layers, **config_kwargs})
    drafter = CarryoverDrafter(config).to(target.device)
    if draft_token_ids is not None:
        drafter.set_draft_vocabulary(draft_token_ids)
    if init_from_target:
        _copy_target_weights(drafter, target)
    return drafter


@torch.no_grad()
def _copy_target_weights(drafter: CarryoverDrafter, target: PreTrainedModel) -> None:
    """Copy what has the same name and shape from evenly spaced late layers of the target."""
    decoder = target.get_decoder()
    layers = getattr(decoder, "layers", None)
    if layers is not None:
        depth, wanted = len(layers), len(drafter.layers)
        first = depth // 2
        copied = [first + (i * (depth - 1 - first)) // max(wanted - 1, 1) for i in range(wanted)]
        for index, layer in zip(copied, drafter.layers, strict=True):
            _copy_matching(layer, dict(layers[index].named_parameters()))
        _start_fusion(drafter, [layers[index] for index in copied], copied[len(copied) // 2])
        norm = getattr(decoder, "norm", None)
        if norm is not None:
            _copy_matching(drafter.norm, dict(norm.named_parameters()))
    if drafter.mask_embedding is not None:
        embedding = target.get_input_embeddings().weight
        drafter.mask_embedding.copy_(embedding.float().mean(dim=0))


def _start_fusion(drafter: CarryoverDrafter, copied: list[nn.Module], layer_id: int) -> None:
    """
    Let the fusion start as the identity on the tapped layer that feeds the middle one of the copied layers, with the
    mean of their input norms: the copied key and value projections then read what they read in the target.
    """
    config = drafter.config
    norms = [getattr(getattr(layer, "input_layernorm", None), "weight", None) for layer in copied]
    if config.hidden_size != config.target_hidden_size or any(norm is None for norm in norms):
        return
    width = config.target_hidden_size
    tap = min(range(len(config.target_layer_ids)), key=lambda i: abs(config.target_layer_ids[i] - (layer_id - 1)))
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, tap * width : (tap + 1) * width] = torch.eye(width)
    drafter.hidden_norm.weight.copy_(torch.stack([norm.float() for norm in norms]).mean(dim=0))


def _copy_matching(module: nn.Module, source: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if name in source and source[name].shape == parameter.shape:
            parameter.copy_(source[name])


__all__ = [
    "PositionLimit",
    "TargetHead",
    "check_fit",
    "drafter_from_target",
    "gather_features",
    "head_parameters",
    "hidden_state_indices",
    "text_config",
    "unwrap_target",
]
