"""What stands in the text already: found where it should be, put where it belongs, without effect on the output."""

import numpy as np
import pytest
import torch
from slow_reference import SlowReference
from tiny_targets import (
    assisted,
    counting_target,
    plain,
    prompt_ids,
    record_proposals,
    tiny_drafter,
    tiny_llama,
    tiny_target,
)

from hf_carryover import CarryoverConfig, CarryoverDrafter
from hf_carryover.convert.convert import write_drafter
from hf_carryover.lookup import block_hints, carried_hints, look_up, lookup_hints
from hf_carryover.reshape import reshape_drafter
from hf_carryover.target import TargetHead
from hf_carryover.vllm.texts import Texts


@pytest.mark.parametrize(
    ("text", "ngram_size", "count", "tokens", "size"),
    [
        ([1, 2, 3, 1, 2], 4, 2, [3, 1], 2),
        ([1, 2, 3, 1, 2], 4, 5, [3, 1, 2, 3, 1], 2),  # goes on with its period
        ([1, 2, 3, 1, 2], 1, 2, [3, 1], 1),
        ([9, 2, 4, 1, 2, 5, 1, 2], 2, 1, [5], 2),  # the last of two places
        ([1, 2, 4, 9, 2, 5, 1, 2], 2, 1, [4], 2),  # a longer match wins over a later one
        ([1, 2, 4, 9, 2, 5, 1, 2], 1, 1, [5], 1),
        ([7, 7, 7], 4, 3, [7, 7, 7], 2),
        ([7, 8, 9], 4, 3, None, 0),
        ([7], 4, 3, None, 0),
    ],
)
def test_what_is_found(text, ngram_size, count, tokens, size):
    found, length = look_up(np.array(text), ngram_size, count)
    assert (None if found is None else found.tolist(), length) == (tokens, size)


def test_against_a_search_by_hand():
    random, found = np.random.default_rng(0), set()
    reference = SlowReference(tiny_llama(), tiny_drafter(tiny_llama(), lookup_ngram_size=5), 4.0)
    for _ in range(300):
        text = random.integers(0, 3, size=random.integers(1, 30))
        tokens, size = look_up(text, 5, 4)
        assert ([] if tokens is None else tokens.tolist(), size) == reference.look_up(text.tolist())
        found.add(size)
    assert found == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("anchor_first", [False, True])
def test_where_it_goes(anchor_first):
    """`s ⊙ emb(c_k) + v_n` on the row that predicts position `a + k`, exactly; nothing where nothing was found."""
    drafter = tiny_drafter(tiny_llama(), block_size=3, lookup_ngram_size=2, anchor_first=anchor_first)
    anchors, embeds = torch.randn(2, 32), torch.randn(2, 3, 32)
    block = drafter.block_states(anchors, None, {"lookup_embeds": embeds, "lookup_sizes": torch.tensor([2, 0])})
    first = 0 if anchor_first else 1
    expected = torch.stack([anchors, *[drafter.mask_embedding.expand(2, -1)] * (2 + first)], dim=1)
    hint = embeds[0] * drafter.lookup_scale + drafter.lookup_embedding[1]
    expected[0, first:] = expected[0, first:] + hint
    assert torch.equal(block, expected)


def test_what_is_pointed_at():
    """`x_k + <g_n, x_k> w / |w|²`: the logit of what was looked up changes by `<g_n, x_k>`, exactly."""
    target = tiny_llama()
    kept = torch.tensor([3, 5, 9, 40])
    drafter = tiny_drafter(target, block_size=3, lookup_ngram_size=2, draft_token_ids=kept)
    head = TargetHead(target, drafter)
    tokens = torch.tensor([[5, 40, 6], [3, 3, 3]])  # 6 is not drafted
    states, rows = torch.randn(2, 3, 32), head.rows(tokens, "cpu")
    weight = target.lm_head.weight.detach()
    torch.testing.assert_close(rows[0, 1], weight[40] / weight[40].square().sum())
    assert not rows[0, 2].any()
    sizes = torch.tensor([2, 0])
    pointed = drafter.point(states, {"lookup_rows": rows * (sizes > 0)[:, None, None], "lookup_sizes": sizes})
    assert torch.equal(pointed[1], states[1])
    assert torch.equal(pointed[0, 2], states[0, 2])
    before, after = (x[0] @ weight[kept].T for x in (states, pointed))
    for k, slot in enumerate([1, 3]):
        torch.testing.assert_close((after - before)[k, slot], states[0, k] @ drafter.lookup_gate[1])


