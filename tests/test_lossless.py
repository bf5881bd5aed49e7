"""
Greedy output with a drafter equals plain greedy output, token for token, in float32.

Drafters: `random` (almost every proposal rejected), `oracle` (every proposal accepted) and `partial` (the first `j`
right, then wrong, `j` running through `0 … B`, so that every number of accepted proposals occurs with carried rows).
The full product of targets, block sizes and options is slow; a selection that holds every pair is quick.
"""

import copy
from itertools import product

import pytest
import torch
from tiny_targets import (
    PROMPT_LENGTH,
    TARGETS,
    VOCAB,
    WINDOW,
    assisted,
    build,
    follow_script,
    pairwise,
    plain,
    prompt_ids,
    record_proposals,
    tiny_drafter,
    tiny_llama,
    tiny_target,
)

from hf_carryover.target import gather_features, hidden_state_indices


LENGTH = 40  # new tokens; five windows of the sliding-window targets
BLOCKS = [1, 4, 15]
SCRIPTS = ["random", "oracle", "partial"]
CASES = (TARGETS, BLOCKS, [True, False], [0, 4], SCRIPTS)
QUICK = pairwise(*CASES)


def case_id(case) -> str:
    name, block_size, carry, rank, script = case
    return f"{name}-B{block_size}-{'carry' if carry else 'plain'}-{'markov' if rank else 'dflash'}-{script}"


@pytest.mark.parametrize("block_size", [1, 4, 15])
@pytest.mark.parametrize("carry", [True, False], ids=["carry", "plain"])
@pytest.mark.parametrize("rank", [0, 4], ids=["dflash", "markov"])
@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_anchor_first_layout(name, rank, carry, block_size):
    for script in ("random", "partial"):
        check_lossless((name, block_size, carry, rank, script), anchor_first=True, mask_token_id=61)


def expected_rounds(block_size: int, plan, length: int) -> tuple[list[int], list[int]]:
    """Proposals and accepted ones per round for a script, from the definition: `m + 1` tokens each, cut at the end."""
    left, proposed, accepted = length - 1, [], []
    for right in plan:
        if left == 0:
            return proposed, accepted
        proposed.append(min(block_size, left - 1))
        accepted.append(min(right, proposed[-1]))
        left -= accepted[-1] + 1


def check_lossless(case, target=None, **drafter_options):
    name, block_size, carry, rank, script = case
    target = tiny_target(name) if target is None else target
    ids = prompt_ids()
    want = greedy(target, ids)
    drafter = tiny_drafter(target, block_size=block_size, carry=carry, markov_rank=rank, **drafter_options)
    plan = {"oracle": [block_size], "partial": list(range(block_size + 1))}.get(script)
    if plan:
        follow_script(drafter, want, plan)
    got = greedy(target, ids, assistant_model=drafter)
    assert got.tolist() == want.tolist()
    report = drafter.last_report
    if plan:
        proposed, accepted = expected_rounds(block_size, plan * LENGTH, LENGTH)
        assert report.proposed == proposed
        assert report.accepted == accepted
    rejected = [proposed - accepted for proposed, accepted in zip(report.proposed, report.accepted)]
    # Round 1 follows the prefill; then the rejected rows of the round before, and no others (R14).
    assert report.carried == ([0] + rejected[:-1] if carry else [0] * report.rounds)
    assert sum(report.committed) == LENGTH - 1


def greedy(target, ids, **options):
    return target.generate(input_ids=ids, do_sample=False, max_new_tokens=LENGTH, **options)


@pytest.mark.parametrize("case", QUICK, ids=case_id)
def test_pairwise_matrix(case):
    check_lossless(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in product(*CASES) if case not in QUICK], ids=case_id)
def test_full_matrix(case):
    check_lossless(case)


@pytest.mark.compat
@pytest.mark.parametrize("name", TARGETS)
def test_oldest_and_newest_transformers(name):
    check_lossless((name, 4, True, 4, "partial"))


def test_every_acceptance_meets_every_number_of_carried_rows():
    """All pairs (accepted before, accepted now) of `0 … B`, hence every `m` with every count of carried rows."""
    block_size = 3
    plan = [m for before in range(block_size + 1) for now in range(block_size + 1) for m in (before, now)]
    length = sum(m + 1 for m in plan) + block_size + 2  # the last rounds are cut by the length limit
    target = tiny_target("llama")
    want = target.generate(prompt_ids(), do_sample=False, max_new_tokens=length)
    drafter = follow_script(tiny_drafter(target, block_size=block_size), want, plan)
    assert assisted(target, prompt_ids(), drafter, max_new_tokens=length).tolist() == want.tolist()
    report = drafter.last_report
    met = set(zip(report.carried[1:], report.accepted[1:]))
    assert met >= set(product(range(block_size + 1), repeat=2))


