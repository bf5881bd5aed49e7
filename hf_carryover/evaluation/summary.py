# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Statistics over the records of `benchmark.py`, and their Markdown form. Definitions:

- **τ**: committed tokens / verification rounds, micro-averaged over all rounds of a set; the target's own token
  counts, the prefill's does not.
- **decode time**: from the first new token to the end; the first token is prefill and counts in neither.
- **speedup**: plain decoding's seconds per decoded token / a system's. Where both wrote the same tokens this is the
  ratio of their summed decode times.
- **all sets**: micro-average over the prompts of all sets. **mean of sets**: mean of the sets' values, each counting
  once. Held-out recordings are a group of their own and belong to neither (unless nothing else was run).
- Intervals: 95 %, paired bootstrap over prompts (`bootstrap.py`); turns and seeds of a prompt stay together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..generation import GenerationReport
from ..timing import PHASES
from .bootstrap import Estimate, PairedBootstrap, ratio
from .systems import PLAIN


HELD_OUT = "held_out"
ALL, MEAN = "all sets", "mean of sets"
# Numbers of one prompt that are summed; the first two are lists over rounds (or absent for plain decoding).
_SUMS = ("committed", "carried", "rounds", "draft_ms", "target_ms", "decode_ms", "prefill_ms", "decoded")


def public_record(record: dict) -> dict:
    """A record without the answers' token ids, which are long and say nothing the report needs."""
    systems = {
        name: {key: value for key, value in numbers.items() if key != "token_ids"}
        for name, numbers in record["systems"].items()
    }
    return {**record, "systems": systems}


class Table:
    """
    Sums per prompt and system, as arrays over prompts.

    Args:
        records (`list[dict]`): Records of `benchmark.py`; turns and seeds of one prompt are added up.

    Attributes:
        sets (`list[str]`): The set of each prompt.
        systems (`list[str]`): Names, plain decoding first.
        values (`dict[str, dict[str, np.ndarray]]`): System, quantity, then one number per prompt.
    """

    def __init__(self, records: list[dict]):
        rows: dict[tuple, int] = {}
        for record in records:
            rows.setdefault((record["set"], record["prompt"]), len(rows))
        self.sets = [name for name, _ in rows]
        self.systems = list(records[0]["systems"])
        self.values = {name: {key: np.zeros(len(rows)) for key in _SUMS} for name in self.systems}
        for record in records:
            row = rows[record["set"], record["prompt"]]
            for name, numbers in record["systems"].items():
                for key in _SUMS:
                    self.values[name][key][row] += _total(numbers, key)

    def sets_of(self, group: str) -> list[str]:
        """The prompt sets that a group consists of."""
        distinct = list(dict.fromkeys(self.sets))
        if group not in (ALL, MEAN):
            return [group]
        return [name for name in distinct if name != HELD_OUT] or distinct

    def members(self, group: str) -> np.ndarray:
        """1.0 for each prompt that belongs to a group, else 0.0."""
        names = self.sets_of(group)
        return np.array([name in names for name in self.sets], dtype=float)

    def tau(self, weights: np.ndarray, system: str) -> np.ndarray:
        """τ of a system under weights `(n, num_prompts)`, `(n,)`."""
        return ratio(weights, self.values[system]["committed"], self.values[system]["rounds"])

    def speedup(self, weights: np.ndarray, system: str) -> np.ndarray:
        """Plain decoding's time per decoded token over the system's."""
        plain, own = (
            ratio(weights, self.values[name]["decode_ms"], self.values[name]["decoded"]) for name in (PLAIN, system)
        )
        return plain / own


def _total(numbers: dict, key: str) -> float:
    # The first new token is prefill's.
    value = max(numbers["new_tokens"] - 1, 0) if key == "decoded" else numbers.get(key, 0)
    return float(sum(value)) if isinstance(value, list) else float(value)


