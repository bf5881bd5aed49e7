# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Drafters of other formats: read, written back as they were, refused where they have no counterpart."""

import json

import pytest
import torch
import transformers
from convert_helpers import (
    KEPT,
    LAYER_IDS,
    MASK,
    VOCAB,
    deepspec_folder,
    layer_config,
    small_target,
    speculators_folder,
    zlab_folder,
)
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tiny_targets import assisted, plain, record_proposals

from hf_carryover import CarryoverConfig, CarryoverDrafter, convert_drafter, drafter_from_target
from hf_carryover.convert import detect_format, write_drafter
from hf_carryover.convert.loading import find_loader


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
CASES = {
    "zlab": lambda path, target, at: zlab_folder(path),
    "zlab-bfloat16": lambda path, target, at: zlab_folder(path, dtype=torch.bfloat16),
    "zlab-sliding": lambda path, target, at: zlab_folder(path, use_sliding_window=True, **SLIDING),
    "zlab-sliding-free": lambda path, target, at: zlab_folder(
        path, use_sliding_window=True, is_causal=False, **SLIDING
    ),
    "zlab-causal": lambda path, target, at: zlab_folder(path, dflash={"causal": True}),
    "zlab-capped": lambda path, target, at: zlab_folder(
        path, dflash={"output_multiplier": 2.0, "final_logit_softcapping": 5.0, "input_embedding_scale": 0.5}
    ),
    "deepspec-dspark": lambda path, target, at: deepspec_folder(path, target),
    "deepspec-dflash": lambda path, target, at: deepspec_folder(path, target, rank=0),
    "speculators-dflash": lambda path, target, at: speculators_folder(path, at),
    "speculators-dflash-anchor": lambda path, target, at: speculators_folder(path, at, sample_from_anchor=True),
    "speculators-dflash-reduced": lambda path, target, at: speculators_folder(path, at, reduced=True),
    "speculators-dflash-sliding": lambda path, target, at: speculators_folder(path, at, **SLIDING),
    "speculators-dspark": lambda path, target, at: speculators_folder(path, at, "dspark", confidence=True),
    "speculators-dspark-own-position": lambda path, target, at: speculators_folder(
        path, at, "dspark", sample_from_anchor=False
    ),
    "speculators-dspark-reduced": lambda path, target, at: speculators_folder(path, at, "dspark", reduced=True),
}
ANCHOR_FIRST = {"deepspec-dspark", "deepspec-dflash", "speculators-dflash-anchor", "speculators-dspark"} | {
    "speculators-dspark-reduced"
}
HOME = {"zlab": "z-lab", "speculators": "speculators"}


