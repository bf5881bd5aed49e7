# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Failures that users of comparable software reported, tried in a real vLLM engine (V1 runner, CPU, float32). The README
beside this file lists all of them.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from training_helpers import fit_drafter, make_batch, make_trainer
from vllm_helpers import (
    NEEDS_VLLM,
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


pytestmark = NEEDS_VLLM

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


# R27: limits of positions, of the token budget, and processes of their own


LIMIT = 128
COUNTING = list(range(2, 14))
PASSING, NEAR = prompts([60, LIMIT - 3], seed=31)
CROWD = prompts([1 + i % 3 for i in range(64)], seed=32)


@pytest.fixture(scope="module")
def limits(tmp_path_factory):
    """
    The folder of a target and of a drafter of 7 proposals, defined up to position 64, and plain outputs, up to 40
    tokens and up to the end.
    """
    folder, target = tmp_path_factory.mktemp("limits"), build_target()
    target.save_pretrained(folder / "target")
    drafter = build_drafter(target, "markov", block_size=7, max_position_embeddings=64)
    drafter.save_pretrained(folder / "drafter")
    with engine(folder / "target", max_model_len=LIMIT, max_num_seqs=64) as llm:
        first, *crowd = generate(llm, [COUNTING, *CROWD], greedy(TOKENS))
        return folder, {"counting": first, "crowd": crowd, "whole": generate(llm, [PASSING, NEAR], greedy(200))}


def test_limits_of_positions(limits):
    """
    Case R27 (a), (b): a request passes the drafter's `max_position_embeddings`, and a prompt ends so near
    `max_model_len` that no block fits.
    """
    folder, plain = limits
    with engine(folder / "target", folder / "drafter", proposals=7, max_model_len=LIMIT) as llm:
        assert generate(llm, [PASSING], greedy(TOKENS))[0] == plain["whole"][0][:TOKENS]
        assert counter(llm, "spec_decode_num_drafts") > 20  # drafting does not stop at 64
        given = [{"prompt_token_ids": ids} for ids in (PASSING, NEAR)]
        outputs = [output.outputs[0] for output in llm.generate(given, greedy(200), use_tqdm=False)]
    assert [list(output.token_ids) for output in outputs] == plain["whole"]
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(68, "length"), (3, "length")]


@pytest.mark.parametrize(("proposals", "together"), [(7, range(17, 33)), (2, [64])], ids=["whole-block", "part-of-it"])
def test_more_block_rows_than_the_token_budget(proposals, together, limits):
    """
    Case R27 (c): 64 requests at once with blocks of 8 rows each, and 256 tokens a step. vLLM counts the proposals into
    the budget; of a block of which only a part is asked for, more rows run than that.
    """
    folder, plain = limits
    budget = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": LIMIT}
    serving = engine(folder / "target", folder / "drafter", proposals=proposals, **budget)
    with serving as llm, Recorder(llm) as recorder:
        outputs = generate(llm, CROWD, greedy(TOKENS))
    assert outputs == plain["crowd"]
    assert max(recorder.batches) in together  # of 8 rows each: within the budget, and twice over it


ENTRY_POINT = """
import json
import sys

from vllm import LLM, SamplingParams


def main():
    target, drafter, limit, prompt = sys.argv[1:]
    llm = LLM(
        target, speculative_config={"model": drafter}, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=int(limit), max_num_seqs=4, enable_prefix_caching=False, block_size=32, disable_log_stats=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=40, detokenize=False)
    output = llm.generate([{"prompt_token_ids": json.loads(prompt)}], params, use_tqdm=False)[0].outputs[0]
    carried = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_carried_rows")
    print("RESULT", carried > 0, list(output.token_ids))


if __name__ == "__main__":
    main()
"""


def test_the_entry_point_alone_in_a_spawned_process(limits, tmp_path):
    """Case R27 (d): a script that imports nothing of ours; the engine runs in a process that vLLM spawns."""
    folder, plain = limits
    script = tmp_path / "serve.py"
    script.write_text(ENTRY_POINT)
    spawn = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    command = [
        sys.executable,
        str(script),
        str(folder / "target"),
        str(folder / "drafter"),
        str(LIMIT),
        json.dumps(COUNTING),
    ]
    done = subprocess.run(
        command, env={**os.environ, **spawn, "VLLM_LOGGING_LEVEL": "ERROR"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    assert line == f"RESULT True {plain['counting']}"


# R16, R22: what the drafter is given, and its keys, are those of transformers and of training


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """A target whose final norm one can see and a drafter of its last layer whose keys turn in part, in an engine."""
    folder, target = tmp_path_factory.mktemp("alike"), build_target()
    torch.nn.init.constant_(target.model.norm.weight, 3.0)
    target.save_pretrained(folder / "target")
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    drafter = build_drafter(target, "markov", target_layer_ids=[1, 3], rope_parameters=rope)
    drafter.save_pretrained(folder / "drafter")
    with engine(folder / "target", folder / "drafter") as llm:
        yield target, drafter, llm


def test_taps_are_equal_everywhere(alike, tmp_path, monkeypatch):
    """Case R16: vLLM, `generate` and the trainer feed `hidden_states[L]`, behind the final norm, to the drafter."""
    target, drafter, llm = alike
    ids = prompts([30], seed=41)[0]
    with torch.no_grad():
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    want = torch.cat([states[2], states[4]], dim=-1)[0]

    def inputs_of(fc) -> list[torch.Tensor]:
        fed, forward = [], fc.forward

        def recorded(features):
            fed.append(features.clone())
            return forward(features)

        monkeypatch.setattr(fc, "forward", recorded)
        return fed

    in_vllm, here = inputs_of(model_runner(llm).drafter.model.model.fc), inputs_of(drafter.fc)
    generate(llm, [ids], greedy(1))
    target.generate(torch.tensor([ids]), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    in_generate = here[0]
    here.clear()
    trainer = make_trainer(target, drafter, tmp_path, [{"input_ids": ids, "response_mask": [0] * 4 + [1] * 26}])
    trainer.block_losses(drafter, make_batch(trainer))
    for fed in (in_vllm[0], in_generate[0], here[0][0]):
        torch.testing.assert_close(fed, want, atol=2e-4, rtol=1e-4)  # two kernels' rounding; the norm is a factor of 3


def test_partly_turned_keys(alike, monkeypatch):
    """Case R22 (b): half of a key's dimensions are equal at positions 0 and 100, in vLLM as in transformers."""
    _, drafter, llm = alike
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    fused, positions = row.expand(2, -1).contiguous(), torch.tensor([0, 100])
    stored, model = [], model_runner(llm).drafter.model.model
    for layer in model._attn_layers:
        monkeypatch.setattr(
            layer.impl, "do_kv_cache_update", lambda layer, key, value, cache, slots: stored.append((key, value))
        )
    model.precompute_and_store_context_kv(fused, positions, positions)
    states = drafter.hidden_norm(fused.unsqueeze(0))
    rope = drafter.rotary_emb(states, positions.unsqueeze(0))
    assert len(stored) == len(drafter.layers) == 2
    for layer, (key, value) in zip(drafter.layers, stored):
        assert torch.equal(key[0, :, 16:], key[1, :, 16:])
        assert (key[0, :, :16] != key[1, :, :16]).any(dim=-1).all()
        with torch.no_grad():
            keys, values = layer.self_attn.project_kv(states, rope)  # also the trainer's
        torch.testing.assert_close(key, keys[0].transpose(0, 1), atol=1e-4, rtol=0)
        torch.testing.assert_close(value, values[0].transpose(0, 1), atol=1e-4, rtol=0)
