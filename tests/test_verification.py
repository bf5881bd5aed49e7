"""The frozen target: masks of branches, features, logits, the feature cache, and what it leaves untouched."""

import pytest
import torch
import transformers
from conftest import spread, tiny_drafter, tiny_llama
from tiny_targets import _COMMON, tiny_target
from training_helpers import make_arguments, make_batch, make_trainer, random_rows

from hf_carryover.training.trainer import CarryoverTrainer
from hf_carryover.training.verification import Branches, FrozenTarget, additive_mask, branch_masks


def padded(lengths=(14, 9), seed=0):
    """Right-padded random ids and their attention mask."""
    ids = torch.zeros((len(lengths), max(lengths)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(2, 60, (length,), generator=torch.Generator().manual_seed(seed + row))
        mask[row, :length] = 1
    return ids, mask


def test_branch_masks_element_by_element():
    """The rule, spelled out: recorded keys in front of the branch, own rows up to itself, a window, no padding."""
    owner = torch.tensor([[0, 0, 1, -1]])
    order = torch.tensor([[1, 2, 0, 0]])
    positions = torch.tensor([[4, 5, 3, 0]])
    first = torch.tensor([[4, 4, 3, 0]])
    masks = branch_masks(owner, order, positions, first, recorded_length=6, window=3)
    places = [*range(6), *positions[0].tolist()]
    for row in range(4):
        for key in range(10):
            if owner[0, row] < 0:
                seen = key == 6 + row
            elif key < 6:
                seen = key < first[0, row]
            else:
                same = owner[0, key - 6] == owner[0, row]
                seen = bool(same) and bool(order[0, key - 6] <= order[0, row])
            assert bool(masks["full_attention"][0, row, key]) == bool(seen), (row, key)
            near = places[key] > int(positions[0, row]) - 3
            assert bool(masks["sliding_attention"][0, row, key]) == bool(seen and near), (row, key)
    assert set(branch_masks(owner, order, positions, first, 6, None)) == {"full_attention"}
    assert bool(masks["sliding_attention"].any(dim=-1).all())


def test_additive_mask():
    mask = additive_mask(torch.tensor([[[True, False]]]), torch.bfloat16)
    assert mask.shape == (1, 1, 1, 2) and mask.dtype == torch.bfloat16
    assert mask[0, 0, 0].tolist() == [0.0, torch.finfo(torch.bfloat16).min]


@pytest.mark.compat
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma4", "mixtral", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_verify_equals_plain_passes(name, attention):
    """Every branch row, of branches with several starts and lengths in padded sequences; the cache stays as it was."""
    target = tiny_target(name)
    before = target.config._attn_implementation
    target.set_attn_implementation(attention)
    try:
        frozen = FrozenTarget(target, [0, 2])
        frozen.check_branches()
        ids, mask = padded()
        recorded = frozen.record(ids, mask, keep_cache=True, keep_logits=False)
        keys = recorded.cache.layers[0].keys.clone()
        tokens = torch.randint(2, 60, (4, 3), generator=torch.Generator().manual_seed(9))
        sequence, anchors = torch.tensor([0, 0, 1, 1]), torch.tensor([3, 12, 2, 7])
        accepted = torch.tensor([0, 1, 2, 3])
        for row, (s, a, m) in enumerate(zip(sequence, anchors, accepted, strict=True)):
            available = min(int(m), int(mask[s].sum()) - int(a) - 1)
            accepted[row] = available
            tokens[row, :available] = ids[s, a + 1 : a + 1 + available]
        wanted = torch.arange(1, 4) > accepted.unsqueeze(1)
        features, predictions = frozen.verify(
            recorded, Branches(tokens, sequence, anchors, accepted, wanted), predict=True
        )
        for row in range(4):
            s, a = int(sequence[row]), int(anchors[row])
            text = torch.cat([ids[s, : a + 1], tokens[row]]).unsqueeze(0)
            with torch.no_grad():
                states = target(text, output_hidden_states=True, use_cache=False).hidden_states
            plain = torch.cat([states[1], states[3]], dim=-1)[0, a + 1 :]
            assert torch.allclose(features[row][wanted[row]], plain[wanted[row]], atol=2e-4, rtol=1e-4)
            assert not features[row][~wanted[row]].any()
            with torch.no_grad():
                said = target(text, use_cache=False).logits[0, a + 1 :].argmax(dim=-1)
            assert torch.equal(predictions[row][wanted[row]], said[wanted[row]])
        assert recorded.cache.get_seq_length() == ids.shape[1]
        assert torch.equal(recorded.cache.layers[0].keys, keys)
    finally:
        target.set_attn_implementation(before)


def test_no_wanted_row_runs_nothing(monkeypatch):
    frozen = FrozenTarget(tiny_target("llama"), [0])
    recorded = frozen.record(*padded(), keep_cache=True, keep_logits=False)
    monkeypatch.setattr(frozen, "decoder", None)
    none = Branches(
        torch.zeros((1, 2), dtype=torch.long), torch.tensor([0]), torch.tensor([3]), torch.tensor([2]),
        torch.zeros((1, 2), dtype=torch.bool),
    )  # fmt: skip
    features, predictions = frozen.verify(recorded, none)
    assert features.shape == (1, 2, 32) and predictions is None


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_teacher_logits_and_last_layer(name):
    """R16: logits are the model's own, and the last layer's tap is `hidden_states[L]`, after a norm one can see."""
    target = spread(type(tiny_target(name))(tiny_target(name).config), seed=5)
    torch.nn.init.constant_(target.get_decoder().norm.weight, 3.0)
    ids, mask = padded((10, 10))
    recorded = FrozenTarget(target, [1, 3]).record(ids, mask, keep_cache=False, keep_logits=True)
    with torch.no_grad():
        outputs = target(ids, output_hidden_states=True)
    assert torch.allclose(recorded.logits, outputs.logits, atol=1e-4)
    wanted = torch.cat([outputs.hidden_states[2], outputs.hidden_states[4]], dim=-1)
    assert torch.allclose(recorded.features, wanted, atol=1e-4)


def test_tapped_layers_are_the_decoder_layers():
    """R15: id `k` is the output of decoder layer `k`, compared with a forward hook."""
    target = tiny_target("llama")
    caught = {}
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output, k=k: caught.update({k: output}))
        for k, layer in enumerate(target.model.layers)
    ]
    try:
        recorded = FrozenTarget(target, [0, 2]).record(*padded(), keep_cache=False, keep_logits=False)
    finally:
        for hook in hooks:
            hook.remove()
    tensors = [caught[k][0] if isinstance(caught[k], tuple) else caught[k] for k in (0, 2)]
    assert torch.equal(recorded.features, torch.cat(tensors, dim=-1))


