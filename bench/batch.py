# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Throughput of batches: new tokens per second with 1, 2, 4, 8, 16 sequences in `generate`, plain and with a drafter.

    python -m bench.batch --target TARGET --drafter carryover=DIR --prompts PROMPTS --output outputs/batch.json

The same prompts go through every batch size; sizes and systems take turns repetition by repetition. Greedy outputs are
compared with plain decoding of single prompts: in float32 they are equal, in half precision near ties may differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from hf_carryover import CarryoverDrafter
from hf_carryover.demo import encode
from hf_carryover.evaluation.bootstrap import median_estimate
from hf_carryover.evaluation.machine import describe_machine, provenance, weights_digest
from hf_carryover.evaluation.prompts import choose_evenly, load_items
from hf_carryover.evaluation.replay_command import named
from hf_carryover.evaluation.summary import cell, pipe_table
from hf_carryover.evaluation.systems import PLAIN


def batches(prompts: list[list[int]], size: int, pad: int, device) -> list[dict]:
    """Left-padded batches of prompts, in order."""
    result = []
    for start in range(0, len(prompts), size):
        chosen = prompts[start : start + size]
        width = max(map(len, chosen))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in chosen], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in chosen], device=device)
        result.append({"input_ids": ids, "attention_mask": mask})
    return result


def run(target, drafter, groups, new_tokens: int, pad: int, options: dict) -> tuple[float, list[list[int]]]:
    """Seconds for all batches, and the new tokens of every prompt; `options` are of assisted generation."""
    arguments: dict = {} if drafter is None else {"assistant_model": drafter, **options}
    outputs: list[list[int]] = []
    start = time.perf_counter()
    for group in groups:
        # No end token: every sequence gets as many tokens, whatever the batch.
        ids = target.generate(
            **group, **arguments, do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=pad
        )
        outputs += ids[:, group["input_ids"].shape[1] :].tolist()
    return time.perf_counter() - start, outputs


def ratios(above: list[float], below: list[float]) -> dict:
    """Median quotient and its interval, paired by repetition."""
    return median_estimate([a / b for a, b in zip(above, below)]).to_dict()


def table(report: dict) -> str:
    """Markdown, a row per system and batch size."""
    body = []
    for name, sizes in report["tokens_per_second"].items():
        for size, speed in sizes.items():
            equal = f"{report['equal_to_plain'][name][size]} of {report['prompts']}"
            body.append([name, str(size), cell(speed, "{:.1f}"), cell(report["over_one"][name][size]), equal])
    return pipe_table(["system", "batch", "tokens/s", "over batch 1", "equal outputs"], body)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", nargs="*", default=[], metavar="NAME=DIR")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--num_prompts", type=int, default=16, help="in all, a multiple of the batch sizes")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--proposals", nargs="+", type=int, default=[7], help="most proposals a round, one or several")
    parser.add_argument("--confidence", nargs="+", type=float, default=[0.0], help="thresholds; 0: none")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", metavar="FILE.json")
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype, folders = getattr(torch, options.dtype), named(options.drafter, "--drafter")
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval().to(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target.generation_config.eos_token_id = None
    drafters: dict = {PLAIN: (None, {})}
    for name, folder in folders.items():
        drafter = CarryoverDrafter.from_pretrained(folder, dtype=dtype).eval().to(options.device)
        # The more sequences, the more a proposal that is rejected costs: a batch may want fewer of them.
        for count, least in itertools.product(options.proposals, options.confidence):
            case = {"num_assistant_tokens": count, "assistant_confidence_threshold": least}
            sure = f", unless below {least}" if least else ""
            drafters[f"{name}, {count} proposals{sure}"] = (drafter, case)
    items = choose_evenly(load_items(options.prompts, options.num_prompts), options.num_prompts)
    prompts = [encode(tokenizer, item.segments[0], item.tools, "cpu")["input_ids"][0].tolist() for item in items]
    pad = tokenizer.pad_token_id or 0
    times: dict = {name: {size: [] for size in options.sizes} for name in drafters}
    expected, equal = None, {name: {} for name in drafters}
    cases = [(name, size) for size in options.sizes for name in drafters]
    for repetition in range(options.repetitions):
        shift = repetition % len(cases)
        for name, size in cases[shift:] + cases[:shift] if expected is not None else cases:
            groups = batches(prompts, size, pad, target.device)
            seconds, outputs = run(target, drafters[name][0], groups, options.max_new_tokens, pad, drafters[name][1])
            times[name][size].append(seconds)
            expected = outputs if expected is None else expected
            equal[name][size] = sum(a == b for a, b in zip(outputs, expected))
    tokens = len(prompts) * options.max_new_tokens
    report = {
        "arguments": {k: v for k, v in vars(options).items() if k not in ("target", "drafter", "prompts", "output")},
        "target": Path(options.target).name,
        "weights": {name: weights_digest(folder) for name, folder in folders.items()},
        "machine": describe_machine(),
        **provenance(),
        "tokens_per_second": {
            name: {s: median_estimate([tokens / t for t in of]).to_dict() for s, of in sizes.items()}
            for name, sizes in times.items()
        },
        "over_one": {
            name: {size: ratios(sizes[options.sizes[0]], of) for size, of in sizes.items()}
            for name, sizes in times.items()
        },
        "equal_to_plain": equal,
        "prompts": len(prompts),
    }
    print(table(report))
    if options.output:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