def summarize(records: list[dict], pairs: list[tuple[str, str]]) -> dict:
    """
    Args:
        records (`list[dict]`): Records of `benchmark.py`.
        pairs (`list[tuple[str, str]]`): Drafters `(a, b)` to compare: τ of `a` minus τ of `b`, and the ratio of their
            speedups.

    Returns:
        `dict`: `groups` (per set, all and mean of sets: `prompts`, and per system its numbers), `comparisons` (per
        pair and group: `tau_difference`, `tau_change` relative to `b`, `speedup_ratio`) and `equality`.
    """
    table = Table(records)
    bootstrap = PairedBootstrap(table.sets)
    sets = list(dict.fromkeys(table.sets))
    drafters = [name for name in table.systems if name != PLAIN]

    def over(group: str, statistic: Callable[..., np.ndarray], *names: str) -> dict:
        def value(weights: np.ndarray) -> np.ndarray:
            if group != MEAN:
                return statistic(weights * table.members(group), *names)
            return np.mean([statistic(weights * table.members(name), *names) for name in table.sets_of(MEAN)], axis=0)

        estimate = bootstrap(value).to_dict()
        # With one prompt a set there is nothing to resample, and no interval.
        alone = table.members(group).sum() == len(table.sets_of(group))
        return estimate | {"low": None, "high": None} if alone else estimate

    def change(weights, a, b):
        return table.tau(weights, a) / table.tau(weights, b) - 1

    groups: dict[str, dict] = {}
    for group in [*sets, ALL, MEAN]:
        chosen = [record for record in records if record["set"] in table.sets_of(group)]
        groups[group] = {
            "prompts": int(table.members(group).sum()),
            "systems": {} if group == MEAN else {name: _system_numbers(chosen, name) for name in table.systems},
        }
        for name in drafters:
            estimates = {"tau": over(group, table.tau, name), "speedup": over(group, table.speedup, name)}
            groups[group]["systems"].setdefault(name, {}).update(estimates)
    compared = {
        f"{a} - {b}": {
            group: {
                "tau_difference": over(group, lambda w, x, y: table.tau(w, x) - table.tau(w, y), a, b),
                "tau_change": over(group, change, a, b),
                "speedup_ratio": over(group, lambda w, x, y: table.speedup(w, x) / table.speedup(w, y), a, b),
            }
            for group in groups
        }
        for a, b in pairs
    }
    return {"groups": groups, "comparisons": compared, "equality": equality(records)}


def _system_numbers(records: list[dict], system: str) -> dict:
    """Sums, rates and per-position acceptance of one system over records."""
    numbers = [record["systems"][system] for record in records]
    totals = {key: sum(_total(entry, key) for entry in numbers) for key in _SUMS}
    result = {
        "decoded": int(totals["decoded"]),
        "decode_ms": totals["decode_ms"],
        "tokens_per_second": _quotient(1000 * totals["decoded"], totals["decode_ms"]),
        "prefill_ms": totals["prefill_ms"] / len(numbers),
    }
    if system == PLAIN:
        return result
    rounds = totals["rounds"]
    result |= {"rounds": int(rounds), "committed": int(totals["committed"])}
    if any("proposed" not in entry for entry in numbers):  # a peer of transformers' own tells no more
        return result
    proposed, accepted, committed = (
        [value for entry in numbers for value in entry[key]] for key in ("proposed", "accepted", "committed")
    )
    pooled = GenerationReport(proposed=proposed, accepted=accepted, committed=committed)
    phases = [entry["phases"] for entry in numbers if entry.get("phases")]
    return result | {
        "proposed": sum(pooled.proposed),
        "accepted": sum(pooled.accepted),
        "acceptance": [None if rate != rate else rate for rate in pooled.acceptance],
        "accepted_shares": accepted_shares(pooled),
        "carried_per_round": _quotient(totals["carried"], rounds),
        "draft_ms_per_round": _quotient(totals["draft_ms"], rounds),
        "target_ms_per_round": _quotient(totals["target_ms"], rounds),
        "phases_per_round": {name: _quotient(sum(entry[name] for entry in phases), rounds) or 0.0 for name in PHASES}
        if phases and rounds
        else None,
    }


def accepted_shares(report: GenerationReport) -> list[float]:
    """
    Share of rounds with `0 … B` accepted proposals, over the rounds that proposed a whole block and were not cut by
    EOS or a limit; the last entry is the ceiling, at which more would have been accepted of a longer block.
    """
    size = max(report.proposed, default=0)
    whole = [
        accepted
        for proposed, accepted, committed in zip(report.proposed, report.accepted, report.committed)
        if proposed == size and committed == accepted + 1
    ]
    return [whole.count(m) / len(whole) for m in range(size + 1)] if whole else []


def _quotient(above: float, below: float) -> float | None:
    return above / below if below else None


def equality(records: list[dict]) -> dict:
    """Per drafter: answers compared with plain decoding, identical ones, near ties and failures with their places."""
    result: dict[str, dict] = {}
    for record in records:
        for name, numbers in record["systems"].items():
            if "difference" not in numbers:
                continue
            counts = result.setdefault(name, {"compared": 0, "identical": 0, "near_ties": [], "failures": []})
            counts["compared"] += 1
            difference = numbers["difference"]
            if difference is None:
                counts["identical"] += 1
                continue
            place = {key: record[key] for key in ("set", "prompt", "turn")}
            kind = "near_ties" if difference["near_tie"] else "failures"
            counts[kind].append({**place, "position": difference["position"], "margin": difference["margin"]})
    return result


def cell(estimate: dict, form: str = "{:.2f}") -> str:
    """`value [low, high]`, a dash where nothing was measured."""
    if estimate["value"] is None:
        return "–"
    value, low, high = (
        "–" if estimate[key] is None else form.format(estimate[key]) for key in ("value", "low", "high")
    )
    return f"{value} [{low}, {high}]"


