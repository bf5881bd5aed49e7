# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
What is this folder, and does it fit that target: `hf-carryover info FOLDER [--target TARGET]`.

Knows drafters of all formats, adapters, recordings, training runs and benchmark reports. With a target it says whether
the drafter was made for it; the exit code is 1 if not. Of the target only the config is read.

examples:
  hf-carryover info runs/carryover/drafter
  hf-carryover info z-lab/Qwen3-4B-DFlash-b16 --target Qwen/Qwen3-4B
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .adapters import ADDED, has_adapter
from .command import Parser, run_command
from .configuration_carryover import CarryoverConfig
from .modeling_carryover import CarryoverDrafter
from .target import check_fit
from .training.loading import METADATA_FILE


def describe_drafter(drafter: CarryoverDrafter) -> dict[str, str]:
    """Lines about a drafter, `name: value`."""
    config = drafter.config
    size = sum(p.numel() for p in drafter.parameters())
    layout = "anchor-first" if config.anchor_first else "own position"
    vocabulary = f"{config.output_vocab_size} of {config.vocab_size} tokens"
    lines = {
        "kind": "adapter" if has_adapter(drafter) else "drafter",
        "format": (config.converted_from or {}).get("format", "carryover"),
        "carry": f"on, from {config.carry_from}{', with pointer' * config.points_at_carried}"
        if config.carry
        else "off",
        "proposals": f"{config.block_size} a round, {layout}",
        "lookup": f"n-grams of up to {config.lookup_ngram_size}" if config.lookup_ngram_size else "off",
        "layers": f"{config.num_hidden_layers} of width {config.hidden_size}",
        "target": f"{config.num_target_layers or 'any number of'} layers of width {config.target_hidden_size}, "
        f"tapped at {config.target_layer_ids}",
        "vocabulary": vocabulary + (", own head" if config.own_head else ""),
        "markov rank": str(config.markov_rank),
        "mask": "learned embedding" if config.mask_token_id is None else f"token {config.mask_token_id}",
        "parameters": f"{size / 1e6:.2f} M, {str(drafter.dtype).removeprefix('torch.')}",
    }
    if has_adapter(drafter):
        own = sum(p.numel() for name, p in drafter.named_parameters() if "lora_" in name or name.startswith(ADDED))
        lines["adapter"] = f"{own / 1e6:.3f} M of them, on {drafter.adapter_base['base'] or 'a base without a name'}"
    return lines


def describe_folder(folder: Path) -> dict[str, str] | None:
    """Lines about a folder or file that is no drafter; `None` where nothing is known of it."""
    if folder.is_file() and folder.suffix == ".json":
        content = json.loads(folder.read_text(encoding="utf-8"))
        if "summary" in content and "settings" in content:
            groups = content["summary"]["groups"]
            systems = next(iter(groups.values()))["systems"]
            return {"kind": "benchmark report", "sets": ", ".join(groups), "systems": ", ".join(systems)}
    if (folder / METADATA_FILE).is_file():
        about = json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
        settings = about.get("settings") or {}
        decoding = f"sampled at {settings.get('temperature')}" if settings.get("do_sample") else "greedy"
        return {
            "kind": "recordings" if about.get("complete") else "recordings, not finished",
            "target": f"{about.get('target')}, {about.get('dtype')}, {about.get('engine')}",
            "decoding": f"{decoding}, at most {settings.get('max_new_tokens')} tokens",
            "prompts": str((about.get("prompts") or {}).get("number")),
        }
    if (folder / "training.json").is_file() and not (folder / "config.json").is_file():
        record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        chosen, metrics = record.get("training_arguments", {}), record.get("metrics", {})
        lines = {"kind": "training run", "stage": str(chosen.get("stage", "baseline"))}
        for name in ("eval_tau", "eval_loss"):
            if metrics.get(name) is not None:
                lines[name] = f"{metrics[name]:.3f}"
        lines["drafter"] = str(folder / "drafter") if (folder / "drafter").is_dir() else "not finished"
        return lines
    return None


def misfit(drafter: CarryoverDrafter, target: str) -> str | None:
    """Why a drafter does not fit a target, `None` if it does. The target is built without weights."""
    config = AutoConfig.from_pretrained(target)
    if isinstance(config, CarryoverConfig):
        raise ValueError(f"{target} is a drafter, not a target.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        check_fit(drafter, model)
    except ValueError as error:
        return str(error)
    return None


def run(argv: list[str]) -> int:
    """Print the lines; returns 1 where a drafter does not fit."""
    parser = Parser(__doc__)
    parser.add_argument("folder", help="folder, report file, or Hub id")
    parser.add_argument("--target", help="folder or Hub id of a target")
    parser.add_argument("--revision", help="branch, tag or commit")
    args = parser.parse_args(argv)
    path, drafter = Path(args.folder), None
    lines = describe_folder(path) if path.exists() else None
    if lines is None:
        hub = {} if args.revision is None else {"revision": args.revision}
        drafter = CarryoverDrafter.from_pretrained(args.folder, **hub)
        lines = describe_drafter(drafter)
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))
    if args.target is None:
        return 0
    if drafter is None:
        raise ValueError(f"{args.folder} is no drafter, so it fits no target: {lines['kind']}.")
    reason = misfit(drafter, args.target)
    print(f"{'fits':<{width}}  {'yes' if reason is None else reason}")
    return int(reason is not None)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
