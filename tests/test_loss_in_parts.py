"""The head and the loss in parts of the rows: the same losses and gradients, and never more logits than allowed."""

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from training_helpers import make_batch, make_trainer, random_rows

from hf_carryover import CarryoverTrainingArguments
from hf_carryover.modeling_carryover import CarryoverDrafter


def losses_and_gradients(folder, max_logits, monkeypatch=None, **options):
    target = tiny_llama()
    drafter = tiny_drafter(target, markov_rank=4, **options.pop("drafter", {}))
    trainer = make_trainer(target, drafter, folder, random_rows([22, 30, 26]), max_logits=max_logits, **options)
    batch = make_batch(trainer)
    sizes = []
    if monkeypatch is not None:
        original = CarryoverDrafter.logits

        def logits(self, *args):
            result = original(self, *args)
            sizes.append(result.numel())
            return result

        monkeypatch.setattr(CarryoverDrafter, "logits", logits)
    drafter.train()
    losses, _ = trainer.block_losses(drafter, batch)
    losses.sum().backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return losses.detach(), gradients, sizes


OPTIONS = {
    "baseline": {"stage": "baseline", "drafter": {"carry": False}},
    "carryover": {"stage": "carryover"},
    "soft": {"stage": "baseline", "drafter": {"carry": False}, "alpha_tv": 0.5, "alpha_kl": 0.3},
    "reduced": {"stage": "carryover", "alpha_kl": 0.3, "drafter": {"draft_token_ids": torch.arange(0, 64, 2)}},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [1, 3, 7, 10_000])
def test_same_losses_and_gradients(name, rows, tmp_path, monkeypatch):
    options = OPTIONS[name]
    vocab = 32 if name == "reduced" else 64
    whole = losses_and_gradients(tmp_path, 2**28, **{**options, "drafter": dict(options.get("drafter", {}))})
    parts = losses_and_gradients(
        tmp_path, rows * vocab, monkeypatch, **{**options, "drafter": dict(options.get("drafter", {}))}
    )
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-5, atol=1e-6)
    assert set(parts[1]) == set(whole[1])
    for key, gradient in whole[1].items():
        torch.testing.assert_close(parts[1][key], gradient, rtol=1e-4, atol=1e-5)
    # A block's proposals are drawn together; no other product is larger than allowed.
    assert max(parts[2]) <= max(rows, 4) * vocab
    if rows == 10_000:
        assert len(parts[2]) == (2 if options["stage"] == "carryover" else 1)


def test_the_bound_is_checked():
    with pytest.raises(ValueError, match="`max_logits` must be at least 1, got 0"):
        CarryoverTrainingArguments(output_dir="unused", max_logits=0)