def pipe_table(head: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(report: dict) -> str:
    """The report's summary as Markdown."""
    summary, settings, machine = report["summary"], report["settings"], report["machine"]
    groups = summary["groups"]
    drafters = [name for name in settings["systems"] if name != PLAIN]
    mode = "greedy" if not settings["temperature"] else f"sampled at temperature {settings['temperature']}"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    place = machine["accelerator"] or machine["cpu"]
    parts = [
        f"{settings['target']}, {settings['dtype']}, {mode}, at most {settings['max_new_tokens']} new tokens, "
        f"{groups[ALL]['prompts']} prompts in all sets; {place}, {machine['cores']} cores, {settings['threads']} "
        f"threads; {versions}; commit {report['commit']}. Brackets: 95 % intervals, paired bootstrap over prompts."
    ]
    if drafters:
        tau = [[group, str(entry["prompts"]), *_estimates(entry, drafters, "tau")] for group, entry in groups.items()]
        parts += ["**Acceptance length τ**", pipe_table(["set", "prompts", *drafters], tau)]
        for pair, by_group in summary["comparisons"].items():
            rows = [
                [
                    group,
                    cell(entry["tau_difference"], "{:+.3f}"),
                    cell(entry["tau_change"], "{:+.1%}"),
                    cell(entry["speedup_ratio"], "{:.3f}"),
                ]
                for group, entry in by_group.items()
            ]
            a, b = pair.split(" - ")
            head = ["set", "τ difference", "τ change", f"speedup {a} / {b}"]
            parts += [f"**{a} against {b}**", pipe_table(head, rows)]
        speed = [[group, *_estimates(entry, drafters, "speedup")] for group, entry in groups.items()]
        parts += ["**Speedup over plain decoding** (prefill apart)", pipe_table(["set", *drafters], speed)]
    parts += [f"**Cost of a round** ({ALL})", _costs(groups[ALL]["systems"])]
    split = _phase_rows(groups[ALL]["systems"])
    if split:
        parts += ["**Where the time of a round goes**, ms", split]
    shares = _share_rows(groups[ALL]["systems"])
    if shares:
        parts += ["**Accepted proposals of a whole block**, share of rounds (the last is the ceiling)", shares]
    parts += [_equality_line(name, counts) for name, counts in summary["equality"].items()]
    return "\n\n".join(parts) + "\n"


def _estimates(entry: dict, drafters: list[str], key: str) -> list[str]:
    return [cell(entry["systems"][name][key]) for name in drafters]


def _costs(systems: dict[str, dict]) -> str:
    """Speed, cost of a round and per-position acceptance of each system."""
    head = ["system", "tokens/s", "prefill, ms", "draft, ms a round", "target, ms a round", "carried a round"]
    rows = []
    for name, numbers in systems.items():
        keys = ("tokens_per_second", "prefill_ms", "draft_ms_per_round", "target_ms_per_round", "carried_per_round")
        values = ["–" if numbers.get(key) is None else f"{numbers[key]:.1f}" for key in keys]
        rates = " ".join("–" if rate is None else f"{rate:.2f}" for rate in numbers.get("acceptance", []))
        rows.append([name, *values, rates or "–"])
    return pipe_table([*head, "acceptance by position"], rows)


def _phase_rows(systems: dict[str, dict]) -> str | None:
    """Milliseconds a round by phase."""
    rows = [
        [name, *(f"{numbers['phases_per_round'][phase]:.2f}" for phase in PHASES)]
        + [f"{sum(numbers['phases_per_round'].values()):.2f}"]
        for name, numbers in systems.items()
        if numbers.get("phases_per_round")
    ]
    return pipe_table(["system", *PHASES, "sum"], rows) if rows else None


def _share_rows(systems: dict[str, dict]) -> str | None:
    """Distribution of accepted lengths."""
    known = {name: numbers["accepted_shares"] for name, numbers in systems.items() if numbers.get("accepted_shares")}
    if not known:
        return None
    size = max(map(len, known.values()))
    rows = [
        [name, *(f"{share:.3f}" for share in shares), *[""] * (size - len(shares))] for name, shares in known.items()
    ]
    return pipe_table(["system", *map(str, range(size))], rows)


def _equality_line(name: str, counts: dict) -> str:
    ties = "; ".join(
        f"{tie['set']} {tie['prompt']} at {tie['position']}, margin {tie['margin']:.3f}" for tie in counts["near_ties"]
    )
    text = f"{name}: {counts['identical']} of {counts['compared']} outputs identical to plain decoding"
    text += f", {len(counts['near_ties'])} differ at a near tie ({ties})" if ties else ""
    return text + (f", **{len(counts['failures'])} DIFFER**." if counts["failures"] else ".")


__all__ = [
    "ALL",
    "HELD_OUT",
    "MEAN",
    "PLAIN",
    "Estimate",
    "Table",
    "equality",
    "markdown",
    "pipe_table",
    "public_record",
    "summarize",
]
