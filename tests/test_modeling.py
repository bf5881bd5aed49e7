# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The drafter as a model: what a block sees, which weights a file holds, and that loading gives the same drafter."""

import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, tiny_drafter, tiny_llama
from drafter_helpers import FULL, KEPT_IDS, block_inputs, run
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_carryover import CarryoverDrafter
from hf_carryover.modeling_carryover import CarryoverCache, CarryoverConfig, CarryoverRotaryEmbedding


PLAIN = {"carry": False, "mask_token_id": 1}
LAYER_KEYS = {
    *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
}
BACKBONE_KEYS = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{i}.{key}" for i in range(2) for key in LAYER_KEYS
}
OWN_KEYS = {
    "full": BACKBONE_KEYS
    | {"embed_proj.weight", "head_proj.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    | {"carry_embedding", "mask_embedding", "d2t", "t2d"},
    "plain": BACKBONE_KEYS,
}
VARIANTS = {"full": FULL, "plain": PLAIN}


@pytest.fixture(params=["full", "plain"])
def variant(request):
    return request.param


@pytest.fixture
def drafter(target, variant):
    return tiny_drafter(target, **VARIANTS[variant])


def stored(folder):
    """Every tensor of the safetensors files in a folder."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert not set(tensors) & set(file.keys())
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (no mapping)
    return tensors


def assert_same_weights(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert list(first) == list(second)
    for name in first:
        assert first[name].dtype == second[name].dtype, name
        assert torch.equal(first[name], second[name]), name


# Saving and loading


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact(drafter, variant, dtype, tmp_path):
    drafter = drafter.to(dtype)
    drafter.rotary_emb = CarryoverRotaryEmbedding(drafter.config)  # float32 again, as it is after loading
    drafter.save_pretrained(tmp_path)
    assert set(stored(tmp_path)) == OWN_KEYS[variant]
    for loaded in (
        CarryoverDrafter.from_pretrained(tmp_path),
        CarryoverDrafter.from_pretrained(tmp_path, dtype=dtype, device_map="cpu"),
        CarryoverDrafter.from_pretrained(tmp_path, dtype="auto"),
    ):
        assert (loaded.dtype, loaded.device, loaded.training) == (dtype, torch.device("cpu"), False)
        assert_same_weights(drafter, loaded)
        expected, found = run(drafter), run(loaded)
        assert torch.equal(expected.logits, found.logits) and torch.equal(expected.hidden_states, found.hidden_states)
        assert expected.hidden_states.abs().max() > 0.1


def test_a_file_of_one_dtype_loads_as_another(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    half = CarryoverDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.rotary_emb.inv_freq.dtype == torch.float32
    half.save_pretrained(tmp_path / "half")
    wide = CarryoverDrafter.from_pretrained(tmp_path / "half", dtype=torch.float32)
    for (name, ours), theirs in zip(wide.named_parameters(), drafter.parameters()):
        assert torch.equal(ours, theirs.bfloat16().float()), name
    if half.d2t is not None:
        assert (half.d2t.dtype, half.t2d.dtype) == (torch.int64, torch.bool)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_draft_vocabulary_is_stored_as_offsets(target, tmp_path, dtype):
    """Case R18: offsets, not ids; integers whatever the weights are; target ids and offsets are told apart."""
    drafter = tiny_drafter(target, **FULL)
    assert drafter.config.draft_vocab_size == 4
    drafter.to(dtype).save_pretrained(tmp_path)
    tensors = stored(tmp_path)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert tensors["d2t"].tolist() == [5, 8, 38, 60]
    assert tensors["t2d"].nonzero().flatten().tolist() == KEPT_IDS
    loaded = CarryoverDrafter.from_pretrained(tmp_path, dtype=torch.float16)
    assert loaded.draft_token_ids().tolist() == KEPT_IDS
    assert loaded.draft_token_ids()[2] == 40


def test_the_draft_vocabulary_starts_as_the_first_ids():
    shapes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    drafter = CarryoverDrafter(CarryoverConfig(vocab_size=VOCAB, draft_vocab_size=4, **shapes))
    assert drafter.d2t.tolist() == [0, 0, 0, 0]
    assert drafter.draft_token_ids().tolist() == drafter.t2d.nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert CarryoverDrafter(CarryoverConfig(vocab_size=VOCAB, **shapes)).draft_token_ids() is None


def test_casting_leaves_the_rope_frequencies_exact(target):
    """Rounded to bfloat16 they turn position 1000 by up to 4 radians too far."""
    drafter = tiny_drafter(target)
    exact = drafter.rotary_emb.inv_freq.clone()
    for cast in (drafter.bfloat16(), drafter.half(), drafter.to("cpu", torch.bfloat16)):
        assert cast.fc.weight.dtype in (torch.bfloat16, torch.float16)
        assert torch.equal(cast.rotary_emb.inv_freq, exact)


@pytest.mark.compat
def test_sharded_files_load_alike(drafter, variant, tmp_path):
    """Case R36, sharded."""
    drafter.save_pretrained(tmp_path, max_shard_size="10KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == OWN_KEYS[variant]
    assert len(set(index["weight_map"].values())) > 1
    loaded = CarryoverDrafter.from_pretrained(tmp_path)
    assert_same_weights(drafter, loaded)
    assert torch.equal(run(drafter).logits, run(loaded).logits)


def test_the_folder_holds_safetensors_and_no_target_weight(drafter, variant, prompt, tmp_path):
    """Case R36: after use with a target, tied or not, only the drafter's own tensors are written."""
    for tied in (False, True):
        target = tiny_llama(tie_word_embeddings=tied)
        target.requires_grad_(False)
        target.lm_head.weight.requires_grad_(True)
        before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
        wanted = [parameter.requires_grad for parameter in target.parameters()]
        expected = target.generate(prompt, assistant_model=drafter, max_new_tokens=8, do_sample=False)
        proposals = drafter.last_report.accepted

        folder = tmp_path / str(tied)
        drafter.save_pretrained(folder)
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["config.json", "configuration_carryover.py", "model.safetensors", "modeling_carryover.py"]
        tensors = stored(folder)
        assert set(tensors) == OWN_KEYS[variant]
        own = sum(p.numel() for p in drafter.parameters()) + sum(t.numel() for n, t in tensors.items() if "2" in n[:3])
        assert sum(tensor.numel() for tensor in tensors.values()) == own

        loaded = CarryoverDrafter.from_pretrained(folder)
        again = target.generate(prompt, assistant_model=loaded, max_new_tokens=8, do_sample=False)
        assert torch.equal(expected, again) and loaded.last_report.accepted == proposals
        assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
        assert [parameter.requires_grad for parameter in target.parameters()] == wanted


# Carry on and off


@pytest.mark.compat
def test_a_baseline_loads_with_a_zero_carry_embedding(target, tmp_path):
    baseline = tiny_drafter(target, carry=False, markov_rank=4)
    baseline.save_pretrained(tmp_path)
    loaded = CarryoverDrafter.from_pretrained(tmp_path, carry=True)
    assert loaded.config.carry is True
    assert loaded.carry_embedding.shape == (32,) and not loaded.carry_embedding.any()
    assert loaded.carry_embedding.requires_grad
    ours, theirs = loaded.state_dict(), baseline.state_dict()
    assert torch.equal(ours.pop("carry_embedding"), torch.zeros(32))
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    # Without carried rows both are the same drafter.
    inputs = block_inputs(baseline, carried=0)
    assert torch.equal(run(loaded, inputs).logits, run(baseline, inputs).logits)
    loaded.save_pretrained(tmp_path / "carry")
    assert "carry_embedding" in stored(tmp_path / "carry")


@pytest.mark.compat
def test_a_carryover_drafter_loads_as_a_baseline(target, tmp_path):
    carryover = tiny_drafter(target)
    carryover.save_pretrained(tmp_path)
    loaded = CarryoverDrafter.from_pretrained(tmp_path, carry=False)
    assert loaded.config.carry is False and loaded.carry_embedding is None
    inputs = block_inputs(carryover, carried=0)
    assert torch.equal(run(loaded, inputs).logits, run(carryover, inputs).logits)
    loaded.save_pretrained(tmp_path / "baseline")
    assert set(stored(tmp_path)) - set(stored(tmp_path / "baseline")) == {"carry_embedding"}


# Checkpoints that do not fit: case R17


def without(folder, *names, **more):
    """Rewrites the weights of a folder without some tensors, or with additional ones."""
    from safetensors.torch import save_file

    tensors = {name: tensor for name, tensor in stored(folder).items() if name not in names}
    save_file({**tensors, **more}, Path(folder) / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.1.mlp.up_proj.weight", "mask_embedding", "markov_head.markov_w2.weight", "d2t"]
)
def test_a_missing_tensor_is_an_error(target, tmp_path, name):
    tiny_drafter(target, **FULL).save_pretrained(tmp_path)
    without(tmp_path, name)
    with pytest.raises(ValueError, match=rf"1 of the drafter's tensors are not in it: {name}\."):
        CarryoverDrafter.from_pretrained(tmp_path)


def test_a_missing_carry_embedding_is_an_error_unless_the_checkpoint_never_had_one(target, tmp_path):
    tiny_drafter(target).save_pretrained(tmp_path)
    without(tmp_path, "carry_embedding")
    with pytest.raises(ValueError, match="carry_embedding"):
        CarryoverDrafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="carry_embedding"):
        CarryoverDrafter.from_pretrained(tmp_path, carry=True)


