# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Failures that users of comparable software reported, tried on drafters of other formats. The README beside this file
lists all of them.
"""

import json
import math

import pytest
import torch
from convert_helpers import (
    KEPT,
    MASK,
    VOCAB,
    deepspec_folder,
    small_target,
    speculators_folder,
    zlab_folder,
)
from safetensors.torch import load_file, save_file
from tiny_targets import assisted, plain

from hf_carryover import CarryoverDrafter, check_fit, convert_drafter, drafter_from_target
from hf_carryover.convert import write_drafter
from hf_carryover.modeling_carryover import CarryoverRotaryEmbedding


FORMATS = ["z-lab", "deepspec", "speculators"]
# What each calls the layers it reads, and what it adds to our ids.
LAYER_KEYS = {"z-lab": "target_layer_ids", "deepspec": "target_layer_ids", "speculators": "aux_hidden_state_layer_ids"}


@pytest.fixture
def prompt():
    return torch.tensor([[1, 4, 2, 2, 1, 3, 0]])


def folder_of(kind, folder, pair, **values):
    """A drafter of a format, its `config.json` changed: values of `None` are left out, `...` ones set to null."""
    target, at = pair
    if kind == "z-lab":
        zlab_folder(folder)
    elif kind == "deepspec":
        deepspec_folder(folder, target)
    else:
        speculators_folder(folder, at)
    return changed(folder, **values)


def changed(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    for key, value in values.items():
        place = config["transformer_layer_config"] if key in config.get("transformer_layer_config", {}) else config
        if key == "target_layer_ids" and "dflash_config" in config:
            place = config["dflash_config"]
        if value is None:
            place.pop(key, None)
        else:
            place[key] = None if value is ... else value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_tensors(folder, **tensors):
    """Tensors added, and those of `None` removed."""
    kept = {**load_file(folder / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in kept.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# R15, R16: tapped layers


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_taps_the_layers_it_means(kind, pair, prompt, tmp_path):
    """Case R15: z-lab and DeepSpec ids 0, 2 and speculators' 1, 3 are outputs of decoder layers 0 and 2, by a hook."""
    target, _ = pair
    drafter = CarryoverDrafter.from_pretrained(folder_of(kind, tmp_path / "drafter", pair))
    fed, states = [], {0: [], 2: []}
    hooks = [
        target.model.layers[k].register_forward_hook(
            lambda module, args, output, k=k: states[k].append(output[0] if isinstance(output, tuple) else output)
        )
        for k in states
    ]
    hooks.append(drafter.fc.register_forward_pre_hook(lambda module, args: fed.append(args[0])))
    try:
        assisted(target, prompt, drafter, max_new_tokens=12)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(fed) > 2
    for features, *layers in zip(fed, states[0], states[2]):
        torch.testing.assert_close(features, torch.cat(layers, dim=-1)[:, : features.shape[1]])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "names no `{key}`"),
        (..., "names no `{key}`"),
        ([-2, 0], r"must be distinct increasing ids in 0 \.\.\. 3 .*, got \[-2, 0\]"),
        ([0, 4], r"got \[0, 4\]"),
        ([-1, 0], r"embedding \((-1|0)\)|got \[-1, 0\]"),
        ([0, 1, 2], r"fc\.weight is \(32, 64\), not \(32, 96\)"),
        ([2], r"fc\.weight is \(32, 64\), not \(32, 32\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", FORMATS)
def test_layer_ids_of_every_format(kind, ids, message, pair, tmp_path):
    """Case R15: missing, null, negative and too large ids, the embedding, and a list that disagrees with `fc`."""
    key = LAYER_KEYS[kind]
    if kind == "speculators" and isinstance(ids, list):
        ids = [k + 1 for k in ids]
    folder = folder_of(kind, tmp_path / "drafter", pair, **{key: ids})
    with pytest.raises(ValueError, match=message.format(key=key)):
        CarryoverDrafter.from_pretrained(folder, target=pair[0])  # speculators names no depth: the target has it


