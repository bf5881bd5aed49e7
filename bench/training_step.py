# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
What makes a training step cheap: its time, its peak memory and its losses, one measure after the other.

    python -m bench.training_step --target TARGET --drafter DIR --recordings FILE --output bench/results/training.json

Every case is a process of its own that takes the same steps of the same recordings; what it peaks at is resident
memory above what the loaded models take. Cases of one stage take turns, repetition by repetition. Losses must agree: a
case is another way to compute the same. Only kept drafts are at anchors of their own, so their losses say nothing.

- `whole`: all draft logits at once, features computed in every step;
- `parts`: head and loss over parts of the rows (`max_logits`);
- `features kept`: as `parts`, with the target's features read back (`feature_cache_dir`);
- `drafts kept`: as `features kept`, with verified first drafts read back (`carry_cache_dir`; stage carryover).
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, logging

from hf_carryover import CarryoverDrafter, CarryoverTrainer, CarryoverTrainingArguments
from hf_carryover.evaluation.bootstrap import median_estimate
from hf_carryover.evaluation.machine import describe_machine, provenance
from hf_carryover.evaluation.summary import cell, pipe_table
from hf_carryover.training.loading import load_recordings


PARTS = 2**23  # logits at a time, 32 MiB in float32
CASES = ("whole", "parts", "features kept", "drafts kept")
TOLERANCE = 1e-3  # relative, between losses of two ways to compute them in bfloat16


def settings(case: str, stage: str, kept: Path) -> dict:
    """Training arguments of a case; `kept` is the folder for what is read back."""
    values: dict = {"max_logits": 2**40 if case == "whole" else PARTS}
    if case in ("features kept", "drafts kept"):
        values["feature_cache_dir"] = str(kept / "features")
    if case == "drafts kept":
        values["carry_cache_dir"] = str(kept / "drafts")
    return {**values, "stage": stage}


def resident() -> int:
    """Highest resident memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def timed_steps(trainer) -> list[float]:
    """A list that gets the time at the end of every training step, once the trainer trains."""
    ends: list[float] = []
    original = trainer.training_step

    def training_step(*arguments, **keywords):
        loss = original(*arguments, **keywords)
        if trainer.args.device.type != "cpu":
            torch.accelerator.synchronize(trainer.args.device)
        ends.append(time.perf_counter())
        return loss

    trainer.training_step = training_step
    return ends


def worker(options: argparse.Namespace) -> dict:
    """Take the steps of one case; seconds of each but the first, its losses, and the peak."""
    logging.set_verbosity_error()
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).eval()
    drafter = CarryoverDrafter.from_pretrained(options.drafter, dtype=torch.float32, carry=options.stage != "baseline")
    rows = load_recordings(options.recordings).select(range(options.responses * (options.steps + 1)))
    with tempfile.TemporaryDirectory() as folder:
        args = CarryoverTrainingArguments(
            output_dir=folder,
            **settings(options.case, options.stage, Path(options.kept)),
            bf16=True,
            use_cpu=True,
            train_sampling_strategy="sequential",
            per_device_train_batch_size=options.responses,
            anchors_per_response=options.anchors,
            max_steps=options.steps + 1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
        )
        trainer = CarryoverTrainer(drafter, target, args, train_dataset=rows)
        ends = timed_steps(trainer)
        loaded = resident()
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    return {"seconds": seconds, "losses": losses, "peak_bytes": resident() - loaded}


def run(options: argparse.Namespace, case: str, stage: str, kept: str) -> dict:
    """A case in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "bench.training_step",
        "--worker",
        "--case",
        case,
        "--stage",
        stage,
        "--kept",
        kept,
    ]
    for name in ("target", "drafter", "recordings", "steps", "responses", "anchors"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{stage}, {case}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(runs: dict[str, list[dict]], stage: str) -> list[dict]:
    """
    One entry a case: seconds a step, their quotient to `whole` paired by repetition, peak memory.

    Raises:
        RuntimeError: If a case's losses are not those of `whole`.
    """
    first = runs["whole"]
    entries = []
    for case, repetitions in runs.items():
        difference = None
        if case != "drafts kept":
            theirs, ours = first[0]["losses"], repetitions[0]["losses"]
            difference = max(abs(a - b) / abs(a) for a, b in zip(theirs, ours, strict=True))
            if difference > TOLERANCE:
                raise RuntimeError(f"{stage}, {case}: losses {ours}, those of `whole` are {theirs}.")
        medians = [statistics.median(run["seconds"]) for run in repetitions]
        whole = [statistics.median(run["seconds"]) for run in first]
        entries.append(
            {
                "stage": stage,
                "case": case,
                "seconds": median_estimate(medians).to_dict(),
                "over_whole": median_estimate([a / b for a, b in zip(medians, whole, strict=True)]).to_dict(),
                "peak_mib": statistics.median(run["peak_bytes"] for run in repetitions) / 2**20,
                "loss_difference": difference,
            }
        )
    return entries


def table(entries: list[dict], anchors: int) -> str:
    """Markdown, a row a case."""
    head = ["stage", "case", "s a step", "over whole", "anchors/s", "peak, MiB", "losses differ by"]
    body = [
        [
            entry["stage"],
            entry["case"],
            cell(entry["seconds"]),
            cell(entry["over_whole"]),
            f"{anchors / entry['seconds']['value']:.0f}",
            f"{entry['peak_mib']:.0f}",
            "–" if entry["loss_difference"] is None else f"{entry['loss_difference']:.0e}",
        ]
        for entry in entries
    ]
    return pipe_table(head, body)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True, help="where training starts")
    parser.add_argument("--recordings", required=True)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, behind one that is not")
    parser.add_argument("--responses", type=int, default=4, help="a step")
    parser.add_argument("--anchors", type=int, default=64, help="a response")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--stages", nargs="+", default=["baseline", "carryover"], choices=["baseline", "carryover"])
    parser.add_argument("--output", metavar="FILE.json")
    for name in ("case", "stage", "kept"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        print(json.dumps(worker(options)))
        return 0
    entries: list[dict] = []
    for stage in options.stages:
        cases = CASES if stage == "carryover" else CASES[:-1]
        with tempfile.TemporaryDirectory() as kept:
            for case in cases[2:]:
                run(options, case, stage, kept)  # what is kept is made here
            runs: dict[str, list[dict]] = {case: [] for case in cases}
            for repetition in range(options.repetitions):
                for case in cases[repetition % len(cases) :] + cases[: repetition % len(cases)]:
                    runs[case].append(run(options, case, stage, kept))
        entries += compare(runs, stage)
    anchors = options.responses * options.anchors
    print(table(entries, anchors))
    if options.output:
        arguments = {name: getattr(options, name) for name in ("steps", "responses", "anchors", "repetitions")}
        report = {"arguments": arguments, "machine": describe_machine(), **provenance(), "cases": entries}
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
