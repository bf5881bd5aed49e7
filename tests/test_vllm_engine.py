"""
Carryover drafters in a real vLLM engine (V1 runner, CPU, float32).

Each scenario is checked twice: what comes out equals plain vLLM, and every single draft equals the block that
transformers computes from the text and the verified window alone (`vllm_helpers.Reference`). The second is what finds
a stale row, another request's row, a slot or a position off by one: the output never depends on the drafter.
"""

import dataclasses

import pytest
import torch
from vllm_helpers import (
    DRAFTERS,
    NEEDS_VLLM,
    Recorder,
    Reference,
    accepted,
    arrive,
    build_drafter,
    build_target,
    engine,
    full_rounds,
    generate,
    greedy,
    model_runner,
    named,
    prompts,
    scripted,
)


pytestmark = NEEDS_VLLM

MIXED = [12, 5, 30, 61, 1, 33, 64, 17]  # a single token, and both sides of vLLM's pages of 32 slots
TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def target(folder):
    model = build_target()
    model.save_pretrained(folder / "target")
    return model


@pytest.fixture(scope="module")
def save(folder, target):
    """Build a drafter of `DRAFTERS` and save it: `(drafter, folder)`."""

    def _save(name, **values):
        drafter = build_drafter(target, name, **values)
        drafter.save_pretrained(folder / name)
        return drafter, folder / name

    return _save


@pytest.fixture(scope="module")
def plain(folder, target):
    """Plain vLLM's greedy text, prompt and output, by prompt and number of tokens."""
    known = {}

    def _plain(texts, tokens=TOKENS):
        missing = [ids for ids in texts if (tuple(ids), tokens) not in known]
        if missing:
            with engine(folder / "target", max_num_seqs=32) as plain_engine:
                for ids, output in zip(missing, generate(plain_engine, missing, greedy(tokens))):
                    known[tuple(ids), tokens] = ids + output
        return [known[tuple(ids), tokens] for ids in texts]

    return _plain


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_equal_those_of_the_generator(name, save, folder, target, plain):
    drafter, drafter_folder = save(name)
    texts = prompts([12, 30, 61])
    reference = Reference(target, drafter)
    expected = plain(texts)
    with engine(folder / "target", drafter_folder) as llm:
        with Recorder(llm) as recorder:
            outputs = generate(llm, texts, greedy(TOKENS))
        rounds = recorder.by_request()
        by_name = dict(zip(sorted(rounds, key=int), expected))
        reference.check(recorder, by_name)
        base = int(max(rounds, key=int)) + 1
        scripts = {str(base + i): text for i, text in enumerate(expected)}
        with Recorder(llm, scripted(scripts)) as replay:
            replayed = generate(llm, texts, greedy(TOKENS))
        checked = reference.check(replay, scripts)
    for ids, output, again, text in zip(texts, outputs, replayed, expected):
        assert ids + output == ids + again == text
    for ids, drafts in zip(texts, (rounds[key] for key in sorted(rounds, key=int))):
        target.generate(torch.tensor([ids]), assistant_model=drafter, max_new_tokens=TOKENS, do_sample=False)
        rounds_there = full_rounds(drafter.last_report, proposals=4)
        assert len(rounds_there) > 10
        assert accepted(drafts)[: len(rounds_there)] == rounds_there
    # Everything from full rejection to full acceptance took place.
    assert {len(draft.window) - 1 - draft.rejected for draft in checked if len(draft.window) == 5} == set(range(5))


