# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
One look at an accelerator, in a few minutes and without downloads: random weights of Qwen3-4B's shape.

Prints the draft step with and without carried rows at several contexts, the share of a round it takes beside the
target's pass, generation with and without carry and with the draft step in CUDA graphs, and a training step's time and
peak memory, with the memory that [`training_bytes`] expects.

    python -m bench.gpu_check --output outputs/gpu.json
    python -m bench.gpu_check --tiny          # the same on a CPU with a model of a few thousand parameters
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, logging

from bench.training_step import timed_steps
from hf_carryover import CarryoverDrafter, CarryoverTrainer, CarryoverTrainingArguments, drafter_from_target
from hf_carryover.evaluation.machine import describe_machine, provenance
from hf_carryover.evaluation.overhead import measure_overhead
from hf_carryover.evaluation.systems import System


QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def training_bytes(drafter: CarryoverDrafter, anchors: int, length: int, max_logits: int, verified_rows: int) -> dict:
    """
    Expected peak of a carryover step of one recording, in bytes, by what needs it.

    Args:
        drafter ([`CarryoverDrafter`]): In float32 masters, run in bfloat16.
        anchors (`int`): Blocks with gradient.
        length (`int`): Recorded tokens.
        max_logits (`int`): Of the training arguments.
        verified_rows (`int`): Rejected rows of all branches in the verification pass.

    Returns:
        `dict[str, int]`: `weights` (master, gradient, two moments), `activations` (of the layers, in bfloat16, with
        keys and values of every block's context), `carried` features, `logits` (two float32 copies and one in
        bfloat16), `masks` of drafting and verification.
    """
    config = drafter.config
    parameters = sum(p.numel() for p in drafter.parameters())
    rows, carried = config.block_rows, config.block_size
    keys = length + carried + rows
    kv = 2 * config.num_key_value_heads * config.head_dim
    per_row = 8 * config.hidden_size + 3 * config.intermediate_size + 2 * config.num_attention_heads * config.head_dim
    layers = config.num_hidden_layers
    logits = min(max_logits, anchors * config.block_size * config.output_vocab_size)
    return {
        "weights": 16 * parameters,
        "activations": layers
        * 2
        * (anchors * rows * per_row + anchors * keys * kv + (length + anchors * carried) * kv),
        "carried": 2 * anchors * carried * config.feature_size,
        "logits": 10 * logits,
        "masks": 2 * anchors * rows * keys + 2 * verified_rows * (length + verified_rows),
    }


class Memory:
    """Peak of a device, 0 on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) - self.before if self.device.type == "cuda" else 0


def make_models(shape: dict, block_size: int, device: torch.device, dtype: torch.dtype):
    """Random target, and a drafter with the paper's shape: 5 layers, Markov rank 256."""
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with device:
        target = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=None, pad_token_id=0)).eval()
    torch.set_default_dtype(previous)
    # Nothing is stopped by an end token.
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    drafter = drafter_from_target(target, num_hidden_layers=5, block_size=block_size, markov_rank=256, mask_token_id=3)
    torch.nn.init.normal_(drafter.carry_embedding, std=0.02)
    return target, drafter


def generation(target, drafter, context: int, new_tokens: int, repetitions: int, graphs: dict) -> dict:
    """
    Milliseconds a round by phase, taking turns: carry on and off, and carry with the draft step in CUDA graphs
    (`graphs` are options of `compile_draft`); random weights accept next to nothing.
    """
    ids = torch.randint(10, target.config.vocab_size, (1, context), device=target.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    config = type(drafter.config)(**{**drafter.config.to_dict(), "carry": False})
    off = CarryoverDrafter(config).to(drafter.device, drafter.dtype).eval()
    off.load_state_dict({k: v for k, v in drafter.state_dict().items() if not k.startswith("carry_")})
    compiled = copy.deepcopy(drafter).compile_draft(**graphs)
    systems = {
        name: System(name, system) for name, system in (("carry", drafter), ("no carry", off), ("graphs", compiled))
    }
    seen: dict = {name: [] for name in systems}
    for repetition in range(repetitions + 1):
        for name in list(systems)[:: 1 if repetition % 2 else -1]:
            numbers = systems[name].generate(target, inputs, new_tokens)
            phases = numbers["phases"] or systems[name].split(target, inputs, new_tokens)
            if repetition:  # the first is a warm-up
                rounds = max(1, numbers["rounds"])
                round_ms = numbers["decode_ms"] / rounds
                seen[name].append({"round": round_ms, **{k: v / rounds for k, v in phases.items()}})
    if compiled.compiled_draft.failure is not None:
        print(f"graphs: not compiled, {compiled.compiled_draft.failure[:300]}", flush=True)
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in seen.items()}


