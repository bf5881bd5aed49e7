# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The gain of carry against the dial, from nothing but a seed:

    hf-carryover testbed --output testbed.json --seeds 0 1 2 3 4

For each seed a language, a target that learns it, a baseline drafter, and from that with equal steps, texts and
anchors a control without carry and one drafter for each `--carry_from`. All are measured on the same new texts at
every position of the dial. An interrupted run goes on behind the last finished seed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from ..command import parse_dataclass, run_command
from ..configuration_carryover import CARRY_SOURCES
from .experiment import Sizes, arrays, measure, new_drafter, probe, train_drafter, train_target, with_carry
from .export import save_testbed
from .language import Language


RESAMPLES = 10_000
CONTROL = "control"


@dataclass(frozen=True)
class TestbedArguments(Sizes):
    """Measure the gain of carry on the language with a dial. Each stage's length is in steps."""

    __test__ = False  # not a test, whatever its name says

    output: str = field(default="testbed.json", metadata={"help": "JSON file; a run that is in it is not repeated."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4], metadata={"help": "One run each."})
    rhos: list[float] = field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0], metadata={"help": "Positions of the dial."}
    )
    carry_from: list[str] = field(
        default_factory=lambda: ["states"], metadata={"help": "What is carried, one or more."}
    )
    texts: int = field(default=256, metadata={"help": "New texts at each position of the dial."})
    save_dir: str | None = field(
        default=None,
        metadata={"help": "Keep target, drafters and prompts in SAVE_DIR/seed-N, to generate with and to serve."},
    )

    def __post_init__(self):
        for source in self.carry_from:
            if source not in CARRY_SOURCES:
                raise ValueError(f"--carry_from must be among {', '.join(CARRY_SOURCES)}, got {source!r}.")

    def sizes(self) -> Sizes:
        """The part that a result depends on."""
        return Sizes(**{item.name: getattr(self, item.name) for item in fields(Sizes)})


def train_systems(language: Language, target, sizes: Sizes, carry_from: list[str], seed: int = 0) -> dict:
    """The baseline, and from it the control and a drafter for each of `carry_from`, by name."""
    baseline = train_drafter(new_drafter(target, sizes, seed), target, language, sizes, "baseline", seed=seed)
    systems = {"baseline": baseline}
    for name in (CONTROL, *carry_from):
        drafter = with_carry(baseline, None if name == CONTROL else name)
        systems[name] = train_drafter(drafter, target, language, sizes, "carryover", seed=seed + 1)
    return systems


def measure_systems(language: Language, target, systems: dict, rhos: list[float], texts: int) -> dict:
    """Committed tokens and rounds of every text, by system and position of the dial."""
    counts: dict = {name: {} for name in systems}
    for rho in rhos:
        for name, drafter in systems.items():
            committed, rounds = arrays(measure(drafter, target, language, rho, texts))
            counts[name][str(rho)] = {"committed": committed.tolist(), "rounds": rounds.tolist()}
    return counts


def run_seed(
    seed: int,
    sizes: Sizes,
    rhos: list[float],
    carry_from: list[str],
    texts: int,
    say=print,
    save_dir: str | None = None,
) -> dict:
    """
    One language, its target and its drafters; with `save_dir` they are kept there.

    Returns:
        `dict`: `target_accuracy`; `probe`, what a linear map reads off the carried rows at each `rho`; and `systems`,
        for each of them and each `rho` the committed tokens and rounds of every text.
    """
    started = time.perf_counter()
    language = Language(seed=seed)
    target, accuracy = train_target(language, sizes, seed)
    say(f"seed {seed}: target gets {accuracy:.1%} of the fixed outputs ({time.perf_counter() - started:.0f} s)")
    systems = train_systems(language, target, sizes, carry_from, seed)
    if save_dir is not None:
        save_testbed(Path(save_dir) / f"seed-{seed}", language, target, systems, rhos)
    counts = measure_systems(language, target, systems, rhos, texts)
    probes = {str(rho): probe(systems["states"], target, language, rho) for rho in rhos if "states" in systems}
    for rho in rhos:
        taus = ", ".join(f"{name} {tau(counts[name][str(rho)]):.3f}" for name in systems)
        ceiling = f"; probe {probes[str(rho)]:.2f}" if str(rho) in probes else ""
        say(f"seed {seed}, rho {rho}: {taus}{ceiling}")
    seconds = round(time.perf_counter() - started, 1)
    return {"target_accuracy": accuracy, "probe": probes, "systems": counts, "seconds": seconds}


