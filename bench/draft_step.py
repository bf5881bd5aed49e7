# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Times a round without the target: ours against transformers' own DFlash generator and z-lab's loop, same weights.

The systems: `transformers` (its `DFlashTokenCandidateGenerator`), `z-lab` (the package `dflash`, if it is installed:
`pip install --no-deps dflash`), `ours` (carry off; its proposals are checked to be the same), `ours+carry`, and with
`--compile` `compiled`, which is `ours+carry` after `compile_draft()`. The
time of a round outside the target's forward is everything from the end of one target pass to the start of the next:
choosing tokens, cropping the cache, committing (and carrying) rows, drafting, preparing the next pass. The part of it
spent inside the candidate generator is reported beside it (z-lab's loop has none). Weights are random, so nearly every
proposal is rejected: with carry on this is the most expensive case, since all rows are carried.

    python -m bench.draft_step --output outputs/draft_step.json
    python -m bench.draft_step --profile --contexts 1024 --block_sizes 15 --dtypes bfloat16
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, logging

from hf_carryover import CarryoverDrafter, drafter_from_target
from hf_carryover.convert import write_drafter
from hf_carryover.evaluation.bootstrap import median_estimate
from hf_carryover.evaluation.machine import describe_machine, provenance
from hf_carryover.evaluation.summary import cell, pipe_table
from hf_carryover.evaluation.systems import transformers_dflash


PEERS = ("transformers", "z-lab")
MASK_TOKEN_ID = 3  # an unused special token of SmolLM2
# The layers of a drafter for SmolLM2-135M, for a random target whose own are smaller.
DRAFTER_SHAPE = {"intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
SPREAD = 3.0  # standard deviation of a drafter matrix, in units of 1 / sqrt(inputs)
SHARPNESS = 8.0  # scale of the drafter's attention scores
MORE_THAN_ENOUGH = 4096  # new tokens: the recorder ends the run long before


class EnoughRounds(Exception):
    """Ends a `generate` call from inside the target, when all wanted rounds were seen."""


class Recorder:
    """
    Watches one `generate` call from inside: wraps the target's `forward` and the generator it makes.

    Args:
        target (`PreTrainedModel`): The target.
        rounds (`int`): Rounds to draft; the call ends in front of the last one's verification.
        profile_rounds (`bool`, *optional*, defaults to `False`): Profile the generator's `get_candidates`.

    Attributes:
        outside (`list[float]`): Milliseconds between target passes, one entry a round.
        inside (`list[float]`): Of these, milliseconds in the candidate generator.
        proposals (`list[list[int]]`): Proposed tokens of each round.
        operators (`dict[str, list[float]]`): Operator name to its own milliseconds and calls, summed over the rounds
            after the first.
    """

    def __init__(self, target, rounds: int, profile_rounds: bool = False):
        self.target, self.rounds, self.profile_rounds = target, rounds, profile_rounds
        self.outside: list[float] = []
        self.inside: list[float] = []
        self.proposals: list[list[int]] = []
        self.operators: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self._pass_end: float | None = None
        self._generator_ms = 0.0

    def __enter__(self):
        self._forward, self._make = self.target.forward, self.target._get_candidate_generator

        @functools.wraps(self._forward)  # keeps the signature, which `generate` inspects
        def forward(*args, **kwargs):
            return self._watch_forward(*args, **kwargs)

        self.target.forward, self.target._get_candidate_generator = forward, self._watch_generator
        return self

    def __exit__(self, error_type, error, traceback):
        # The wrappers are instance attributes in front of the class's methods.
        del self.target.forward, self.target._get_candidate_generator
        return error_type is EnoughRounds

    def _watch_forward(self, *args, **kwargs):
        if self._pass_end is not None:
            block = args[0] if args else kwargs["input_ids"]  # the anchor and what was proposed behind it
            self.proposals.append(block[0, 1:].tolist())
            self.outside.append(1000 * (time.perf_counter() - self._pass_end))
            self.inside.append(self._generator_ms)
            if len(self.outside) >= self.rounds:
                raise EnoughRounds
        outputs = self._forward(*args, **kwargs)
        self._generator_ms = 0.0
        self._pass_end = time.perf_counter()
        return outputs

    def _watch_generator(self, *args, **kwargs):
        generator = self._make(*args, **kwargs)
        draft, update = generator.get_candidates, generator.update_candidate_strategy

        def get_candidates(input_ids, **call):
            start = time.perf_counter()
            if self.profile_rounds and self.outside:
                candidates = self._profiled(draft, input_ids, **call)
            else:
                candidates = draft(input_ids, **call)
            self._generator_ms += 1000 * (time.perf_counter() - start)
            return candidates

        def update_candidate_strategy(*args):
            start = time.perf_counter()
            update(*args)
            self._generator_ms += 1000 * (time.perf_counter() - start)

        generator.get_candidates, generator.update_candidate_strategy = get_candidates, update_candidate_strategy
        return generator

    def _profiled(self, draft, *args, **kwargs):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            candidates = draft(*args, **kwargs)
        for event in profiler.key_averages():
            entry = self.operators[event.key]
            entry[0] += event.self_cpu_time_total / 1000
            entry[1] += event.count
        return candidates


def random_target(num_hidden_layers: int = 6, seed: int = 0, **kwargs) -> LlamaForCausalLM:
    """A random target as wide as SmolLM2-135M, with its vocabulary; its time is taken out, so its layers are small."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 576,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_hidden_layers, **{**values, **kwargs})).eval()


def build_systems(target, block_size: int, compiled: bool = False, **shape) -> dict:
    """The same random weights as the peers' drafters, as ours, and as ours with a carry embedding."""
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 3, "mask_token_id": MASK_TOKEN_ID, **shape}
    plain = drafter_from_target(target, block_size=block_size, init_from_target=False, carry=False, **shape).eval()
    with torch.no_grad():
        # Wide and with sharp attention, so that the context makes the proposals. At the usual start every proposal is
        # the mask token, whatever the context, and equal proposals would prove nothing.
        for name, parameter in plain.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=SPREAD * parameter.shape[1] ** -0.5)
            elif name.endswith("q_norm.weight"):
                parameter.fill_(SHARPNESS)
    carry = CarryoverDrafter(type(plain.config)(**{**plain.config.to_dict(), "carry": True})).to(plain.device).eval()
    carry.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        carry.carry_embedding.normal_(std=0.02)
    plain, carry = plain.to(target.dtype), carry.to(target.dtype)
    systems: dict = {"transformers": transformers_dflash(plain)}
    if importlib.util.find_spec("dflash") is not None:
        systems["z-lab"] = zlab_dflash(plain, target)
    systems |= {"ours": plain, "ours+carry": carry}
    return systems | {"compiled": copy.deepcopy(carry).compile_draft()} if compiled else systems


