# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Acceptance lengths of drafters along recorded responses, with paired intervals:

    hf-carryover replay --target DIR --recordings greedy=DIR sampled:1.0=DIR --drafter control=DIR carryover=DIR \
        --output report.json

Recordings are named, and those of a sampled target say their temperature behind a colon.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from ..command import parse_dataclass, run_command
from ..modeling_carryover import CarryoverDrafter
from ..train import DTYPES
from ..training.loading import load_recordings
from .analysis import choose_recordings, prompt_set
from .replay import Replay, ReplayedResponse, acceptance_length, replay_together


logger = logging.get_logger(__name__)


@dataclass
class ReplayArguments:
    """Replay recorded responses with one or more drafters."""

    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    recordings: list[str] = field(metadata={"help": "NAME=DIR, or NAME:TEMPERATURE=DIR if the target sampled."})
    drafter: list[str] = field(metadata={"help": "NAME=DIR of each drafter."})
    output: str | None = field(default=None, metadata={"help": "JSON file for all numbers."})
    dtype: str = field(default="bfloat16", metadata={"help": "Data type of target and drafters."})
    batch_size: int = field(default=16, metadata={"help": "Responses at a time."})
    per_set: int | None = field(
        default=None, metadata={"help": "Use only so many recordings of each prompt set, at even distances."}
    )
    seed: int = field(default=0, metadata={"help": "Of the draws where the target sampled."})


def named(values: list[str], what: str) -> dict[str, str]:
    """`NAME=VALUE` words as a dictionary."""
    pairs: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not name or not rest or name in pairs:
            raise ValueError(f"{what} {value!r}: expected NAME=DIR with a name of its own.")
        pairs[name] = rest
    return pairs


def run(args: ReplayArguments) -> dict:
    """All drafters on all recordings; returns the report."""
    recordings, drafters = named(args.recordings, "--recordings"), named(args.drafter, "--drafter")
    temperatures = {name: float(name.partition(":")[2] or 0) for name in recordings}
    if args.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {args.dtype!r}.")
    dtype = getattr(torch, args.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    loaded = {k: CarryoverDrafter.from_pretrained(v, dtype=dtype).to(device) for k, v in drafters.items()}
    report: dict = {"dtype": args.dtype, "seed": args.seed, "results": {}}
    for name, folder in recordings.items():
        data = choose_recordings(load_recordings(folder), args.per_set)
        replays = {k: Replay(drafter, target, temperatures[name], args.seed) for k, drafter in loaded.items()}
        report["results"][name] = {}
        for system, responses in replay_together(replays, data, args.batch_size).items():
            report["results"][name][system] = [vars(response) for response in responses]
            print(f"{name:>12} {system:>14}: {_line(responses)}", flush=True)
        if args.output:  # after each, so that an interrupted run leaves what it has
            Path(args.output).write_text(json.dumps(report) + "\n", encoding="utf-8")
    return report


def by_set(responses: list[ReplayedResponse]) -> dict[str, list[ReplayedResponse]]:
    """Responses of each prompt set."""
    groups: dict[str, list[ReplayedResponse]] = {}
    for response in responses:
        groups.setdefault(prompt_set(response.id), []).append(response)
    return groups


def _line(responses: list[ReplayedResponse]) -> str:
    taus = {name: acceptance_length(part) for name, part in by_set(responses).items()}
    mean = sum(taus.values()) / max(1, len(taus))
    return f"mean of sets {mean:.3f} | " + "  ".join(f"{name} {tau:.2f}" for name, tau in taus.items())


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""

    def work(arguments: list[str]) -> None:
        run(parse_dataclass(ReplayArguments, arguments, __doc__))

    return run_command(work, argv)


if __name__ == "__main__":
    sys.exit(main())