@pytest.fixture
def prompt():
    return torch.tensor([[1, 4, 2, 2, 1, 3, 0]])


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def same_tensors(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("carry", [False, True], ids=["plain", "carry"])
def test_loads_directly_and_stays_lossless(name, carry, pair, prompt, tmp_path):
    target, at = pair
    folder = CASES[name](tmp_path / "drafter", target, at)
    drafter = CarryoverDrafter.from_pretrained(folder, dtype=torch.float32, **({"carry": True} if carry else {}))
    assert drafter.config.carry is carry
    assert drafter.config.anchor_first is (name in ANCHOR_FIRST)
    assert drafter.config.target_layer_ids == LAYER_IDS
    assert drafter.config.mask_token_id == MASK
    rows = config_of(folder)["block_size"]
    assert drafter.config.block_rows == rows
    assert drafter.config.block_size == (rows if name in ANCHOR_FIRST else rows - 1)
    if carry:
        assert torch.equal(drafter.carry_embedding, torch.zeros(32))
        with torch.no_grad():
            drafter.carry_embedding.normal_(generator=torch.Generator().manual_seed(0))
    got = assisted(target, prompt, drafter, max_new_tokens=60)
    assert got.tolist() == plain(target, prompt, max_new_tokens=60).tolist()
    assert sum(drafter.last_report.accepted) > 0
    assert (sum(drafter.last_report.carried) > 0) is carry


@pytest.mark.parametrize("name", CASES)
def test_round_trip_is_exact(name, pair, tmp_path):
    """Into our format and back: the same tensors, bit by bit, and the same config, but for what was dropped."""
    target, at = pair
    source = CASES[name](tmp_path / "source", target, at)
    kind = name.split("-")[0]
    there = convert_drafter(source, tmp_path / "ours")
    assert there.source_format == HOME.get(kind, kind)
    original = tensors_of(source)
    dropped = {key for key in original if any(key in note for note in there.notes)}
    expected = {"deepspec": {"embed_tokens.weight", "lm_head.weight"}}.get(kind, set())
    confidence = {key for key in original if key.startswith("confidence_head.")}
    assert dropped == expected | confidence
    again = convert_drafter(tmp_path / "ours", tmp_path / "twice")
    same_tensors(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "twice"))
    assert config_of(tmp_path / "ours") == config_of(tmp_path / "twice")
    assert again.notes == []
    if kind == "deepspec":
        with pytest.raises(ValueError, match="`to` must be one of carryover, z-lab, speculators, got 'deepspec'"):
            convert_drafter(tmp_path / "ours", tmp_path / "back", to="deepspec")
        return
    back = convert_drafter(tmp_path / "ours", tmp_path / "back", to=HOME[kind])
    assert back.notes == []
    same_tensors(tensors_of(tmp_path / "back"), {k: v for k, v in original.items() if k not in dropped})
    if not dropped:
        assert config_of(tmp_path / "back") == config_of(source)
    else:
        ours, theirs = config_of(tmp_path / "back"), config_of(source)
        assert (ours.pop("enable_confidence_head"), theirs.pop("enable_confidence_head")) == (False, True)
        assert (ours.pop("confidence_head_with_markov"), theirs.pop("confidence_head_with_markov")) == (False, True)
        for part in ("speculators_config", "transformer_layer_config"):  # written anew, in other words
            ours.pop(part), theirs.pop(part)
        assert ours == theirs
    same_drafter(tmp_path / "ours", tmp_path / "back")


def same_drafter(first, second):
    """Two folders that draft alike: the same state, and the same config but for where it is from."""
    a, b = (CarryoverDrafter.from_pretrained(folder) for folder in (first, second))
    same_tensors(dict(a.state_dict()), dict(b.state_dict()))
    fields = set(CarryoverConfig.__annotations__) - {"converted_from"}
    assert {k: getattr(a.config, k) for k in fields} == {k: getattr(b.config, k) for k in fields}


@pytest.mark.parametrize("name", ["deepspec-dspark", "deepspec-dflash", "zlab"])
def test_from_one_format_to_another(name, pair, tmp_path):
    target, at = pair
    CASES[name](tmp_path / "source", target, at)
    done = convert_drafter(tmp_path / "source", tmp_path / "spec", to="speculators", target=at)
    config = config_of(done.folder)
    assert config["speculators_config"]["verifier"] == {"name_or_path": str(at), "architectures": ["LlamaForCausalLM"]}
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert config["sample_from_anchor"] is (name in ANCHOR_FIRST)
    assert config["speculators_model_type"] == ("dspark" if "dspark" in name else "dflash")
    drafters = [CarryoverDrafter.from_pretrained(tmp_path / place) for place in ("source", "spec")]
    same_tensors(*(dict(drafter.state_dict()) for drafter in drafters))
    fields = set(CarryoverConfig.__annotations__) - {"converted_from", "num_target_layers"}
    values = [{key: getattr(drafter.config, key) for key in fields} for drafter in drafters]
    assert values[0] == values[1]