def test_the_last_layer_goes_to_speculators_and_back(pair, tmp_path):
    """Cases R15, R16: no tap is dropped, `fc` keeps its width, and what is read of the last layer is said."""
    target, at = pair
    source = changed(zlab_folder(tmp_path / "source"), target_layer_ids=[1, 3])
    there = convert_drafter(source, tmp_path / "there", to="speculators", target=at)
    assert json.loads((there.folder / "config.json").read_text())["aux_hidden_state_layer_ids"] == [2, 4]
    back = convert_drafter(there.folder, tmp_path / "back", to="z-lab", target=target)
    config = json.loads((back.folder / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [1, 3]
    weights = [load_file(folder / "model.safetensors")["fc.weight"] for folder in (source, back.folder)]
    assert weights[0].shape == (32, 64) and torch.equal(*weights)
    for done in (there, back):
        assert [note for note in done.notes if "read behind the final norm" in note]
    assert convert_drafter(zlab_folder(tmp_path / "other"), tmp_path / "ours").notes == []


def test_the_last_layer_is_behind_the_final_norm(prompt, tmp_path):
    """Case R16: with a norm one can see, a converted drafter is given `hidden_states[L]`."""
    target = small_target()
    torch.nn.init.constant_(target.model.norm.weight, 3.0)
    drafter = CarryoverDrafter.from_pretrained(changed(zlab_folder(tmp_path / "drafter"), target_layer_ids=[0, 3]))
    fed = []
    with drafter.fc.register_forward_pre_hook(lambda module, args: fed.append(args[0])):
        text = assisted(target, prompt, drafter, max_new_tokens=8)
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
    want = torch.cat([states[1], states[4]], dim=-1)[:, : prompt.shape[1]]
    torch.testing.assert_close(fed[0][:, : prompt.shape[1]], want, atol=1e-4, rtol=0)


# R17: heads


def test_a_full_head_of_its_own_is_kept(pair, prompt, tmp_path):
    """Case R17: z-lab's format has no head; one that is there is used, bit for bit, and the target's is not."""
    target, _ = pair
    head = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(7))
    folder = with_tensors(zlab_folder(tmp_path / "drafter"), **{"lm_head.weight": head})
    drafter = CarryoverDrafter.from_pretrained(folder)
    assert drafter.config.own_head and torch.equal(drafter.head_weight, head)
    text = assisted(target, prompt, drafter, max_new_tokens=20)
    assert text.tolist() == plain(target, prompt, max_new_tokens=20).tolist()
    assert torch.equal(drafter.head_weight, head)
    drafter.save_pretrained(tmp_path / "ours")
    assert torch.equal(CarryoverDrafter.from_pretrained(tmp_path / "ours").head_weight, head)


def test_heads_of_a_reduced_vocabulary(pair, tmp_path):
    """Case R17: kept bit for bit; without one its rows are the target's, never drawn; without its table an error."""
    target, at = pair
    folder = speculators_folder(tmp_path / "drafter", at, reduced=True)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(CarryoverDrafter.from_pretrained(folder).head_weight, head)
    with_tensors(folder, **{"lm_head.weight": None})
    assert CarryoverDrafter.from_pretrained(folder).head_weight is None
    done = convert_drafter(folder, tmp_path / "there", to="speculators", target=target)
    rows = target.get_output_embeddings().weight[torch.tensor(KEPT)]
    assert torch.equal(load_file(done.folder / "model.safetensors")["lm_head.weight"], rows)
    with_tensors(folder, d2t=None)
    with pytest.raises(ValueError, match=r"have no \['d2t'\]: the draft vocabulary is reduced"):
        CarryoverDrafter.from_pretrained(folder)


# R18: draft vocabularies


def test_ids_in_place_of_offsets(pair, tmp_path):
    """Case R18: a table of ids is refused, not read as offsets; so is one that another table contradicts."""
    folder = speculators_folder(tmp_path / "drafter", pair[1], reduced=True)
    drafter = CarryoverDrafter.from_pretrained(folder)
    assert drafter.d2t.tolist() == [0, 0, 1, 1] and drafter.draft_token_ids().tolist() == KEPT
    with_tensors(folder, d2t=torch.tensor(KEPT))
    with pytest.raises(ValueError, match=r"Draft token ids must increase within 0 \.\.\. 4, got \[0, 2, 5, 7\]"):
        CarryoverDrafter.from_pretrained(folder)
    with_tensors(folder, d2t=torch.tensor([0, 0, 0, 1]))
    with pytest.raises(ValueError, match="`d2t` and `t2d` name different draft vocabularies"):
        CarryoverDrafter.from_pretrained(folder)


# R21: mask tokens


def test_mask_tokens_of_every_format(pair, tmp_path):
    """Case R21: read from the top level, `dflash_config` and speculators' config; two that disagree are an error."""
    for kind in FORMATS:
        folder = folder_of(kind, tmp_path / kind, pair)
        assert CarryoverDrafter.from_pretrained(folder).config.mask_token_id == MASK
    folder = changed(tmp_path / "z-lab", mask_token_id=MASK)
    assert CarryoverDrafter.from_pretrained(folder).config.mask_token_id == MASK
    for name, beside in (("mask_token_id", MASK - 1), ("target_layer_ids", [0, 3]), ("block_size", 7)):
        folder = zlab_folder(tmp_path / name, dflash={"block_size": 5})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, name: beside}))
        with pytest.raises(ValueError, match=f"two values of `{name}`: .* in `dflash_config` and .* beside it"):
            CarryoverDrafter.from_pretrained(folder)


