# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
vLLM with the plugin and without, another drafter than ours in use: the same text, and how fast.

    python -m bench.vllm_untouched --target DIR --prompts FILE.jsonl --output vllm-untouched.json

Each engine is a process of its own, with n-gram drafts; the two kinds take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from hf_carryover.evaluation.bootstrap import median_estimate
from hf_carryover.evaluation.machine import describe_machine, provenance
from hf_carryover.evaluation.prompts import read_prompts


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
MARK = "RESULT "


def engine(options: argparse.Namespace) -> None:
    """One engine: seconds of every timed call, the texts, and whether the plugin was there."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from hf_carryover.demo import encode

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    encoded = [encode(tokenizer, item.segments[0], item.tools, "cpu") for item in read_prompts(options.prompts)]
    prompts = [{"prompt_token_ids": ids["input_ids"][0].tolist()} for ids in encoded]
    llm = LLM(
        options.target, enforce_eager=True, max_num_seqs=8, enable_prefix_caching=False, speculative_config=NGRAM
    )
    sampling, seconds = SamplingParams(temperature=0, max_tokens=options.max_new_tokens, ignore_eos=True), []
    for _ in range(options.calls + 1):
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    plugin = "hf_carryover.vllm.hooks" in sys.modules
    print(MARK + json.dumps({"seconds": seconds[1:], "texts": texts, "plugin": plugin}))


def run(argv: list[str], plugin: bool) -> dict:
    """An engine in a process of its own."""
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **({} if plugin else {"VLLM_PLUGINS": "none"})}
    command = [sys.executable, "-m", "bench.vllm_untouched", *argv, "--engine"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith(MARK))[len(MARK) :])
    if result["plugin"] != plugin:
        raise RuntimeError(f"The plugin was {'not ' if plugin else ''}loaded, expected otherwise.")
    return result


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, metavar="FILE.jsonl")
    parser.add_argument("--max_new_tokens", type=int, default=24)
    parser.add_argument("--calls", type=int, default=8, help="timed calls an engine, all prompts each (default: 8)")
    parser.add_argument("--repetitions", type=int, default=3, help="engines of each kind (default: 3)")
    parser.add_argument("--output", metavar="FILE.json")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.engine:
        engine(options)
        return 0
    runs = [(run(argv, True), run(argv, False)) for _ in range(options.repetitions)]
    same = all(one["texts"] == runs[0][0]["texts"] for pair in runs for one in pair)
    medians = [[statistics.median(one["seconds"]) for one in pair] for pair in runs]
    ratio = median_estimate([with_plugin / without for with_plugin, without in medians]).to_dict()
    seconds = [[one["seconds"] for one in pair] for pair in runs]
    report = {"same_texts": same, "ratio": ratio, "seconds": seconds, "machine": describe_machine(), **provenance()}
    print(f"same texts: {same}; seconds with the plugin / without: {ratio}; medians {medians}")
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
