# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Measure acceptance, speed and equality of outputs on prompts:

    hf-carryover bench --quick
    hf-carryover bench --target DIR --drafter control=DIR carryover=DIR --prompts DIR --output report.json

Plain decoding always runs along; `--peers` adds transformers' own ways to go faster. Each prompt is written to a
journal beside the report as soon as it is done, and the same command goes on where an interrupted one ended. The
report comes with a Markdown table, and with figures where matplotlib is installed.

The exit code is 1 when a greedy output differs from plain decoding without being a near tie.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ..command import parse_dataclass, run_command
from ..demo import DEFAULT_DRAFTERS
from ..modeling_carryover import CarryoverDrafter
from ..smollm2 import load_smollm2
from ..train import DTYPES
from ..training.loading import load_recordings, split_recordings
from .benchmark import Evaluation, failures
from .figures import draw_figures
from .journal import Journal
from .machine import describe_machine, provenance, weights_digest
from .prompts import Item, choose_evenly, load_items
from .replay_command import named
from .report_file import SCHEMA_VERSION, write_report
from .summary import HELD_OUT, markdown, public_record, summarize
from .systems import System, peer


# `--quick`: what it sets where nothing else is asked for, and seconds after which it begins no further prompt.
QUICK = {"max_new_tokens": 48, "num_prompts": 8}
QUICK_SECONDS = 90.0