@pytest.mark.parametrize("wrong", [VOCAB, -1])
@pytest.mark.parametrize("kind", FORMATS)
def test_mask_tokens_out_of_range(kind, wrong, pair, tmp_path):
    """Case R21: an id outside the embedding, or one that ends texts, is no mask token."""
    folder = folder_of(kind, tmp_path / "drafter", pair)
    config = json.loads((folder / "config.json").read_text())
    config["mask_token_id"] = wrong
    config.get("dflash_config", {}).pop("mask_token_id", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"`mask_token_id` must lie in 0 \.\.\. 4, got {wrong}"):
        CarryoverDrafter.from_pretrained(folder)
    fitting = CarryoverDrafter.from_pretrained(folder_of(kind, tmp_path / "fitting", pair))
    with pytest.raises(ValueError, match=f"`mask_token_id` {MASK} is an end token of the target"):
        check_fit(fitting, small_target(eos_token_id=MASK))


# R22: RoPE


ROPE = {
    "nested-only": (
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
        {"rope_type": "default", "rope_theta": 1e7},
    ),
    "no-scaling": ({"rope_theta": 1e4, "rope_scaling": ...}, {"rope_type": "default", "rope_theta": 1e4}),
    "old-yarn": (
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("name", ROPE)
@pytest.mark.parametrize("kind", FORMATS)
def test_rope_of_every_format(kind, name, pair, tmp_path):
    """Case R22 (a), (c), (d): read once, and kept through our format and the others."""
    given, want = ROPE[name]
    folder = folder_of(kind, tmp_path / "drafter", pair)
    config = json.loads((folder / "config.json").read_text())
    layers = config.get("transformer_layer_config", config)
    layers.update({key: None if value is ... else value for key, value in given.items() if value is not None})
    for key in [key for key, value in given.items() if value is None]:
        layers.pop(key)
    (folder / "config.json").write_text(json.dumps(config))
    first = CarryoverDrafter.from_pretrained(folder)
    frequencies = CarryoverRotaryEmbedding(first.config)
    if name == "nested-only":
        assert frequencies.inv_freq[1].item() == pytest.approx(0.017783, abs=5e-7)
    ways = ["carryover", "speculators", *([] if kind == "deepspec" else ["z-lab"])]
    first.config.converted_from = None  # so that every word of a config is our own
    for to in ways:
        done = write_drafter(first, tmp_path / to, to=to, target=pair[0])
        again = CarryoverDrafter.from_pretrained(done.folder)
        kept = {key: value for key, value in again.config.rope_parameters.items() if key in want}
        assert kept == want, to
        turned = CarryoverRotaryEmbedding(again.config)
        assert torch.equal(turned.inv_freq, frequencies.inv_freq)
        assert math.isclose(turned.attention_scaling, frequencies.attention_scaling)


def test_partly_turned_keys_stay_in_our_format(pair, tmp_path):
    """Case R22 (b): other formats turn whole keys; a drafter that does not is not written as one of theirs."""
    target, _ = pair
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    options = {"num_hidden_layers": 1, "block_size": 3, "mask_token_id": MASK, "carry": False}
    drafter = drafter_from_target(target, rope_parameters=rope, **options)
    for to in ("z-lab", "speculators"):
        with pytest.raises(ValueError, match=r"turn whole keys, .* \(`partial_rotary_factor` 0\.5\)"):
            write_drafter(drafter, tmp_path / to, to=to, target=target)
    write_drafter(drafter, tmp_path / "ours")
    assert CarryoverDrafter.from_pretrained(tmp_path / "ours").config.rope_parameters == rope


@pytest.mark.parametrize("key", [{"is_neox_style": False}, {"rope_interleaved": True}])
@pytest.mark.parametrize("kind", FORMATS)
def test_interleaved_pairs_are_refused(kind, key, pair, tmp_path):
    """Case R22 (e): the drafter's own layout counts; one that is not ours is not read as if it were."""
    folder = folder_of(kind, tmp_path / "drafter", pair)
    config = json.loads((folder / "config.json").read_text())
    config.get("transformer_layer_config", config).update(key)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="RoPE in interleaved pairs, which is not supported"):
        CarryoverDrafter.from_pretrained(folder)
