# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Sizes of fused states and of what is added to carried ones: what `--carry_learning_rate_scale` is chosen by.

    python -m bench.carry_size --target TARGET --recordings DIR --drafter NAME=DIR ... --output carry-size.json

Sizes are root mean squares; of fused states `fc(h)`, the median over the rows of some recordings.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_carryover import CarryoverDrafter, load_recordings
from hf_carryover.evaluation.replay_command import named
from hf_carryover.training.verification import FrozenTarget


def rms(values: torch.Tensor) -> torch.Tensor:
    """Root mean square over the last dimension."""
    return values.float().pow(2).mean(dim=-1).sqrt()


@torch.no_grad()
def sizes(drafter: CarryoverDrafter, target, recordings) -> dict:
    """`fused` (median over rows) and `carry_embedding`, `None` without carry."""
    frozen = FrozenTarget(target, list(drafter.config.target_layer_ids))
    rows = []
    for ids in recordings["input_ids"]:
        tokens = torch.tensor([ids])
        features = frozen.record(tokens, torch.ones_like(tokens), keep_cache=False, keep_logits=False).features
        rows.append(rms(drafter.fc(features.to(drafter.fc.weight.dtype)))[0])
    carried = drafter.carry_embedding
    return {
        "fused": float(torch.cat(rows).median()),
        "carry_embedding": None if carried is None else float(rms(carried)),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--recordings", required=True)
    parser.add_argument("--drafter", nargs="+", required=True, metavar="NAME=DIR")
    parser.add_argument("--num_recordings", type=int, default=16)
    parser.add_argument("--output", metavar="FILE.json")
    options = parser.parse_args(argv)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).eval()
    recordings = load_recordings(options.recordings)
    recordings = recordings.select(range(min(options.num_recordings, len(recordings))))
    report = {
        name: sizes(CarryoverDrafter.from_pretrained(folder, dtype=torch.float32), target, recordings)
        for name, folder in named(options.drafter, "--drafter").items()
    }
    print(json.dumps(report, indent=1))
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
