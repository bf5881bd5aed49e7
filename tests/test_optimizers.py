# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Muon for the layers' matrices, AdamW for the rest, and soft labels."""

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from training_helpers import make_trainer, random_rows, weights_of

from hf_carryover.training.losses import block_loss
from hf_carryover.training.optimizers import MuonAdamW


ROWS = random_rows([14, 20, 9, 17])


def trainer(folder, **kwargs):
    target = tiny_llama()
    values = {"muon": True, "max_steps": 4, "stage": "baseline", "per_device_train_batch_size": 2, **kwargs}
    return make_trainer(target, tiny_drafter(target, carry=False, markov_rank=4), folder, ROWS, **values)


def test_every_parameter_has_one_group_and_the_scaled_rate_stays(tmp_path):
    run = trainer(tmp_path, fc_learning_rate_scale=0.1, learning_rate=1e-2)
    optimizer = run.create_optimizer()
    assert isinstance(optimizer, MuonAdamW)
    names = {parameter: name for name, parameter in run.drafter.named_parameters()}
    muon = {names[p] for group in optimizer.parts[0].param_groups for p in group["params"]}
    rest = [names[p] for group in optimizer.parts[1].param_groups for p in group["params"]]
    assert muon == {n for n in names.values() if n.startswith("layers.") and n.endswith("proj.weight")}
    assert sorted([*muon, *rest]) == sorted(names.values())
    rates = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates.pop("fc.weight") == pytest.approx(1e-3) and set(rates.values()) == {1e-2}


def test_it_trains_and_a_resumed_run_ends_with_the_same_weights(tmp_path):
    whole = trainer(tmp_path / "a")
    before = weights_of(whole.drafter)
    whole.train()
    after = weights_of(whole.drafter)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    first = trainer(tmp_path / "b", save_strategy="steps", save_steps=2)
    first.train()
    resumed = trainer(tmp_path / "b", save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    for name, value in weights_of(resumed.drafter).items():
        assert torch.equal(value, after[name]), name


def test_soft_labels_are_the_cross_entropy_to_p():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 5, generator=generator, requires_grad=True)
    p = torch.randn(3, 2, 5, generator=generator).softmax(-1)
    labels, weights = torch.zeros(3, 2, dtype=torch.long), torch.tensor([[1.0, 0.5]] * 3)
    found = block_loss(logits, labels, weights, p, alpha_ce=0.0, alpha_kl=2.0)
    expected = -2 * (p * logits.log_softmax(-1)).sum(-1) * weights
    assert torch.allclose(found, expected, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert torch.allclose(gradient, 2 * weights.unsqueeze(-1) * (logits.softmax(-1) - p), atol=1e-6)


def test_soft_labels_reach_the_trainer(tmp_path):
    losses = {}
    for name, alphas in {"hard": {}, "soft": {"alpha_ce": 0.0, "alpha_kl": 1.0}}.items():
        run = trainer(tmp_path / name, muon=False, max_steps=1, **alphas)
        run.train()
        losses[name] = run.state.log_history[0]["loss"]
    assert losses["soft"] > 0 and losses["soft"] != losses["hard"]