def test_carryover_drafter_out_and_in(pair, prompt, tmp_path, monkeypatch):
    """Carry is left out and noted; what is written proposes what the drafter without carry does."""
    target, _ = pair
    options = {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": MASK, "carry": True}
    ids = torch.tensor(KEPT)
    drafter = drafter_from_target(target, draft_token_ids=ids, markov_rank=3, anchor_first=True, **options)
    done = write_drafter(drafter, tmp_path / "spec", to="speculators", target=target)
    assert done.notes == [
        "Dropped carry_embedding: the format 'speculators' has no carried rows.",
    ]
    head = tensors_of(tmp_path / "spec")["lm_head.weight"]
    assert torch.equal(head, target.get_output_embeddings().weight[ids])
    back = CarryoverDrafter.from_pretrained(tmp_path / "spec")
    assert back.config.own_head and back.config.num_target_layers is None
    drafter.config.carry = False
    rounds = []
    for one in (drafter, back):
        proposals = record_proposals(one, monkeypatch)
        assisted(target, prompt, one, max_new_tokens=30)
        rounds.append(list(proposals))
    assert rounds[0] == rounds[1]


def test_plain_drafter_to_zlab(pair, tmp_path):
    target, _ = pair
    drafter = drafter_from_target(target, num_hidden_layers=1, block_size=3, mask_token_id=MASK, carry=False)
    done = write_drafter(drafter, tmp_path / "out", to="z-lab")
    assert done.notes == [
        "Assumed that the target's embedding module only looks up; give `target` to have it checked."
    ]
    config = config_of(done.folder)
    assert config["block_size"] == 4 and config["num_target_layers"] == 4
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [1]}
    assert write_drafter(drafter, tmp_path / "checked", to="z-lab", target=target).notes == []


def test_scaled_embeddings_are_written_as_they_are(tmp_path):
    """Gemma's embedding module scales; DFlash takes the bare rows, so the factor is written."""
    from tiny_targets import build

    target = build("Gemma3Text", head_dim=8, sliding_window=8, layer_types=["full_attention"] * 4)
    drafter = drafter_from_target(target, num_hidden_layers=1, block_size=3, mask_token_id=MASK, carry=False)
    write_drafter(drafter, tmp_path / "out", to="z-lab", target=target)
    scale = config_of(tmp_path / "out")["dflash_config"]["input_embedding_scale"]
    assert scale == pytest.approx(32**0.5, rel=1e-3)
    with pytest.raises(ValueError, match="no place for scaled logits or embeddings"):
        write_drafter(drafter, tmp_path / "spec", to="speculators", target=target)


@pytest.mark.parametrize(
    ("options", "to", "message"),
    [
        ({"anchor_first": True}, "z-lab", "no place for anchor-first blocks .* Write 'speculators'"),
        ({"markov_rank": 2}, "z-lab", r"no place for a Markov head \(`markov_rank` 2\)"),
        (
            {"draft_token_ids": torch.tensor(KEPT)},
            "z-lab",
            r"no place for a vocabulary or head of its own \(4 tokens\)",
        ),
        ({"mask_token_id": None}, "z-lab", "no place for a learned mask embedding .* Train with a mask token"),
        ({"hidden_size": 16}, "speculators", r"no place for a width other than the target's \(16 and 32\)"),
        ({"block_attention": "causal"}, "speculators", "no place for causal attention in full layers"),
        ({"logit_scale": 2.0}, "speculators", "no place for scaled logits"),
        (SLIDING, "speculators", "no place for windows counted from each row"),
        ({}, "eagle", "`to` must be one of carryover, z-lab, speculators, got 'eagle'"),
    ],
)
def test_what_a_format_has_no_place_for(options, to, message, pair, tmp_path):
    target, _ = pair
    values = {"num_hidden_layers": 2, "block_size": 3, "mask_token_id": MASK, "carry": False}
    drafter = drafter_from_target(target, **{**values, **options})
    with pytest.raises(ValueError, match=message):
        write_drafter(drafter, tmp_path / "out", to=to, target=target)
    assert list(tmp_path.iterdir()) == []


