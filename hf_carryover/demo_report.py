# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
What the demo measures and prints: one system's run, the comparison of all systems, the table, and the verdict.

The columns are defined in `demo.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


PLAIN = "plain"  # the name of decoding without a drafter


@dataclass
class Run:
    """
    One system's answer to one message, or several pooled by [`pool`].

    Args:
        tokens (`int`):
            New tokens, the one from prefill included.
        decoded (`int`):
            New tokens without the one from prefill.
        seconds (`float`):
            Decode time in seconds, prefill excluded.
        prefill (`float`):
            Seconds from the call to the first new token.
        token_ids (`list[int]`):
            The new tokens.
        rounds (`int`, *optional*, defaults to 0):
            Verification rounds; 0 for plain decoding.
        committed (`int`, *optional*, defaults to 0):
            Tokens committed in these rounds.
        carried (`int`, *optional*, defaults to 0):
            Rows carried into these rounds, summed.
        draft (`float`, *optional*, defaults to 0.0):
            Seconds spent drafting.
    """

    tokens: int
    decoded: int
    seconds: float
    prefill: float
    token_ids: list[int] = field(default_factory=list)
    rounds: int = 0
    committed: int = 0
    carried: int = 0
    draft: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.decoded / self.seconds if self.decoded and self.seconds > 0 else math.nan

    @property
    def tau(self) -> float:
        return self.committed / self.rounds if self.rounds else math.nan

    def speedup_over(self, plain: Run) -> float:
        """Plain's seconds per decoded token over this run's; the ratio of decode times when both wrote the same."""
        return self.tokens_per_second / plain.tokens_per_second


@dataclass(frozen=True)
class Difference:
    """
    Where an output leaves plain decoding.

    Args:
        position (`int`):
            Index of the first differing new token (0-based).
        margin (`float` or `None`):
            The target's top-1 minus top-2 logit there; `None` where one output only ended earlier.
        near_tie (`bool`):
            Whether rounding explains it.
    """

    position: int
    margin: float | None
    near_tie: bool


@dataclass
class Comparison:
    """All systems on one message. `label` names prompt and turn, `runs` and `differences` are by system."""

    label: str
    runs: dict[str, Run]
    differences: dict[str, Difference]


def pool(runs: Sequence[Run]) -> Run:
    """
    Args:
        runs (`Sequence[Run]`):
            Runs of one system.

    Returns:
        [`Run`]: Their sums, so that every rate computed from it is micro-averaged. Without `token_ids`.
    """
    names = ("tokens", "decoded", "seconds", "prefill", "rounds", "committed", "carried", "draft")
    return Run(**{name: sum(getattr(run, name) for run in runs) for name in names})


def print_result(comparison: Comparison) -> None:
    """Prints one line for each system: tokens, rate, tau, rounds, carried rows and speedup."""
    width = max(map(len, comparison.runs))
    for name, run in comparison.runs.items():
        line = f"  {name:<{width}}  {run.tokens:3d} tokens  {number(run.tokens_per_second)} tok/s"
        if name != PLAIN:
            rows = run.carried / run.rounds if run.rounds else 0.0
            line += f"  tau {number(run.tau, 2)} ({run.rounds} rounds, {rows:.1f} rows carried into each)"
            line += f"  {number(run.speedup_over(comparison.runs[PLAIN]), 2)}x plain"
        print(line, flush=True)


def table(comparisons: list[Comparison]) -> str:
    """
    Args:
        comparisons (`list[Comparison]`):
            What [`compare_systems`] returned.

    Returns:
        `str`: One row a message and one for all of them, pooled.
    """
    names = list(comparisons[0].runs)
    rows = [(comparison.label, comparison.runs) for comparison in comparisons]
    rows.append(("all", {name: pool([comparison.runs[name] for comparison in comparisons]) for name in names}))
    header = ["prompt", "tokens", "plain tok/s"]
    for name in names[1:]:
        header += [f"{name} tok/s", "tau", "speedup"]
    cells = [header]
    for label, runs in rows:
        row = [label, str(runs[PLAIN].tokens), number(runs[PLAIN].tokens_per_second)]
        for name in names[1:]:
            run = runs[name]
            row += [number(run.tokens_per_second), number(run.tau, 2), number(run.speedup_over(runs[PLAIN]), 2) + "x"]
        cells.append(row)
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for label, *values in cells:
        padded = [value.rjust(width) for value, width in zip(values, widths[1:])]
        lines.append("  ".join([label.ljust(widths[0]), *padded]))
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def gains(comparisons: list[Comparison]) -> str:
    """
    Args:
        comparisons (`list[Comparison]`):
            What [`compare_systems`] returned.

    Returns:
        `str`: What the last drafter gains over the first (`carryover` over `control`) in tau and speed, and its share
        of drafting. Empty with fewer than two drafters.
    """
    names = list(comparisons[0].runs)[1:]
    if len(names) < 2:
        return ""
    base, best = (pool([comparison.runs[name] for comparison in comparisons]) for name in (names[0], names[-1]))
    drafting = best.draft / best.seconds if best.seconds else math.nan
    return (
        f"{names[-1]} against {names[0]}: tau {number(100 * (best.tau / base.tau - 1), 1, '+')} %, "
        f"decoding speed {number(100 * (best.speedup_over(base) - 1), 1, '+')} %. "
        f"Drafting took {number(100 * drafting, 0)} % of its decode time."
    )


def verdict(comparisons: list[Comparison], dtype: str) -> tuple[str, bool]:
    """
    Args:
        comparisons (`list[Comparison]`):
            What [`compare_systems`] returned.
        dtype (`str`):
            Name of the target's dtype.

    Returns:
        `tuple[str, bool]`: The closing lines, and whether every output equals plain decoding up to near ties.
    """
    outputs = [(c.label, name, c.differences.get(name)) for c in comparisons for name in c.runs if name != PLAIN]
    differing = [(label, name, difference) for label, name, difference in outputs if difference is not None]
    tokens = sum(comparison.runs[PLAIN].tokens for comparison in comparisons)
    if not differing:
        head = f"OK: all {len(outputs)} assisted outputs are identical to plain decoding"
        return f"{head} ({tokens} tokens, {dtype}).", True
    lines = []
    for label, name, difference in differing:
        if difference.margin is None:
            reason = "one output ends there, the other goes on: NOT a near tie"
        else:
            kind = "a near tie" if difference.near_tie else "NOT a near tie"
            reason = f"the target's top-1 minus top-2 logit is {difference.margin:.4f} there: {kind}"
        lines.append(f"  {label}, {name}: first difference at new token {difference.position}; {reason}")
    passed = all(difference.near_tie for _, _, difference in differing)
    head = "OK, up to near ties" if passed else "FAILED"
    same = len(outputs) - len(differing)
    return "\n".join([*lines, f"{head}: {same} of {len(outputs)} assisted outputs are identical ({dtype})."]), passed


def number(value: float, digits: int = 1, sign: str = "") -> str:
    """A number with `digits` decimals, or a dash where there is nothing to divide."""
    return "-" if math.isnan(value) else f"{value:{sign}.{digits}f}"