def test_an_unknown_tensor_is_an_error(target, tmp_path):
    tiny_drafter(target, **FULL).save_pretrained(tmp_path)
    without(tmp_path, **{"lm_head.weight": torch.ones(VOCAB, 32)})
    with pytest.raises(ValueError, match=r"1 tensors in it are ones the drafter does not know: lm_head\.weight"):
        CarryoverDrafter.from_pretrained(tmp_path)


def test_another_model_is_an_error(tmp_path):
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Not a drafter that can be read: .*'qwen3'. Expected a Carryover"):
        CarryoverDrafter.from_pretrained(tmp_path)
    # Renamed, it still lacks what a drafter has.
    values = json.loads((tmp_path / "config.json").read_text())
    values.update(model_type="carryover", target_layer_ids=[1])
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"(?s)carry_embedding, fc\.weight, hidden_norm\.weight.*embed_tokens"):
        CarryoverDrafter.from_pretrained(tmp_path)


def test_another_shape_is_an_error(target, tmp_path):
    tiny_drafter(target).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"another shape than its config says: layers\.0\.mlp\.down_proj\.weight is \("
    ):
        CarryoverDrafter.from_pretrained(tmp_path, intermediate_size=8)
    CarryoverDrafter.from_pretrained(tmp_path, intermediate_size=8, ignore_mismatched_sizes=True)


