# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Why carry helps, or does not: the analyses of arXiv 2609.14717 and two of our own, on one pair of drafters.

    hf-carryover analyze
    hf-carryover analyze --target DIR --carryover DIR --control DIR --recordings greedy=DIR --output DIR

1. the same drafter at the same anchors, with its carried rows and without: Recall@1, @4, @16 by position;
2. re-convergence of rejected rows by set, and its correlation with the gain over the control;
3. the attention on carried rows by layer, head and number of carried rows;
4. what is carried (`--probe NAME=DIR ...`, drafters trained equally): the gain of each over the first;
5. the time of a draft step by number of carried rows and context;
6. one generation round by round, as a page.

Everything is measured along recorded responses of the target, which a lossless drafter does not change. Without
`--recordings` the target answers the prompts first, greedily.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils import logging

from ..command import parse_dataclass, run_command
from ..demo import DEFAULT_DRAFTERS, encode
from ..modeling_carryover import CarryoverDrafter
from ..train import DTYPES
from ..training.loading import load_recordings
from .acceptance import Acceptance
from .analysis import MatchedAnchors, Reconvergence, choose_recordings
from .analysis_report import draw, markdown
from .attention import AttentionShare
from .bench_command import load_target
from .correlation import correlate
from .machine import describe_machine, provenance, weights_digest
from .overhead import measure_overhead
from .prompts import load_items
from .replay import Replay, replay_together
from .replay_command import named
from .summary import MEAN
from .view import RoundTracer, to_html


