"""The compiled draft step proposes what the other one does, and steps aside where it can't."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from tiny_targets import assisted, plain, prompt_ids, record_proposals, tiny_drafter, tiny_target

from hf_carryover import CarryoverDrafter, split_times
from hf_carryover.compiled import CompiledDraft, DraftStep, FixedCache
from hf_carryover.modeling_carryover import CarryoverCache


NEW_TOKENS = 28
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
DRAFTERS = {
    "carry": {},
    "markov": {"markov_rank": 4},
    "no-carry": {"carry": False, "markov_rank": 4},
    "reduced": {"draft_token_ids": torch.arange(1, 64, 2), "markov_rank": 4},
    "mask-token": {"mask_token_id": 1},
    "anchor-first": {"anchor_first": True},
    "sliding": WINDOWED,
    "sliding-from-anchor": {**WINDOWED, "sliding_window_from": "anchor"},
    "causal": {**WINDOWED, "block_attention": "causal"},
    "narrow": {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    "soft-cap": {"logit_scale": 0.5, "logit_softcapping": 2.0},
    "one": {"block_size": 1},
    "lookup": {"lookup_ngram_size": 3, "markov_rank": 4},
    "pointer": {"carry_pointer": True, "lookup_ngram_size": 3},
}


def drafter_for(target, name: str = "markov"):
    return tiny_drafter(target, std=0.3, **DRAFTERS[name])


def count_steps(monkeypatch) -> list[tuple]:
    """A list that grows by `(rows, fixed)` of every draft that the compiled step takes."""
    steps = []
    original = CompiledDraft.__call__

    def call(self, drafter, head, cache, *args):
        rows = cache.unfused.shape[1]
        drafted = original(self, drafter, head, cache, *args)
        if drafted is not None:
            steps.append((rows, isinstance(cache, FixedCache)))
        return drafted

    monkeypatch.setattr(CompiledDraft, "__call__", call)
    return steps


QUICK = [(name, False) for name in ("markov", "no-carry", "sliding", "lookup")] + [
    ("markov", True),
    ("no-carry", True),
]
OTHERS = [(name, fixed) for name in DRAFTERS for fixed in (False, True) if (name, fixed) not in QUICK]


@pytest.mark.parametrize(("name", "fixed"), QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS])
def test_it_proposes_the_same(name, fixed, monkeypatch):
    target = tiny_target("llama")
    drafter = drafter_for(target, name)
    rounds = record_proposals(drafter, monkeypatch)
    text = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS)
    expected, carried = list(rounds), drafter.last_report.carried
    rounds.clear()
    steps = count_steps(monkeypatch)
    drafter.compile_draft(fixed_shapes=fixed, backend="eager")
    assert torch.equal(assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS), text)
    assert torch.equal(text, plain(target, prompt_ids(), max_new_tokens=NEW_TOKENS))
    assert rounds == expected
    assert len({token for block in rounds for token in block}) > 3
    assert drafter.last_report.carried == carried
    # All but the first window, which is the prompt, and with carry the short ones at the end.
    assert len(expected) - 1 - drafter.config.block_size <= len(steps) <= len(expected) - 1
    assert {kind for _, kind in steps} == {fixed}
    assert drafter.compiled_draft.failure is None


@pytest.mark.compat
@pytest.mark.parametrize(("name", "fixed"), [("markov", False), ("no-carry", True)])
@pytest.mark.parametrize(
    "options",
    [
        {"num_assistant_tokens": 2},
        {"assistant_confidence_threshold": 0.2},
        {"max_new_tokens": 7},
        {"repetition_penalty": 1.3},
        {"do_sample": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_with_the_options_of_a_call(options, name, fixed, monkeypatch):
    target = tiny_target("llama")
    drafter = drafter_for(target, name)
    rounds = record_proposals(drafter, monkeypatch)
    texts, proposals = [], []
    for compiled in (False, True):
        if compiled:
            drafter.compile_draft(fixed_shapes=fixed, backend="eager")
        torch.manual_seed(0)
        texts.append(assisted(target, prompt_ids(), drafter, **{"max_new_tokens": NEW_TOKENS, **options}))
        proposals.append(list(rounds))
        rounds.clear()
    assert torch.equal(*texts)
    assert proposals[0] == proposals[1]


@pytest.mark.slow
def test_a_continued_cache_and_growing_storage(monkeypatch):
    target = tiny_target("llama")
    texts = []
    for options in (None, {"fixed_shapes": False}, {"fixed_shapes": True}):
        drafter = drafter_for(target)
        if options is not None:
            drafter.compile_draft(backend="eager", **options)
        steps = count_steps(monkeypatch)
        first = assisted(target, prompt_ids(), drafter, max_new_tokens=8, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, prompt_ids(4, seed=5)], dim=1)
        texts.append(
            assisted(target, longer, drafter, max_new_tokens=250, past_key_values=first.past_key_values).tolist()
        )
        assert options is None or len(steps) > 100
    assert texts[0] == texts[1] == texts[2]


def test_a_window_that_nothing_was_drafted_behind():
    """Deferred, then fused and written by the next one."""
    target = tiny_target("llama")
    drafter = drafter_for(target)
    features = torch.randn(1, 11, drafter.config.feature_size, generator=torch.Generator().manual_seed(0))
    anchor = target.get_input_embeddings()(torch.tensor([5]))
    hidden = []
    for fuse in (True, False):
        cache = CarryoverCache(drafter.config, torch.float32, "cpu")
        drafter.commit_window(cache, features[:, :5], 3, fuse=fuse)
        drafter.commit_window(cache, features[:, 5:8], 2, fuse=fuse)
        drafter.commit_window(cache, features[:, 8:], 1, fuse=fuse)
        assert (cache.committed, cache.carried) == (6, 2)
        hidden.append(drafter.draft(cache, anchor, None))
    assert torch.equal(*hidden)


def test_a_compiler_that_fails_is_reported_once():
    target = tiny_target("llama")
    drafter = drafter_for(target)
    calls = []

    def broken(graph, inputs):
        calls.append(1)
        raise RuntimeError("no compiler here")

    text = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS)
    carried = drafter.last_report.carried
    drafter.compile_draft(backend=broken)
    with pytest.warns(UserWarning, match="could not be compiled and runs without .*no compiler here"):
        assert torch.equal(assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS), text)
    assert drafter.last_report.carried == carried
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS), text)
    assert len(calls) == 1


def test_what_it_leaves_alone(monkeypatch):
    """Batches, and drafters that carry tokens; and it can be undone."""
    target = tiny_target("llama")
    steps = count_steps(monkeypatch)
    drafter = drafter_for(target).compile_draft(backend="eager")
    batch = torch.cat([prompt_ids(), prompt_ids(seed=4)])
    mask = torch.ones_like(batch)
    texts = target.generate(
        batch,
        attention_mask=mask,
        assistant_model=drafter,
        do_sample=False,
        max_new_tokens=12,
    )
    assert torch.equal(texts, plain(target, batch, attention_mask=mask, max_new_tokens=12))
    tokens = tiny_drafter(target, carry_from="predictions").compile_draft(backend="eager")
    assisted(target, prompt_ids(), tokens, max_new_tokens=12)
    drafter.compiled_draft = None
    assisted(target, prompt_ids(), drafter, max_new_tokens=12)
    assert steps == []


def test_the_weights_may_change():
    """A step that was compiled once goes on with the drafter's present weights."""
    target = tiny_target("llama")
    drafter = drafter_for(target).compile_draft(backend="eager")
    assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS)
    other = tiny_drafter(target, seed=7, std=0.3, **DRAFTERS["markov"])
    drafter.load_state_dict(other.state_dict())
    assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS)
    assisted(target, prompt_ids(), other, max_new_tokens=NEW_TOKENS)
    assert drafter.last_report.accepted == other.last_report.accepted


