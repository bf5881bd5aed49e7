# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Figure of reports of `hf-carryover testbed`: the gain of carry against the dial.

    python -m bench.testbed_figure bench/results/testbed-b7.json --readme README.md

The table of the first report goes between two markers of the README.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_carryover.testbed.command import CONTROL, gain, table

from .model_cards import replace_between


BEGIN, END = "<!-- testbed:begin -->", "<!-- testbed:end -->"


def curves(reports: list[dict]) -> dict[str, list[tuple[float, float, float, float]]]:
    """`(ρ, gain, low, high)` of every system of every report, named by what is carried and, if they differ, by B."""
    several = len({report["settings"]["block_size"] for report in reports}) > 1
    result: dict = {}
    for report in reports:
        runs = list(report["runs"].values())
        for name in runs[0]["systems"]:
            if name in ("baseline", CONTROL):
                continue
            label = f"{name}, B = {report['settings']['block_size']}" if several else name
            result[label] = [(rho, *gain(runs, rho, name)) for rho in report["rhos"]]
    return result


def draw(reports: list[dict], output: Path) -> None:
    """Write the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), dpi=160)
    for label, points in curves(reports).items():
        rhos, gains, lows, highs = (list(values) for values in zip(*points))
        (line,) = axes.plot(rhos, [100 * value for value in gains], marker="o", label=label.replace("_", " "))
        axes.fill_between(rhos, [100 * v for v in lows], [100 * v for v in highs], color=line.get_color(), alpha=0.2)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xlabel("ρ: share of rejected rows whose word stays valid")
    axes.set_ylabel("gain in τ over control, %")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(output)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("bench/results/testbed.png"))
    parser.add_argument("--readme", type=Path, help="File with the two markers.")
    arguments = parser.parse_args(argv)
    reports = [json.loads(path.read_text()) for path in arguments.reports]
    draw(reports, arguments.output)
    if arguments.readme:
        replace_between(arguments.readme, BEGIN, END, table(reports[0]))
    for path, report in zip(arguments.reports, reports):
        print(f"{path.name}, B = {report['settings']['block_size']}\n\n{table(report)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
