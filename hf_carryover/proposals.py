# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Which tokens of a block are proposed, and how many of them."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from .modeling_carryover import CarryoverDrafter


def argmax_proposals(drafter: CarryoverDrafter, base: torch.Tensor, anchor_ids: torch.LongTensor, token_ids):
    """
    Greedy proposals when nothing but the Markov bias changes the logits: `y_k = argmax(base_k + W2 · W1[y_{k-1}])`.

    Args:
        drafter ([`CarryoverDrafter`]): The drafter.
        base (`torch.Tensor` of shape `(batch_size, proposals, output_vocab_size)`): Logits without Markov bias.
        anchor_ids (`torch.LongTensor` of shape `(batch_size,)`): `y_0`, target ids.
        token_ids (`torch.LongTensor` of shape `(output_vocab_size,)`, *optional*): Target ids of a draft vocabulary.

    Returns:
        `torch.LongTensor` of shape `(batch_size, proposals)`: target ids.
    """
    if drafter.markov_head is None:
        tokens = base.argmax(dim=-1)
        return tokens if token_ids is None else token_ids[tokens]
    drawn, previous = [], anchor_ids
    for rows in base.unbind(dim=1):
        # In the dtype of the rows: a sum of two dtypes takes several times as long on CPU.
        bias = drafter.markov_head(previous.to(drafter.device)).to(rows)
        token = (rows + bias).argmax(dim=-1)
        previous = token if token_ids is None else token_ids[token]
        drawn.append(previous)
    return torch.stack(drawn, dim=1)


def confident_proposals(
    drafter: CarryoverDrafter,
    base: torch.Tensor,
    tokens: torch.LongTensor,
    anchor_ids: torch.LongTensor,
    threshold: float,
) -> torch.LongTensor:
    """
    How many of the greedy proposals to verify: up to the first that the drafter gives less than `threshold`, that one
    included. So it is in transformers' assisted generation, and so it has to be when proposals are drawn: a block that
    ended before a token *because of* that token would change what is sampled.

    Args:
        drafter ([`CarryoverDrafter`]): The drafter.
        base (`torch.Tensor` of shape `(batch_size, proposals, output_vocab_size)`): Logits without Markov bias.
        tokens (`torch.LongTensor` of shape `(batch_size, proposals)`): The result of [`argmax_proposals`].
        anchor_ids (`torch.LongTensor` of shape `(batch_size,)`): `y_0`, target ids.
        threshold (`float`): Least probability of a proposal behind which the block goes on.

    Returns:
        `torch.LongTensor` of shape `(batch_size,)`: 1 to `proposals`.
    """
    logits = base.float()
    if drafter.markov_head is not None:
        previous = torch.cat([anchor_ids.to(tokens.device).unsqueeze(1), tokens[:, :-1]], dim=1)
        logits = logits + drafter.markov_head(previous.to(drafter.device)).to(logits)
    confidence = (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()
    unsure = (confidence < threshold)[:, :-1].cumsum(dim=1)
    return 1 + (unsure == 0).sum(dim=1)


def _set_by_the_call(generation_config: GenerationConfig, name: str):
    """A value of assisted generation, `None` where it is the library's default, which counts as unset."""
    value = getattr(generation_config, name)
    return None if value == GenerationConfig._get_default_generation_params().get(name) else value


def proposals_per_round(drafter: CarryoverDrafter, generation_config: GenerationConfig) -> int:
    """
    `block_size`, or fewer when the call sets `num_assistant_tokens`.

    Raises:
        ValueError: If it is less than 1.
    """
    wanted = _set_by_the_call(generation_config, "num_assistant_tokens")
    if wanted is None:
        return drafter.config.block_size
    if wanted < 1:
        raise ValueError(f"`num_assistant_tokens` must be at least 1, got {wanted}.")
    return min(drafter.config.block_size, int(wanted))


def confidence_threshold(generation_config: GenerationConfig) -> float | None:
    """
    `assistant_confidence_threshold`, where the call sets one.

    Raises:
        ValueError: If it is not in [0, 1].
    """
    wanted = _set_by_the_call(generation_config, "assistant_confidence_threshold")
    if wanted is None or wanted == 0:
        return None
    if not 0 < wanted <= 1:
        raise ValueError(f"`assistant_confidence_threshold` must be a probability, from 0 to 1, got {wanted}.")
    return float(wanted)


__all__ = ["argmax_proposals", "confidence_threshold", "confident_proposals", "proposals_per_round"]