def test_copies_compile_for_themselves(tmp_path):
    target = tiny_target("llama")
    drafter = drafter_for(target).compile_draft(fixed_shapes=False, backend="eager")
    text = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS)
    for other in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert other.compiled_draft is not drafter.compiled_draft
        assert other.compiled_draft.options == {"backend": "eager"}
        assert torch.equal(assisted(target, prompt_ids(), other, max_new_tokens=NEW_TOKENS), text)
        assert other.compiled_draft._step._orig_mod.drafter is other
    drafter.save_pretrained(tmp_path)
    loaded = CarryoverDrafter.from_pretrained(tmp_path)
    assert loaded.compiled_draft is None
    assert loaded.state_dict().keys() == drafter.state_dict().keys()


def test_buffers_of_fixed_shapes_are_used_again_and_empty(monkeypatch):
    target = tiny_target("llama")
    drafter = drafter_for(target).compile_draft(fixed_shapes=True, backend="eager")
    seen = []
    original = CompiledDraft.new_cache

    def new_cache(self, *args):
        cache = original(self, *args)
        buffers = [*cache.keys, *cache.values]
        assert not any(bool(buffer.any()) for buffer in buffers)
        seen.append({buffer.data_ptr() for buffer in buffers})
        assert all(buffer.shape[2] == 256 for buffer in buffers)
        return cache

    monkeypatch.setattr(CompiledDraft, "new_cache", new_cache)
    for _ in range(3):
        assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS)
        gc.collect()
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 4


def test_times_are_still_split():
    target = tiny_target("llama")
    drafter = drafter_for(target).compile_draft(backend="eager")
    with split_times(target):
        assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS)
    report = drafter.last_report
    assert report.phases["draft"] > 0
    assert sum(report.phases.values()) == pytest.approx(report.draft_ms + report.target_ms, rel=0.2)


def test_the_step_has_no_graph_break():
    """One graph, or nothing would be gained; the position of every row and slot comes from a tensor."""
    target = tiny_target("llama")
    for fixed in (False, True):
        drafter = drafter_for(target).compile_draft(fixed_shapes=fixed, backend="eager", fullgraph=True)
        text = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS)
        assert drafter.compiled_draft.failure is None
        assert torch.equal(text, plain(target, prompt_ids(), max_new_tokens=NEW_TOKENS))
    assert isinstance(drafter.compiled_draft._step._orig_mod, DraftStep)


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True], ids=["exact", "fixed"])
@pytest.mark.parametrize("name", ["markov", "no-carry"])
def test_with_the_compiler(name, fixed, monkeypatch):
    """Inductor itself, with warnings as errors: it has to compile here."""
    target = tiny_target("llama")
    drafter = drafter_for(target, name)
    rounds = record_proposals(drafter, monkeypatch)
    text = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS)
    expected = list(rounds)
    rounds.clear()
    steps = count_steps(monkeypatch)
    drafter.compile_draft(fixed_shapes=fixed)
    assert torch.equal(assisted(target, prompt_ids(), drafter, max_new_tokens=NEW_TOKENS), text)
    assert drafter.compiled_draft.failure is None
    assert rounds == expected
    assert len(steps) >= len(expected) - 1 - drafter.config.block_size
