"""What training starts from: weights of a new drafter, and the learning rate of the layer that reads raw states."""

import pytest
import torch
from tiny_targets import tiny_drafter
from training_helpers import make_arguments, make_trainer, random_rows, weights_of

from hf_carryover import CarryoverConfig, CarryoverDrafter, drafter_from_target


def test_layers_and_norms_are_the_targets(target):
    drafter = drafter_from_target(target, num_hidden_layers=2, markov_rank=4, block_size=3)
    layers = target.model.layers
    # Two of four target layers, from the middle to the last.
    for ours, theirs in zip(drafter.layers, (layers[2], layers[3])):
        assert torch.equal(ours.mlp.gate_proj.weight, theirs.mlp.gate_proj.weight)
        assert torch.equal(ours.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
        assert torch.equal(ours.input_layernorm.weight, theirs.input_layernorm.weight)
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    mean = target.get_input_embeddings().weight.mean(dim=0)
    torch.testing.assert_close(drafter.mask_embedding.detach(), mean.detach())


def test_fusion_starts_as_the_tap_below_the_copied_layers(target):
    """The middle copied layer is 3, which reads the output of layer 2; of the taps 0, 1, 3 the nearest comes first."""
    with torch.no_grad():
        for i, layer in enumerate(target.model.layers):
            layer.input_layernorm.weight.fill_(1.0 + i)
    drafter = drafter_from_target(target, num_hidden_layers=2, target_layer_ids=[0, 1, 3])
    width = target.config.hidden_size
    expected = torch.zeros(width, 3 * width)
    expected[:, width : 2 * width] = torch.eye(width)
    assert torch.equal(drafter.fc.weight, expected)
    assert torch.equal(drafter.hidden_norm.weight, torch.full((width,), 3.5))
    with torch.no_grad():
        for layer in target.model.layers:
            layer.input_layernorm.weight.fill_(1.0)


def test_another_width_keeps_its_random_start(target):
    drafter = drafter_from_target(target, num_hidden_layers=1, hidden_size=48)
    assert drafter.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(drafter.hidden_norm.weight, torch.ones(48))


@pytest.mark.compat
def test_a_fresh_markov_head_changes_nothing():
    """transformers skips outside modules without parameters of their own, so the initialisation names the leaves."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    drafter = CarryoverDrafter(
        CarryoverConfig(**sizes, intermediate_size=16, num_hidden_layers=1, num_target_layers=4, markov_rank=8)
    )
    assert drafter.markov_head.markov_w1.weight.std().item() == pytest.approx(1.0, abs=0.05)
    assert not drafter.markov_head.markov_w2.weight.any()
    assert not drafter.carry_embedding.any()
    assert drafter.mask_embedding.std().item() == pytest.approx(0.02, rel=0.5)


def moved_by_one_step(target, drafter, folder, names, **kwargs):
    """How far one Adam step from zero moments at 0.01 moves the weights `names`: each by its learning rate."""
    values = {"learning_rate": 0.01, "warmup_steps": 0, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    trainer = make_trainer(target, drafter, folder, random_rows([20, 24]), max_steps=1, **values, **kwargs)
    before = weights_of(drafter)
    trainer.train()
    after = weights_of(drafter)
    return {name: (after[name] - before[name]).abs().max().item() for name in names}


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_learning_rate_of_fc(target, tmp_path, scale):
    drafter = tiny_drafter(target, block_size=3, carry=False)
    expected = {"fc.weight": 0.01 * scale, "norm.weight": 0.01}
    moved = moved_by_one_step(target, drafter, tmp_path, expected, fc_learning_rate_scale=scale)
    assert moved == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize(("scale", "rest"), [(1.0, 1.0), (30.0, 0.25)])
def test_learning_rate_of_what_carried_rows_use(target, tmp_path, scale, rest, muon):
    """`e` and the map of carried tokens alone are scaled, whatever else is, and also beside Muon."""
    drafter = tiny_drafter(target, block_size=3, carry_from="states_and_predictions")
    # A step of the map moves what it makes of a mean embedding as far as a step of `e` moves `e`.
    reach = float(target.get_input_embeddings().weight.detach().abs().sum(dim=-1).mean())
    mapped = 1.0 if scale == 1.0 else scale / reach
    expected = {"carry_embedding": scale, "carry_proj.weight": mapped, "fc.weight": rest, "norm.weight": 1.0}
    moved = moved_by_one_step(
        target, drafter, tmp_path, expected,
        carry_learning_rate_scale=scale, fc_learning_rate_scale=rest, muon=muon,
    )  # fmt: skip
    assert moved == pytest.approx({name: 0.01 * factor for name, factor in expected.items()}, rel=1e-3)


@pytest.mark.parametrize("muon", [False, True])
def test_learning_rate_of_what_looking_up_adds(target, tmp_path, muon):
    drafter = tiny_drafter(target, block_size=3, carry=False, lookup_ngram_size=2)
    parts = ("lookup_scale", "lookup_embedding", "lookup_gate")
    expected = {**dict.fromkeys(parts, 0.05), "norm.weight": 0.01}
    moved = moved_by_one_step(target, drafter, tmp_path, expected, pointer_learning_rate_scale=5.0, muon=muon)
    assert moved == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "name", ["fc_learning_rate_scale", "carry_learning_rate_scale", "pointer_learning_rate_scale"]
)
@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scale_must_be_positive(tmp_path, scale, name):
    with pytest.raises(ValueError, match=f"`{name}` must be positive, got {scale}"):
        make_arguments(tmp_path, **{name: scale})
