"""Folders of the other formats, written here from their description: no code of ours makes them."""

import json

import torch
from conftest import spread, tiny_llama
from safetensors.torch import save_file
from transformers import LlamaForCausalLM


MASK = 4
VOCAB = 5  # few tokens, so that random proposals are accepted now and then
KEPT = [0, 1, 3, 4]
LAYER_IDS = [0, 2]


def small_target(**kwargs):
    """A Llama over few tokens, whose greedy text a random drafter meets sometimes."""
    values = {"vocab_size": VOCAB, "tie_word_embeddings": False, "max_position_embeddings": 256, "pad_token_id": None}
    return tiny_llama(**{**values, **kwargs})


def layer_config(layers=2, **kwargs):
    """The Qwen3 config of the drafters' layers, in the words of transformers 4."""
    return {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **kwargs,
    }


def drafter_tensors(layers=2, features=2, seed=0, dtype=torch.float32):
    """Tensors of the layers and the fusion."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype)

    def norm(size):
        return (1 + 0.2 * torch.randn(size, generator=generator)).to(dtype)

    tensors = {"fc.weight": draw(32, 32 * features), "hidden_norm.weight": norm(32), "norm.weight": norm(32)}
    for i in range(layers):
        name = f"layers.{i}."
        tensors |= {
            f"{name}self_attn.q_proj.weight": draw(32, 32),
            f"{name}self_attn.k_proj.weight": draw(16, 32),
            f"{name}self_attn.v_proj.weight": draw(16, 32),
            f"{name}self_attn.o_proj.weight": draw(32, 32),
            f"{name}self_attn.q_norm.weight": norm(8),
            f"{name}self_attn.k_norm.weight": norm(8),
            f"{name}mlp.gate_proj.weight": draw(48, 32),
            f"{name}mlp.up_proj.weight": draw(48, 32),
            f"{name}mlp.down_proj.weight": draw(32, 48),
            f"{name}input_layernorm.weight": norm(32),
            f"{name}post_attention_layernorm.weight": norm(32),
        }
    return tensors


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def zlab_folder(folder, dflash=None, dtype=torch.float32, **kwargs):
    """z-lab DFlash: 5 rows, hence 4 proposals."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 5,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": LAYER_IDS, **(dflash or {})},
        "dtype": str(dtype).removeprefix("torch."),
        **layer_config(**kwargs),
    }
    return write(folder, config, drafter_tensors(dtype=dtype))


def markov_tensors(rank=3, out=VOCAB, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return {
        "markov_head.markov_w1.weight": torch.randn(VOCAB, rank, generator=generator),
        "markov_head.markov_w2.weight": torch.randn(out, rank, generator=generator),
    }


def confidence_tensors(width, seed=6):
    generator = torch.Generator().manual_seed(seed)
    return {
        "confidence_head.proj.weight": torch.randn(1, width, generator=generator),
        "confidence_head.proj.bias": torch.randn(1, generator=generator),
    }


def deepspec_folder(folder, target, rank=3, **kwargs):
    """DeepSpec DSpark (with `rank`) or DFlash (0): 4 rows, hence 4 proposals."""
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 4,
        "num_target_layers": 4,
        "mask_token_id": MASK,
        "target_layer_ids": LAYER_IDS,
        "num_anchors": 512,
        "enable_confidence_head": rank > 0,
        "markov_rank": rank,
        "dtype": "float32",
        **layer_config(layer_types=["full_attention"] * 2),
    }
    tensors = drafter_tensors()
    if rank:
        config |= {"markov_head_type": "vanilla", "confidence_head_with_markov": True}
        tensors |= markov_tensors(rank) | confidence_tensors(32 + rank)
    tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return write(folder, {**config, **kwargs}, tensors)


def speculators_folder(folder, target_folder, kind="dflash", reduced=False, confidence=False, **kwargs):
    """speculators `dflash` or `dspark`: 5 rows."""
    layer = {key: kwargs.pop(key) for key in list(kwargs) if key in ("layer_types", "sliding_window")}
    if layer:
        layer["use_sliding_window"] = True
    anchor_first = kwargs.get("sample_from_anchor", kind == "dspark")
    config = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5 if anchor_first else 4}],
            "verifier": {"name_or_path": str(target_folder), "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config(**layer),
        "draft_vocab_size": len(KEPT) if reduced else VOCAB,
        "block_size": 5,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [k + 1 for k in LAYER_IDS],
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "sample_from_anchor": anchor_first,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **kwargs,
    }
    tensors, out = drafter_tensors(), len(KEPT) if reduced else VOCAB
    if kind == "dspark":
        config = {
            "markov_rank": 3,
            "markov_head_type": "vanilla",
            "enable_confidence_head": confidence,
            "confidence_head_with_markov": confidence,
            **config,
        }
        tensors |= markov_tensors(3, out)
        if confidence:
            tensors |= confidence_tensors(35)
    if reduced:
        ids = torch.tensor(KEPT)
        tensors["d2t"] = ids - torch.arange(len(KEPT))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
        # Not the target's rows: so that it shows when they stand in for them.
        tensors["lm_head.weight"] = torch.randn(out, 32, generator=torch.Generator().manual_seed(9))
    return write(folder, config, tensors)


def save_target(folder, **kwargs):
    """The small target as a folder, which speculators reads its frozen parts from."""
    small_target(**kwargs).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder), folder


__all__ = [
    "KEPT",
    "LAYER_IDS",
    "MASK",
    "VOCAB",
    "confidence_tensors",
    "deepspec_folder",
    "drafter_tensors",
    "layer_config",
    "markov_tensors",
    "save_target",
    "small_target",
    "speculators_folder",
    "spread",
    "write",
    "zlab_folder",
]