def test_what_was_carried_is_pointed_at():
    """The prediction behind the first rejected row is for the next position; rows that were accepted say nothing."""
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=3, carry_pointer=True)
    head, tokens = TargetHead(target, drafter), torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]])
    rows = carried_hints(head, drafter, tokens, torch.tensor([1, 3, 2]), torch.tensor([4, 4, 2]))["carry_rows"]
    expected = torch.zeros(3, 3, 32)
    expected[0], expected[1, 0] = head.rows(torch.tensor([6, 7, 8]), "cpu"), head.rows(torch.tensor(12), "cpu")
    assert torch.equal(rows, expected)
    states = torch.randn(3, 3, 32)
    trust = (states * drafter.carry_gate).sum(dim=-1, keepdim=True)
    assert torch.equal(drafter.point(states, {"carry_rows": rows}), states + trust * rows)
    assert carried_hints(head, tiny_drafter(target), tokens, None, None) == {}


def test_a_fresh_one_passes_the_embedding_on():
    config = {"vocab_size": 64, "hidden_size": 32, "num_target_layers": 4, "head_dim": 8, "num_hidden_layers": 1}
    drafter = CarryoverDrafter(CarryoverConfig(**config, lookup_ngram_size=3))
    assert torch.equal(drafter.lookup_scale, torch.ones(32))
    assert torch.equal(drafter.lookup_embedding, torch.zeros(3, 32))
    assert torch.equal(drafter.lookup_gate, torch.zeros(3, 32))


def test_a_draft_without_what_it_needs_is_refused():
    drafter = tiny_drafter(tiny_llama(), lookup_ngram_size=2)
    with pytest.raises(
        ValueError, match=r"`lookup_embeds`, `lookup_rows` and `lookup_sizes` are required: .* up to 2 tokens"
    ):
        drafter.block_states(torch.zeros(1, 32), None)


@pytest.mark.parametrize("size", [-1, 65])
def test_sizes_out_of_range_are_refused(size):
    with pytest.raises(ValueError, match=f"`lookup_ngram_size` must lie in 0 .*, got {size}"):
        CarryoverConfig(lookup_ngram_size=size)


def test_blocks_see_the_text_up_to_their_anchor():
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=3, lookup_ngram_size=2)
    head, ids = TargetHead(target, drafter), torch.tensor([[1, 2, 3, 1, 2, 9, 2, 5], [4, 4, 6, 4, 6, 4, 0, 0]])
    hints = block_hints(head, drafter, ids, torch.tensor([0, 0, 1]), torch.tensor([4, 2, 4]))
    assert hints["lookup_sizes"].tolist() == [2, 0, 2]
    for row, tokens in ((0, [3, 1, 2]), (2, [4, 6, 4])):
        assert torch.equal(hints["lookup_embeds"][row], target.get_input_embeddings()(torch.tensor(tokens)))
    assert lookup_hints(head, tiny_drafter(target), [ids[0].numpy()]) == {}


OPTIONS = {
    "carry": {"markov_rank": 4},
    "control": {"carry": False},
    "anchor-first": {"anchor_first": True},
    "reduced": {"draft_token_ids": torch.arange(1, 64, 2)},
    "predictions": {"carry_from": "predictions"},
    "pointer": {"carry_pointer": True, "markov_rank": 4},
}


@pytest.mark.compat
@pytest.mark.parametrize("name", OPTIONS)
def test_lossless_greedy(name):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=4, lookup_ngram_size=3, **OPTIONS[name])
    expected = plain(target, prompt_ids(), max_new_tokens=40)
    assert torch.equal(assisted(target, prompt_ids(), drafter, max_new_tokens=40), expected)


def copying_drafter(target):
    """Proposes what was looked up: its layers add nothing, and nothing but that is in a row."""
    drafter = tiny_drafter(target, block_size=4, lookup_ngram_size=3)
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        drafter.mask_embedding.zero_()
        drafter.lookup_embedding.zero_()
        drafter.lookup_gate.zero_()
        drafter.lookup_scale.fill_(1.0)
        drafter.norm.weight.fill_(1.0)
    return drafter


def test_what_is_looked_up_reaches_the_head(monkeypatch):
    """The counting target's head reads the embedding of `t` as `t + 1`: looked up behind 10 are 11, 12, 13, 14."""
    target, ids = counting_target(), torch.cat([torch.arange(20), torch.arange(10)])[None]
    drafter = copying_drafter(target)
    rounds = record_proposals(drafter, monkeypatch)
    text = assisted(target, ids, drafter, max_new_tokens=9)
    assert torch.equal(text, plain(target, ids, max_new_tokens=9))
    assert rounds[0] == [12, 13, 14, 15]


