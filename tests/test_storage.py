"""
The drafter's storage during `generate`: one window per round in place, bounded, and equal to drafting from scratch.

The reference recomputes every round's draft with the training path, `CarryoverDrafter.forward`, which has no storage:
it is given the features of all committed rows, those of this round's rejected rows, and the anchor (R14).
"""

from dataclasses import dataclass, field

import pytest
import torch
from tiny_targets import assisted, follow_script, plain, prompt_ids, tiny_drafter, tiny_llama, tiny_target

from hf_carryover.modeling_carryover import CarryoverCache


B = 4


@dataclass
class Rounds:
    """What a drafter was given and gave, per round."""

    committed: list = field(default_factory=list)
    carried: list = field(default_factory=list)
    anchors: list = field(default_factory=list)
    hidden: list = field(default_factory=list)
    states: list = field(default_factory=list)  # (first_position, committed, carried, capacity) when drafting
    windows: list = field(default_factory=list)  # (slot, rows) of each window
    at: list = field(default_factory=list)  # the window behind which each draft stands
    buffers: list = field(default_factory=list)


def record(drafter) -> Rounds:
    rounds = Rounds()
    commit_window, draft = drafter.commit_window, drafter.draft

    def recording_commit(cache, features, num_committed, carried_embeds, **options):
        rounds.committed.append(features[:, :num_committed].clone())
        rounds.carried.append(features[:, num_committed:].clone())
        rounds.windows.append((cache.committed, features.shape[1] if drafter.config.carry else num_committed))
        commit_window(cache, features, num_committed, carried_embeds, **options)

    def recording_draft(cache, anchor_embeds, mask_embeds):
        rounds.at.append(len(rounds.windows) - 1)
        rounds.states.append((cache.first_position, cache.committed, cache.carried, cache.capacity))
        rounds.buffers.append(cache.keys[0].data_ptr())
        hidden = draft(cache, anchor_embeds, mask_embeds)
        rounds.anchors.append(anchor_embeds.clone())
        rounds.hidden.append(hidden.clone())
        return hidden

    drafter.commit_window, drafter.draft = recording_commit, recording_draft
    return rounds


@torch.no_grad()
def from_scratch(drafter, rounds: Rounds, r: int, mask_embeds=None) -> torch.Tensor:
    """Final states of round `r`'s mask rows, by the training path."""
    last = rounds.at[r]
    features = torch.cat(rounds.committed[: last + 1], dim=1)
    anchor = features.shape[1]
    carried = rounds.carried[last] if drafter.config.carry else rounds.carried[last][:, :0]
    extra = {}
    if carried.shape[1]:
        extra = {
            "carried_features": carried,
            "carried_positions": anchor + torch.arange(carried.shape[1]).unsqueeze(0),
            "carried_mask": torch.ones(1, carried.shape[1], dtype=torch.bool),
        }
    return drafter(
        anchor_embeds=rounds.anchors[r],
        anchor_positions=torch.tensor([anchor]),
        features=features,
        sequence_index=torch.tensor([0]),
        mask_embeds=mask_embeds,
        **extra,
    ).hidden_states


OPTIONS = {
    "plain": {"carry": False},
    "carry": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "sliding_eager": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
    "mask_token_and_widths": {"mask_token_id": 61, "hidden_size": 48, "num_attention_heads": 6},
}


@pytest.mark.compat
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_round_equals_drafting_from_scratch(name, options):
    target = tiny_target(name)
    text = plain(target, prompt_ids(), max_new_tokens=40)
    drafter = follow_script(tiny_drafter(target, block_size=B, **options), text, [0, 1, 2, 3, 4, 4, 0, 0])
    if options.get("sliding_window") == 3:
        drafter.set_attn_implementation("eager")
    rounds = record(drafter)
    mask_id = drafter.config.mask_token_id
    embed = target.get_input_embeddings()
    mask_embeds = None if mask_id is None else embed(torch.tensor([mask_id]))[0]
    assert assisted(target, prompt_ids(), drafter, max_new_tokens=40).tolist() == text.tolist()
    position = prompt_ids().shape[1]
    for r, hidden in enumerate(rounds.hidden):
        # Each round's anchor is the token behind the committed rows, and its embedding is the target's.
        assert rounds.states[r][:2] == (0, position)
        assert torch.equal(rounds.anchors[r], embed(text[:, position]))
        torch.testing.assert_close(hidden, from_scratch(drafter, rounds, r, mask_embeds), atol=1e-4, rtol=1e-4)
        position += drafter.last_report.committed[r]
    assert {carried.shape[1] for carried in rounds.carried[1:]} >= {0, 1, 2, 3, 4}


