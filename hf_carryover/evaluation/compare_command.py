# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Show one report of `hf-carryover bench`, or compare two:

    hf-carryover report run.json
    hf-carryover report before.json after.json

Compared are systems of the same name, over the prompts both reports have, paired: τ, speedup over plain decoding, and
seconds. What differs between the runs (weights, dtype, machine, versions) is said first. Times of two runs were not
interleaved: trust their ratio as far as you trust the machine to have been the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..command import Parser, run_command
from .bootstrap import PairedBootstrap, ratio
from .report_file import read_report
from .summary import ALL, MEAN, PLAIN, Table, cell, markdown, pipe_table


def differences(before: dict, after: dict) -> list[str]:
    """What makes two reports differ, one line each."""
    lines = []
    for part in ("settings", "machine", "versions"):
        for name in sorted({*before[part], *after[part]}):
            a, b = before[part].get(name), after[part].get(name)
            if a != b and name != "systems":
                lines.append(f"{part}: {name} {_short(a)} → {_short(b)}")
    if before["commit"] != after["commit"]:
        lines.append(f"commit {before['commit']} → {after['commit']}")
    return lines


def _short(value) -> str:
    return "–" if value is None else str(value)


def shared_records(before: dict, after: dict) -> tuple[list[dict], list[dict]]:
    """
    Records of the prompts (set, id, turn, seed) that both reports have, in the same order.

    Raises:
        ValueError: If there are none, or one of them had another prompt.
    """
    keyed = [
        {(r["set"], r["prompt"], r["turn"], r["seed"]): r for r in report["prompts"]} for report in (before, after)
    ]
    keys = [key for key in keyed[0] if key in keyed[1]]
    if not keys:
        raise ValueError("The reports have no prompt in common.")
    for key in keys:
        lengths = [table[key]["prompt_tokens"] for table in keyed]
        if lengths[0] != lengths[1]:
            raise ValueError(
                f"Prompt {key[1]!r} of set {key[0]!r} has {lengths[0]} tokens in one report and {lengths[1]} in the "
                "other: they did not ask the same."
            )
    return [keyed[0][key] for key in keys], [keyed[1][key] for key in keys]


def compare(before: dict, after: dict) -> dict:
    """
    Returns:
        `dict`: `prompts`, and for each system in both reports and each group estimates of `tau_before`, `tau_after`,
        `tau_difference`, `speedup_before`, `speedup_after` and `speed` (before's time per token / after's; for plain
        decoding this alone).
    """
    tables = [Table(records) for records in shared_records(before, after)]
    first, second = tables
    bootstrap = PairedBootstrap(first.sets)
    groups = [*dict.fromkeys(first.sets), ALL, MEAN]
    names = [name for name in first.systems if name in second.systems]

    def over(group, statistic):
        def value(weights):
            members = first.sets_of(group) if group == MEAN else [group]
            return np.mean([statistic(weights * first.members(name)) for name in members], axis=0)

        return bootstrap(value).to_dict()

    def pace(table: Table, name: str, weights):
        return ratio(weights, table.values[name]["decode_ms"], table.values[name]["decoded"])

    result: dict = {"prompts": len(first.sets), "systems": {}}
    for name in names:
        result["systems"][name] = {}
        for group in groups:
            entry = {"speed": over(group, lambda w, n=name: pace(first, n, w) / pace(second, n, w))}
            if name != PLAIN:
                entry |= {
                    "tau_before": over(group, lambda w, n=name: first.tau(w, n)),
                    "tau_after": over(group, lambda w, n=name: second.tau(w, n)),
                    "tau_difference": over(group, lambda w, n=name: second.tau(w, n) - first.tau(w, n)),
                    "speedup_before": over(group, lambda w, n=name: first.speedup(w, n)),
                    "speedup_after": over(group, lambda w, n=name: second.speedup(w, n)),
                }
            result["systems"][name][group] = entry
    return result


def comparison_text(before: dict, after: dict) -> str:
    """The comparison as Markdown."""
    result = compare(before, after)
    changed = differences(before, after)
    parts = [f"{result['prompts']} prompts in both reports. Brackets: 95 % intervals, paired bootstrap over prompts."]
    parts.append("Differences: " + ("; ".join(changed) if changed else "none") + ".")
    head = ["set", "τ before", "τ after", "τ difference", "speedup before", "speedup after", "time before / after"]
    for name, groups in result["systems"].items():
        if name == PLAIN:
            lines = [[group, cell(entry["speed"], "{:.3f}")] for group, entry in groups.items()]
            parts += ["**plain decoding**", pipe_table(["set", "time before / after"], lines)]
            continue
        lines = [
            [
                group,
                cell(entry["tau_before"]),
                cell(entry["tau_after"]),
                cell(entry["tau_difference"], "{:+.3f}"),
                cell(entry["speedup_before"]),
                cell(entry["speedup_after"]),
                cell(entry["speed"], "{:.3f}"),
            ]
            for group, entry in groups.items()
        ]
        parts += [f"**{name}**", pipe_table(head, lines)]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""

    def work(arguments: list[str]) -> None:
        parser = Parser(__doc__)
        parser.add_argument("reports", nargs="+", metavar="REPORT.json", help="one to show, two to compare")
        parser.add_argument("--output", metavar="FILE.md", help="also write it to a file")
        options = parser.parse_args(arguments)
        if len(options.reports) > 2:
            parser.error(f"takes one report or two, got {len(options.reports)}")
        reports = [read_report(path) for path in options.reports]
        text = markdown(reports[0]) if len(reports) == 1 else comparison_text(*reports)
        if options.output:
            Path(options.output).write_text(text, encoding="utf-8")
        print(text)

    return run_command(work, argv)


if __name__ == "__main__":
    raise SystemExit(main())
