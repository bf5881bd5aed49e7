# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The configuration: defaults, derived values, every refusal, and a round trip that loses nothing."""

import json
import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from hf_carryover import CarryoverConfig, CarryoverDrafter
from hf_carryover.configuration_carryover import default_target_layer_ids
from hf_carryover.modeling_carryover import CarryoverRotaryEmbedding, apply_rotary


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_target_layers": 4,
    "target_layer_ids": [0, 2],
    "block_size": 4,
}
# Every own key, away from its default.
EVERYTHING = {
    "anchor_first": True,
    "block_attention": "causal",
    "sliding_window_from": "anchor",
    "own_head": True,
    "logit_scale": 0.5,
    "logit_softcapping": 30.0,
    "embedding_scale": 2.0,
    "converted_from": {"format": "z-lab", "config": {"block_size": 3}},
    **TINY,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "initializer_range": 0.01,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "attention_bias": True,
    "attention_dropout": 0.1,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "target_hidden_size": 16,
    "mask_token_id": 3,
    "carry": False,
    "lookup_ngram_size": 3,
    "markov_rank": 4,
    "draft_vocab_size": 32,
    "draft_sampling": "argmax",
    "carry_from": "predictions",
    "carry_pointer": True,
}


# Defaults


def test_defaults():
    config = CarryoverConfig()
    expected = {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "target_hidden_size": 2560,
        "num_target_layers": 36,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "block_size": 15,
        "mask_token_id": None,
        "carry": True,
        "markov_rank": 0,
        "draft_vocab_size": None,
        "draft_sampling": "sample",
        "layer_types": ["full_attention"] * 5,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert (config.feature_size, config.output_vocab_size) == (5 * 2560, 151936)
    assert config.model_type == "carryover"


def test_derived_values():
    config = CarryoverConfig(**{**TINY, "num_key_value_heads": None, "head_dim": None, "target_layer_ids": None})
    assert (config.num_key_value_heads, config.head_dim, config.target_hidden_size) == (4, 8, 32)
    assert config.target_layer_ids == [1]
    config = CarryoverConfig(**TINY, target_hidden_size=24, draft_vocab_size=10)
    assert (config.feature_size, config.output_vocab_size) == (2 * 24, 10)


@pytest.mark.parametrize(
    ("layers", "features", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),  # as the DFlash drafters for Qwen3-4B
        (30, 5, [1, 8, 14, 20, 27]),
        (62, 5, [1, 16, 30, 44, 59]),
        (36, 3, [1, 17, 33]),
        (36, 1, [1]),
        (7, 5, [1, 2, 3, 4]),
        (5, 5, [1, 2]),
        (4, 5, [1]),
        (3, 2, [1]),
        (2, 5, [1]),
        (1, 5, [0]),
    ],
)
def test_default_target_layer_ids(layers, features, expected):
    assert default_target_layer_ids(layers, features) == expected


def test_default_target_layer_ids_always_make_a_valid_config():
    for depth in range(1, 80):
        config = CarryoverConfig(**{**TINY, "num_target_layers": depth, "target_layer_ids": None})
        assert len(config.target_layer_ids) == min(5, max(1, depth - 3)), depth


def test_default_target_layer_ids_refuses():
    with pytest.raises(ValueError, match=r"`num_target_layers` must be at least 1, got 0\."):
        default_target_layer_ids(0)
    with pytest.raises(ValueError, match=r"`num_features` must be at least 1, got 0\."):
        default_target_layer_ids(4, 0)


# Refusals