def test_mixed_batches_arriving_over_time_with_aborts(save, folder, target, plain):
    drafter, drafter_folder = save("pointer")
    reference = Reference(target, drafter)
    pool = prompts([1 + (11 * i) % 70 for i in range(32)], seed=5)
    expected = plain(pool, 16)
    with engine(folder / "target", drafter_folder, max_num_seqs=32) as llm:
        for size in (1, 2, 4, 8, 16, 32):
            texts = named(pool[:size], f"n{size}x")
            with Recorder(llm, scripted(dict(zip(texts, expected)))) as recorder:
                done = arrive(llm, texts, 16, every=1 + 32 // (4 * size))
            assert [texts[name] + done[name] for name in texts] == expected[:size]
            reference.check(recorder, dict(zip(texts, expected)))
            assert size == 1 or len({len(draft.window) for draft in recorder.drafts}) > 1
        texts = named(pool[:12], "a")
        with Recorder(llm, scripted(dict(zip(texts, expected)))) as recorder:
            done = arrive(llm, texts, 16, every=1, abort={"a1": 4, "a3": 6, "a8": 11})
        assert set(texts) - set(done) == {"a1", "a3", "a8"}
        assert all(texts[name] + done[name] == text for name, text in zip(texts, expected) if name in done)
        reference.check(recorder, dict(zip(texts, expected)))


def test_prefix_caching(save, folder, target, plain):
    drafter, drafter_folder = save("pointer")
    reference = Reference(target, drafter)
    shared = prompts([70], seed=9)[0]
    first = [shared + tail for tail in prompts([3, 9, 20], seed=10)]
    expected = plain(first)
    # The next turn: the prompt reaches over pages that held carried rows and blocks while the text was written.
    turns = [text + tail for text, tail in zip(expected, prompts([5, 1, 8], seed=11))]
    expected_turns = plain(turns)
    with engine(folder / "target", drafter_folder, enable_prefix_caching=True) as llm:
        for prefix, texts, whole in (("p", first, expected), ("q", first, expected), ("r", turns, expected_turns)):
            texts = named(texts, prefix)
            with Recorder(llm, scripted(dict(zip(texts, whole)))) as recorder:
                done = arrive(llm, texts, TOKENS, every=2)
            assert [texts[name] + done[name] for name in texts] == whole
            checked = reference.check(recorder, dict(zip(texts, whole)))
            starts = {name: drafts[0].window_start for name, drafts in recorder.by_request().items()}
            # Later requests did begin behind cached pages.
            assert prefix == "p" or min(starts.values()) >= 32
            assert any(draft.rejected for draft in checked)


def test_chunked_prefill_and_fewer_drafts_than_proposed(save, folder, target, plain):
    drafter, drafter_folder = save("pointer")
    reference = Reference(target, drafter)
    texts = prompts(MIXED, seed=6)
    expected = plain(texts)
    budget = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "enable_chunked_prefill": True}
    with engine(folder / "target", drafter_folder, **budget) as llm:
        texts = named(texts, "c")
        with Recorder(llm, scripted(dict(zip(texts, expected)))) as recorder:
            done = arrive(llm, texts, TOKENS, every=1)
    assert [texts[name] + done[name] for name in texts] == expected
    checked = reference.check(recorder, dict(zip(texts, expected)))
    rounds = recorder.by_request()
    assert len([draft for draft in rounds["c3"] if draft.anchor_position <= len(texts["c3"])]) > 2  # several chunks
    lengths = {len(draft.window) for draft in checked if draft.window_start >= len(texts[draft.request.split("-")[0]])}
    assert lengths & {2, 3, 4}, lengths  # windows with fewer drafts than the four proposed


