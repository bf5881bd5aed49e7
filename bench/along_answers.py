# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What the benches that replay drafters along recorded answers share: flags, the target, and the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_carryover import load_recordings
from hf_carryover.evaluation.analysis import choose_recordings
from hf_carryover.evaluation.machine import describe_machine, provenance
from hf_carryover.evaluation.replay_command import named


def run(argv: list[str] | None, about: str | None, measure: Callable[..., dict], table: Callable[[dict], str]) -> int:
    """
    Measure drafters, print the `table` of the report and write it; returns the exit code.

    Args:
        argv (`list[str]`, *optional*): Arguments.
        about (`str`, *optional*): Shown by `--help`.
        measure (`Callable`): From a drafter's folder, target, recordings and batch size to the entry of the report.
        table (`Callable`): From the report to Markdown.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--recordings", required=True, help="greedy answers, by prompt set")
    parser.add_argument("--drafter", nargs="+", required=True, metavar="NAME=DIR")
    parser.add_argument("--per_set", type=int, default=6, help="recordings of each set (default: 6)")
    parser.add_argument("--batch_size", type=int, default=48)
    parser.add_argument("--output", metavar="FILE.json")
    options = parser.parse_args(argv)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).eval()
    recordings = choose_recordings(load_recordings(options.recordings), options.per_set)
    report: dict = {"per_set": options.per_set, "machine": describe_machine(), **provenance(), "drafters": {}}
    for name, folder in named(options.drafter, "--drafter").items():
        report["drafters"][name] = measure(folder, target, recordings, options.batch_size)
    print(table(report))
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


__all__ = ["run"]
