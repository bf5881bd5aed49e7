# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
How far a draft step is from what the machine could do.

For every part of a draft step the operations and the bytes it cannot avoid are counted from the drafter's shapes, and
divided by what the machine is measured to do: `floor = max(operations / peak, bytes / bandwidth)`, summed over parts.
Weights are read from memory once a step (the target's pass in between has pushed them out of the caches), as are the
keys and values of the context. Our step is timed part by part after a walk through a buffer larger than the caches.

    python -m bench.floor --output bench/FLOOR.md

Without `--drafter` the weights are random, with the shapes of the SmolLM2-135M drafters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
from torch import nn

from bench.draft_step import DRAFTER_SHAPE, MASK_TOKEN_ID, random_target
from hf_carryover import CarryoverDrafter, drafter_from_target
from hf_carryover.evaluation.bootstrap import median_estimate
from hf_carryover.evaluation.machine import describe_machine, provenance
from hf_carryover.modeling_carryover import CarryoverCache
from hf_carryover.proposals import argmax_proposals
from hf_carryover.target import TargetHead


PARTS = ("projection", "layers", "head", "sampling")
WALK_BYTES = 256 << 20  # read between two steps: more than any cache holds


def work(drafter: CarryoverDrafter, context: int, window_rows: int) -> dict[str, tuple[float, float]]:
    """
    Operations and bytes of each part of a draft step.

    Args:
        drafter ([`CarryoverDrafter`]): Its shapes count.
        context (`int`): Committed rows.
        window_rows (`int`): Rows of the window, committed and carried.

    Returns:
        `dict[str, tuple[float, float]]`: part to (floating point operations, bytes). Two operations per multiply-add.
    """
    config = drafter.config
    size = drafter.fc.weight.element_size()
    d, rows, layers = config.hidden_size, config.block_rows, config.num_hidden_layers
    kv = 2 * config.num_key_value_heads * config.head_dim
    q = config.num_attention_heads * config.head_dim
    keys = context + window_rows + rows
    vocab = config.output_vocab_size
    per_row = d * q + d * kv + q * d + 3 * d * config.intermediate_size
    layer_operations = 2 * rows * per_row + 2 * window_rows * d * kv + 2 * 2 * rows * keys * q
    layer_bytes = size * (per_row + kv * keys)
    sampling_operations, sampling_bytes = config.block_size * vocab, 4.0 * config.block_size * vocab
    if config.markov_rank:
        sampling_operations += 2 * config.block_size * config.markov_rank * vocab
        sampling_bytes += size * config.markov_rank * vocab
    return {
        "projection": (2.0 * window_rows * config.feature_size * d, float(size * config.feature_size * d)),
        "layers": (float(layers * layer_operations), float(layers * layer_bytes)),
        "head": (
            2.0 * config.block_size * config.target_hidden_size * vocab,
            float(size * config.target_hidden_size * vocab),
        ),
        "sampling": (float(sampling_operations), sampling_bytes),
    }


def ceilings(dtype: torch.dtype, repetitions: int = 5) -> dict[str, float]:
    """Measured operations per second of a large product in `dtype`, and bytes per second of reading memory."""
    n = 1536
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    buffer = torch.ones(WALK_BYTES // 4)
    product, reading = [], []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        a @ b
        middle = time.perf_counter()
        buffer.sum()
        product.append(middle - start)
        reading.append(time.perf_counter() - middle)
    return {"operations": 2 * n**3 / min(product[1:]), "bytes": WALK_BYTES / min(reading[1:])}


def floor_ms(parts: dict[str, tuple[float, float]], ceiling: dict[str, float]) -> dict[str, float]:
    """Milliseconds of each part that the machine can't go below."""
    return {
        name: 1000 * max(operations / ceiling["operations"], amount / ceiling["bytes"])
        for name, (operations, amount) in parts.items()
    }


class Products:
    """
    The products a draft step can't do without, bare and in order, part by part: what the library's kernels take.

    No norm, rotation, activation, draw or write, and no module around them. A product of few rows runs far below the
    machine's ceilings in any library, so a step is also compared with this.
    """

    def __init__(self, drafter: CarryoverDrafter, target, context: int, window_rows: int):
        config, head = drafter.config, TargetHead(target, drafter)
        rows, both = config.block_rows, config.block_rows + window_rows
        layers: list[tuple[torch.Tensor, int]] = []
        for layer in drafter.layers:
            attention, mlp = layer.self_attn, layer.mlp
            layers += [
                (attention.v_proj.weight, both),
                (attention.k_proj.weight, both),
                (attention.q_proj.weight, rows),
            ]
            layers += [(attention.o_proj.weight, rows)]
            layers += [(mlp.gate_proj.weight, rows), (mlp.up_proj.weight, rows), (mlp.down_proj.weight, rows)]
        sampling = []
        if config.markov_rank:
            sampling = [(drafter.markov_head.markov_w2.weight, 1)] * config.block_size
        self.parts = {
            "projection": [(drafter.fc.weight, window_rows)],
            "layers": layers,
            "head": [(head.weight, config.block_size)],
            "sampling": sampling,
        }
        dtype, kv, groups = drafter.fc.weight.dtype, config.num_key_value_heads, config.num_attention_heads
        self.inputs = {
            (rows_, width): torch.randn(rows_, width, dtype=dtype)
            for part in self.parts.values()
            for rows_, width in ((rows_, weight.shape[1]) for weight, rows_ in part)
        }
        keys = context + window_rows + rows
        self.attention = config.num_hidden_layers
        self.query = torch.randn(1, kv, groups // kv * rows, config.head_dim, dtype=dtype)
        self.keys = [torch.randn(1, kv, keys, config.head_dim, dtype=dtype) for _ in range(2 * self.attention)]
        self.walk = torch.ones(WALK_BYTES // 4)

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Milliseconds by part."""
        self.walk.sum()
        times = [time.perf_counter()]
        for name, part in self.parts.items():
            for weight, rows in part:
                nn.functional.linear(self.inputs[rows, weight.shape[1]], weight)
            if name == "layers":
                for i in range(self.attention):
                    nn.functional.scaled_dot_product_attention(self.query, *self.keys[2 * i : 2 * i + 2])
            times.append(time.perf_counter())
        return {name: 1000 * (b - a) for name, a, b in zip(self.parts, times, times[1:])}


class Step:
    """A draft step, timed part by part, that leaves the storage as it found it."""

    def __init__(self, drafter: CarryoverDrafter, target, context: int, committed: int, carried: int):
        self.drafter, self.head, self.context, self.committed = (
            drafter,
            TargetHead(target, drafter),
            context,
            committed,
        )
        config, dtype = drafter.config, drafter.fc.weight.dtype
        torch.manual_seed(0)
        self.cache = CarryoverCache(config, dtype, drafter.device, capacity=context + 2 * config.block_size + 4)
        for buffer in [*self.cache.keys, *self.cache.values]:
            buffer.normal_()
        self.features = torch.randn(1, committed + carried, config.feature_size, dtype=dtype)
        self.input_ids = torch.tensor([[5]])
        self.walk = torch.ones(WALK_BYTES // 4)

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Milliseconds by part."""
        drafter, cache, head = self.drafter, self.cache, self.head
        cache.committed, cache.carried, cache.window = self.context, 0, None
        self.walk.sum()
        times = [time.perf_counter()]
        drafter.commit_window(cache, self.features, self.committed)
        times.append(time.perf_counter())
        hidden = drafter.draft(cache, head.embed(self.input_ids[:, -1], drafter.device), head.mask_embeds)[0]
        times.append(time.perf_counter())
        base = drafter.logits(hidden, head.weight, head.bias).float()
        times.append(time.perf_counter())
        argmax_proposals(drafter, base[None], self.input_ids[0, -1:], head.token_ids)
        times.append(time.perf_counter())
        return {name: 1000 * (b - a) for name, a, b in zip(PARTS, times, times[1:])}


def random_drafter(target, block_size: int, dtype: torch.dtype) -> CarryoverDrafter:
    """A drafter of the shipped shape: 3 layers, 6 taps, Markov rank 64, 16384 draft tokens."""
    layers = target.config.num_hidden_layers
    drafter = drafter_from_target(
        target,
        **DRAFTER_SHAPE,
        num_hidden_layers=3,
        block_size=block_size,
        target_layer_ids=list(range(layers))[:6],
        markov_rank=64,
        draft_vocab_size=16384,
        mask_token_id=MASK_TOKEN_ID,
        draft_token_ids=torch.arange(16384),
    )
    return drafter.to(dtype).eval()


def measure(drafter, target, context: int, carried: int, ceiling: dict, repetitions: int) -> dict:
    """Floor and time of a case whose window has one committed row and `carried` others."""
    # In turns, so that both meet the same machine.
    step, products = Step(drafter, target, context, 1, carried), Products(drafter, target, context, 1 + carried)
    pairs = [(step(), products()) for _ in range(repetitions + 1)][1:]
    runs, bare = zip(*pairs)
    floor = floor_ms(work(drafter, context, 1 + carried), ceiling)
    total, least = (median_estimate([sum(run.values()) for run in part]) for part in (runs, bare))
    return {
        "context": context,
        "carried": carried,
        "floor_ms": floor,
        "products_ms": {name: median_estimate([run[name] for run in bare]).value for name in PARTS},
        "ms": {name: median_estimate([run[name] for run in runs]).value for name in PARTS},
        "total_ms": total.to_dict(),
        "multiple": total.value / sum(floor.values()),
        "products_multiple": total.value / least.value,
    }


def table(cases: list[dict]) -> str:
    """Markdown: time over floor by part, and together."""
    head = ["dtype", "B", "context", "carried", *(f"{name}, ms" for name in PARTS)]
    head += ["together", "× machine", "× products"]
    lines = [head, ["---"] * len(head)]
    for case in cases:
        cells = [case["dtype"], str(case["block_size"]), str(case["context"]), str(case["carried"])]
        cells += [f"{case['ms'][n]:.2f} ({case['floor_ms'][n]:.2f}, {case['products_ms'][n]:.2f})" for n in PARTS]
        total = case["total_ms"]
        cells += [f"{total['value']:.2f} [{total['low']:.2f}, {total['high']:.2f}]", f"{case['multiple']:.2f}"]
        cells.append(f"{case['products_multiple']:.2f}")
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def document(report: dict) -> str:
    """`FLOOR.md`."""
    machine = report["machine"]
    lines = [
        f"- {dtype}: {c['operations'] / 1e9:.0f} GFLOP/s in a large product, {c['bytes'] / 1e9:.1f} GB/s reading"
        for dtype, c in report["ceilings"].items()
    ]
    doc = (__doc__ or "").strip().split("\n\n")[1]
    return (
        "\n\n".join(
            [
                "# The floor of a draft step",
                doc,
                f"Measured by `python -m bench.floor` at commit {report['commit']} on {machine['cpu']}, "
                f"{machine['threads']} threads, torch {report['versions']['torch']}:",
                "\n".join(lines),
                "Projection: fusing the verified window. Layers: window keys and values, and the block through them. "
                "Head: the target's head over the draft vocabulary. Sampling: Markov bias and argmax, one by one. "
                "One row of the window is committed; brackets are 95 % intervals of the median over repetitions.",
                "In parentheses, beside the milliseconds of our step: the machine's floor, then the same products "
                "bare (torch's kernels in order, no module, norm, activation or draw around them, caches as cold). "
                "Products of eight rows run far below the machine's ceilings in any kernel torch has, so the last "
                "column, our step over the bare products, is what this code answers for.",
                table(report["cases"]),
            ]
        )
        + "\n"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--block_sizes", nargs="+", type=int, default=[7, 15])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024, 4096, 16384])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--output", metavar="FILE.md", help="document; the numbers go to FILE.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    report: dict = {"machine": describe_machine(), **provenance(), "ceilings": {}, "cases": []}
    for name in options.dtypes:
        dtype = getattr(torch, name)
        report["ceilings"][name] = ceilings(dtype)
        target: nn.Module = random_target(max_position_embeddings=max(options.contexts) + 64).to(dtype)
        for block_size, context in itertools.product(options.block_sizes, options.contexts):
            drafter = random_drafter(target, block_size, dtype)
            for carried in (0, block_size):
                case = measure(drafter, target, context, carried, report["ceilings"][name], options.repetitions)
                report["cases"].append({"dtype": name, "block_size": block_size, **case})
                print(table(report["cases"][-1:]).splitlines()[-1], flush=True)
    if options.output:
        path = Path(options.output)
        path.write_text(document(report), encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
