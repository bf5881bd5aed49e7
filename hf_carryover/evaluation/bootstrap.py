# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Paired bootstrap over prompts.

Every number that is compared here is made of ratios of sums (micro-averages): τ = committed tokens / rounds, a speedup
= seconds per token of one system / seconds per token of another. A resample draws prompts with replacement within
each prompt set (the sets are chosen by design, their prompts are the sample) and takes each drawn prompt with the
numbers of *all* systems, so that what makes a prompt easy or slow cancels in a difference or ratio of two systems.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np


NUM_RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value and its percentile interval; NaN where nothing was measured."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """JSON has no NaN: it becomes `None`."""
        return {name: value if np.isfinite(value) else None for name, value in asdict(self).items()}


def ratio(weights: np.ndarray, numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """
    Micro-average under weights.

    Args:
        weights (`np.ndarray` of shape `(num_resamples, num_prompts)`): How often each prompt was drawn.
        numerators, denominators (`np.ndarray` of shape `(num_prompts,)`): Sums of each prompt.

    Returns:
        `np.ndarray` of shape `(num_resamples,)`: `weights @ numerators / weights @ denominators`, NaN where the
        denominator is 0.
    """
    below = weights @ np.asarray(denominators, dtype=float)
    above = weights @ np.asarray(numerators, dtype=float)
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below != 0)


class PairedBootstrap:
    """
    Resamples prompts within strata.

    Args:
        strata (`Sequence`): The prompt set of each prompt, any hashable, of length `num_prompts`.
        num_resamples (`int`, *optional*, defaults to 10000): Resamples.
        seed (`int`, *optional*, defaults to 0): Of the resampling.

    Example:

    ```python
    >>> bootstrap = PairedBootstrap(["math", "math", "qa"])
    >>> bootstrap(lambda weights: ratio(weights, committed_a, rounds_a) - ratio(weights, committed_b, rounds_b))
    Estimate(value=0.12, low=0.03, high=0.2)
    ```
    """

    def __init__(self, strata: Sequence, num_resamples: int = NUM_RESAMPLES, seed: int = 0):
        if not len(strata):
            raise ValueError("There is no prompt to resample, expected at least one.")
        names = np.asarray([str(name) for name in strata])
        self.num_prompts = len(names)
        self.weights = np.zeros((num_resamples, self.num_prompts))
        generator = np.random.default_rng(seed)
        for name in dict.fromkeys(names.tolist()):
            members = np.flatnonzero(names == name)
            even = np.full(len(members), 1 / len(members))
            self.weights[:, members] = generator.multinomial(len(members), even, size=num_resamples)

    def __call__(self, statistic: Callable[[np.ndarray], np.ndarray], level: float = LEVEL) -> Estimate:
        """
        Args:
            statistic (`Callable`): Takes weights `(n, num_prompts)`, returns `(n,)` values.
            level (`float`, *optional*, defaults to 0.95): Coverage of the percentile interval.
        """
        value = float(statistic(np.ones((1, self.num_prompts)))[0])
        return Estimate(value, *percentiles(statistic(self.weights), level))


def percentiles(values: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Equal-tailed percentile interval; resamples without a value (NaN) are left out."""
    tail = 50 * (1 - level)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing but NaN gives NaN, without a message
        low, high = np.nanpercentile(values, [tail, 100 - tail])
    return float(low), float(high)


def median_estimate(values: Sequence[float], num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Estimate:
    """Median of `values` (one per repetition) and its 95 % bootstrap interval over repetitions."""
    array = np.asarray(values, dtype=float)
    drawn = np.random.default_rng(seed).integers(len(array), size=(num_resamples, len(array)))
    return Estimate(float(np.median(array)), *percentiles(np.median(array[drawn], axis=1)))