def test_padding_changes_nothing():
    """A sequence's features, and branches on it, are the same alone and beside a longer one."""
    frozen = FrozenTarget(tiny_target("mistral"), [0, 2])
    ids, mask = padded((30, 12))
    both = frozen.record(ids, mask, keep_cache=True, keep_logits=False).features
    alone = frozen.record(ids[1:, :12], mask[1:, :12], keep_cache=True, keep_logits=False).features
    assert torch.allclose(both[1, :12], alone[0], atol=1e-4)
    assert bool(torch.isfinite(both).all())


def test_cached_features_equal_those_on_line(tmp_path, monkeypatch):
    """The second reading does not call the target, and gives the same numbers for any batch and padding."""
    target = tiny_target("llama")
    ids, mask = padded((14, 9))
    plain = FrozenTarget(target, [0, 2]).record(ids, mask, keep_cache=False, keep_logits=False).features
    first = FrozenTarget(target, [0, 2], str(tmp_path))
    written = first.record(ids, mask, keep_cache=False, keep_logits=False).features
    real = mask.bool()
    assert torch.equal(written[real], plain[real]) and not written[~real].any()
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2 and not list(tmp_path.glob("*/*.tmp"))

    second = FrozenTarget(target, [0, 2], str(tmp_path))
    monkeypatch.setattr(second, "decoder", None)
    monkeypatch.setattr(target, "forward", None)
    assert torch.equal(second.record(ids, mask, keep_cache=False, keep_logits=False).features, written)
    shorter = second.record(ids[1:, :9], mask[1:, :9], keep_cache=False, keep_logits=False).features
    assert torch.equal(shorter[0], written[1, :9])


