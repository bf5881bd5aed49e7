# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
An adapter against full fine-tuning, on the test bed: `python -m bench.adapter --output bench/results/adapter.json`.

From one baseline without carry, three drafters are trained for equally many steps on the same texts: the control
(all weights, no carry), full fine-tuning with carry, and a LoRA with the carry embedding on the frozen baseline. What
counts is the gain of τ over the control, with its interval over texts, and which share of the full one's gain the
adapter keeps. Also measured: trained parameters, file sizes, training time, and the memory that gradients and
optimizer take (3 numbers of 4 bytes a trained parameter). The sizes on the SmolLM2 drafter are those of its files.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig

from hf_carryover import CarryoverDrafter
from hf_carryover.adapters import add_adapter
from hf_carryover.evaluation.bootstrap import PairedBootstrap, ratio
from hf_carryover.evaluation.machine import describe_machine, provenance
from hf_carryover.evaluation.summary import cell, pipe_table
from hf_carryover.testbed.experiment import (
    Sizes,
    arrays,
    measure,
    new_drafter,
    train_drafter,
    train_target,
    with_carry,
)
from hf_carryover.testbed.language import Language


def trained_parameters(drafter: CarryoverDrafter) -> int:
    """Parameters that an optimizer would change."""
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def file_size(drafter: CarryoverDrafter) -> int:
    """Bytes of the saved weights."""
    with tempfile.TemporaryDirectory() as folder:
        drafter.save_pretrained(folder)
        return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def smollm2_sizes(ranks: list[int]) -> dict[str, dict]:
    """Adapters of the shipped SmolLM2 drafter, in its dtype."""
    folder = Path(__file__).parents[1] / "model_cards" / "smollm2-135m-markov-control"
    sizes = {}
    for rank in ranks:
        drafter = CarryoverDrafter.from_pretrained(folder, carry=True)
        whole, full = file_size(drafter), trained_parameters(drafter)
        add_adapter(drafter, LoraConfig(r=rank, lora_alpha=2 * rank))
        drafter.to(torch.bfloat16)
        own = trained_parameters(drafter)
        sizes[f"rank {rank}"] = {"trained": own, "of": full, "bytes": file_size(drafter), "of_bytes": whole}
    return sizes


def train_all(rank: int, learning_rate: float, seed: int) -> tuple[dict, dict, object, Language]:
    """The three drafters and what training them took."""
    sizes, language = Sizes(), Language(seed=seed)
    target, _ = train_target(language, sizes, seed)
    baseline = train_drafter(new_drafter(target, sizes, seed), target, language, sizes, "baseline", seed)
    drafters = {
        "control": with_carry(baseline, None),
        "full": with_carry(baseline, "states"),
        "adapter": with_carry(baseline, "states"),
    }
    add_adapter(drafters["adapter"], LoraConfig(r=rank, lora_alpha=2 * rank))
    cost = {}
    for name, drafter in drafters.items():
        count, start = trained_parameters(drafter), time.perf_counter()
        used = Sizes(learning_rate=learning_rate) if name == "adapter" else sizes
        train_drafter(drafter, target, language, used, "carryover", seed)
        cost[name] = {
            "trained": count,
            "seconds": time.perf_counter() - start,
            "optimizer_bytes": 12 * count,
            "file_bytes": file_size(drafter),
        }
    return drafters, cost, target, language


def compare(drafters: dict, target, language: Language, rho: float) -> dict:
    """τ of all, gains over the control, and the adapter's share of the full gain, with intervals over texts."""
    counts = {name: arrays(measure(drafter, target, language, rho)) for name, drafter in drafters.items()}
    bootstrap = PairedBootstrap(["texts"] * len(counts["control"][0]), num_resamples=2000)

    def estimate(of) -> dict:
        return bootstrap(lambda weights: of({name: ratio(weights, *counts[name]) for name in counts})).to_dict()

    return {
        "tau": {name: estimate(lambda t, name=name: t[name]) for name in drafters},
        "gain": {name: estimate(lambda t, name=name: t[name] / t["control"] - 1) for name in ("full", "adapter")},
        "share": estimate(lambda t: (t["adapter"] - t["control"]) / (t["full"] - t["control"])),
    }


def gains(report: dict) -> str:
    """The first table: gains over the control by position of the dial; and how much was trained."""
    body = []
    for rho, result in report["results"].items():
        taus = [f"{result['tau'][name]['value']:.2f}" for name in ("control", "full", "adapter")]
        over = [cell(result["gain"][name], "{:+.1%}") for name in ("full", "adapter")]
        body.append([rho, *taus, *over, cell(result["share"], "{:.0%}")])
    names = ["control", "full", "adapter"]
    head = ["ρ", *(f"τ {name}" for name in names), "gain, full", "gain, adapter", "adapter's share of the gain"]
    trained, whole = (report["cost"][name]["trained"] for name in ("adapter", "full"))
    return f"{pipe_table(head, body)}\n\nTrained: {trained:,} parameters, {trained / whole:.1%} of full fine-tuning's."


def markdown(report: dict) -> str:
    """The report as a page."""
    lines = ["# Adapter against full fine-tuning, on the test bed", "", gains(report)]
    lines += [
        "",
        "| | trained parameters | seconds | gradients and optimizer, KB | file, KB |",
        "|---|---|---|---|---|",
    ]
    for name, cost in report["cost"].items():
        lines.append(
            f"| {name} | {cost['trained']:,} | {cost['seconds']:.0f} | {cost['optimizer_bytes'] / 1e3:.0f} | "
            f"{cost['file_bytes'] / 1e3:.0f} |"
        )
    lines += ["", "The shipped SmolLM2 drafter, all linear maps adapted:", ""]
    lines += ["| | parameters | share | file, MB | share of the drafter's |", "|---|---|---|---|---|"]
    for name, size in report["smollm2"].items():
        lines.append(
            f"| {name} | {size['trained']:,} | {size['trained'] / size['of']:.1%} | {size['bytes'] / 1e6:.2f} | "
            f"{size['bytes'] / size['of_bytes']:.1%} |"
        )
    settings = report["settings"]
    lines += [
        "",
        f"Seed {settings['seed']}, rank {settings['rank']}, learning rate of the adapter {settings['learning_rate']}, "
        f"of the others {Sizes().learning_rate}; {Sizes().carry_steps} steps each. Brackets: 95 % over texts. The "
        "baseline has 64 wide layers, of which a LoRA of this rank is no small part: sizes are to be read off the "
        "second table.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rho", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--output", type=Path, default=Path("bench/results/adapter.json"))
    args = parser.parse_args()
    drafters, cost, target, language = train_all(args.rank, args.learning_rate, args.seed)
    report = {
        "settings": {"rank": args.rank, "learning_rate": args.learning_rate, "seed": args.seed},
        "machine": describe_machine(),
        **provenance(),
        "results": {str(rho): compare(drafters, target, language, rho) for rho in args.rho},
        "cost": cost,
        "smollm2": smollm2_sizes([4, 8, 16]),
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    args.output.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main()