@dataclass
class BenchArguments:
    """
    What to measure.

    Args:
        target (`str`, *optional*): Folder or Hub id of the target. Defaults to the demo's.
        drafter (`list[str]`, *optional*): `NAME=DIR` of each drafter. Defaults to the shipped pair with the demo's
            target, and to none with another.
        peers (`list[str]`, *optional*): See [`~hf_carryover.evaluation.systems.peer`].
        prompts (`list[str]`, *optional*): JSONL files, folders of them, or datasets `owner/name` on the Hub.
        num_prompts (`int`, *optional*, defaults to 10): Prompts of each set, at even distances.
        recordings (`str`, *optional*): Recordings, of which held-out ones are asked as a set apart.
        held_out (`int`, *optional*, defaults to 100): Size of the split, as in training.
        num_held_out (`int`, *optional*, defaults to 20): Held-out recordings to ask.
        max_turns (`int`, *optional*, defaults to 1): Turns of a conversation that are asked.
        max_new_tokens (`int`, *optional*, defaults to 96): Length limit of an answer.
        temperature (`float`, *optional*, defaults to 0.0): 0 is greedy.
        seeds (`list[int]`, *optional*): Of sampling; every prompt is asked once for each.
        dtype (`str`, *optional*, defaults to `"bfloat16"`), device (`str`, *optional*): Where and how all of it runs.
        compare (`list[str]`, *optional*): Pairs `A-B` of drafters whose difference is reported.
        quick (`bool`, *optional*, defaults to `False`): A first answer in two minutes.
        output (`str`, *optional*, defaults to `"runs/bench.json"`): The report; the rest lies beside it.
    """

    target: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the target (default: the demo's)."}
    )
    drafter: list[str] | None = field(default=None, metadata={"help": "NAME=DIR of each drafter."})
    peers: list[str] = field(
        default_factory=list,
        metadata={"help": "prompt_lookup[:TOKENS], assistant:DIR, dflash:NAME (weights of a drafter)."},
    )
    prompts: list[str] = field(default_factory=list, metadata={"help": "JSONL files, folders, datasets owner/name."})
    num_prompts: int = field(default=10, metadata={"help": "Prompts of each set."})
    recordings: str | None = field(default=None, metadata={"help": "Recordings, of which held-out ones are asked."})
    held_out: int = field(default=100, metadata={"help": "Size of the split, as in training."})
    num_held_out: int = field(default=20, metadata={"help": "Held-out recordings to ask."})
    max_turns: int = field(default=1, metadata={"help": "Turns of a conversation that are asked."})
    max_new_tokens: int = field(default=96, metadata={"help": "Length limit of an answer."})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy; else the softmax is sampled as it is."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Of sampling."})
    dtype: str = field(default="bfloat16", metadata={"help": "float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "Default: the accelerator if there is one."})
    compare: list[str] | None = field(
        default=None,
        metadata={"help": "Pairs A-B (default: carryover-control, control-baseline where they were run)."},
    )
    quick: bool = field(default=False, metadata={"help": "A first answer in two minutes, also without other flags."})
    output: str = field(default="runs/bench.json", metadata={"help": "Report; .md, .png, .journal.jsonl beside it."})

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        if self.temperature < 0:
            raise ValueError(f"--temperature must be 0 (greedy) or positive, got {self.temperature}.")
        for name in ("num_prompts", "num_held_out", "max_turns", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if not self.output.endswith(".json"):
            raise ValueError(f"--output must end in .json, got {self.output!r}.")
        if self.target is None and not self.quick and not self.drafter:
            raise ValueError("Name a --target and its --drafter, or ask for --quick.")
        if self.quick:
            for name, value in QUICK.items():
                if getattr(self, name) == type(self).__dataclass_fields__[name].default:
                    setattr(self, name, value)

    @property
    def drafter_folders(self) -> dict[str, str]:
        """Folders by name."""
        if self.drafter is None:
            return {name: str(folder) for name, folder in DEFAULT_DRAFTERS.items()} if self.target is None else {}
        return named(self.drafter, "--drafter")


def comparisons(wanted: list[str] | None, names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of systems whose difference is reported; an unknown name is an error."""
    if wanted is None:
        usual = [("carryover", "control"), ("control", "baseline")]
        return [pair for pair in usual if set(pair) <= set(names)]
    pairs = []
    for text in wanted:
        # Names may have hyphens of their own.
        found = [(a, text[len(a) + 1 :]) for a in names if text.startswith(f"{a}-") and text[len(a) + 1 :] in names]
        if len(found) != 1:
            raise ValueError(f"--compare takes A-B with two of {', '.join(names)}, got {text!r}.")
        pairs += found
    return pairs


def gather_items(args: BenchArguments) -> list[Item]:
    """Prompts set by set in turn (so that an early end has seen all sets), then the held-out recordings."""
    prompts = args.prompts or ([str(Path(__file__).parents[1] / "demo_prompts.jsonl")] if args.quick else [])
    sets: dict[str, list[Item]] = {}
    for item in load_items(prompts, args.num_prompts):
        sets.setdefault(item.set, []).append(item)
    items = [item for row in zip_longest(*sets.values()) for item in row if item is not None]
    if args.recordings is not None:
        _, held_out = split_recordings(load_recordings(args.recordings), args.held_out, seed=0)
        for row in choose_evenly(range(len(held_out)), args.num_held_out):
            recording = held_out[row]
            first = list(recording["response_mask"]).index(1)
            items.append(Item(HELD_OUT, str(recording["id"]), prompt_ids=list(recording["input_ids"][:first])))
    if not items:
        raise ValueError("There are no prompts. Name some with --prompts, or held-out ones with --recordings.")
    return items


def load_target(args):
    """Target and tokenizer of arguments with `target`, `dtype` and `device`."""
    dtype = getattr(torch, args.dtype)
    device = args.device or (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu")
    if args.target is None:
        model, tokenizer = load_smollm2(dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    return model.eval().to(device), tokenizer


def run(args: BenchArguments) -> tuple[dict, list[str]]:
    """Measures, and writes the report and what lies beside it; returns it and the failures of equality."""
    items = gather_items(args)
    folders = args.drafter_folders
    code = provenance()  # before the run: a checkout may move on meanwhile
    target, tokenizer = load_target(args)
    drafters = {
        name: CarryoverDrafter.from_pretrained(folder, dtype=target.dtype).eval().to(target.device)
        for name, folder in folders.items()
    }
    systems = [System(name, drafter) for name, drafter in drafters.items()]
    systems += [peer(text, target, drafters) for text in args.peers]
    pairs = comparisons(args.compare, [system.name for system in systems])
    evaluation = Evaluation(target, tokenizer, systems, args.max_new_tokens, args.max_turns, args.temperature)
    weights = {name: weights_digest(folder) for name, folder in folders.items()}
    name = "SmolLM2-135M-Instruct" if args.target is None else Path(args.target).resolve().name
    settings = {"target": name, **evaluation.settings(), "weights": weights}
    output = Path(args.output)
    journal = Journal(output.with_suffix(".journal.jsonl"), settings)
    deadline = time.perf_counter() + QUICK_SECONDS if args.quick else None
    with tqdm(total=len(items), unit="prompt", desc="bench", dynamic_ncols=True) as bar:
        records = evaluation.run(items, args.seeds, journal, bar.write, bar.update, deadline)
    names = ("num_prompts", "held_out", "num_held_out", "max_turns", "max_new_tokens", "seeds", "quick")
    report = {
        "schema_version": SCHEMA_VERSION,
        "settings": settings,
        "arguments": {name: getattr(args, name) for name in names},
        "machine": describe_machine(),
        **code,
        "summary": summarize(records, pairs),
        "prompts": [public_record(record) for record in records],
    }
    write_report(output, report)
    output.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    draw_figures(report, output.with_suffix(".png"))
    return report, failures(records)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""

    def work(arguments: list[str]) -> int:
        report, wrong = run(parse_dataclass(BenchArguments, arguments, __doc__))
        print("\n" + markdown(report))
        for line in wrong:
            print(f"DIFFERENT FROM PLAIN: {line}")
        return 1 if wrong else 0

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return run_command(work, argv)


if __name__ == "__main__":
    raise SystemExit(main())