@pytest.mark.parametrize("layers", [[0], [3], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_features_are_the_outputs_of_the_named_layers(name, layers):
    """R15, R16: entry `k + 1` of the full hidden states, the last layer after the final norm; adapters included."""
    target = tiny_target(name)
    drafter = tiny_drafter(target, block_size=2, target_layer_ids=layers)
    windows = []
    original = drafter.commit_window

    def commit_window(cache, features, num_committed, carried_embeds, **options):
        windows.append(features[:, :num_committed])
        original(cache, features, num_committed, carried_embeds, **options)

    drafter.commit_window = commit_window
    text = target.generate(input_ids=prompt_ids(), assistant_model=drafter, do_sample=False, max_new_tokens=8)
    with torch.no_grad():
        states = target(input_ids=text, output_hidden_states=True).hidden_states
    features = torch.cat(windows, dim=1)
    want = torch.cat([states[k + 1] for k in layers], dim=-1)[:, : features.shape[1]]
    assert features.shape[1] >= prompt_ids().shape[1] + 5
    torch.testing.assert_close(features, want, atol=2e-4, rtol=1e-4)


def test_features_from_all_hidden_states_and_from_the_selected_ones():
    target, ids = tiny_target("qwen3"), prompt_ids()
    with torch.no_grad():
        every = target(ids, output_hidden_states=True).hidden_states
        for layers in ([0], [1, 3], [0, 1, 2, 3]):
            some = target(ids, output_hidden_states=hidden_state_indices(layers)).hidden_states
            want = torch.cat([every[k + 1] for k in layers], dim=-1)
            assert torch.equal(gather_features(every, layers), want)
            assert torch.equal(gather_features(some, layers), want)
            assert sum(states is not None for states in some) == len(layers)
    with pytest.raises(ValueError, match=r"5 hidden states, and not all of the layers \[1, 4\]"):
        gather_features(every, [1, 4])


SHAPES = {
    "anchor_first": {"anchor_first": True, "markov_rank": 3},
    "anchor_first_mask_token": {"anchor_first": True, "mask_token_id": 61},
    "own_reduced_head": {"draft_token_ids": torch.arange(0, VOCAB, 2), "own_head": True, "anchor_first": True},
    "raw_embeddings_capped_logits": {"embedding_scale": 0.5, "logit_scale": 2.0, "logit_softcapping": 3.0},
    "causal_block": {"block_attention": "causal"},
    "causal_sliding_layers": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "block_attention": "causal_sliding",
        "sliding_window_from": "anchor",
    },
    "reduced_vocabulary": {"draft_token_ids": torch.arange(0, VOCAB, 2), "markov_rank": 3},
    "mask_token": {"mask_token_id": 61, "markov_rank": 3},
    "wider": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
    "narrower_with_mask_token": {"hidden_size": 16, "num_attention_heads": 2, "mask_token_id": 61},
    "sliding_layers": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "one_layer_one_feature": {"num_hidden_layers": 1, "target_layer_ids": [3]},
    "partial_rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}


# A script needs every token of the text in the draft vocabulary.
SHAPES_AND_SCRIPTS = [
    pytest.param(options, script, id=f"{name}-{script}")
    for name, options in SHAPES.items()
    for script in ("random", "partial")
    if script == "random" or "draft_token_ids" not in options
]


@pytest.mark.parametrize(("options", "script"), SHAPES_AND_SCRIPTS)
def test_drafter_shapes(options, script):
    rank = options.get("markov_rank", 0)
    rest = {key: value for key, value in options.items() if key != "markov_rank"}
    check_lossless(("llama", 4, True, rank, script), **rest)


@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("backend", ["sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])  # it compiles
def test_attention_backends_of_the_drafter(backend, sliding, monkeypatch):
    """All propose what eager attention proposes."""
    target = tiny_target("llama")
    options = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6} if sliding else {}
    proposals = {}
    for implementation in ("eager", backend):
        drafter = tiny_drafter(target, block_size=4, markov_rank=3, **options)
        drafter.set_attn_implementation(implementation)
        rounds = record_proposals(drafter, monkeypatch)
        text = assisted(target, prompt_ids(), drafter, max_new_tokens=12)
        assert text.tolist() == plain(target, prompt_ids(), max_new_tokens=12).tolist()
        proposals[implementation] = list(rounds)
    assert proposals[backend] == proposals["eager"]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text"])
def test_attention_backends_of_a_sliding_target(name, backend):
    """R5: a block longer than the target's window, under both backends."""
    options = {"sliding_window": WINDOW, "attn_implementation": backend}
    target = build(name, **options)
    for script in ("random", "partial"):
        check_lossless((name, 15, True, 0, script), target=target)


def test_adapters_switched_off_and_on(monkeypatch):
    """R11: one drafter object serves the adapted and the bare target; it gets no adapter itself."""
    target = tiny_target("lora")
    drafter = tiny_drafter(target, block_size=4)
    adapted = greedy(target, prompt_ids())
    assert greedy(target, prompt_ids(), assistant_model=drafter).tolist() == adapted.tolist()
    with target.disable_adapter():
        bare = greedy(target, prompt_ids())
        assert greedy(target, prompt_ids(), assistant_model=drafter).tolist() == bare.tolist()
    assert bare.tolist() == greedy(tiny_llama(), prompt_ids()).tolist() != adapted.tolist()
    assert greedy(target, prompt_ids(), assistant_model=drafter).tolist() == adapted.tolist()
    assert not [name for name, _ in drafter.named_parameters() if "lora_" in name]


def test_convolution_target():
    """R5: the cache of a hybrid with convolutions rolls back."""
    layers = ["conv", "full_attention", "conv", "full_attention"]
    target = build("Lfm2", layer_types=layers)
    for script in ("random", "partial"):
        check_lossless(("lfm2", 4, True, 0, script), target=target)


FOLLOWS_LENGTH = {
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}, 24),
    "longrope": (
        {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "factor": 4.0,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 24,
        },
        96,
    ),
}


@pytest.mark.parametrize(("rope", "trained"), FOLLOWS_LENGTH.values(), ids=FOLLOWS_LENGTH)
def test_rope_that_follows_the_length(rope, trained):
    """No row of a block may change the frequencies of the rows before it: blocks stop where they would."""
    target = tiny_llama(rope_parameters=rope, max_position_embeddings=trained)
    want = greedy(target, prompt_ids())
    drafter = follow_script(tiny_drafter(target, block_size=15), want, 15)
    assert drafter.config.rope_parameters == {"rope_type": "default", "rope_theta": 100.0}
    assert greedy(target, prompt_ids(), assistant_model=drafter).tolist() == want.tolist()
    # The first block stops at position 23. "longrope" goes on behind the limit, "dynamic" changes with every token.
    assert drafter.last_report.proposed == ([11, 15, 10] if rope["rope_type"] == "longrope" else [11] + [0] * 27)


def test_table_of_positions_ends_inside_a_block():
    """R27: plain decoding ends by EOS before the table does, so must a block that could reach behind it."""
    target = build("GPT2", max_position_embeddings=PROMPT_LENGTH + 18, tie_word_embeddings=True)
    text = target.generate(prompt_ids(), do_sample=False, max_new_tokens=18)
    new = text[0, PROMPT_LENGTH:].tolist()
    place = max(i for i in range(18) if new[i] not in text[0, : PROMPT_LENGTH + i].tolist())
    assert place >= 14
    options = {"max_new_tokens": 100, "eos_token_id": new[place]}
    drafter = tiny_drafter(target, block_size=15)
    got = assisted(target, prompt_ids(), drafter, **options)
    assert got.tolist() == text[:, : PROMPT_LENGTH + place + 1].tolist()
    assert drafter.last_report.proposed[:5] == [15, 15, 15, 14, 13]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEAR_TIE = 0.25  # of the target's own logits; R-rules: rounding stays below, a defect shows 0.6 and more


@pytest.mark.parametrize("drafter_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
def test_low_precision_differs_at_near_ties_only(target_dtype, drafter_dtype):
    """R10: no combination of dtypes fails, casts the drafter, or departs from the text but at a near tie."""
    target = copy.deepcopy(tiny_target("qwen3")).to(target_dtype)
    want = greedy(target, prompt_ids())
    for script in ("random", "partial"):
        drafter = tiny_drafter(target, block_size=4, markov_rank=3).to(drafter_dtype)
        if script == "partial":
            follow_script(drafter, want, [4, 1, 0, 2])
        got = greedy(target, prompt_ids(), assistant_model=drafter)
        assert {parameter.dtype for parameter in drafter.parameters()} == {drafter_dtype}
        different = (got != want)[0].nonzero()
        if len(different):
            first = int(different[0])
            with torch.no_grad():
                top = target(want[:, :first]).logits[0, -1].float().topk(2).values
            assert float(top[0] - top[1]) < NEAR_TIE
        assert target_dtype != torch.float32 or not len(different)
