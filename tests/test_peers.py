# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Converted drafters against the original implementations, proposal by proposal, on tiny weights.

The packages `dflash` (z-lab) and `speculators` pin versions of their own, so they live in an environment of their own:
`make test-peers` creates it and runs this module there. DeepSpec is no package; its tensors are loaded into
speculators' DSpark, which is the same model, and its backbone into z-lab's.
"""

import pytest
import torch
from convert_helpers import (
    LAYER_IDS,
    MASK,
    VOCAB,
    deepspec_folder,
    layer_config,
    speculators_folder,
    zlab_folder,
)
from safetensors.torch import load_file
from tiny_targets import assisted, plain, record_proposals

from hf_carryover import CarryoverDrafter, convert_drafter


dflash = pytest.importorskip("dflash.model", reason="needs the package dflash: `make test-peers`")
speculators = pytest.importorskip("speculators", reason="needs the package speculators: `make test-peers`")

# float32 against float32, summed in another order; the largest logit is about 10.
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
NEW = 60


@pytest.fixture
def prompt():
    return torch.tensor([[1, 4, 2, 2, 1, 3, 0]])


def ours_of(folder, target, prompt, monkeypatch):
    """Our drafter, the text, and the proposals of each round with the anchor's position."""
    drafter = CarryoverDrafter.from_pretrained(folder)
    proposals = record_proposals(drafter, monkeypatch)
    text = assisted(target, prompt, drafter, max_new_tokens=NEW)
    assert text.tolist() == plain(target, prompt, max_new_tokens=NEW).tolist()
    report, anchors, anchor = drafter.last_report, [], prompt.shape[1]
    for committed in report.committed:
        anchors.append(anchor)
        anchor += committed
    assert sum(report.accepted) >= 3, "a test of few acceptances says little"
    return drafter, text, list(zip(anchors, proposals))


# z-lab

ZLAB = {
    "full": {},
    "sliding-causal": {"use_sliding_window": True, **SLIDING},
    "sliding-free": {"use_sliding_window": True, "is_causal": False, **SLIDING},
    "causal": {"is_causal": True},
    "capped": {"dflash": {"output_multiplier": 2.0, "final_logit_softcapping": 5.0, "input_embedding_scale": 0.5}},
}


@pytest.mark.parametrize("options", ZLAB.values(), ids=ZLAB)
def test_zlab(options, pair, prompt, tmp_path, monkeypatch):
    """`dflash_generate` and `generate` verify the same blocks, round by round."""
    target, _ = pair
    folder = zlab_folder(tmp_path / "drafter", **options)
    _, text, rounds = ours_of(folder, target, prompt, monkeypatch)
    peer = dflash.DFlashDraftModel.from_pretrained(folder).eval()
    blocks = []
    forward = type(target).forward

    def watched(self, input_ids=None, **kwargs):
        blocks.append(input_ids[0].tolist())
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(target), "forward", watched)
    theirs = dflash.dflash_generate(peer, target, prompt, max_new_tokens=NEW, stop_token_ids=None)
    assert theirs.tolist() == text.tolist()
    # Near the end they fill a block up to the limit, where ours leaves room for the target's own token.
    mine = [[int(text[0, anchor]), *proposals] for anchor, proposals in rounds if len(proposals) == 4]
    assert len(mine) > 15
    assert blocks[1 : len(mine) + 1] == mine


# speculators


def backbone(peer, features, text):
    """Hidden states and logits of speculators' own training pass, by anchor: `{a: (rows, width)}`."""
    length, rows = text.shape[1], peer.block_size
    with torch.no_grad():
        hidden, logits, _, _, indices = peer._backbone_forward(
            features,
            text,
            torch.ones(1, length),
            torch.zeros(1, length, 32),
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=length - rows,
        )
    anchors = indices.view(-1, rows)[:, 0].tolist()
    assert anchors == list(range(length - rows))
    return {a: (hidden.view(-1, rows, 32)[i], logits.view(len(anchors), rows, -1)[i]) for i, a in enumerate(anchors)}