def test_padding_is_no_text(monkeypatch):
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=4, lookup_ngram_size=3)
    rounds = record_proposals(drafter, monkeypatch)
    bare = assisted(target, prompt_ids(), drafter, max_new_tokens=20)
    expected = list(rounds)
    rounds.clear()
    token = int(bare[0, 14])
    padded = torch.cat([torch.full((1, 5), token), prompt_ids()], dim=1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(prompt_ids())], dim=1)
    text = assisted(target, padded, drafter, attention_mask=mask, max_new_tokens=20)
    assert torch.equal(text[:, 5:], bare)
    assert rounds == expected


def test_checkpoints(tmp_path):
    """Saved and loaded; started anew on a checkpoint without, and left out on request."""
    target = tiny_llama()
    drafter = tiny_drafter(target, lookup_ngram_size=3)
    drafter.save_pretrained(tmp_path / "with")
    loaded = CarryoverDrafter.from_pretrained(tmp_path / "with")
    assert torch.equal(loaded.lookup_embedding, drafter.lookup_embedding)
    assert torch.equal(loaded.lookup_scale, drafter.lookup_scale)
    without = CarryoverDrafter.from_pretrained(tmp_path / "with", lookup_ngram_size=0)
    assert without.lookup_scale is None
    without.save_pretrained(tmp_path / "without")
    fresh = CarryoverDrafter.from_pretrained(tmp_path / "without", lookup_ngram_size=2)
    assert torch.equal(fresh.lookup_scale, torch.ones(32)) and fresh.lookup_embedding.shape == (2, 32)
    pointing = CarryoverDrafter.from_pretrained(tmp_path / "with", carry_pointer=True)
    assert torch.equal(pointing.carry_gate, torch.zeros(4, 32))
    pointing.save_pretrained(tmp_path / "pointing")
    assert CarryoverDrafter.from_pretrained(tmp_path / "pointing", carry_pointer=False).carry_gate is None
    control = CarryoverDrafter.from_pretrained(tmp_path / "pointing", carry=False)
    assert control.carry_gate is None and not control.config.points_at_carried
    control.save_pretrained(tmp_path / "control")
    again = CarryoverDrafter.from_pretrained(tmp_path / "control", carry=True)
    assert torch.equal(again.carry_gate, torch.zeros(4, 32))
    reshaped = reshape_drafter(drafter, lookup_ngram_size=4)
    assert torch.equal(reshaped.lookup_embedding[:3], drafter.lookup_embedding)
    assert torch.equal(reshaped.lookup_embedding[3], torch.zeros(32))
    with pytest.raises(ValueError, match=r"2 tensors in it have another shape.*lookup_embedding"):
        CarryoverDrafter.from_pretrained(tmp_path / "with", lookup_ngram_size=2)


@pytest.mark.parametrize("to", ["z-lab", "speculators"])
def test_other_formats_have_no_place_for_it(to, tmp_path):
    drafter = tiny_drafter(tiny_llama(), lookup_ngram_size=2, mask_token_id=1)
    with pytest.raises(ValueError, match=r"no place for a drafter that looks up n-grams.*`lookup_ngram_size=0`"):
        write_drafter(drafter, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_texts_of_a_serving_batch():
    """Windows with rejected rows, a cached prefix, requests that come, go and change places."""
    texts = Texts(limit=16, ngram_size=3, count=2)
    known = np.array([[1, 2, 3, 4, 0, 0], [5, 6, 7, 0, 0, 0]])

    def step(names, table, windows, rejected, anchors):
        starts = torch.tensor([0, *np.cumsum([len(tokens) for _, tokens in windows])])
        positions = torch.cat([torch.arange(len(tokens)) + first for first, tokens in windows])
        tokens = torch.tensor([token for _, window in windows for token in window])
        found, sizes = texts.look_up(
            names, table, tokens, positions, starts, torch.tensor(rejected), torch.tensor(anchors)
        )
        return found.tolist(), sizes.tolist()

    # "a" has a cached prefix of four tokens, "b" begins.
    assert step(["a", "b"], known, [(4, [9]), (0, [5, 6, 7])], [0, 0], [2, 5]) == ([[3, 4], [6, 7]], [1, 1])
    # "b": 6 and 7 were proposed, 7 was rejected, 8 is the target's own. The table still has nothing of it.
    assert step(["b", "a"], known[::-1], [(3, [5, 6, 7]), (5, [2, 3])], [1, 0], [8, 4]) == (
        [[0, 0], [9, 2]],
        [0, 3],
    )
    # "b" went away and is back at the same place with another text, "a" is gone.
    assert step(["c"], np.array([[8, 8, 8]]), [(0, [8, 1])], [0], [8]) == ([[1, 8]], [1])
    assert step(["b"], np.array([[1, 2, 1]]), [(3, [2])], [0], [1]) == ([[2, 1]], [3])
    # Behind the longest text nothing is looked up.
    assert step(["d"], np.ones((1, 20), dtype=np.int64), [(17, [1])], [0], [1]) == ([[0, 0]], [0])
