"""Anchors, labels and weights."""

import pytest
import torch

from hf_carryover.training.anchors import (
    accepted_prefix,
    block_labels,
    position_weights,
    response_runs,
    sample_anchors,
    sample_draws,
    to_draft_labels,
)
from hf_carryover.training.arguments import CarryoverTrainingArguments


@pytest.mark.compat
@pytest.mark.parametrize(
    "mask, runs",
    [
        pytest.param([0, 1, 1, 0, 1], [2, 1, 0, 1, 0], id="two-turns"),
        pytest.param([1, 1, 1], [2, 1, 0], id="all-response"),
        pytest.param([0, 0, 0], [0, 0, 0], id="none"),
        pytest.param([1, 0, 0], [0, 0, 0], id="first-token-only"),
        pytest.param([1], [0], id="one-token"),
    ],
)
def test_response_runs(mask, runs):
    assert response_runs(torch.tensor([mask])).tolist() == [runs]


def test_response_runs_by_definition():
    """Against a loop, on random masks of several rows."""
    masks = (torch.rand((20, 15), generator=torch.Generator().manual_seed(0)) < 0.6).long()
    for mask, runs in zip(masks.tolist(), response_runs(masks).tolist(), strict=True):
        for t in range(15):
            length = 0
            while t + 1 + length < 15 and mask[t + 1 + length]:
                length += 1
            assert runs[t] == length


def test_last_prompt_token_is_an_anchor():
    """R29: with a prompt of 20 the anchor 19 is usable, so the first answer token is a label."""
    mask = torch.tensor([[0] * 20 + [1] * 6])
    ids = torch.arange(26).unsqueeze(0)
    sequences, positions = sample_anchors(mask, torch.tensor([0]), 512, seed=0, step=1)
    assert positions.tolist() == [19, 20, 21, 22, 23, 24]
    labels, valid = block_labels(ids, mask, sequences, positions, 3)
    assert labels[0].tolist() == [20, 21, 22] and valid[0].tolist() == [True] * 3


def test_labels_end_with_the_response():
    """Slot `k` is labelled `ids[anchor + k]`, and nothing behind a turn or the end is a label."""
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16]])
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1]])
    sequences, positions = sample_anchors(mask, torch.tensor([0]), 512, seed=0, step=1)
    assert positions.tolist() == [0, 1, 4, 5]
    labels, valid = block_labels(ids, mask, sequences, positions, 3)
    assert labels.tolist() == [[11, 12, 0], [12, 0, 0], [15, 16, 0], [16, 0, 0]]
    assert valid.sum(dim=1).tolist() == [2, 1, 2, 1]


def test_anchors_depend_on_seed_step_and_example_alone():
    mask = torch.ones((3, 40), dtype=torch.long)
    together = sample_anchors(mask, torch.tensor([7, 8, 9]), 5, seed=1, step=2)
    for row, example in enumerate((7, 8, 9)):
        _, alone = sample_anchors(mask[:1], torch.tensor([example]), 5, seed=1, step=2)
        assert together[1][together[0] == row].tolist() == alone.tolist()
        assert len(set(alone.tolist())) == 5 and alone.tolist() == sorted(alone.tolist())
    base = together[1].tolist()
    assert base != sample_anchors(mask, torch.tensor([7, 8, 9]), 5, seed=1, step=3)[1].tolist()
    assert base != sample_anchors(mask, torch.tensor([7, 8, 9]), 5, seed=2, step=2)[1].tolist()


def test_anchors_are_spread_evenly():
    """Every valid position is drawn equally often: 4 of 10, over 2000 steps, within 5 standard deviations."""
    mask = torch.ones((1, 11), dtype=torch.long)
    counts = torch.zeros(11)
    for step in range(2000):
        counts[sample_anchors(mask, torch.tensor([0]), 4, seed=0, step=step)[1]] += 1
    assert counts[10] == 0
    assert bool(((counts[:10] - 800).abs() < 5 * (2000 * 0.4 * 0.6) ** 0.5).all())


def test_no_anchor():
    sequences, positions = sample_anchors(torch.zeros((2, 5)), torch.tensor([0, 1]), 4, seed=0, step=1)
    assert sequences.shape == positions.shape == (0,)
    assert sample_draws(sequences, torch.tensor([0, 1]), 3, seed=0, step=1).shape == (0, 3)


def test_draws_follow_their_example():
    both = sample_draws(torch.tensor([0, 0, 1]), torch.tensor([4, 5]), 3, seed=1, step=2)
    alone = sample_draws(torch.tensor([0]), torch.tensor([5]), 3, seed=1, step=2)
    assert torch.equal(both[2:], alone)
    assert bool(((both >= 0) & (both < 1)).all()) and len(both.unique()) == 9
    assert not torch.equal(alone, sample_draws(torch.tensor([0]), torch.tensor([5]), 3, seed=1, step=3))


@pytest.mark.parametrize("block_size, gamma", [(15, 7.0), (7, 4.0), (11, 5.5), (1, 1.75)])
def test_default_gamma(block_size, gamma, tmp_path):
    assert CarryoverTrainingArguments(output_dir=str(tmp_path)).position_gamma(block_size) == gamma


def test_position_weights():
    assert torch.allclose(position_weights(3, 2.0), torch.tensor([1.0, 0.60653066, 0.36787944]))


def test_draft_labels():
    """R18: labels are mapped by the table, and those it lacks don't count."""
    kept = torch.tensor([5, 9, 40, 63])
    labels, valid = to_draft_labels(
        torch.tensor([[5, 6, 63, 40, 2]]), torch.tensor([[True, True, True, False, True]]), kept
    )
    assert valid.tolist() == [[True, False, True, False, False]]
    assert labels.tolist() == [[0, 0, 3, 0, 0]]


def test_accepted_prefix():
    """Agreement behind the first difference, or behind the end of the recording, is not accepted."""
    labels = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 0]])
    proposals = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 0]])
    valid = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [True, True, False]])
    assert accepted_prefix(proposals, labels, valid).tolist() == [3, 1, 0, 2]