def propose(peer, hidden, logits, anchor_token, anchor_first):
    """Greedy proposals of one block, left to right with the Markov head as speculators' `block_bias` applies it."""
    ids = None if peer.d2t is None else peer.d2t + torch.arange(len(peer.d2t))
    proposals, previous = [], anchor_token
    for row in range(0 if anchor_first else 1, len(logits)):
        scores = logits[row]
        if getattr(peer, "markov_head", None) is not None:
            bias = peer.markov_head.block_bias(
                prev_token_ids=torch.tensor([[previous]]), hidden_states=hidden[None, row : row + 1]
            )
            scores = scores + bias[0, 0]
        previous = int(scores.argmax()) if ids is None else int(ids[scores.argmax()])
        proposals.append(previous)
    return proposals


def compare(peer, drafter, target, text, rounds):
    """Logits of every block of the text, and the proposals of every round."""
    config, rows = drafter.config, peer.block_size
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
        # Their id `k` is `hidden_states[k]`.
        features = torch.cat([states[k] for k in peer.config.aux_hidden_state_layer_ids], dim=-1)
    blocks = backbone(peer, features, text)
    anchors = torch.tensor(list(blocks))
    weight = drafter.head_weight
    if weight is None:
        weight = target.get_output_embeddings().weight.detach()
    embedding = target.get_input_embeddings().weight.detach()
    with torch.no_grad():
        mine = drafter(
            anchor_embeds=embedding[text[0, anchors]],
            anchor_positions=anchors,
            features=features,
            sequence_index=torch.zeros_like(anchors),
            mask_embeds=embedding[MASK],
            head_weight=weight,
        ).logits
    theirs = torch.stack([logits for _, logits in blocks.values()])
    torch.testing.assert_close(mine, theirs[:, rows - config.block_size :], **TOLERANCE)
    compared = 0
    for anchor, proposals in rounds:
        if anchor not in blocks or len(proposals) < config.block_size:
            continue
        token = int(text[0, anchor])
        assert proposals == propose(peer, *blocks[anchor], token, config.anchor_first), f"anchor {anchor}"
        compared += 1
    assert compared > 15


def load_peer(folder):
    peer = speculators.SpeculatorModel.from_pretrained(folder).eval()
    # Its dense masks; the compiled ones need a GPU to be worth it.
    peer.config.transformer_layer_config._attn_implementation = "eager"
    for layer in peer.layers:
        layer.self_attn.config._attn_implementation = "eager"
    from speculators.models.attention import create_float_mask

    peer._create_mask_fn = create_float_mask
    return peer


SPECULATORS = {
    "dflash": {},
    "dflash-anchor-first": {"sample_from_anchor": True},
    "dflash-reduced": {"reduced": True},
    "dflash-reduced-anchor-first": {"reduced": True, "sample_from_anchor": True},
    "dflash-sliding-causal": SLIDING,
    "dflash-sliding-free": {"sliding_window_non_causal": True, **SLIDING},
    "dspark": {"kind": "dspark", "confidence": True},
    "dspark-own-position": {"kind": "dspark", "sample_from_anchor": False},
    "dspark-reduced": {"kind": "dspark", "reduced": True},
    "dspark-reduced-own-position": {"kind": "dspark", "reduced": True, "sample_from_anchor": False},
    "dspark-sliding": {"kind": "dspark", **SLIDING},
}


@pytest.mark.parametrize("options", SPECULATORS.values(), ids=SPECULATORS)
def test_speculators(options, pair, prompt, tmp_path, monkeypatch):
    target, at = pair
    folder = speculators_folder(tmp_path / "drafter", at, **options)
    drafter, text, rounds = ours_of(folder, target, prompt, monkeypatch)
    peer = load_peer(folder)
    if options.get("reduced"):
        assert torch.equal(peer.lm_head.weight, drafter.head_weight)
    compare(peer, drafter, target, text, rounds)