SIZES = [
    *("block_size", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "target_hidden_size", "num_target_layers"),
    "sliding_window",
]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one(name, value):
    with pytest.raises(ValueError, match=rf"^`{name}` must be at least 1, got {value}\.$"):
        CarryoverConfig(**{**TINY, name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_key_value_heads": 3}, r"`num_attention_heads` \(4\) must be a multiple of `num_key_value_heads` \(3\)"),
        ({"target_layer_ids": []}, r"distinct increasing ids in 0 \.\.\. 3 .*, got \[\]"),
        ({"target_layer_ids": [0, 4]}, r"0 \.\.\. 3 \(`num_target_layers` is 4\), got \[0, 4\]"),
        ({"target_layer_ids": [-1, 2]}, r"got \[-1, 2\]\. Id k is the output of decoder layer k"),
        ({"target_layer_ids": [2, 0]}, r"got \[2, 0\]"),
        ({"target_layer_ids": [2, 2]}, r"got \[2, 2\]"),
        ({"mask_token_id": 64}, r"`mask_token_id` must lie in 0 \.\.\. 63, got 64\. Use an unused token"),
        ({"mask_token_id": -1}, r"`mask_token_id` must lie in 0 \.\.\. 63, got -1\..*`mask_token_id=None`"),
        ({"markov_rank": -1}, r"`markov_rank` must be 0 \(no Markov head\) or positive, got -1"),
        ({"num_target_layers": None, "target_layer_ids": [2, 0]}, r"increasing ids in 0 \.\.\., got \[2, 0\]"),
        ({"logit_scale": 0.0}, r"`logit_scale` must be positive, got 0\.0"),
        ({"logit_softcapping": -1.0}, r"`logit_softcapping` must be positive, got -1\.0"),
        ({"embedding_scale": 0.0}, r"`embedding_scale` must be positive, got 0\.0"),
        ({"sliding_window_from": "row"}, r'`sliding_window_from` must be "query" or "anchor", got \'row\''),
        ({"block_attention": "none"}, r"must be one of bidirectional, causal_sliding, causal, got 'none'"),
        ({"draft_vocab_size": 0}, r"`draft_vocab_size` must lie in 1 \.\.\. 64 \(`vocab_size`\), got 0"),
        ({"draft_vocab_size": 65}, r"`draft_vocab_size` must lie in 1 \.\.\. 64 \(`vocab_size`\), got 65"),
        ({"draft_sampling": "greedy"}, '`draft_sampling` must be "sample" or "argmax", got \'greedy\''),
        ({"layer_types": ["full_attention"]}, r"each of the 2 layers, got \['full_attention'\]"),
        ({"layer_types": ["full_attention", "linear"]}, r"each of the 2 layers, got \['full_attention', 'linear'\]"),
        ({"layer_types": ["sliding_attention"] * 2}, "`sliding_window` must be positive .*, got None"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic' lets the frequ"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "`rope_type` must be one of .*'spiral'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}},
            r"one set for all drafter layers, .* got sets for \['full_attention', 'sliding_attention'\]",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}},
            "`partial_rotary_factor` must be above 0 and at most 1, got 1.5",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.0}},
            "`partial_rotary_factor` must be above 0 and at most 1, got 0.0",
        ),
    ],
)
def test_refusals_name_the_value(values, message):
    with pytest.raises(ValueError, match=message):
        CarryoverConfig(**{**TINY, **values})


@pytest.mark.parametrize(
    ("name", "value"), [("block_size", "4"), ("carry", "yes"), ("target_layer_ids", [0.5]), ("draft_sampling", 1)]
)
def test_wrong_types(name, value):
    with pytest.raises(StrictDataclassFieldValidationError, match=f"field '{name}'"):
        CarryoverConfig(**{**TINY, name: value})


# Saving and loading


@pytest.mark.compat
def test_round_trip_keeps_every_key(tmp_path):
    own = set(CarryoverConfig.__annotations__)
    defaults = CarryoverConfig()
    assert {name for name in own if EVERYTHING.get(name, "missing") == getattr(defaults, name)} == set()
    assert own <= set(EVERYTHING), "a new key needs a value here"
    config = CarryoverConfig(**EVERYTHING)
    config.save_pretrained(tmp_path)
    for loaded in (CarryoverConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is CarryoverConfig
        assert {name: getattr(loaded, name) for name in own} == EVERYTHING
        assert loaded.to_diff_dict() == config.to_diff_dict()
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written[name] for name in own} == EVERYTHING
    assert written["model_type"] == "carryover"


