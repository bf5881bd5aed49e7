# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Failures that users of comparable software reported, tried in a real vLLM engine (V1 runner, CPU, float32). The README
beside this file lists all of them.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from training_helpers import fit_drafter, make_batch, make_trainer, random_rows
from vllm_helpers import (
    Recorder,
    Reference,
    arrive,
    build_drafter,
    build_target,
    engine,
    generate,
    greedy,
    model_runner,
    named,
    prompts,
)


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM, in an environment of its own: `make test-vllm`"
    ),
]

TOKENS = 40


def counter(llm, name: str) -> float:
    """A counter of the engine, over its whole life."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


# R26: prefix-cache hits and preemption


class Conversations:
    """A prompt of 200 tokens and four that share 160, their plain texts, and a drafter that was trained on them."""

    def __init__(self, folder):
        self.folder, self.target = folder, build_target()
        self.target.save_pretrained(folder / "target")
        self.alone = prompts([200], seed=21)
        shared = prompts([160], seed=22)[0]
        self.sharing = [shared + tail for tail in prompts([40, 7, 21, 33], seed=23)]
        self.others = prompts([90, 33, 150, 64], seed=24)
        self.given = [*self.alone, *self.sharing, *self.others]
        with engine(folder / "target") as llm:
            self.texts = [ids + out for ids, out in zip(self.given, generate(llm, self.given, greedy(TOKENS)))]
        drafter = build_drafter(self.target, "dflash")
        known = [*self.alone, *self.sharing]
        self.drafter = fit_drafter(self.target, drafter, self.texts[:5], [len(ids) for ids in known], folder / "run")
        self.drafter.save_pretrained(folder / "drafter")
        self.reference = Reference(self.target, self.drafter)

    def engine(self, **options):
        return engine(self.folder / "target", self.folder / "drafter", enable_prefix_caching=True, **options)

    def run(self, llm, given, prefix: str, every: int = 1, check: bool = True) -> float:
        """
        Serve `given`, compare ids and drafts, and return the mean number of accepted proposals of the whole rounds.
        """
        requests = named(given, prefix)
        texts = {name: self.texts[self.given.index(ids)] for name, ids in requests.items()}
        with Recorder(llm) as recorder:
            done = arrive(llm, requests, TOKENS, every=every)
        assert {name: requests[name] + done[name] for name in requests} == texts
        if check:
            self.reference.check(recorder, texts, limit=256)
        rounds = [draft for draft in recorder.drafts if len(draft.window) == 5]
        return sum(4 - draft.rejected for draft in rounds) / len(rounds)

    @staticmethod
    def forget(llm) -> None:
        """Lose the drafter's half of every cached page, as engines do that restore the target's alone."""
        for layer in model_runner(llm).drafter.model.model._attn_layers:
            layer.kv_cache.zero_()


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    return Conversations(tmp_path_factory.mktemp("conversations"))


def test_a_cached_prefix_drafts_as_before(conversations):
    """Case R26: a repeat after other requests, and tails behind a shared prefix, are accepted as the first time."""
    talk = conversations
    with talk.engine() as llm:
        first = talk.run(llm, talk.alone, "first")
        assert first >= 2 and counter(llm, "prefix_cache_hits") == 0
        talk.run(llm, talk.others, "others")
        again = talk.run(llm, talk.alone, "again")
        hits = counter(llm, "prefix_cache_hits")
        assert hits >= 160  # whole pages of 32 below 200, but for the last, which vLLM computes anew for drafters
        assert again == pytest.approx(first, rel=0.1)
        cold = talk.run(llm, talk.sharing[:1], "cold")
        shared = talk.run(llm, talk.sharing, "tails", every=2)
        assert counter(llm, "prefix_cache_hits") >= hits + 4 * 128
        assert min(cold, shared) >= 2
        # The comparison has the power it needs: without its half of the pages the drafter is accepted less.
        talk.forget(llm)
        assert talk.run(llm, talk.alone, "lost", check=False) < 0.8 * first


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_gpu_blocks_override": 14, "max_num_seqs": 4}, id="few-blocks"),
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 4}, id="chunks-of-64"),
        pytest.param(
            {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 64, "max_num_seqs": 4},
            id="few-blocks-and-chunks",
        ),
    ],
)
def test_a_cached_prefix_with_preemption_and_in_chunks(options, conversations):
    """Case R26: few cache blocks, with preemptions, and prefill of 64 tokens a step."""
    talk = conversations
    with talk.engine(**options) as llm:
        first = talk.run(llm, talk.alone, "first")
        talk.run(llm, talk.sharing, "tails")
        talk.run(llm, talk.others[:2], "others")
        again = talk.run(llm, talk.sharing, "again", every=2)
        alone = talk.run(llm, talk.alone, "alone")
        assert counter(llm, "prefix_cache_hits") > 0
        assert (counter(llm, "num_preemptions") > 0) is ("num_gpu_blocks_override" in options)
    assert alone == pytest.approx(first, rel=0.1) and min(first, again) >= 2