def training(target, drafter, length: int, anchors: int, steps: int, folder: str) -> dict:
    """Seconds a carryover step, anchors a second, peak memory, and what was expected."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "id": str(i),
            "input_ids": torch.randint(10, target.config.vocab_size, (length,), generator=generator).tolist(),
            "response_mask": [0] * 8 + [1] * (length - 8),
        }
        for i in range(steps + 1)
    ]
    drafter = drafter.float().train()
    args = CarryoverTrainingArguments(
        output_dir=folder,
        stage="carryover",
        bf16=True,
        use_cpu=target.device.type == "cpu",
        per_device_train_batch_size=1,
        anchors_per_response=anchors,
        max_steps=steps + 1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = CarryoverTrainer(drafter, target, args, train_dataset=rows)
    ends = timed_steps(trainer)
    memory = Memory(target.device)
    trainer.train()
    seconds = statistics.median(b - a for a, b in itertools.pairwise(ends))
    expected = training_bytes(drafter, anchors, length, args.max_logits, anchors * drafter.config.block_size)
    return {
        "length": length,
        "anchors": anchors,
        "seconds": seconds,
        "anchors_per_second": anchors / seconds,
        "peak_gib": memory.peak() / 2**30,
        "expected_gib": {name: round(amount / 2**30, 3) for name, amount in expected.items()},
        "expected_total_gib": sum(expected.values()) / 2**30,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--block_size", type=int, default=15)
    parser.add_argument("--output", metavar="FILE.json")
    parser.add_argument("--workdir", default="runs/gpu_check")
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    shape = TINY if options.tiny else QWEN3_4B
    target, drafter = make_models(shape, options.block_size, device, torch.bfloat16)
    served = drafter.to(torch.bfloat16).eval()
    contexts = (64, 128) if options.tiny else (1024, 4096, 16384)
    graphs = {"fixed_shapes": True, "backend": "eager"} if options.tiny else {"mode": "reduce-overhead"}
    report: dict = {"shape": shape, "machine": describe_machine(), **provenance()}
    report["draft_step"] = measure_overhead(served, target, contexts, repetitions=9, rounds=3)
    for entry in report["draft_step"]:
        if entry["carried"] in (0, options.block_size):
            print(
                f"draft step, context {entry['context']}, {entry['carried']} carried: {entry['draft_ms']}", flush=True
            )
    report["generation"] = {
        context: generation(target, served, context, 8 if options.tiny else 48, 3, graphs) for context in contexts[:2]
    }
    for context, systems in report["generation"].items():
        for name, phases in systems.items():
            text = ", ".join(f"{key} {value:.2f}" for key, value in phases.items())
            print(f"round, context {context}, {name}: ms {text}", flush=True)
    cases = [(64, 8)] if options.tiny else [(1024, 128), (2048, 512)]
    report["training"] = [training(target, drafter, *case, steps=3, folder=options.workdir) for case in cases]
    for case in report["training"]:
        print(
            f"training, {case['anchors']} anchors of {case['length']} tokens: {case['seconds']:.2f} s a step, "
            f"{case['anchors_per_second']:.0f} anchors/s, peak {case['peak_gib']:.1f} GiB "
            f"(expected {case['expected_total_gib']:.1f})",
            flush=True,
        )
    if options.output:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
