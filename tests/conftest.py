"""Tiny models, built in memory."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_carryover import drafter_from_target


VOCAB = 64


def spread(model, std: float = 0.3, seed: int = 0):
    """Redraw every matrix wide enough that the model's choices are not ties."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model.eval()


def tiny_llama(**kwargs):
    """A Llama of 4 layers over `VOCAB` tokens."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    return spread(LlamaForCausalLM(LlamaConfig(**{**values, **kwargs})))


def tiny_drafter(target, seed: int = 0, std: float = 0.2, **kwargs):
    """A random drafter for `target`, its carry embedding and Markov head not zero."""
    values = {"num_hidden_layers": 2, "block_size": 4, "init_from_target": False}
    drafter = spread(drafter_from_target(target, **{**values, **kwargs}), std=std, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        if drafter.head_weight is not None:
            drafter.head_weight.copy_(torch.randn(drafter.head_weight.shape, generator=generator) * std)
        for vector in (drafter.carry_embedding, drafter.mask_embedding, drafter.lookup_scale):
            if vector is not None:
                vector.copy_(torch.randn(vector.shape, generator=generator))
    return drafter


@pytest.fixture(scope="session")
def target():
    return tiny_llama()


@pytest.fixture
def prompt():
    return torch.randint(2, 60, (1, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target over few tokens, for drafters of other formats, and its folder."""
    from convert_helpers import save_target  # which imports this module

    return save_target(tmp_path_factory.mktemp("target") / "target")
