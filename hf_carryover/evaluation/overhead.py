# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
What carry costs by itself: the time of a draft step against the number of carried rows, everything else fixed.

A draft step is what lies between two passes of the target: fusing the verified window, the block through the drafter's
layers, and the head over the draft vocabulary. Its window has one committed row and 0 … B carried ones; nothing else
changes, so that the difference is the carry's alone. Numbers of carried rows take turns within every repetition.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from ..lookup import lookup_hints
from ..modeling_carryover import CarryoverCache, CarryoverDrafter
from ..target import TargetHead
from .bootstrap import median_estimate


@torch.no_grad()
def measure_overhead(
    drafter: CarryoverDrafter,
    target,
    contexts: tuple[int, ...] = (128, 1024),
    repetitions: int = 15,
    rounds: int = 5,
    seed: int = 0,
) -> list[dict]:
    """
    Args:
        drafter ([`CarryoverDrafter`]): A drafter with carry.
        target (`PreTrainedModel`): Its target, for embedding and head.
        contexts (`tuple[int]`, *optional*, defaults to `(128, 1024)`): Committed rows.
        repetitions (`int`, *optional*, defaults to 15): Paired repetitions.
        rounds (`int`, *optional*, defaults to 5): Draft steps of a repetition; its time is their median.
        seed (`int`, *optional*, defaults to 0): Of the random states.

    Returns:
        `list[dict]`: For each context and number of carried rows `context`, `carried`, `draft_ms` (median and its 95 %
        interval over repetitions), `ratio` to no carried rows, paired by repetition, and `carried_bytes`, the keys and
        values of the carried rows.

    Raises:
        ValueError: If the drafter carries nothing.
    """
    if not drafter.config.carry:
        raise ValueError(
            "The drafter does not carry (`config.carry` is False), so carry has no cost. Use one that does."
        )
    counts = list(range(drafter.config.block_size + 1))
    results = []
    for context in contexts:
        step = _Step(drafter, target, context, seed)
        for count in counts:
            step(count)  # warm-up
        times: dict[int, list[float]] = {count: [] for count in counts}
        for repetition in range(repetitions):
            shift = repetition % len(counts)
            for count in counts[shift:] + counts[:shift]:
                times[count].append(statistics.median(step(count) for _ in range(rounds)))
        for count in counts:
            results.append(
                {
                    "context": context,
                    "carried": count,
                    "draft_ms": median_estimate(times[count]).to_dict(),
                    "ratio": median_estimate([a / b for a, b in zip(times[count], times[0])]).to_dict(),
                    "carried_bytes": count * step.bytes_per_row,
                }
            )
    return results


class _Step:
    """A draft step that can be repeated: it leaves the storage as it found it."""

    def __init__(self, drafter: CarryoverDrafter, target, context: int, seed: int):
        self.drafter, self.head, self.context = drafter, TargetHead(target, drafter), context
        config, dtype, device = drafter.config, drafter.fc.weight.dtype, drafter.device
        torch.manual_seed(seed)
        self.cache = CarryoverCache(config, dtype, device, capacity=context + 2 * config.block_size + 4)
        self.anchor = torch.randn(1, config.target_hidden_size, device=device, dtype=dtype)
        self.features = torch.randn(1, config.block_size + 1, config.feature_size, device=device, dtype=dtype)
        self.embeds = torch.randn(1, config.block_size + 1, config.target_hidden_size, device=device, dtype=dtype)
        self.text = np.arange(context + 1) % 97
        for keys in (self.cache.keys, self.cache.values):
            for buffer in keys:
                buffer.normal_()
        buffers = [*self.cache.keys, *self.cache.values]
        self.bytes_per_row = sum(b[:, :, 0].numel() * b.element_size() for b in buffers)

    def __call__(self, carried: int) -> float:
        """Milliseconds of a step whose window has one committed row and `carried` others."""
        drafter, cache = self.drafter, self.cache
        cache.committed, cache.carried, cache.window = self.context, 0, None
        features = self.features[:, : carried + 1]
        embeds = self.embeds[:, : carried + 1] if drafter.config.carried_token and carried else None
        start = self._now()
        drafter.commit_window(cache, features, 1, embeds)
        hidden = drafter.draft(cache, self.anchor, self.head.mask_embeds, **self._hints())
        drafter.logits(hidden.to(self.head.weight.device), self.head.weight, self.head.bias)
        return 1000 * (self._now() - start)

    def _hints(self) -> dict:
        """What is looked up in a text of as many tokens as there are rows, its time included."""
        return lookup_hints(self.head, self.drafter, [self.text])

    def _now(self) -> float:
        if self.drafter.device.type != "cpu":
            torch.accelerator.synchronize(self.drafter.device)
        return time.perf_counter()


__all__ = ["measure_overhead"]
