# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""A drafter of another shape that starts with what a trained one has learned."""

from __future__ import annotations

from typing import Any

import torch

from .configuration_carryover import CarryoverConfig
from .modeling_carryover import CarryoverDrafter


# What can change and keep a meaning for the old weights.
RESHAPABLE = (
    "block_size",
    "carry",
    "carry_from",
    "carry_pointer",
    "draft_sampling",
    "lookup_ngram_size",
    "markov_rank",
    "target_layer_ids",
)


@torch.no_grad()
def reshape_drafter(
    drafter: CarryoverDrafter, *, draft_token_ids: torch.LongTensor | None = None, **changes: Any
) -> CarryoverDrafter:
    """
    A copy of a drafter with another block size, draft vocabulary, set of tapped layers, Markov head, n-gram size of
    what it looks up, or carry.

    What both shapes have is kept, what is new starts without effect where it can: tapped layers with weight 0, tokens
    with a Markov bias of 0, carry with `e = 0`. What is looked up has an effect from the start.

    Args:
        drafter ([`CarryoverDrafter`]): The trained drafter, left as it is.
        draft_token_ids (`torch.LongTensor`, *optional*): Increasing target ids of a new draft vocabulary.
        changes: Fields of [`CarryoverConfig`] among `block_size`, `carry`, `carry_from`, `carry_pointer`,
            `draft_sampling`, `lookup_ngram_size`, `markov_rank` and `target_layer_ids`.

    Returns:
        [`CarryoverDrafter`], in the dtype and on the device of the old one.

    Raises:
        ValueError: If something else is to change, or a value is out of range.
    """
    unknown = sorted(set(changes) - set(RESHAPABLE))
    if unknown:
        raise ValueError(
            f"A trained drafter can't change {', '.join(f'`{name}`' for name in unknown)}; expected some of "
            f"{', '.join(RESHAPABLE)}. Start a new one with `drafter_from_target`."
        )
    if draft_token_ids is not None and drafter.config.own_head:
        raise ValueError(
            "A drafter with a head of its own (`own_head`) can't take another draft vocabulary: the head has rows for "
            "its own tokens only."
        )
    values = {**drafter.config.to_dict(), **changes}
    if draft_token_ids is not None:
        values["draft_vocab_size"] = len(draft_token_ids)
    new = CarryoverDrafter(CarryoverConfig(**values)).to(device=drafter.device, dtype=drafter.dtype)
    if draft_token_ids is not None:
        new.set_draft_vocabulary(draft_token_ids)
    old = drafter.state_dict()
    special = {"fc.weight", "markov_head.markov_w2.weight", "d2t", "t2d"}
    for name, value in new.state_dict().items():
        if name in special or name not in old or old[name].shape != value.shape:
            continue
        value.copy_(old[name])
    _copy_fusion(drafter, new)
    if drafter.lookup_embedding is not None and new.lookup_embedding is not None:
        both = min(drafter.config.lookup_ngram_size, new.config.lookup_ngram_size)
        new.lookup_embedding[:both] = drafter.lookup_embedding[:both]
        new.lookup_gate[:both] = drafter.lookup_gate[:both]
    if drafter.carry_gate is not None and new.carry_gate is not None:
        both = min(drafter.config.block_size, new.config.block_size)
        new.carry_gate[:both] = drafter.carry_gate[:both]
    if new.d2t is not None and draft_token_ids is None:
        new.d2t.copy_(drafter.d2t)
        new.t2d.copy_(drafter.t2d)
    if drafter.markov_head is not None and new.config.markov_rank == drafter.config.markov_rank:
        _copy_markov(drafter, new)
    return new


def _copy_fusion(old: CarryoverDrafter, new: CarryoverDrafter) -> None:
    """The columns of layers that both tap; those of new ones are 0."""
    width = old.config.target_hidden_size
    places = {layer: i for i, layer in enumerate(old.config.target_layer_ids)}
    new.fc.weight.zero_()
    for i, layer in enumerate(new.config.target_layer_ids):
        if layer in places:
            j = places[layer]
            new.fc.weight[:, i * width : (i + 1) * width] = old.fc.weight[:, j * width : (j + 1) * width]


def _copy_markov(old: CarryoverDrafter, new: CarryoverDrafter) -> None:
    """The rows of tokens that both draft; those of new ones are 0."""
    before, after = (
        torch.arange(d.config.vocab_size, device=d.device) if d.d2t is None else d.draft_token_ids()
        for d in (old, new)
    )
    rows = torch.full((old.config.vocab_size,), -1, dtype=torch.long, device=before.device)
    rows[before] = torch.arange(len(before), device=before.device)
    source = rows[after]
    weight = old.markov_head.markov_w2.weight[source.clamp(min=0)]
    new.markov_head.markov_w2.weight.copy_(torch.where((source >= 0).unsqueeze(1), weight, 0.0))


__all__ = ["reshape_drafter"]