def test_overrides_when_loading_are_checked(tmp_path):
    """transformers would set them on the finished object, where nothing looks at them again."""
    CarryoverConfig(**TINY).save_pretrained(tmp_path)
    loaded, unused = CarryoverConfig.from_pretrained(tmp_path, carry=False, other=1, return_unused_kwargs=True)
    assert (loaded.carry, unused) == (False, {"other": 1})
    rope = CarryoverConfig.from_pretrained(tmp_path, rope_parameters={"rope_theta": 5.0}).rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 5.0}
    with pytest.raises(ValueError, match="`block_size` must be at least 1, got 0"):
        CarryoverConfig.from_pretrained(tmp_path, block_size=0)
    with pytest.raises(ValueError, match="each of the 3 layers, got"):
        CarryoverConfig.from_pretrained(tmp_path, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"`mask_token_id` must lie in 0 \.\.\. 63, got 64"):
        AutoConfig.from_pretrained(tmp_path, mask_token_id=64)


# RoPE, case R22


def reload(tmp_path, **values):
    """The config as it was given, saved and loaded, and its rotary embedding."""
    CarryoverConfig(**{**TINY, **values}).save_pretrained(tmp_path)
    config = CarryoverConfig.from_pretrained(tmp_path)
    return config, CarryoverRotaryEmbedding(config)


@pytest.mark.compat
def test_rope_theta_nested_only(tmp_path):
    """Case R22 (a)."""
    config, rotary = reload(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}
    expected = [1.0, 1e7**-0.25, 1e7**-0.5, 1e7**-0.75]
    assert rotary.inv_freq.tolist() == pytest.approx(expected, rel=1e-6)
    assert rotary.inv_freq[1].item() == pytest.approx(0.017783, abs=5e-7)
    assert rotary.attention_scaling == 1.0


@pytest.mark.compat
@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
    ids=["nested", "top-level"],
)
def test_partial_rotary_keeps_the_other_dimensions(tmp_path, given):
    """Case R22 (b)."""
    config, rotary = reload(tmp_path, **given)
    assert rotary.inv_freq.tolist() == pytest.approx([1.0, 1e4**-0.5], rel=1e-6)
    drafter = CarryoverDrafter(config)
    states = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0))
    states[:, 1] = states[:, 0]
    positions = torch.tensor([[0, 100]])
    key, value = drafter.layers[0].self_attn.project_kv(states, drafter.rotary_emb(states, positions))
    assert key.shape == value.shape == (1, 2, 2, 8)
    assert torch.equal(key[:, :, 0, 4:], key[:, :, 1, 4:])
    assert (key[:, :, 0, :4] != key[:, :, 1, :4]).all()
    assert torch.equal(value[:, :, 0], value[:, :, 1])


@pytest.mark.compat
def test_yarn_of_the_old_style_is_applied_once(tmp_path):
    """Case R22 (c)."""
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config, rotary = reload(tmp_path, rope_theta=1e4, rope_scaling=old, max_position_embeddings=256)
    again = CarryoverRotaryEmbedding(CarryoverConfig.from_dict(config.to_dict()))
    plain = [1e4 ** (-i / 4) for i in range(4)]
    # Yarn's ramp, with its defaults beta_fast 32 and beta_slow 1, for 8 dimensions and a window of 64.
    low, high = (8 * math.log(64 / (beta * 2 * math.pi)) / (2 * math.log(1e4)) for beta in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), 7)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(4)]
    expected = [f * (1 - r) + f / 4.0 * r for f, r in zip(plain, ramp)]
    assert expected != plain
    for embedding in (rotary, again):
        assert embedding.inv_freq.tolist() == pytest.approx(expected, rel=1e-6)
        assert embedding.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.compat
def test_rope_scaling_null_is_plain(tmp_path):
    """Case R22 (d)."""
    config, rotary = reload(tmp_path, rope_theta=1e4, rope_scaling=None)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert rotary.inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)


def test_rotary_pairs_are_half_split():
    """Case R22 (e): dimension i turns with dimension i + half, whatever the target does."""
    states = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    angle = torch.tensor([0.5, 0.25, 0.5, 0.25]).view(1, 1, 4)
    rotated = apply_rotary(states, (angle.cos(), angle.sin())).flatten().tolist()
    assert rotated == pytest.approx([math.cos(0.5), 0.0, math.sin(0.5), 0.0])