def zlab_dflash(drafter: CarryoverDrafter, target):
    """A drafter's weights in z-lab's own model."""
    from dflash.model import DFlashDraftModel

    with tempfile.TemporaryDirectory() as folder:
        write_drafter(drafter, Path(folder) / "drafter", "z-lab", target)
        return DFlashDraftModel.from_pretrained(Path(folder) / "drafter", dtype=drafter.dtype).eval()


def run(target, system: str, assistant, input_ids: torch.LongTensor, rounds: int, profile_rounds=False) -> Recorder:
    """One recorded call of `rounds` drafted rounds."""
    special = {"speculation_type": "dflash"} if system == "transformers" else {}
    with Recorder(target, rounds, profile_rounds) as recorder:
        if system == "z-lab":
            from dflash.model import dflash_generate

            dflash_generate(assistant, target, input_ids, MORE_THAN_ENOUGH, None)
        else:
            target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                assistant_model=assistant,
                do_sample=False,
                max_new_tokens=MORE_THAN_ENOUGH,
                **special,
            )
    if len(recorder.outside) < rounds:
        raise RuntimeError(f"{system}: {len(recorder.outside)} rounds, expected {rounds}. Does the target stop early?")
    return recorder


def same_proposals(target, systems: dict, input_ids: torch.LongTensor, rounds: int, peer: str = PEERS[0]) -> float:
    """
    Share of proposals that are the same in a peer and ours (carry off), position by position.

    Raises:
        RuntimeError: If the proposals hardly vary, so that being equal would mean nothing.
    """
    theirs, ours = (
        [token for block in run(target, name, systems[name], input_ids, rounds).proposals for token in block]
        for name in (peer, "ours")
    )
    if len(set(ours)) < rounds:
        raise RuntimeError(f"Only {len(set(ours))} different proposals in {rounds} rounds: equality proves nothing.")
    return sum(a == b for a, b in zip(theirs, ours, strict=True)) / len(ours)


def measure(target, systems: dict, input_ids: torch.LongTensor, rounds: int, repetitions: int) -> dict:
    """
    Interleaved repetitions with rotating order.

    Returns:
        `dict`: `per_repetition` holds for each system and quantity (`outside`, `inside`) the median round of each
        repetition in milliseconds, `first_ms` the median first round (it stores the whole prompt), `ratios` the
        quotients of two systems, paired by repetition.
    """
    names = list(systems)
    medians = {name: {"outside": [], "inside": []} for name in names}
    first = {name: [] for name in names}
    for name in names:
        run(target, name, systems[name], input_ids, 3)  # warm-up, past what is compiled
    for repetition in range(repetitions):
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            recorder = run(target, name, systems[name], input_ids, rounds + 1)
            first[name].append(recorder.outside[0])
            for quantity in ("outside", "inside"):
                medians[name][quantity].append(statistics.median(getattr(recorder, quantity)[1:]))
    pairs = [(ours, peer) for peer in PEERS if peer in systems for ours in ("ours", "ours+carry")]
    pairs.append(("ours+carry", "ours"))
    if "compiled" in systems:
        pairs += [("compiled", peer) for peer in ("ours+carry", *PEERS) if peer in systems]
    ratios = {
        f"{a} / {b}": {
            quantity: median_estimate(
                [x / y for x, y in zip(medians[a][quantity], medians[b][quantity], strict=True)]
            ).to_dict()
            for quantity in (("outside",) if "z-lab" in (a, b) else ("outside", "inside"))
        }
        for a, b in pairs
    }
    return {
        "per_repetition": medians,
        "median_ms": {
            name: {quantity: median_estimate(values).to_dict() for quantity, values in medians[name].items()}
            for name in names
        },
        "first_ms": {name: statistics.median(first[name]) for name in names},
        "ratios": ratios,
    }


