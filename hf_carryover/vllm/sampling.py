# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Drawing a batch of blocks left to right. Pure torch, no vLLM."""

from collections.abc import Callable, Mapping

import torch


# vLLM counts temperatures below as greedy.
GREEDY_TEMPERATURE = 1e-5


def draw_blocks(
    logits: torch.Tensor,
    anchors: torch.Tensor,
    markov_bias: Callable[[torch.Tensor], torch.Tensor | None],
    token_ids: torch.Tensor | None,
    vocab_size: int,
    temperature: torch.Tensor | None = None,
    generators: Mapping[int, torch.Generator] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Draw the proposals of every request, `y_k` from `softmax((logits_k + W2 · W1[y_{k-1}]) / T)`, `y_0 = x_a`.

    Args:
        logits (`torch.Tensor` of shape `(requests, proposals, draft vocabulary)`): Float32, without the Markov bias.
        anchors (`torch.Tensor` of shape `(requests,)`): Anchor tokens `x_a`.
        markov_bias (`Callable`): From target tokens `(requests,)` to the bias, or to `None` without a Markov head.
        token_ids (`torch.Tensor` of shape `(draft vocabulary,)`, *optional*): Target ids of a reduced vocabulary.
        vocab_size (`int`): Of the target.
        temperature (`torch.Tensor` of shape `(requests,)`, *optional*):
            Draw instead of taking the likeliest token; requests with temperature 0 stay greedy.
        generators (`Mapping[int, torch.Generator]`, *optional*): Of the requests that have a seed.

    Returns:
        `tuple[torch.Tensor, torch.Tensor | None]`: Proposals `(requests, proposals)` in target ids, and with
        `temperature` the distribution each was drawn from, `(requests, proposals, vocab_size)`.
    """
    previous, drawn, kept = anchors, [], []
    greedy = None if temperature is None else temperature < GREEDY_TEMPERATURE
    for k in range(logits.shape[1]):
        row, bias = logits[:, k], markov_bias(previous)
        row = row if bias is None else row + bias
        choice = row.argmax(dim=-1)
        if temperature is not None:
            q = torch.softmax(row / torch.where(greedy, 1.0, temperature).unsqueeze(1), dim=-1)
            choice = torch.where(greedy, choice, _draw(q, generators or {}))
            kept.append(q)
        previous = choice if token_ids is None else token_ids[choice]
        drawn.append(previous)
    if not drawn:
        return anchors.new_zeros((anchors.shape[0], 0), dtype=torch.long), None
    probs = torch.stack(kept, dim=1) if kept else None
    if probs is not None and token_ids is not None:
        full = probs.new_zeros((*probs.shape[:2], vocab_size))
        probs = full.index_copy_(2, token_ids, probs)
    return torch.stack(drawn, dim=1), probs


def _draw(q: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """One token a row: `argmax(q / noise)` with exponential noise draws from `q`, without a synchronisation."""
    noise = torch.empty_like(q)
    if len(generators) < q.shape[0]:
        noise.exponential_()
    for row, generator in generators.items():
        noise[row].exponential_(generator=generator)
    return (q / noise.clamp_min_(torch.finfo(q.dtype).tiny)).argmax(dim=-1)


__all__ = ["draw_blocks"]