@dataclass
class AnalyzeArguments:
    """
    What to analyze.

    Args:
        target (`str`, *optional*): Folder or Hub id of the target. Defaults to the demo's.
        carryover, control (`str`, *optional*): The pair. Defaults to the shipped one.
        probe (`list[str]`, *optional*): `NAME=DIR` of drafters that differ in what they carry; the first is the
            reference.
        recordings (`str`, *optional*): Greedy recordings of the target.
        prompts (`list[str]`, *optional*): Prompts to answer where there are no recordings. Defaults to the demo's.
        num_prompts (`int`, *optional*, defaults to 20): Recordings or prompts of each set, at even distances.
        max_new_tokens (`int`, *optional*, defaults to 96): Length of an answer.
        contexts (`list[int]`, *optional*): Committed rows at which the draft step is timed.
        batch_size (`int`, *optional*, defaults to 16): Responses replayed at a time.
        dtype (`str`, *optional*, defaults to `"bfloat16"`), device (`str`, *optional*): Where and how all of it runs.
        output (`str`, *optional*, defaults to `"runs/analysis"`): Folder for `analysis.json`, `analysis.md`, figures
            and `view.html`.
    """

    target: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the target (default: the demo's)."}
    )
    carryover: str | None = field(default=None, metadata={"help": "Drafter with carry (default: the shipped one)."})
    control: str | None = field(default=None, metadata={"help": "Its control (default: the shipped one)."})
    probe: list[str] = field(default_factory=list, metadata={"help": "NAME=DIR of drafters that carry other things."})
    recordings: str | None = field(default=None, metadata={"help": "Greedy recordings of the target."})
    prompts: list[str] = field(default_factory=list, metadata={"help": "Prompts to answer without recordings."})
    num_prompts: int = field(default=20, metadata={"help": "Recordings or prompts of each set."})
    max_new_tokens: int = field(default=96, metadata={"help": "Length of an answer."})
    contexts: list[int] = field(default_factory=lambda: [128, 1024], metadata={"help": "Committed rows."})
    batch_size: int = field(default=16, metadata={"help": "Responses replayed at a time."})
    dtype: str = field(default="bfloat16", metadata={"help": "float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "Default: the accelerator if there is one."})
    output: str = field(default="runs/analysis", metadata={"help": "Folder for the results."})

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        for name in ("num_prompts", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if self.target is not None and (self.carryover is None or self.control is None):
            raise ValueError("With a --target of your own name its pair too: --carryover and --control.")
        self.carryover = self.carryover or str(DEFAULT_DRAFTERS["carryover"])
        self.control = self.control or str(DEFAULT_DRAFTERS["control"])


@torch.no_grad()
def answer(args: AnalyzeArguments, target, tokenizer) -> list[dict]:
    """Greedy answers of the target to the prompts, as recordings."""
    prompts = args.prompts or [str(Path(__file__).parents[1] / "demo_prompts.jsonl")]
    rows = []
    for number, item in enumerate(tqdm(load_items(prompts, args.num_prompts), desc="answers", unit="prompt")):
        inputs = encode(tokenizer, item.segments[0], item.tools, target.device)
        output = target.generate(**inputs, do_sample=False, max_new_tokens=args.max_new_tokens)
        prompt = inputs["input_ids"][0].tolist()
        rows.append(
            {"id": f"{item.set}-{number}", "prompt_ids": prompt, "response_ids": output[0, len(prompt) :].tolist()}
        )
    return rows


def analyze(
    target, tokenizer, carryover, control, probes: dict, recordings, args: AnalyzeArguments
) -> tuple[dict, str]:
    """
    All six analyses.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        carryover, control ([`CarryoverDrafter`]): The pair.
        probes (`dict[str, CarryoverDrafter]`): Drafters of the interface probe; the first is the reference.
        recordings (`datasets.Dataset`): Greedy recordings.
        args ([`AnalyzeArguments`]): `contexts` and `batch_size` count.

    Returns:
        `tuple[dict, str]`: numbers, and the page of [`to_html`].
    """
    attention, reconvergence, tracer = AttentionShare(carryover), Reconvergence(), RoundTracer()
    replay = Replay(carryover, target, observers=[reconvergence, attention, tracer])
    matched = MatchedAnchors(carryover, replay.head)
    replay.observers.append(matched)
    together = replay_together({"carryover": replay, "control": Replay(control, target)}, recordings, args.batch_size)
    systems = {name: [vars(response) for response in responses] for name, responses in together.items()}
    acceptance = Acceptance(systems)
    sets = [name for name in acceptance.names if name in reconvergence.rows]
    gains = {name: acceptance.change("carryover", "control", name) for name in [*acceptance.names, MEAN]}
    per_round = {name: reconvergence.summary(name) for name in sets}
    result = {
        "responses": len(recordings),
        "tau": {name: {group: acceptance.estimate(name, group).to_dict() for group in gains} for name in systems},
        "gain": {name: estimate.to_dict() for name, estimate in gains.items()},
        "matched_anchors": {"all": matched.recalls(), **{name: matched.recalls(name) for name in matched.ranks}},
        "reconvergence": {"all": reconvergence.summary(), **per_round},
        "correlation": correlate(sets, [per_round[n]["reconverged"] for n in sets], [gains[n].value for n in sets]),
        "attention": attention.summary(),
        "probe": probe(target, probes, recordings, args.batch_size),
        "overhead": measure_overhead(carryover, target, tuple(args.contexts)),
    }
    shown = max(tracer.rounds, key=lambda name: sum(sum(t.reconverged) for t in tracer.rounds[name]))
    return result, to_html(tracer.rounds[shown], tokenizer, title=f"{shown}, round by round")


def probe(target, drafters: dict, recordings, batch_size: int) -> dict | None:
    """τ of every drafter, and its change against the first, per set and over the mean of sets; `None` without any."""
    if not drafters:
        return None
    replays = {name: Replay(drafter, target) for name, drafter in drafters.items()}
    together = replay_together(replays, recordings, batch_size)
    systems = {name: [vars(response) for response in responses] for name, responses in together.items()}
    acceptance, reference = Acceptance(systems), next(iter(systems))
    groups = [*acceptance.names, MEAN]
    return {
        "reference": reference,
        "tau": {n: {g: acceptance.estimate(n, g).to_dict() for g in groups} for n in systems},
        "change": {n: {g: acceptance.change(n, reference, g).to_dict() for g in groups} for n in systems},
    }


def run(args: AnalyzeArguments) -> dict:
    """Loads, analyzes, and writes the results; returns the report."""
    probes = named(args.probe, "--probe")
    code = provenance()
    recordings = None if args.recordings is None else load_recordings(args.recordings)
    target, tokenizer = load_target(args)

    def load(folder: str) -> CarryoverDrafter:
        return CarryoverDrafter.from_pretrained(folder, dtype=target.dtype).eval().to(target.device)

    carryover, control = load(args.carryover), load(args.control)
    if not carryover.config.carry:
        raise ValueError(f"--carryover {Path(args.carryover).name} has no carry (`config.carry` is False).")
    if recordings is None:
        recordings = load_recordings(answer(args, target, tokenizer))
    recordings = choose_recordings(recordings, args.num_prompts)
    probed = {name: load(folder) for name, folder in probes.items()}
    result, page = analyze(target, tokenizer, carryover, control, probed, recordings, args)
    folders = {"carryover": args.carryover, "control": args.control, **probes}
    report = {
        "settings": {
            "dtype": args.dtype,
            "threads": torch.get_num_threads(),
            "weights": {name: weights_digest(folder) for name, folder in folders.items()},
        },
        "machine": describe_machine(),
        **code,
        **result,
    }
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "analysis.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (output / "analysis.md").write_text(markdown(report), encoding="utf-8")
    (output / "view.html").write_text(page, encoding="utf-8")
    draw(report, output)
    return report


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""

    def work(arguments: list[str]) -> None:
        args = parse_dataclass(AnalyzeArguments, arguments, __doc__)
        print("\n" + markdown(run(args)))
        print(f"{args.output}: analysis.json, analysis.md, view.html and, with matplotlib, three figures.")

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return run_command(work, argv)


if __name__ == "__main__":
    raise SystemExit(main())