def tau(counts: dict) -> float:
    """Acceptance length of one system at one position of the dial."""
    return sum(counts["committed"]) / sum(counts["rounds"])


def gain(
    runs: list[dict], rho: float, system: str, against: str = CONTROL, seed: int = 0
) -> tuple[float, float, float]:
    """
    Relative gain in τ of `system` over `against`, mean over runs, with its 95 % interval: runs are resampled, and
    within each run texts, each with the numbers of both systems.
    """
    generator = np.random.default_rng(seed)
    point, resampled = [], []
    for run in runs:
        counts = [run["systems"][name][str(rho)] for name in (system, against)]
        committed, rounds = (np.array([c[key] for c in counts], dtype=float) for key in ("committed", "rounds"))
        point.append(_relative(committed.sum(axis=1), rounds.sum(axis=1)))
        number = committed.shape[1]
        weights = generator.multinomial(number, np.full(number, 1 / number), size=RESAMPLES)
        resampled.append(_relative(committed @ weights.T, rounds @ weights.T))
    chosen = generator.integers(len(runs), size=(RESAMPLES, len(runs)))
    means = np.stack(resampled)[chosen, np.arange(RESAMPLES)[:, None]].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(np.mean(point)), float(low), float(high)


def _relative(committed: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    taus = committed / rounds
    return taus[0] / taus[1] - 1


def table(report: dict) -> str:
    """The gains of all systems at all positions of the dial, as Markdown."""
    runs = list(report["runs"].values())
    names = [name for name in runs[0]["systems"] if name not in ("baseline", CONTROL)]
    lines = ["| ρ | τ control | " + " | ".join(f"{name}: gain" for name in names) + " | linear probe |"]
    lines.append("|---" * (3 + len(names)) + "|")
    for rho in report["rhos"]:
        control = np.mean([tau(run["systems"][CONTROL][str(rho)]) for run in runs])
        cells = ["{:+.1%} [{:+.1%}, {:+.1%}]".format(*gain(runs, rho, name)) for name in names]
        probes = [run["probe"].get(str(rho)) for run in runs]
        ceiling = f"{np.mean(probes):.2f}" if None not in probes else ""
        lines.append(f"| {rho:g} | {control:.2f} | " + " | ".join(cells) + f" | {ceiling} |")
    return "\n".join(lines)


def run(args: TestbedArguments) -> dict:
    """All seeds that the output does not hold yet."""
    settings = {**asdict(args.sizes()), "carry_from": args.carry_from, "texts": args.texts}
    path = Path(args.output)
    report: dict = {"settings": settings, "rhos": args.rhos, "runs": {}}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if (before["settings"], before["rhos"]) != (settings, args.rhos):
            raise ValueError(f"{str(path)!r} holds a run with other settings. Choose another --output.")
        report = before
    for seed in args.seeds:
        if str(seed) in report["runs"]:
            continue
        report["runs"][str(seed)] = run_seed(
            seed, args.sizes(), args.rhos, args.carry_from, args.texts, _say, args.save_dir
        )
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(report) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    return report


def _say(text: str) -> None:
    print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""

    def work(arguments: list[str]) -> None:
        print(table(run(parse_dataclass(TestbedArguments, arguments, __doc__))))

    return run_command(work, argv)


if __name__ == "__main__":
    sys.exit(main())
