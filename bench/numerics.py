# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
How often half precision departs from itself: greedy text with a drafter against plain decoding in the same dtype, and
plain decoding in half precision against float32.

A pass over several rows rounds differently from passes over one, so texts part where the target's two best tokens are
nearly tied. Reported per dtype: first differences per 1000 tokens compared (a text is compared up to and with its
first difference), and the largest gap, in logits, between the token plain decoding took and the one taken instead.

    python -m bench.numerics --target SMOLLM2 --drafter model_cards/smollm2-135m-markov-carryover --output FILE.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_carryover import CarryoverDrafter
from hf_carryover.evaluation.machine import describe_machine, provenance


PROMPTS = [
    "Explain photosynthesis to a child.",
    "Write a Python function that reverses a list.",
    "What is 17 times 23? Show your steps.",
    "Translate to French: the weather is nice today.",
    "Name three rivers in South America.",
    "Summarize the story of Romeo and Juliet.",
    "Why is the sky blue?",
    "Give me a recipe with eggs and tomatoes.",
]


@torch.no_grad()
def first_difference(target, want: torch.LongTensor, got: torch.LongTensor, start: int) -> tuple[int, float | None]:
    """Tokens compared from column `start` on, and the gap at the first that differs, `None` if none does."""
    shorter = min(want.shape[1], got.shape[1])
    places = (want[0, :shorter] != got[0, :shorter]).nonzero().flatten().tolist()
    if not places:
        return shorter - start, None
    logits = target(want[:, : places[0]]).logits[0, -1].float()
    return places[0] - start + 1, float(logits[want[0, places[0]]] - logits[got[0, places[0]]])


def summary(found: list[tuple[int, float | None]]) -> dict:
    """Rate and gaps of a list of [`first_difference`]."""
    gaps = [gap for _, gap in found if gap is not None]
    tokens = sum(count for count, _ in found)
    return {
        "texts": len(found),
        "tokens_compared": tokens,
        "first_differences": len(gaps),
        "per_1000_tokens": round(1000 * len(gaps) / max(tokens, 1), 2),
        "largest_gap": max(gaps, default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Folder or Hub id of the target.")
    parser.add_argument("--drafter", required=True, help="Folder of its drafter.")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="How many prompts.")
    parser.add_argument("--new-tokens", type=int, default=64, help="Tokens of a text.")
    parser.add_argument("--output", type=Path, help="JSON file for the numbers.")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[: args.prompts]]
    encoded = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        for chat in chats
    ]
    options = {"do_sample": False, "max_new_tokens": args.new_tokens}
    report: dict = {"new_tokens": args.new_tokens, "machine": describe_machine(), **provenance(), "dtypes": {}}
    exact: list[torch.LongTensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        begin = time.perf_counter()
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval()
        drafter = CarryoverDrafter.from_pretrained(args.drafter, dtype=dtype).eval()
        own, against_exact, texts = [], [], []
        for number, inputs in enumerate(encoded):
            start = inputs["input_ids"].shape[1]
            want = target.generate(**inputs, **options)
            got = target.generate(**inputs, **options, assistant_model=drafter)
            own.append(first_difference(target, want, got, start))
            texts.append(want)
            if exact:
                against_exact.append(first_difference(target, exact[number], want, start))
        exact = exact or texts
        name = str(dtype).removeprefix("torch.")
        report["dtypes"][name] = {"with_drafter": summary(own)}
        if against_exact:
            report["dtypes"][name]["plain_against_float32"] = summary(against_exact)
        print(name, json.dumps(report["dtypes"][name]), f"{time.perf_counter() - begin:.0f} s", flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