def test_rounds_without_a_draft_are_stored_too():
    """Between two drafts several windows may pass: here one block may not straddle a limit of the target's RoPE."""
    limit = 24
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, "short_factor": [1.0] * 4}
    rope |= {"long_factor": [3.0] * 4, "original_max_position_embeddings": limit}
    target = tiny_llama(rope_parameters=rope, max_position_embeddings=96)
    text = plain(target, prompt_ids(), max_new_tokens=40)
    drafter = follow_script(tiny_drafter(target, block_size=B), text, [1, 0, 3, 0])
    rounds = record(drafter)
    assert assisted(target, prompt_ids(), drafter, max_new_tokens=40).tolist() == text.tolist()
    assert 0 in drafter.last_report.proposed[:-1]
    assert len(rounds.windows) > len(rounds.at) == drafter.last_report.rounds - drafter.last_report.proposed.count(0)
    for r, hidden in enumerate(rounds.hidden):
        torch.testing.assert_close(hidden, from_scratch(drafter, rounds, r), atol=1e-4, rtol=1e-4)


def test_blocks_that_ended_where_the_drafter_was_unsure():
    """R14: what is carried is what was drafted less what was accepted, also when less was drafted."""
    target = tiny_target("llama")
    text = plain(target, prompt_ids(), max_new_tokens=40)
    drafter = tiny_drafter(target, block_size=B, std=0.5)
    rounds, threshold = record(drafter), {"assistant_confidence_threshold": 0.2}
    assert assisted(target, prompt_ids(), drafter, max_new_tokens=40, **threshold).tolist() == text.tolist()
    report = drafter.last_report
    assert set(report.proposed[:-B]) >= {1, 2, B}
    rejected = [proposed - accepted for proposed, accepted in zip(report.proposed, report.accepted)]
    assert report.carried == [0, *rejected[:-1]]
    for r, hidden in enumerate(rounds.hidden):
        torch.testing.assert_close(hidden, from_scratch(drafter, rounds, r), atol=1e-4, rtol=1e-4)


def test_carried_rows_matter():
    """The comparison above can fail: without the carried rows the states differ."""
    target = tiny_target("llama")
    text = plain(target, prompt_ids(), max_new_tokens=20)
    drafter = follow_script(tiny_drafter(target, block_size=B), text, 1)
    rounds = record(drafter)
    assisted(target, prompt_ids(), drafter, max_new_tokens=20)
    rounds.carried = [carried[:, :0] for carried in rounds.carried]
    assert float((rounds.hidden[2] - from_scratch(drafter, rounds, 2)).abs().max()) > 1e-2


def test_one_window_per_round_in_bounded_storage():
    target = tiny_target("llama")
    text = plain(target, prompt_ids(), max_new_tokens=120)
    drafter = follow_script(tiny_drafter(target, block_size=B), text, [0, 2, 4, 1])
    rounds = record(drafter)
    assisted(target, prompt_ids(), drafter, max_new_tokens=120)
    report = drafter.last_report
    prompt = prompt_ids().shape[1]
    # The prompt's window, then one of `1 + proposals` rows a round right behind the committed rows: what was carried
    # before lies there and is overwritten.
    starts = [0, *(prompt + sum(report.committed[:r]) for r in range(report.rounds - 1))]
    assert [slot for slot, _ in rounds.windows] == starts
    assert [rows for _, rows in rounds.windows] == [prompt, *(1 + count for count in report.proposed[:-1])]
    grown = 0
    for before, now, old, new in zip(rounds.states, rounds.states[1:], rounds.buffers, rounds.buffers[1:]):
        assert now[1] + now[2] + B + 1 <= now[1] + 2 * (B + 1)
        if now[3] == before[3]:
            assert new == old  # same buffer, nothing concatenated
        else:
            assert now[3] == 2 * before[3]
            grown += 1
    assert grown == 2 and rounds.states[0][3] == prompt + 8 * (B + 1)


def test_growth_keeps_committed_and_carried_rows():
    config = tiny_drafter(tiny_target("llama"), block_size=B).config
    cache = CarryoverCache(config, dtype=torch.float32, device="cpu", capacity=6)
    for layer in range(config.num_hidden_layers):
        cache.keys[layer][:, :, :5] = float(layer + 1)
        cache.values[layer][:, :, :5] = -float(layer + 1)
    cache.committed, cache.carried = 3, 2
    cache.reserve(6)
    assert cache.capacity == 6
    cache.reserve(7)
    assert cache.capacity == 12
    cache.reserve(40)
    assert cache.capacity == 40
    assert [float(keys[:, :, :5].unique()) for keys in cache.keys] == [1.0, 2.0]
    assert [float(values[:, :, :5].unique()) for values in cache.values] == [-1.0, -2.0]


def test_prompt_that_is_masked_altogether():
    """No row to commit: the first draft sees the block alone."""
    target = tiny_target("llama")
    ids = torch.zeros(1, 3, dtype=torch.long)  # the padding token, from which `generate` infers the mask
    drafter = tiny_drafter(target, block_size=B)
    rounds = record(drafter)
    want = plain(target, ids, max_new_tokens=12)
    assert assisted(target, ids, drafter, max_new_tokens=12).tolist() == want.tolist()
    assert rounds.states[0][:3] == (0, 0, 0)