# Attention backends and checkpointing


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_attention_backends_agree(target, implementation, layer_type, tmp_path):
    sliding = {"layer_types": [layer_type, "full_attention"], "sliding_window": 4}
    drafter = tiny_drafter(target, **FULL, **sliding)
    drafter.save_pretrained(tmp_path)
    loaded = CarryoverDrafter.from_pretrained(tmp_path, attn_implementation=implementation)
    reference = CarryoverDrafter.from_pretrained(tmp_path, attn_implementation="eager").double()
    assert loaded.config._attn_implementation == implementation
    inputs = block_inputs(drafter)
    # flex attention is compiled where it is used. On a CPU the C++ kernel of torch 2.13 rejects any additive mask, so
    # its uncompiled form stands in: the same masks through the same interface.
    with torch.compiler.set_stance("force_eager"):
        found = run(loaded, inputs)
    exact = run(reference, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})
    assert exact.logits.abs().max() > 1
    # float32 against float64; both backends stay within a few units of the last place.
    torch.testing.assert_close(found.logits.double(), exact.logits, atol=2e-5, rtol=2e-5)


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_changes_nothing(drafter):
    def gradients():
        drafter.zero_grad()
        output = drafter(**block_inputs(drafter))
        output.logits.square().mean().backward()
        return output.logits.detach(), {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}

    drafter.train()
    plain, plain_gradients = gradients()
    calls = []
    drafter.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    handle = drafter.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed, checkpointed_gradients = gradients()
    handle.remove()
    assert len(calls) == 2  # once forward, once more for the backward pass
    assert torch.equal(plain, checkpointed)
    assert plain_gradients.keys() == checkpointed_gradients.keys() and len(plain_gradients) >= len(BACKBONE_KEYS)
    for name, gradient in plain_gradients.items():
        assert torch.equal(gradient, checkpointed_gradients[name]), name


