# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What a card says about measurements, read from a report of `hf-carryover bench`."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import EvalResult

from ..evaluation.report_file import read_report as read_file
from ..evaluation.summary import ALL, HELD_OUT, MEAN, PLAIN, cell


# Kinds of figures and tables that go along with a report.
FIGURES = (".png", ".svg")


def read_report(report: dict | str | Path | None) -> tuple[dict | None, list[Path]]:
    """
    A report and the files that go with it.

    Args:
        report (`dict`, `str` or `Path`, *optional*):
            A report of `hf-carryover bench` as a dictionary or a JSON file; or a folder with one, and figures.

    Returns:
        `tuple`: the report, and the files to publish with it.

    Raises:
        ValueError: If it is no such report.
    """
    if report is None or isinstance(report, dict):
        return report, []
    path, files = Path(report), []
    if path.is_dir():
        found = [name for name in sorted(path.glob("*.json")) if "summary" in json.loads(name.read_text("utf-8"))]
        if len(found) != 1:
            raise ValueError(f"{path} has {len(found)} reports of `hf-carryover bench`, expected one.")
        files = [file for file in sorted(path.iterdir()) if file.suffix in FIGURES]
        path = found[0]
    if not path.is_file():
        raise ValueError(f"The report {path} does not exist.")
    return read_file(path), [path, *files]


def system_of(report: dict, system: str | None) -> str:
    """The system in a report that is the drafter of the card: `system`, or the one that carries, or the last."""
    names = [name for name in report["summary"]["groups"][_overall(report)]["systems"] if name != PLAIN]
    if system is None:
        system = "carryover" if "carryover" in names else names[-1]
    if system not in names:
        raise ValueError(f"The report has no system {system!r}, only {', '.join(names)}.")
    return system


def _overall(report: dict) -> str:
    groups = report["summary"]["groups"]
    return next(name for name in (MEAN, ALL, *groups) if name in groups)


def _sets(report: dict) -> list[str]:
    """Prompt sets in order, then the means."""
    groups = report["summary"]["groups"]
    own = [name for name in groups if name not in (ALL, MEAN, HELD_OUT)]
    return [*own, *(name for name in (ALL, MEAN, HELD_OUT) if name in groups)]


def comparison(report: dict, system: str) -> tuple[str, dict] | None:
    """Name of the control and what the system changes against it; `None` where no control was measured."""
    for name, pair in report["summary"].get("comparisons", {}).items():
        ours, _, other = name.partition(" - ")
        if ours == system:
            return other, pair
    return None


def result_tables(report: dict, system: str) -> str:
    """τ, what carry changes against the control, and speed, with their intervals."""
    groups = report["summary"]["groups"]
    names = [name for name in groups[_overall(report)]["systems"] if name != PLAIN]
    against = comparison(report, system)
    head = [*(f"τ {name}" for name in names), *([f"{system} − {against[0]}"] if against else []), "speedup"]
    lines = ["| set | prompts | " + " | ".join(head) + " |", "| --- " * (len(head) + 2) + "|"]
    for group in _sets(report):
        systems = groups[group]["systems"]
        cells = [cell(systems[name]["tau"]) if against is None else _short(systems[name]["tau"]) for name in names]
        if against:
            cells.append(cell(against[1][group]["tau_difference"], "{:+.3f}"))
        cells.append(cell(systems[system]["speedup"]))
        lines.append(f"| {group.replace('_', ' ')} | {groups[group]['prompts']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + _conditions(report, system)


def _short(estimate: dict) -> str:
    return "–" if estimate["value"] is None else f"{estimate['value']:.2f}"


def _conditions(report: dict, system: str) -> str:
    equal = [
        f"{name}: {counts['identical']} of {counts['compared']} identical to plain decoding, "
        f"{len(counts['near_ties'])} differ at a near tie, {len(counts['failures'])} otherwise"
        for name, counts in report["summary"].get("equality", {}).items()
    ]
    settings, machine = report["settings"], report["machine"]
    temperature = settings.get("temperature") or 0.0
    decoding = "Greedy" if not temperature else f"Sampled at temperature {temperature}"
    return (
        f"{decoding}, {settings['dtype']}, at most {settings['max_new_tokens']} new tokens, {machine['cpu']}, "
        f"{machine['cores']} cores{_accelerator(machine)}; plain decoding and all drafters interleaved prompt by "
        f"prompt. τ is committed tokens / verification rounds; speedup is that of {system} over plain `generate`, "
        "prefill apart. Brackets: 95 % paired bootstrap over prompts."
        + (f" Outputs: {'; '.join(equal)}." if equal else "")
    )


def _accelerator(machine: dict) -> str:
    return f", {machine['accelerator']}" if machine.get("accelerator") else ""


def verdict(report: dict, system: str) -> str:
    """What the intervals allow to say: of carry, and of speed."""
    groups, overall = report["summary"]["groups"], _overall(report)
    text, against = "", comparison(report, system)
    if against is None:
        text = "No control was measured, so this table says nothing about what carry adds."
    else:
        estimate = against[1][overall]["tau_change"]
        text = f"Carry changes τ against the {against[0]} by {cell(estimate, '{:+.1%}')} on the {overall}: "
        if estimate["low"] is None or estimate["low"] <= 0 <= estimate["high"]:
            text += "**no gain is shown** by this pair."
        else:
            text += "a gain." if estimate["low"] > 0 else "a loss."
    speed = cell(groups[overall]["systems"][system]["speedup"])
    text += f" Decoding is {speed} times as fast as plain `generate` on the {overall}"
    if HELD_OUT in groups:
        held_out = cell(groups[HELD_OUT]["systems"][system]["speedup"])
        text += f", {held_out} on held-out prompts of the kind it was trained on"
    return text + "."


def eval_results(report: dict, system: str) -> list[EvalResult]:
    """The `model-index` entries: τ and speedup on every prompt set."""
    settings, results = report["settings"], []
    arguments = {name: settings[name] for name in ("max_new_tokens", "temperature", "dtype") if name in settings}
    for group in _sets(report):
        numbers = report["summary"]["groups"][group]
        metrics = {
            "acceptance_length": "τ, committed tokens / verification rounds",
            "speedup": "speedup over generate",
        }
        for (kind, name), estimate in zip(
            metrics.items(), (numbers["systems"][system][key] for key in ("tau", "speedup"))
        ):
            if estimate["value"] is None:
                continue
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=group.replace(" ", "_"),
                    dataset_name=f"{group.replace('_', ' ')} ({numbers['prompts']} prompts)",
                    dataset_args=arguments,
                    metric_type=kind,
                    metric_name=name,
                    metric_value=round(float(estimate["value"]), 4),
                    metric_args={"interval": [estimate["low"], estimate["high"]], "level": 0.95},
                )
            )
    return results


__all__ = ["comparison", "eval_results", "read_report", "result_tables", "system_of", "verdict"]