def test_cache_knows_target_layers_and_tokens(tmp_path):
    """Another target of the same name, other layers, another adapter state or text never read the first's features."""
    ids, mask = padded((9,))

    def features(target, layers):
        return FrozenTarget(target, layers, str(tmp_path)).record(ids, mask, False, False).features

    one, other = tiny_llama(), tiny_llama()
    first = features(one, [0, 2])
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    assert not torch.allclose(features(other, [0, 2]), first)
    assert not torch.allclose(features(one, [1, 2]), first)
    lora = tiny_target("lora")
    adapted = features(lora, [0, 2])
    with lora.disable_adapter():
        assert not torch.allclose(features(lora, [0, 2]), adapted)


def unsupported(name):
    """A tiny target whose layers can't verify branches."""
    if name == "lfm2":
        layers = ["conv", "full_attention", "conv", "full_attention"]
        return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**_COMMON, layer_types=layers))
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, state_size=4)
    return transformers.MambaForCausalLM(config)


def test_unsupported_layers_are_refused(tmp_path):
    """Before any pass, with the way out; the baseline stage takes the same target."""
    target = unsupported("lfm2")
    rows = random_rows([12, 9])
    drafter = tiny_drafter(target, carry=True)
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM has \['conv'\] layers. Train with `stage=\"baseline\"`"):
        make_trainer(target, drafter, tmp_path, rows)
    trainer = make_trainer(target, tiny_drafter(target, carry=False), tmp_path, rows, stage="baseline")
    losses, _ = trainer.block_losses(trainer.drafter, make_batch(trainer))
    assert bool(torch.isfinite(losses).all())


def test_recurrent_target_is_refused():
    with pytest.raises(ValueError, match=r"MambaForCausalLM has (\['linear_attention'\] layers|a recurrent state)"):
        FrozenTarget(unsupported("mamba"), [0]).check_branches()


def test_attention_without_masks_is_refused(monkeypatch):
    frozen = FrozenTarget(tiny_target("llama"), [0])
    monkeypatch.setattr(frozen.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match="attention backend 'flash_attention_2' does not take"):
        frozen.check_branches()


@pytest.mark.parametrize("training", [True, False])
def test_target_is_left_as_it_was(training, tmp_path):
    """R36: weights, `requires_grad` and the mode of every module, mixed modes included; dropout is off meanwhile."""
    target = tiny_llama(attention_dropout=0.5)
    target.train(training)
    target.model.layers[1].train(not training)
    target.model.embed_tokens.weight.requires_grad_(False)
    modes = [module.training for module in target.modules()]
    flags = [parameter.requires_grad for parameter in target.parameters()]
    weights = {name: value.clone() for name, value in target.state_dict().items()}
    drafter = tiny_drafter(target, carry=True)
    rows = random_rows([12, 9])
    trainer = make_trainer(target, drafter, tmp_path, rows, max_steps=2)
    batch = make_batch(trainer)
    with torch.no_grad():
        once, again = (trainer.block_losses(drafter, batch)[0] for _ in range(2))
    assert torch.equal(once, again)
    trainer.train()
    assert [module.training for module in target.modules()] == modes
    assert [parameter.requires_grad for parameter in target.parameters()] == flags
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in target.state_dict().items())


def test_mode_returns_after_an_error(monkeypatch):
    target = tiny_llama().train()
    frozen = FrozenTarget(target, [0])
    with pytest.raises(IndexError):
        frozen.record(torch.tensor([[99]]), torch.tensor([[1]]), keep_cache=False, keep_logits=False)
    assert all(module.training for module in target.modules())


def test_cache_without_effect_warns(tmp_path, caplog):
    target = tiny_target("llama")
    args = make_arguments(tmp_path, feature_cache_dir=str(tmp_path / "features"))
    with caplog.at_level("WARNING"):
        CarryoverTrainer(tiny_drafter(target, carry=True), target, args, train_dataset=random_rows([9]))
    assert "`feature_cache_dir` has no effect: carried rows" in caplog.text