# What a block sees


def visible(output_row, features):
    """Positions that one output row depends on, exactly: a masked key has weight 0.0 and so gradient 0.0."""
    (gradient,) = torch.autograd.grad(output_row.sum(), features, retain_graph=True)
    return gradient[0].abs().sum(-1).nonzero().flatten().tolist()


def only_layer(drafter, kept):
    """Layers other than `kept` add nothing."""
    with torch.no_grad():
        for index, layer in enumerate(drafter.layers):
            if index != kept:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    return drafter


def window_inputs(drafter, anchor, length, carried):
    generator, config = torch.Generator().manual_seed(1), drafter.config
    return {
        "anchor_embeds": torch.randn(1, config.target_hidden_size, generator=generator),
        "anchor_positions": torch.tensor([anchor]),
        "features": torch.randn(1, length, config.feature_size, generator=generator).requires_grad_(),
        "sequence_index": torch.tensor([0]),
        "carried_features": torch.randn(1, len(carried), config.feature_size, generator=generator).requires_grad_(),
        "carried_positions": torch.tensor([carried]),
        "carried_mask": torch.ones(1, len(carried), dtype=torch.bool),
    }


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.mark.compat
@pytest.mark.parametrize(("layer", "window"), [(0, 8), (1, None)], ids=["sliding", "full"])
def test_a_window_reaches_exactly_so_far(target, layer, window):
    """Case R24: committed and carried rows obey the distance rule, each by its own position."""
    drafter = only_layer(tiny_drafter(target, **SLIDING, block_size=12), layer)
    anchor, carried = 30, list(range(30, 36))
    inputs = window_inputs(drafter, anchor, 40, carried)
    hidden = drafter(**inputs).hidden_states
    assert hidden.shape == (1, 12, 32)
    for row in range(12):
        position = anchor + 1 + row
        first = 0 if window is None else position - window + 1
        # Nothing recorded at or behind the anchor is ever seen.
        assert visible(hidden[0, row], inputs["features"]) == list(range(first, anchor)), row
        near = [index for index, place in enumerate(carried) if place >= first]
        assert visible(hidden[0, row], inputs["carried_features"]) == near, row


class NoMemory:
    """A block on its own; unlike the in-place storage of a generation it lets gradients through."""

    def keys_and_values(self, attention, hidden_states, rope):
        return attention.project_kv(hidden_states, rope)


