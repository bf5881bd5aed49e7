# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""A drafter with every optional part, and inputs of its parallel forward pass."""

import torch
from conftest import VOCAB


KEPT_IDS = [5, 9, 40, 63]
# Another width than the target's, a Markov head, a reduced vocabulary, a learned mask and the carry embedding.
FULL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "markov_rank": 4,
    "draft_token_ids": torch.tensor(KEPT_IDS),
}


def block_inputs(drafter, seed=0, carried=4):
    """Three blocks over two recorded sequences, with no, some and all but one of the carried rows."""
    generator, config = torch.Generator().manual_seed(seed), drafter.config

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    anchors = torch.tensor([1, 5, 8])
    inputs = {
        "anchor_embeds": draw(3, config.target_hidden_size),
        "anchor_positions": anchors,
        "features": draw(2, 9, config.feature_size),
        "sequence_index": torch.tensor([0, 1, 1]),
        "previous_ids": torch.randint(0, VOCAB, (3, config.block_size), generator=generator),
        "head_weight": draw(config.output_vocab_size, config.target_hidden_size),
        "mask_embeds": draw(config.target_hidden_size),
    }
    if carried:
        inputs["carried_features"] = draw(3, carried, config.feature_size)
        inputs["carried_positions"] = anchors.unsqueeze(1) + torch.arange(carried)
        inputs["carried_mask"] = torch.tensor([[False] * 4, [True, True, False, False], [False, True, True, True]])
    return inputs


def run(drafter, inputs=None):
    with torch.no_grad():
        return drafter(**(block_inputs(drafter) if inputs is None else inputs))
