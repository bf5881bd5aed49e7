# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Tables over reports of `hf-carryover replay`: acceptance lengths per prompt set, and what carry changes.

    python -m hf_carryover.evaluation.acceptance report.json --pair carryover control --output table.md

Each set's τ is a micro-average over its rounds; "mean of sets" counts each set once, held-out recordings apart.
Brackets are 95 % intervals, paired bootstrap over prompts within their sets: all systems saw the very same responses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from .analysis import prompt_set
from .bootstrap import Estimate, PairedBootstrap, percentiles, ratio
from .summary import MEAN


class Acceptance:
    """
    Committed tokens and rounds of all systems on one kind of recordings.

    Args:
        systems (`dict[str, list[dict]]`): Responses of each system, as the report has them, in the same order.
        apart (`tuple[str, ...]`, *optional*): Sets that the mean of sets leaves out.
    """

    def __init__(self, systems: dict[str, list[dict]], apart: tuple[str, ...] = ()):
        ids = {name: [response["id"] for response in responses] for name, responses in systems.items()}
        first = next(iter(ids.values()))
        if any(other != first for other in ids.values()):
            raise ValueError(f"The systems {sorted(ids)} were not measured on the same responses.")
        self.sets = [prompt_set(name) for name in first]
        self.names = list(dict.fromkeys(self.sets))
        self.averaged = [name for name in self.names if name not in apart] or self.names
        self.committed = {k: np.array([sum(r["committed"]) for r in v]) for k, v in systems.items()}
        self.rounds = {k: np.array([len(r["committed"]) for r in v]) for k, v in systems.items()}
        self.bootstrap = PairedBootstrap(self.sets)

    def tau(self, weights: np.ndarray, system: str, group: str) -> np.ndarray:
        """τ of a system on a set, or the mean over sets, under weights `(n, num_prompts)`."""
        if group == MEAN:
            return np.mean([self.tau(weights, system, name) for name in self.averaged], axis=0)
        mine = weights * (np.array(self.sets) == group)
        return ratio(mine, self.committed[system], self.rounds[system])

    def estimate(self, system: str, group: str) -> Estimate:
        """τ with its interval."""
        return self.bootstrap(lambda w: self.tau(w, system, group))

    def change(self, system: str, against: str, group: str) -> Estimate:
        """Relative change of τ with its interval."""
        return self.bootstrap(lambda w: self._change(w, system, against, group))

    def _change(self, weights: np.ndarray, system: str, against: str, group: str) -> np.ndarray:
        return self.tau(weights, system, group) / self.tau(weights, against, group) - 1

    def mean_change(self, pairs: list[tuple[str, str]], group: str, seed: int = 0) -> Estimate:
        """
        Mean of [`~Acceptance.change`] over `(system, against)` of several trainings. The interval resamples prompts
        and trainings: it covers what another seed would have given, as far as so few of them can tell.
        """

        def gains(weights: np.ndarray) -> np.ndarray:
            return np.stack([self._change(weights, *pair, group) for pair in pairs], axis=1)

        resampled = gains(self.bootstrap.weights)
        chosen = np.random.default_rng(seed).integers(len(pairs), size=resampled.shape)
        value = gains(np.ones((1, self.bootstrap.num_prompts))).mean()
        return Estimate(float(value), *percentiles(np.take_along_axis(resampled, chosen, axis=1).mean(axis=1)))

    def by_position(self, system: str, responses: list[dict], most: int = 7) -> list[float]:
        """`α_k`, over all responses."""
        rates = []
        for k in range(1, most + 1):
            pairs = [(m, c) for r in responses for m, c in zip(r["accepted"], r["committed"]) if m >= k - 1 and c >= k]
            rates.append(sum(m >= k for m, _ in pairs) / len(pairs) if pairs else float("nan"))
        return rates


def table(report: dict, pairs: list[tuple[str, str]], apart: tuple[str, ...] = ()) -> str:
    """All tables of a report, as Markdown."""
    parts = []
    for kind, systems in report["results"].items():
        acceptance = Acceptance(systems, apart)
        names = list(systems)
        head = ["set", "prompts", *(f"τ {name}" for name in names), *(f"{a} against {b}" for a, b in pairs)]
        lines = [head, ["---"] * len(head)]
        for group in [*acceptance.names, MEAN]:
            number = len(acceptance.sets) if group == MEAN else acceptance.sets.count(group)
            cells = [_cell(acceptance.estimate(name, group), "{:.2f}") for name in names]
            cells += [_cell(acceptance.change(a, b, group), "{:+.1%}") for a, b in pairs]
            lines.append([group.replace("_", " "), str(number), *cells])
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        rates = "; ".join(
            f"{name} " + " ".join(f"{rate:.2f}" for rate in acceptance.by_position(name, responses))
            for name, responses in systems.items()
        )
        parts.append(f"**{kind}**\n\n{text}\n\nAcceptance by position, all sets: {rates}.")
    return "\n\n".join(parts) + "\n"


def _cell(estimate: Estimate, form: str) -> str:
    return f"{form.format(estimate.value)} [{form.format(estimate.low)}, {form.format(estimate.high)}]"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", help="Reports of `hf-carryover replay`.")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("A", "B"), help="A against B.")
    parser.add_argument("--apart", nargs="*", default=["held_out"], help="Sets that the mean leaves out.")
    parser.add_argument("--output", type=Path, help="Markdown file.")
    arguments = parser.parse_args(argv)
    merged: dict = {"results": {}}
    for path in arguments.reports:
        for kind, systems in json.loads(path.read_text())["results"].items():
            merged["results"].setdefault(kind, {}).update(systems)
    text = table(merged, [tuple(pair) for pair in arguments.pair], tuple(arguments.apart))
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