def table(results: list[dict]) -> str:
    """Markdown: a row per case; milliseconds a round outside the target (in the generator), and ratios."""
    systems, pairs = list(results[0]["median_ms"]), list(results[0]["ratios"])
    head = ["dtype", "B", "context", *(f"{name}, ms" for name in systems), *pairs, "same proposals"]
    body = []
    for case in results:
        cells = [case["dtype"], str(case["block_size"]), str(case["context"])]
        for name in systems:
            values = case["median_ms"][name]
            inside = "" if name == "z-lab" else f" ({values['inside']['value']:.2f})"
            cells.append(f"{values['outside']['value']:.2f}{inside}")
        cells += [cell(case["ratios"][pair]["outside"], "{:.3f}") for pair in pairs]
        cells.append(", ".join(f"{share:.0%}" for share in case["same_proposals"].values()))
        body.append(cells)
    return pipe_table(head, body)


def profile_table(target, systems: dict, input_ids: torch.LongTensor, rounds: int, top: int = 14) -> str:
    """Operators by their own time, milliseconds and calls a round, without the first round."""
    lines = []
    for name, assistant in systems.items():
        operators = run(target, name, assistant, input_ids, rounds + 1, profile_rounds=True).operators
        total = sum(ms for ms, _ in operators.values()) / rounds
        calls = sum(count for _, count in operators.values()) / rounds
        lines.append(f"{name}: {total:.2f} ms in {calls:.0f} operator calls a round (profiled)")
        for key, (ms, count) in sorted(operators.items(), key=lambda item: -item[1][0])[:top]:
            lines.append(f"  {ms / rounds:8.3f} ms  {count / rounds:6.1f} x  {key}")
    return "\n".join(lines)


def load_target(path: str | None, dtype: torch.dtype):
    """The target in `dtype`, without an end token: a run must not end early."""
    target = (
        random_target(max_position_embeddings=32768)
        if path is None
        else AutoModelForCausalLM.from_pretrained(path).eval()
    )
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target.to(dtype)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", metavar="DIR", help="target (default: random, with the widths of SmolLM2-135M)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--block_sizes", nargs="+", type=int, default=[7, 15], metavar="B")
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024, 4096, 16384], metavar="TOKENS")
    parser.add_argument("--layers", type=int, default=3, help="drafter layers (default: 3)")
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds a repetition (default: 12)")
    parser.add_argument("--repetitions", type=int, default=9, help="interleaved repetitions (default: 9)")
    parser.add_argument("--compile", action="store_true", help="also with a compiled draft step")
    parser.add_argument("--profile", action="store_true", help="also print where the generators spend their time")
    parser.add_argument("--output", metavar="FILE.json", help="where the report goes")
    return parser.parse_args(argv)


def write(options: argparse.Namespace, results: list[dict]) -> None:
    """The report so far."""
    arguments = {key: value for key, value in vars(options).items() if key not in ("output", "target")}
    arguments["target"] = Path(options.target).name if options.target else None
    report = {"arguments": arguments, "machine": describe_machine(), **provenance(), "results": results}
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    Path(options.output).write_text(json.dumps(report, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    results = []
    for dtype in options.dtypes:
        target = load_target(options.target, getattr(torch, dtype))
        for block_size, context in itertools.product(options.block_sizes, options.contexts):
            shape = {"num_hidden_layers": options.layers, **({} if options.target else DRAFTER_SHAPE)}
            systems = build_systems(target, block_size, options.compile, **shape)
            generator = torch.Generator().manual_seed(context)
            input_ids = torch.randint(20, target.config.vocab_size, (1, context), generator=generator)
            peers = [peer for peer in PEERS if peer in systems]
            shared = {peer: same_proposals(target, systems, input_ids, 6, peer) for peer in peers}
            if dtype == "float32" and min(shared.values()) < 1:
                raise RuntimeError(f"The drafters propose different tokens (equal: {shared}), expected all.")
            case = {"dtype": dtype, "block_size": block_size, "context": context, "same_proposals": shared}
            results.append(case | measure(target, systems, input_ids, options.rounds, options.repetitions))
            print(table(results[-1:]).splitlines()[-1] if len(results) > 1 else table(results), flush=True)
            if options.output:  # after every case: long contexts take long
                write(options, results)
            if options.profile:
                print(profile_table(target, systems, input_ids, 4), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