@pytest.mark.parametrize("name", [name for name in SPECULATORS if "sliding" not in name])
def test_speculators_reads_what_we_write(name, pair, prompt, tmp_path, monkeypatch):
    """Our own folder, written as speculators', read by speculators, drafts as before."""
    target, at = pair
    source = speculators_folder(tmp_path / "source", at, **SPECULATORS[name])
    convert_drafter(source, tmp_path / "ours")
    drafter, text, rounds = ours_of(tmp_path / "ours", target, prompt, monkeypatch)
    drafter.config.converted_from = None  # so that every word of the config is our own
    drafter.save_pretrained(tmp_path / "ours")
    done = convert_drafter(tmp_path / "ours", tmp_path / "out", to="speculators", target=at)
    compare(load_peer(done.folder), drafter, target, text, rounds)


def test_zlab_reads_what_we_write(pair, prompt, tmp_path, monkeypatch):
    target, _ = pair
    drafter = CarryoverDrafter.from_pretrained(zlab_folder(tmp_path / "source"))
    drafter.config.converted_from = None
    drafter.save_pretrained(tmp_path / "ours")
    convert_drafter(tmp_path / "ours", tmp_path / "out", to="z-lab")
    peer = dflash.DFlashDraftModel.from_pretrained(tmp_path / "out").eval()
    reference = dflash.DFlashDraftModel.from_pretrained(tmp_path / "source").eval()
    for (name, ours), theirs in zip(peer.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    texts = [dflash.dflash_generate(one, target, prompt, NEW, None) for one in (peer, reference)]
    assert texts[0].tolist() == texts[1].tolist()


# DeepSpec


@pytest.mark.parametrize("rank", [0, 3], ids=["dflash", "dspark"])
def test_deepspec(rank, pair, prompt, tmp_path, monkeypatch):
    """Its tensors in speculators' DSpark, by names and config that are its own; and its backbone in z-lab's."""
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from transformers import Qwen3Config

    target, _ = pair
    folder = deepspec_folder(tmp_path / "drafter", target, rank=rank)
    drafter, text, rounds = ours_of(folder, target, prompt, monkeypatch)
    layers = Qwen3Config(**{**layer_config(), "attn_implementation": "eager"})
    peer = DSparkDraftModel(
        DSparkSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=VOCAB,
            block_size=4,
            aux_hidden_state_layer_ids=[k + 1 for k in LAYER_IDS],
            mask_token_id=MASK,
            markov_rank=rank,
            enable_confidence_head=rank > 0,
            confidence_head_with_markov=rank > 0,
            sample_from_anchor=True,
        )
    ).eval()
    tensors = load_file(folder / "model.safetensors")
    missing, unexpected = peer.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight"}
    peer.verifier_lm_head.weight.data.zero_()
    compare(peer, drafter, target, text, rounds)
    compare_backbone(tensors, drafter, target, text, tmp_path)


def compare_backbone(tensors, drafter, target, text, tmp_path):
    """Block states of z-lab's model with the same tensors: the anchor and 3 masks, all of them predicting."""
    body = {
        key: value for key, value in tensors.items() if key.startswith(("fc.", "hidden_norm.", "layers.", "norm."))
    }
    folder = zlab_folder(tmp_path / "backbone")
    from safetensors.torch import save_file

    save_file(body, folder / "model.safetensors", metadata={"format": "pt"})
    peer = dflash.DFlashDraftModel.from_pretrained(folder).eval()
    embedding = target.get_input_embeddings().weight.detach()
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[k + 1] for k in LAYER_IDS], dim=-1)
        for anchor in (5, 20, 40):
            block = torch.cat([text[0, anchor : anchor + 1], torch.full((3,), MASK)])
            theirs = peer(
                position_ids=torch.arange(anchor + 4).unsqueeze(0),
                noise_embedding=embedding[block].unsqueeze(0),
                target_hidden=features[:, :anchor],
            )
            mine = drafter(
                anchor_embeds=embedding[text[0, anchor : anchor + 1]],
                anchor_positions=torch.tensor([anchor]),
                features=features,
                sequence_index=torch.tensor([0]),
                mask_embeds=embedding[MASK],
            ).hidden_states
            torch.testing.assert_close(mine, theirs, **TOLERANCE)
