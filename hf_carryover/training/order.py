# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The order in which recordings are seen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler


class EpochLengthGroupedSampler(LengthGroupedSampler):
    """
    Recordings of about a length together, in an order that depends on the seed and the epoch alone.

    transformers draws this order from the global generator (up to 5.23 at least): `data_seed` moved nothing, a run
    resumed in a later epoch saw other batches, and processes that had drawn different numbers other shares.

    Args:
        sampler ([`~transformers.trainer_pt_utils.LengthGroupedSampler`]): What transformers made: lengths, batch size.
        seed (`int`): `data_seed`, or `seed` without one.
    """

    def __init__(self, sampler: LengthGroupedSampler, seed: int):
        super().__init__(sampler.batch_size, lengths=sampler.lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order comes next; the trainer calls it before each, also when it goes on in one."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # A seed of its own for each pair: with seed + epoch the second epoch of one were the first of the next.
        seeds = torch.Generator().manual_seed(self.seed)
        own = torch.randint(2**62, (self.epoch + 1,), generator=seeds)[-1]
        self.generator = torch.Generator().manual_seed(int(own))
        return super().__iter__()


__all__ = ["EpochLengthGroupedSampler"]
