# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Fill the tables of `bench/results/RESULTS.md` from the reports beside it; the words between them are written by hand.

    python -m bench.results_page

Each table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. What the page does not have a report for stays
as it is.
"""

from __future__ import annotations

import json
from pathlib import Path

from hf_carryover.evaluation.acceptance import Acceptance, table
from hf_carryover.evaluation.analysis_report import markdown as analysis_markdown
from hf_carryover.evaluation.summary import HELD_OUT, MEAN, cell, pipe_table
from hf_carryover.evaluation.summary import markdown as bench_markdown
from hf_carryover.testbed.command import table as testbed_table

from .model_cards import replace_between


RESULTS = Path(__file__).parent / "results"
# Pairs along the training of one carryover drafter: report, control, carryover, and what was trained.
SCALING = (
    (
        "smollm2-scaling.json",
        "control-first-pair",
        "carryover-first-pair",
        "baseline 900 small steps, pair 240; `e` slow",
    ),
    ("smollm2-scaling.json", "control-100", "carryover-100", "baseline 2500, pair 100 of 300"),
    ("smollm2-scaling.json", "control-200", "carryover-200", "baseline 2500, pair 200 of 300"),
    ("smollm2-scaling.json", "control-300", "carryover-300", "baseline 2500, pair 300"),
    ("smollm2-scaling.json", "control-600", "carryover-600", "baseline 2500, pair 300 + 300"),
)


def load(name: str) -> dict | None:
    """A report, `None` if it is not there."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def scaling() -> str | None:
    """The gain of carry against training, one row a pair; τ and gain are means over the sets."""
    body = []
    for name, control, carryover, trained in SCALING:
        report = load(name)
        systems = None if report is None else report["results"]["greedy"]
        if systems is None or not {control, carryover} <= set(systems):
            continue
        acceptance = Acceptance({key: systems[key] for key in (control, carryover)}, (HELD_OUT,))
        taus = [cell(acceptance.estimate(key, MEAN).to_dict()) for key in (control, carryover)]
        gain = cell(acceptance.change(carryover, control, MEAN).to_dict(), "{:+.1%}")
        body.append([trained, *taus, gain])
    return pipe_table(["trained", "τ control", "τ carryover", "gain"], body) if body else None


def acceptance(name: str) -> str | None:
    """All tables of a replay report."""
    report = load(name)
    return None if report is None else table(report, [("carryover", "control")], (HELD_OUT,)).rstrip()


def sections() -> dict[str, str | None]:
    """Markers and what belongs between them."""
    analysis, bench = load("smollm2-analysis.json"), load("smollm2-bench.json")
    result = {
        "markov": acceptance("smollm2-markov-replay.json"),
        "dflash": acceptance("smollm2-dflash-replay.json"),
        "scaling": scaling(),
        "analysis": None if analysis is None else analysis_markdown(analysis).replace("\n## ", "\n### ").rstrip(),
        "bench": None if bench is None else bench_markdown(bench).rstrip(),
    }
    for name in ("testbed-b7", "testbed-sources", "testbed-b3", "testbed-b15"):
        report = load(f"{name}.json")
        result[name] = None if report is None else testbed_table(report)
    return result


def main() -> int:
    page = RESULTS / "RESULTS.md"
    for name, body in sections().items():
        if body is not None and f"<!-- {name}:begin -->" in page.read_text():
            replace_between(page, f"<!-- {name}:begin -->", f"<!-- {name}:end -->", body)
            print(f"{name}: {len(body.splitlines())} lines")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
