# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Does carry gain where rejected rows re-converge? The correlation over prompt sets, and how much it hangs on one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pearson(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Pearson's correlation; NaN where one of the two does not vary."""
    first, second = (np.asarray(values, dtype=float) for values in (x, y))
    first, second = first - first.mean(), second - second.mean()
    below = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / below) if below > 0 else float("nan")


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 1, equal values sharing the mean of theirs."""
    array = np.asarray(values, dtype=float)
    order = array.argsort(kind="stable")
    result = np.empty(len(array))
    result[order] = np.arange(1, len(array) + 1)
    for value in np.unique(array):
        same = array == value
        result[same] = result[same].mean()
    return result


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's correlation: Pearson's of the ranks."""
    return pearson(ranks(x), ranks(y))


def correlate(names: Sequence[str], x: Sequence[float], y: Sequence[float]) -> dict:
    """
    Args:
        names (`Sequence[str]`): Sets.
        x, y (`Sequence[float]`): Their re-convergence and their gain.

    Returns:
        `dict`: `pearson`, `spearman`, and `without`, for each set both of them with that set left out. Values are
        `None` where they are not defined. With fewer than three sets all of them are.

    Raises:
        ValueError: If the lengths differ.
    """
    if not len(names) == len(x) == len(y):
        raise ValueError(f"Expected a value of both for each of {len(names)} sets, got {len(x)} and {len(y)}.")

    def both(keep: list[int]) -> dict:
        chosen = ([x[i] for i in keep], [y[i] for i in keep])
        values = {"pearson": pearson(*chosen), "spearman": spearman(*chosen)} if len(keep) > 2 else {}
        return {key: values[key] if np.isfinite(values.get(key, np.nan)) else None for key in ("pearson", "spearman")}

    everything = list(range(len(names)))
    without = {name: both([i for i in everything if i != left]) for left, name in enumerate(names)}
    return {**both(everything), "without": without}


__all__ = ["correlate", "pearson", "ranks", "spearman"]