def test_speculators_needs_a_target(pair, tmp_path):
    target, _ = pair
    drafter = drafter_from_target(target, num_hidden_layers=1, block_size=3, mask_token_id=MASK, embedding_scale=1.0)
    with pytest.raises(ValueError, match=r"names the target \(verifier\): give `target`"):
        write_drafter(drafter, tmp_path / "out", to="speculators")


# Reading what is not as expected


def changed(folder, **values):
    config = config_of(folder)
    for key, value in values.items():
        config.pop(key, None) if value is None else config.update({key: value})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("deepspec-dspark", {"markov_head_type": "rnn"}, "`markov_head_type` 'rnn' is not supported, only 'vanilla'"),
        ("speculators-dspark", {"markov_head_type": "gated"}, "`markov_head_type` 'gated' is not supported"),
        ("deepspec-dspark", {"target_layer_ids": [-1, 2]}, r"taps the embedding \(-1\)"),
        ("speculators-dflash", {"aux_hidden_state_layer_ids": [0, 3]}, r"taps the embedding \(0\)"),
        ("speculators-dflash", {"mask_token_id": None}, "The config names no `mask_token_id`"),
        ("zlab", {"dflash_config": {"mask_token_id": MASK}}, "names no `target_layer_ids`"),
        ("zlab", {"dflash_config": {"use_swa": True}}, r"`dflash_config` has \['use_swa'\]"),
        ("zlab", {"block_size": 1}, "`block_size` 1 leaves no row behind the anchor"),
        ("zlab", {"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel is not supported"),
        ("deepspec-dspark", {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel is not supported"),
        ("speculators-dflash", {"speculators_model_type": "eagle3"}, "'eagle3' is not supported, only"),
        ("speculators-dflash", {"target_hidden_size": 64}, "`target_hidden_size` 64 differs from `hidden_size` 32"),
    ],
)
def test_refused_with_the_reason(name, values, message, pair, tmp_path):
    target, at = pair
    folder = changed(CASES[name](tmp_path / "drafter", target, at), **values)
    with pytest.raises(ValueError, match=message):
        CarryoverDrafter.from_pretrained(folder)


def test_short_window(pair, tmp_path):
    folder = zlab_folder(tmp_path / "d", use_sliding_window=True, **{**SLIDING, "sliding_window": 4})
    with pytest.raises(ValueError, match="`sliding_window` 4 is shorter than a block of 5 rows"):
        CarryoverDrafter.from_pretrained(folder)


def test_not_a_drafter(tmp_path, pair):
    _, at = pair
    with pytest.raises(ValueError, match=r"Not a drafter that can be read: `architectures` \['LlamaForCausalLM'\]"):
        CarryoverDrafter.from_pretrained(at)


def test_pickles_are_not_opened(tmp_path):
    folder = zlab_folder(tmp_path / "drafter")
    (folder / "mask_embedding.pt").write_bytes(b"not to be opened")
    with pytest.raises(ValueError, match="no pickled file is"):
        CarryoverDrafter.from_pretrained(folder)
    (folder / "mask_embedding.pt").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no safetensors weights, only \['pytorch_model.bin'\]"):
        CarryoverDrafter.from_pretrained(folder)


@pytest.mark.parametrize("name", ["zlab", "deepspec-dspark", "speculators-dspark-reduced"])
def test_every_tensor_has_to_be_there(name, pair, tmp_path):
    target, at = pair
    folder = CASES[name](tmp_path / "drafter", target, at)
    tensors = tensors_of(folder)
    missing = [
        key for key in tensors if key.startswith(("fc.", "layers.1.mlp.up", "markov_head.markov_w2", "lm_head"))
    ]
    for key in missing:
        if key == "lm_head.weight" and name != "speculators-dspark-reduced":
            continue
        save_file({k: v for k, v in tensors.items() if k != key}, folder / "model.safetensors")
        if key == "lm_head.weight":  # gathered from the target's, as speculators does
            assert CarryoverDrafter.from_pretrained(folder).head_weight is None
            continue
        with pytest.raises(ValueError, match=f"tensors are not in it: {key}"):
            CarryoverDrafter.from_pretrained(folder)
    save_file({**tensors, "layers.0.g_proj.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"ones the drafter does not know: layers\.0\.g_proj\.weight"):
        CarryoverDrafter.from_pretrained(folder)


def test_sharded_weights(tmp_path):
    folder = zlab_folder(tmp_path / "drafter")
    tensors = tensors_of(folder)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    (folder / "model.safetensors").unlink()
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    weight_map = {key: file for file, keys in parts.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    same_tensors(dict(CarryoverDrafter.from_pretrained(folder).state_dict()), tensors)


def test_a_copy_that_is_not_the_targets(pair, tmp_path):
    """DeepSpec keeps copies of embedding and head. Given the target they are compared."""
    target, _ = pair
    folder = deepspec_folder(tmp_path / "drafter", target)
    assert convert_drafter(folder, tmp_path / "fits", target=target).source_format == "deepspec"
    other = small_target()
    with torch.no_grad():
        other.lm_head.weight[3] += 1
    with pytest.raises(ValueError, match=r"`lm_head\.weight` of .* is not the target's"):
        convert_drafter(folder, tmp_path / "other", target=other)
    assert not (tmp_path / "other").exists()


def test_reduced_head_is_its_own(pair, prompt, tmp_path, monkeypatch):
    """The head of a reduced vocabulary is read, and the target's does not replace it."""
    target, at = pair
    folder = speculators_folder(tmp_path / "drafter", at, reduced=True)
    drafter = CarryoverDrafter.from_pretrained(folder)
    assert torch.equal(drafter.head_weight, tensors_of(folder)["lm_head.weight"])
    assert drafter.draft_token_ids().tolist() == KEPT
    assert "head_weight" not in dict(drafter.named_parameters())
    mine = record_proposals(drafter, monkeypatch)
    assisted(target, prompt, drafter, max_new_tokens=20)
    drafter.head_weight.copy_(target.get_output_embeddings().weight[torch.tensor(KEPT)])
    other = record_proposals(drafter, monkeypatch)
    assisted(target, prompt, drafter, max_new_tokens=20)
    assert mine[: len(other)] != other


def test_unordered_draft_vocabulary(pair, tmp_path):
    folder = speculators_folder(tmp_path / "drafter", pair[1], reduced=True)
    tensors = tensors_of(folder)
    tensors["d2t"] = tensors["d2t"].flip(0)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="not in the order of the target's ids"):
        CarryoverDrafter.from_pretrained(folder)


def test_depth_of_the_target(pair, tmp_path):
    """speculators does not name it: known with a target, checked at the first use without."""
    target, at = pair
    folder = speculators_folder(tmp_path / "drafter", at)
    assert CarryoverDrafter.from_pretrained(folder, target=target).config.num_target_layers == 4
    drafter = CarryoverDrafter.from_pretrained(folder)
    shallow = small_target(num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"it reads layers \[0, 2\] \(`target_layer_ids`\), the target has 2"):
        shallow.generate(torch.tensor([[1, 2, 3]]), assistant_model=drafter, max_new_tokens=4)


def test_folders_appear_as_a_whole(pair, tmp_path, monkeypatch):
    source = zlab_folder(tmp_path / "source")
    convert_drafter(source, tmp_path / "out")
    with pytest.raises(FileExistsError, match=r"exists\. Choose another folder, or overwrite it"):
        convert_drafter(source, tmp_path / "out")
    before = config_of(tmp_path / "out")

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(CarryoverDrafter, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        convert_drafter(source, tmp_path / "out", overwrite=True)
    assert config_of(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_detection_by_the_file_alone():
    assert detect_format({"model_type": "carryover"}) == "carryover"
    assert detect_format({**layer_config(), "target_layer_ids": [1], "markov_rank": 0, "num_anchors": 8}) == "deepspec"
    assert detect_format({**layer_config(), "dflash_config": {}}) == "z-lab"
    assert find_loader(None, {}) is None


def test_trained_on_with_carry(pair, tmp_path):
    """A converted drafter goes on training with carry, in both layouts."""
    from training_helpers import losses_of, make_trainer

    target, at = pair
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "id": str(i),
            "input_ids": torch.randint(0, VOCAB, (30,), generator=generator).tolist(),
            "response_mask": [0] * 3 + [1] * 27,
        }
        for i in range(4)
    ]
    for name in ("zlab", "speculators-dspark-reduced"):
        folder = CASES[name](tmp_path / name / "drafter", target, at)
        drafter = CarryoverDrafter.from_pretrained(folder, carry=True)
        head = None if drafter.head_weight is None else drafter.head_weight.clone()
        trainer = make_trainer(target, drafter, tmp_path / name / "run", rows, max_steps=8, learning_rate=3e-3)
        trainer.train()
        losses = losses_of(trainer)
        assert losses[-1] < losses[0]
        assert drafter.carry_embedding.abs().sum() > 0
        assert head is None or torch.equal(head, drafter.head_weight)
        drafter.save_pretrained(tmp_path / name / "trained")
        loaded = CarryoverDrafter.from_pretrained(tmp_path / name / "trained")
        same_tensors(dict(loaded.state_dict()), dict(drafter.state_dict()))


# transformers' own DFlash generator


@pytest.mark.skipif(
    Version(transformers.__version__).release < (5, 23),
    reason="transformers' DFlash generator taps `hidden_states[k + 1]` from 5.23 on; before, it reads one layer off",
)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_proposes_what_transformers_generator_does(do_sample, pair, prompt, tmp_path, monkeypatch):
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    target, _ = pair
    folder = zlab_folder(tmp_path / "drafter")
    renamed = {
        name.replace("fc.", "encoder.fc.").replace("hidden_norm.", "encoder.output_norm_enc."): tensor
        for name, tensor in tensors_of(folder).items()
    }
    layers = {key: value for key, value in layer_config().items() if key not in ("model_type", "rope_scaling")}
    layers["rope_parameters"] = {"rope_type": "default", "rope_theta": layers.pop("rope_theta")}
    config = MuseGlimmerAssistantConfig(
        **layers,
        layer_types=["full_attention"] * 2,
        block_size=5,
        mask_token_id=MASK,
        target_layer_ids=LAYER_IDS,
    )
    peer = MuseGlimmerAssistantModel(config).eval()
    missing, unexpected = peer.load_state_dict(renamed, strict=False)
    assert not unexpected and not missing
    theirs = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, *args, **kwargs):
        ids, logits = original(self, input_ids, *args, **kwargs)
        if ids.shape[1] > input_ids.shape[1]:
            theirs.append((ids[0, input_ids.shape[1] :].tolist(), logits))
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", get_candidates)
    options = {"max_new_tokens": 60, "do_sample": do_sample}
    torch.manual_seed(1)
    want = target.generate(prompt, assistant_model=peer, speculation_type="dflash", **options)
    drafter = CarryoverDrafter.from_pretrained(folder)
    ours = record_proposals(drafter, monkeypatch)
    torch.manual_seed(1)
    got = target.generate(prompt, assistant_model=drafter, **options)
    # At the end theirs drafts a whole block where fewer tokens are left, so the draws differ from there on.
    assert got[:, :-5].tolist() == want[:, :-5].tolist()
    rounds = sum(len(proposals) == 4 for proposals in ours)
    assert rounds > 20
    assert [proposals for proposals, _ in theirs][:rounds] == ours[:rounds]