def test_preemption(save, folder, target, plain):
    drafter, drafter_folder = save("pointer")
    reference = Reference(target, drafter)
    texts = prompts([30, 25, 40, 33], seed=7)
    expected = plain(texts, 60)
    with engine(folder / "target", drafter_folder, num_gpu_blocks_override=11, max_num_seqs=4) as llm:
        texts = named(texts, "e")
        with Recorder(llm, scripted(dict(zip(texts, expected)))) as recorder:
            done = arrive(llm, texts, 60, every=1)
        preempted = {m.name: m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"}
    assert preempted["vllm:num_preemptions"] > 0
    assert [texts[name] + done[name] for name in texts] == expected
    reference.check(recorder, dict(zip(texts, expected)))


def test_max_model_len_inside_a_block(save, folder, target):
    drafter, drafter_folder = save("pointer")
    reference = Reference(target, drafter)
    texts = prompts([40, 12, 50, 45], seed=8)
    with engine(folder / "target", max_model_len=64) as llm:
        expected = [ids + out for ids, out in zip(texts, generate(llm, texts, greedy(200)))]
    assert {len(text) for text in expected} == {64}
    with engine(folder / "target", drafter_folder, max_model_len=64) as llm:
        texts = named(texts, "m")
        with Recorder(llm, scripted(dict(zip(texts, expected)))) as recorder:
            done = arrive(llm, texts, 200, every=1)
    assert [texts[name] + done[name] for name in texts] == expected
    checked = reference.check(recorder, dict(zip(texts, expected)), limit=64)
    # While some requests sat at the limit the others went on drafting, with nothing missing from their cache.
    late = recorder.drafts.index(next(d for d in recorder.drafts if d.window_start + len(d.window) >= 60))
    assert len([draft for draft in recorder.drafts[late:] if draft in checked]) > 5
    assert all(torch.isfinite(draft.logits).all() for draft in recorder.drafts)


def test_fewer_proposals_than_the_block_holds(save, folder, target, plain):
    drafter, drafter_folder = save("pointer")
    reference = Reference(target, drafter)
    texts = prompts([12, 30, 61])
    expected = plain(texts)
    with engine(folder / "target", drafter_folder, proposals=2) as llm:
        assert llm.llm_engine.vllm_config.num_lookahead_tokens == drafter.config.block_size + 1
        scripts = dict(zip(named(texts, "k"), expected))
        with Recorder(llm, scripted(scripts)) as recorder:
            done = arrive(llm, named(texts, "k"), TOKENS, every=1)
    assert [ids + done[f"k{i}"] for i, ids in enumerate(texts)] == expected
    reference.check(recorder, scripts)


def test_metrics_count_carried_rows(save, folder):
    _, drafter_folder = save("markov")
    with engine(folder / "target", drafter_folder) as llm:
        model_runner(llm).drafter.count_carried = True
        with Recorder(llm) as recorder:
            generate(llm, prompts([12, 30]), greedy(TOKENS))
        counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        carried = model_runner(llm).drafter.carried_rows
    assert carried == sum(draft.rejected for draft in recorder.drafts) > 0
    assert counters["vllm:spec_decode_num_carried_rows"] == carried
    assert counters["vllm:spec_decode_num_drafts"] == sum(len(d.window) > 1 for d in recorder.drafts if d.rejected)
    _, drafter_folder = save("markov-control")
    with engine(folder / "target", drafter_folder) as llm:
        generate(llm, prompts([12]), greedy(8))
        names = {m.name for m in llm.get_metrics() if getattr(m, "value", 0)}
    assert "vllm:spec_decode_num_drafts" in names


MISTAKES = {
    "block-one-slot-late": {"slots": lambda layout: layout.slots + 1},
    "window-one-slot-late": {"window_slots": lambda layout: layout.window_slots + 1},
    "block-one-position-late": {"positions": lambda layout: layout.positions + 1},
    "no-carry-embedding": {"carried": lambda layout: torch.zeros_like(layout.carried)},
    "carried-one-row-early": {"carried": lambda layout: layout.carried | layout.carried.roll(-1)},
    "one-row-unseen": {"seq_lens": lambda layout: layout.seq_lens - 1},
    "one-stale-row-seen": {"seq_lens": lambda layout: layout.seq_lens + 1},
}


def test_the_reference_notices_mistakes(save, folder, target, plain, monkeypatch):
    """The output is the same whatever the drafter reads; the comparison with the reference is not."""
    from hf_carryover.vllm import proposer

    drafter, drafter_folder = save("markov")
    reference, right = Reference(target, drafter), proposer.block_layout
    texts = prompts([12, 30])
    expected = plain(texts)
    with engine(folder / "target", drafter_folder) as llm:
        for number, (name, wrong) in enumerate(MISTAKES.items()):

            def mistaken(*args, wrong=wrong, **kwargs):
                layout = right(*args, **kwargs)
                return dataclasses.replace(layout, **{field: change(layout) for field, change in wrong.items()})

            monkeypatch.setattr(proposer, "block_layout", mistaken)
            requests = named(texts, f"w{number}x")
            with Recorder(llm, scripted(dict(zip(requests, expected)))) as recorder:
                done = arrive(llm, requests, TOKENS, every=1)
            assert [requests[key] + done[key] for key in requests] == expected, name
            with pytest.raises(AssertionError, match="Draft"):
                reference.check(recorder, dict(zip(requests, expected)))


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_sampled_distribution(sampling, tmp_path):
    """The joint distribution of two tokens, over 4096 seeded requests, against the target's own probabilities."""
    target = build_target(vocab_size=8, max_position_embeddings=64)
    kept = torch.tensor([0, 1, 2, 4, 5, 7])
    drafter = build_drafter(target, "markov", draft_token_ids=kept, block_size=3)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.5)  # every token has a chance
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    prompt, samples = [1, 3, 2, 6, 5], 4096
    # vLLM's first token comes from the prefill: the second and third are the first to be verified.
    after = torch.tensor([prompt + [a, b] for a in range(8) for b in range(8)])
    with torch.no_grad():
        p = torch.softmax(target(after).logits, dim=-1).view(8, 8, len(after[0]), 8)
    first, second, third = p[0, 0, -3], p[:, 0, -2], p[:, :, -1]
    expected = torch.einsum("a,ab,abc->bc", first, second, third)
    options = {"max_model_len": 64, "max_num_seqs": 64, "speculative": {"draft_sample_method": sampling}}
    with engine(tmp_path / "target", tmp_path / "drafter", proposals=3, **options) as llm:
        params = [greedy(3, temperature=1.0, seed=s) for s in range(samples)]
        outputs = generate(llm, [prompt] * samples, params)
        assert outputs[:64] == generate(llm, [prompt] * 64, params[:64])  # the same seeds, the same text
        accepted = {m.name: m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"}
    assert accepted["vllm:spec_decode_num_accepted_tokens"] > samples / 10
    counts = torch.zeros(8, 8)
    for _, b, c in outputs:
        counts[b, c] += 1
    likely = expected * samples >= 5
    statistic = ((counts - samples * expected) ** 2 / (samples * expected))[likely].sum()
    freedom = int(likely.sum())
    # Chi-squared with `freedom` degrees: 4.5 standard deviations above its mean.
    assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5, (statistic, freedom)
    assert counts[~likely].sum() <= 3 * (samples * expected[~likely]).sum() + 5