def test_a_window_keeps_the_block_two_way(target):
    """Case R24: inside the block a mask row sees its successors, and the anchor as long as it is near."""
    drafter = only_layer(tiny_drafter(target, **SLIDING, block_size=12), 0)
    states = torch.randn(1, 13, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    positions = torch.arange(30, 43).unsqueeze(0)
    masks = drafter.additive_masks(None, positions, positions, torch.float32)
    hidden = drafter.run_layers(states, drafter.rotary_emb(states, positions), NoMemory(), masks)
    for row in range(1, 13):
        assert visible(hidden[0, row - 1], states) == list(range(max(row - 7, 0), 13)), row


@pytest.mark.compat
def test_within_the_window_sliding_equals_full(target):
    """Case R24: a context as short as the window."""
    sliding = tiny_drafter(target, **SLIDING, block_size=4)
    full = tiny_drafter(target, block_size=4)
    inputs = window_inputs(sliding, 3, 6, [3, 4])
    assert torch.equal(run(sliding, inputs).hidden_states, run(full, inputs).hidden_states)
    further = window_inputs(sliding, 5, 6, [5, 6])
    assert not torch.equal(run(sliding, further).hidden_states, run(full, further).hidden_states)


@pytest.mark.compat
@pytest.mark.parametrize("layers", [SLIDING, {}], ids=["sliding", "full"])
@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_generation_and_training_see_the_same(target, layers, accepted):
    """Case R24: stored window by window, or all at once: the same drafts, carried rows included."""
    drafter = tiny_drafter(target, **layers)
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(1, 25, drafter.config.feature_size, generator=generator)
    anchor_embeds = torch.randn(1, 32, generator=generator)
    cache = CarryoverCache(drafter.config, torch.float32, "cpu", capacity=4)
    drafter.commit_window(cache, features[:, :20], 20)
    drafter.commit_window(cache, features[:, 20:], accepted + 1)
    assert (cache.committed, cache.carried) == (21 + accepted, 4 - accepted)
    found = drafter.draft(cache, anchor_embeds, None)

    committed = 21 + accepted
    carried = torch.arange(committed, 25)
    inputs = {
        "anchor_embeds": anchor_embeds,
        "anchor_positions": torch.tensor([committed]),
        "features": features[:, :committed],
        "sequence_index": torch.tensor([0]),
    }
    if len(carried):
        inputs["carried_features"] = features[:, committed:]
        inputs["carried_positions"] = carried.unsqueeze(0)
        inputs["carried_mask"] = torch.ones(1, len(carried), dtype=torch.bool)
    torch.testing.assert_close(found, run(drafter, inputs).hidden_states, atol=1e-5, rtol=1e-5)


# Mistakes


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 3], r"Expected token ids of shape \(4,\) \(`draft_vocab_size`\), got \(3,\)"),
        ([[1, 2, 3, 4]], r"Expected token ids of shape \(4,\) .*, got \(1, 4\)"),
        ([1, 2, 4, 3], r"must increase within 0 \.\.\. 63, got \[1, 2, 4, 3\]"),
        ([1, 2, 2, 3], r"must increase within 0 \.\.\. 63, got \[1, 2, 2, 3\]"),
        ([-1, 2, 3, 4], r"must increase within 0 \.\.\. 63, got \[-1, 2, 3, 4\]"),
        ([1, 2, 3, 64], r"must increase within 0 \.\.\. 63, got \[1, 2, 3, 64\]"),
    ],
)
def test_draft_vocabulary_mistakes(target, ids, message):
    drafter = tiny_drafter(target, **FULL)
    with pytest.raises(ValueError, match=message):
        drafter.set_draft_vocabulary(ids)
    assert drafter.draft_token_ids().tolist() == KEPT_IDS


def test_draft_vocabulary_of_a_full_drafter(target):
    with pytest.raises(ValueError, match=r"\(`draft_vocab_size`\), got \(2,\)"):
        tiny_drafter(target).set_draft_vocabulary([1, 2])


def test_blocks_need_the_mask_tokens_embedding(target):
    drafter = tiny_drafter(target, mask_token_id=7)
    assert drafter.mask_embedding is None
    with pytest.raises(ValueError, match="`mask_embeds` is required: the config names mask token 7"):
        drafter.block_states(torch.zeros(2, 32), None)
    block = drafter.block_states(torch.zeros(2, 32), torch.ones(32))
    assert block.tolist() == [[[0.0] * 32, *[[1.0] * 32] * 4]] * 2


def test_a_learned_mask_wins_over_the_target_row(target, tmp_path):
    """Case R21: the stored mask embedding is the one used, also when the target's row changes."""
    drafter = tiny_drafter(target)
    drafter.save_pretrained(tmp_path)
    loaded = CarryoverDrafter.from_pretrained(tmp_path)
    block = loaded.block_states(torch.zeros(1, 32), torch.ones(32))
    assert torch.equal(block[0, 1:], drafter.mask_embedding.detach().expand(4, 32))


@pytest.mark.parametrize("inputs", [{}, {"input_ids": torch.tensor([[1, 2]])}])
def test_token_ids_are_refused(target, inputs):
    with pytest.raises(ValueError, match=r"drafts from target features, not from token ids.*assistant_model=drafter"):
        tiny_drafter(target)(**inputs)
