# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Figures of a benchmark report."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..timing import PHASES
from .summary import ALL, MEAN, PLAIN


def draw_figures(report: dict, path: Path) -> bool:
    """
    Four panels: τ and speedup per set with intervals, acceptance by position with the distribution of accepted
    lengths, and where the time of a round goes.

    Args:
        report (`dict`): Of `hf-carryover bench`.
        path (`Path`): Image file.

    Returns:
        `bool`: `False` without matplotlib (`pip install hf_carryover[bench]`), or when there is no system to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    groups = report["summary"]["groups"]
    names = [name for name in report["settings"]["systems"] if name != PLAIN]
    if not names:
        return False
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    axes = figure.subplots(2, 2)
    sets = [name for name in groups if name != ALL]
    _bars(axes[0, 0], groups, sets, names, "tau", "acceptance length τ")
    _bars(axes[0, 1], groups, sets, names, "speedup", "speedup over plain decoding")
    axes[0, 1].axhline(1.0, color="black", linewidth=0.8)
    _acceptance(axes[1, 0], groups[ALL]["systems"], names)
    _phases(axes[1, 1], groups[ALL]["systems"], names)
    axes[0, 0].legend(fontsize=8)
    settings = report["settings"]
    figure.suptitle(
        f"{settings['target']}, {settings['dtype']}, temperature {settings['temperature']:g}; "
        "95 % paired bootstrap intervals",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _bars(axis, groups: dict, sets: list[str], names: list[str], key: str, label: str) -> None:
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        estimates = [groups[group]["systems"][name][key] for group in sets]
        values = np.array([np.nan if e["value"] is None else e["value"] for e in estimates])
        below, above = (
            np.array([0.0 if e[end] is None else abs(e[end] - e["value"]) for e in estimates])
            for end in ("low", "high")
        )
        places = np.arange(len(sets)) + (i - (len(names) - 1) / 2) * width
        axis.bar(places, values, width, yerr=[below, above], label=name, error_kw={"linewidth": 0.8})
    labels = ["mean" if name == MEAN else name for name in sets]
    axis.set_xticks(range(len(sets)), labels, rotation=30, ha="right", fontsize=8)
    axis.set_ylabel(label)


def _acceptance(axis, systems: dict, names: list[str]) -> None:
    """Lines: P(accepted | all before were). Bars: how many of a full block's proposals were accepted."""
    drafters = [name for name in names if systems[name].get("acceptance")]
    for i, name in enumerate(drafters):
        rates = [np.nan if rate is None else rate for rate in systems[name]["acceptance"]]
        axis.plot(range(1, len(rates) + 1), rates, "o-", markersize=4, color=f"C{names.index(name)}")
        shares = systems[name]["accepted_shares"]
        width = 0.8 / len(drafters)
        places = np.arange(len(shares)) + (i - (len(drafters) - 1) / 2) * width
        axis.bar(places, shares, width, color=f"C{names.index(name)}", alpha=0.3)
    axis.set_xlabel("line: position k, bar: accepted proposals m (the last is the ceiling, a whole block)", fontsize=8)
    axis.set_ylabel("acceptance α_k / share of rounds")


def _phases(axis, systems: dict, names: list[str]) -> None:
    drafters = [name for name in names if systems[name].get("phases_per_round")]
    base = np.zeros(len(drafters))
    for phase in PHASES:
        values = np.array([systems[name]["phases_per_round"][phase] for name in drafters])
        axis.bar(range(len(drafters)), values, bottom=base, label=phase, width=0.6)
        base += values
    axis.set_xticks(range(len(drafters)), drafters, fontsize=8)
    axis.set_ylabel("milliseconds of a round")
    if drafters:
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


__all__ = ["draw_figures"]
