# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Tables and figures of `hf-carryover analyze`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .analysis import RECALLS
from .summary import MEAN, cell, pipe_table


def markdown(report: dict) -> str:
    """All six analyses as Markdown."""
    machine, settings = report["machine"], report["settings"]
    parts = [
        f"{report['responses']} greedy responses, {settings['dtype']}; {machine['accelerator'] or machine['cpu']}, "
        f"{settings['threads']} threads; commit {report['commit']}. Brackets: 95 % intervals, paired bootstrap over "
        "responses within their sets.",
        "## 1. The same anchors with carry and without",
        _recalls(report["matched_anchors"]),
        "## 2. Re-convergence and gain",
        _reconvergence(report),
        "## 3. Attention on carried rows",
        _attention(report["attention"]),
        "## 4. What is carried",
        _probe(report["probe"]),
        "## 5. What carry costs",
        _overhead(report["overhead"]),
        "## 6. One generation",
        "`view.html` beside this file shows one generation round by round.",
    ]
    return "\n\n".join(parts) + "\n"


def _recalls(matched: dict) -> str:
    everything = matched["all"]
    size = len(everything[f"recall@{RECALLS[0]}"]["by_position"])
    body = []
    for k in RECALLS:
        entry = everything[f"recall@{k}"]
        for at, name in enumerate(("on", "off")):
            values = [entry[name], *(pair[at] for pair in entry["by_position"])]
            body.append([f"Recall@{k}, carry {name}", *(f"{value:.3f}" for value in values)])
    head = ["", "all", *(f"k = {k}" for k in range(1, size + 1))]
    text = (
        f"{everything['blocks']} blocks that could read carried rows; the drafter has the same weights and is given "
        "the true token before each position. k is the position in the block."
    )
    return f"{text}\n\n{pipe_table(head, body)}"


def _reconvergence(report: dict) -> str:
    body = []
    for name, entry in report["reconvergence"].items():
        group = MEAN if name == "all" else name
        taus = [cell(report["tau"][system][group]) for system in ("control", "carryover")]
        shares = [f"{entry['rows']:.2f}", f"{entry['reconverged']:.2f}", f"{entry['share']:.3f}"]
        body.append([group, *shares, *taus, cell(report["gain"][group], "{:+.1%}")])
    head = ["set", "carried rows a round", "re-converged", "share", "τ control", "τ carryover", "gain"]
    rows = " ".join(f"{share:.3f}" for share in report["reconvergence"]["all"]["by_row"])
    correlation = report["correlation"]
    without = [entry for entry in correlation["without"].values() if entry["pearson"] is not None]
    text = f"Share of re-converged rows by place behind the last committed token: {rows}."
    if correlation["pearson"] is None:
        text += " A correlation needs at least three sets."
    else:
        ranges = (
            {key: (min(e[key] for e in without), max(e[key] for e in without)) for key in ("pearson", "spearman")}
            if without
            else {}
        )
        text += " Gain against re-converged rows a round over the sets: " + ", ".join(
            f"{key.capitalize()} {_number(correlation[key])}"
            + (f" (one set left out: {ranges[key][0]:.2f} to {ranges[key][1]:.2f})" if key in ranges else "")
            for key in ("pearson", "spearman")
        )
        text += "."
    return f"{pipe_table(head, body)}\n\n{text}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _attention(attention: dict) -> str:
    body = [
        [str(e["carried"]), str(e["blocks"]), f"{e['share']:.3f}", f"{e['uniform']:.3f}"]
        + [f"{value:.3f}" for value in e["by_layer"]]
        for e in attention["by_carried"]
    ]
    layers = len(attention["by_layer_and_head"])
    head = ["carried rows", "blocks", "share", "if even", *(f"layer {i}" for i in range(layers))]
    text = (
        f"Mean share of the predicting rows' attention on carried rows: {attention['share']:.3f}; spread evenly over "
        f"all rows a block sees it would be {attention['uniform']:.3f}."
    )
    return f"{text}\n\n{pipe_table(head, body)}"


def _probe(probe: dict | None) -> str:
    if probe is None:
        return "Not run: name equally trained drafters with `--probe`."
    groups = list(next(iter(probe["tau"].values())))
    body = [
        [name, cell(values[MEAN]), cell(probe["change"][name][MEAN], "{:+.1%}")]
        + [cell(probe["change"][name][group], "{:+.1%}") for group in groups if group != MEAN]
        for name, values in probe["tau"].items()
    ]
    head = ["carried", f"τ, {MEAN}", f"against {probe['reference']}", *(group for group in groups if group != MEAN)]
    return pipe_table(head, body)


def _overhead(overhead: list[dict]) -> str:
    body = [
        [str(e["context"]), str(e["carried"]), cell(e["draft_ms"]), cell(e["ratio"], "{:.3f}")]
        + [f"{e['carried_bytes'] / 1024:.1f}"]
        for e in overhead
    ]
    return pipe_table(["context", "carried rows", "draft step, ms", "against none", "keys and values, KiB"], body)


def draw(report: dict, folder: Path) -> bool:
    """`reconvergence.png`, `attention.png` and `overhead.png`; `False` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    for name, panel in (("reconvergence", _scatter), ("attention", _heat_map), ("overhead", _cost)):
        figure = Figure(figsize=(6, 4.2), layout="constrained")
        panel(figure, figure.subplots(), report)
        figure.savefig(folder / f"{name}.png", dpi=120)
    return True


def _scatter(figure, axis, report: dict) -> None:
    for name, entry in report["reconvergence"].items():
        if name == "all":
            continue
        gain = report["gain"][name]
        below, above = ((0 if gain[end] is None else abs(gain[end] - gain["value"])) for end in ("low", "high"))
        axis.errorbar(entry["reconverged"], 100 * gain["value"], [[100 * below], [100 * above]], fmt="o", capsize=2)
        axis.annotate(
            name, (entry["reconverged"], 100 * gain["value"]), fontsize=8, xytext=(4, 4), textcoords="offset points"
        )
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel("re-converged rejected rows a round")
    axis.set_ylabel("gain of τ over the control, %")


def _heat_map(figure, axis, report: dict) -> None:
    shares = np.array(report["attention"]["by_layer_and_head"])
    image = axis.imshow(shares, aspect="auto", vmin=0)
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    axis.set_yticks(range(len(shares)))
    axis.set_xticks(range(shares.shape[1]))
    figure.colorbar(image, label="share of attention on carried rows")


def _cost(figure, axis, report: dict) -> None:
    for context in dict.fromkeys(entry["context"] for entry in report["overhead"]):
        entries = [entry for entry in report["overhead"] if entry["context"] == context]
        values = np.array([entry["ratio"]["value"] for entry in entries])
        low, high = (np.array([entry["ratio"][end] for entry in entries]) for end in ("low", "high"))
        counts = [entry["carried"] for entry in entries]
        axis.errorbar(counts, values, [values - low, high - values], fmt="o-", capsize=2, label=f"context {context}")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xlabel("carried rows")
    axis.set_ylabel("time of a draft step / without carried rows")
    axis.legend(fontsize=8)


__all__ = ["draw", "markdown"]
