"""The block loss against float64 formulas and finite differences, and the acceptance counts by hand."""

import math

import pytest
import torch

from hf_carryover.training.anchors import accepted_prefix
from hf_carryover.training.losses import acceptance_counts, acceptance_metrics, block_loss


def case(vocabulary=6, missing=0.0, seed=0):
    """Logits, labels, weights and target probabilities whose sum is `1 - missing`."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((3, 2, vocabulary), generator=generator, dtype=torch.float64) * 2
    labels = torch.randint(0, vocabulary, (3, 2), generator=generator)
    weights = torch.tensor([[1.0, 0.5], [1.0, 0.0], [0.25, 0.125]], dtype=torch.float64)
    probs = torch.randn((3, 2, vocabulary), generator=generator, dtype=torch.float64).softmax(-1) * (1 - missing)
    return logits, labels, weights, probs


def by_hand(logits, labels, weights, probs, alpha_ce, alpha_tv, row, k):
    z = [math.exp(v) for v in logits[row, k].tolist()]
    q = [v / sum(z) for v in z]
    p = probs[row, k].tolist()
    tv = 0.5 * (sum(abs(a - b) for a, b in zip(p, q, strict=True)) + max(1 - sum(p), 0.0))
    return float(weights[row, k]) * (alpha_ce * -math.log(q[int(labels[row, k])]) + alpha_tv * tv)


@pytest.mark.parametrize("alpha_ce, alpha_tv, missing", [(1.0, 0.0, 0.0), (0.1, 0.9, 0.0), (0.0, 1.0, 0.3)])
def test_block_loss_by_hand(alpha_ce, alpha_tv, missing):
    """Float32 arithmetic inside: 1e-5."""
    logits, labels, weights, probs = case(missing=missing)
    losses = block_loss(logits, labels, weights, probs, alpha_ce, alpha_tv)
    for row in range(3):
        for k in range(2):
            wanted = by_hand(logits, labels, weights, probs, alpha_ce, alpha_tv, row, k)
            assert float(losses[row, k]) == pytest.approx(wanted, abs=1e-5)
    assert losses[1, 1] == 0


def test_total_variation_is_that_of_whole_distributions():
    """The same distance whether the drafter has the tokens with chance 0 or lacks them."""
    probs = torch.tensor([[[0.5, 0.2, 0.3]]])
    logits = torch.tensor([[[1.0, 0.0, -1e9]]])
    label, weight = torch.zeros((1, 1), dtype=torch.long), torch.ones((1, 1))
    whole = block_loss(logits, label, weight, probs, 0.0, 1.0)
    reduced = block_loss(logits[..., :2], label, weight, probs[..., :2], 0.0, 1.0)
    assert torch.allclose(whole, reduced)
    assert 0.3 < float(whole) < 1.0
    same = block_loss(probs.log(), label, weight, probs, 0.0, 1.0)
    assert float(same) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("alpha_ce, alpha_tv", [(1.0, 0.0), (0.1, 0.9)])
def test_gradient_by_finite_differences(alpha_ce, alpha_tv):
    """Central differences of step 1e-2 in float32: 2e-3."""
    logits, labels, weights, probs = case()
    logits = logits.float().requires_grad_(True)
    block_loss(logits, labels, weights, probs, alpha_ce, alpha_tv).sum().backward()
    step = 1e-2
    for index in [(0, 0, 1), (0, 1, 3), (2, 0, 0), (1, 1, 2), (2, 1, 5)]:
        values = []
        for sign in (1, -1):
            moved = logits.detach().clone()
            moved[index] += sign * step
            values.append(float(block_loss(moved, labels, weights, probs, alpha_ce, alpha_tv).sum()))
        assert float(logits.grad[index]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=2e-3)
    assert not logits.grad[1, 1].any()


def test_ignored_rows_may_be_infinite():
    logits, labels, weights, _ = case()
    logits[1, 1] = float("inf")
    losses = block_loss(logits, labels, weights)
    assert bool(torch.isfinite(losses).all()) and losses[1, 1] == 0


def test_acceptance_metrics_of_known_runs():
    """R34: leading correct runs 3, 1, 2, 0 of K = 3 make a mean of 1.5 and τ = 2.5; α is conditional."""
    counts = acceptance_counts(torch.tensor([3, 1, 2, 0]), torch.tensor([9, 9, 9, 9]), 3)
    metrics = acceptance_metrics(counts.sum(dim=0).tolist())
    assert metrics == {
        "tau": 2.5,
        "blocks": 4,
        "acceptance_1": pytest.approx(3 / 4),
        "acceptance_2": pytest.approx(2 / 3),
        "acceptance_3": pytest.approx(1 / 2),
    }


def test_cut_blocks_count_what_they_commit():
    """R34: the response ends inside the block: no token of the target's own follows, and no slot there is judged."""
    counts = acceptance_counts(torch.tensor([2, 1]), torch.tensor([2, 2]), 3)
    assert counts.tolist() == [[1, 2, 1, 1, 0, 1, 1, 0], [1, 2, 1, 0, 0, 1, 1, 0]]
    metrics = acceptance_metrics(counts.sum(dim=0).tolist())
    assert metrics["tau"] == 2.0 and math.isnan(metrics["acceptance_3"])


def test_masked_slot_ends_a_run():
    """R34: agreement behind a slot without a label is no acceptance."""
    same = torch.tensor([[4, 5, 6]])
    accepted = accepted_prefix(same, same, torch.tensor([[True, False, True]]))
    assert acceptance_counts(accepted, torch.tensor([1]), 3).tolist() == [[1, 1, 1, 0, 0, 1, 0, 0]]


def test_no_block_is_not_a_number():
    metrics = acceptance_metrics([0.0] * 4)
    assert math.isnan(metrics["tau"]) and math.isnan(metrics["acceptance_1"]) and metrics["blocks"] == 0
