# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The Carryover drafter (arXiv 2609.14717) on a DFlash backbone (arXiv 2602.06036).

Notation, used throughout the package:

- `x_a` the anchor, the last committed token, at position `a`; its target states are not known yet;
- `B` proposals per round, `y_1 … y_B`, for positions `a+1 … a+B`; a block has `B + 1` rows, anchor and `B` masks,
  whose row `k` predicts its own position `a+k`; or (`anchor_first`, DSpark) `B` rows, whose row `k` predicts `a+k+1`;
- `h_0 … h_B` target features of the verified rows, row `j` at position `a+j`; `m` proposals are accepted;
- `F(h) = hidden_norm(fc(h))` the fusion; `e` the carry embedding, the only parameter Carryover adds.

One round. *Draft*: every block row attends, without a causal mask, to the committed keys (positions `< a`), the
carried keys of the last round and the block itself. *Verify*: one target pass gives `h_0 … h_B`. *Commit*: rows
`0 … m` become keys and values of `F(h_j)`. *Carry*: rows `m+1 … B` become keys and values of
`hidden_norm(fc(h_j) + e)` at their own positions `a+j`; they replace the carried rows of the round before.

The output never depends on the drafter: the target verifies every proposal, and carried rows live in the drafter's
storage only. Embedding and output head are the target's; they are passed in and never saved.

This file and `configuration_carryover.py` need transformers, torch and safetensors alone.
"""

import importlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import ModelOutput

from .configuration_carryover import CarryoverConfig


# The last report per thread and drafter. Not on the drafter, which stays free to be copied and pickled; a report goes
# with its thread or its drafter.
_REPORTS = threading.local()


@dataclass
class CarryoverDrafterOutput(ModelOutput):
    """
    Output of [`CarryoverDrafter`].

    Args:
        logits (`torch.Tensor` of shape `(num_blocks, block_size, output_vocab_size)`, *optional*):
            Draft logits for positions `a+1 … a+B`, over the draft vocabulary; with `head_weight` only.
        hidden_states (`torch.Tensor` of shape `(num_blocks, block_size, target_hidden_size)`):
            Final states of the rows that predict, the input of the head.
        losses (`torch.Tensor` of shape `(num_blocks, block_size)`, *optional*):
            What `row_loss` made of the logits, if it was given; then `logits` is `None`.
    """

    logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    losses: torch.Tensor | None = None


class CarryoverRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's rotary embedding, with `partial_rotary_factor` respected for the default type too."""

    @staticmethod
    def compute_default_rope_parameters(config: CarryoverConfig, **kwargs) -> tuple[torch.Tensor, float]:
        """Inverse frequencies of shape `(rotary_dim / 2,)` and the attention factor, 1.0."""
        dim = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponent), 1.0

    def _apply(self, fn, recurse=True):
        """Casting the drafter (`drafter.bfloat16()`) leaves the frequencies in float32; moving it moves them."""
        exact = {name: buffer for name, buffer in self.named_buffers() if not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self


def apply_rotary(states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the first `rotary_dim` dimensions of `states` `(batch, heads, rows, head_dim)`; the rest is kept."""
    cos, sin = (part.unsqueeze(1) for part in position_embeddings)
    rotary_dim = cos.shape[-1]
    rotated, kept = states[..., :rotary_dim], states[..., rotary_dim:]
    rotated = rotated * cos + rotate_half(rotated) * sin
    return rotated if kept.shape[-1] == 0 else torch.cat([rotated, kept], dim=-1)


class CarryoverCache:
    """
    Keys and values of one generation: committed rows, carried rows and the block, contiguous and in place.

    Slot `s` of the first two kinds holds position `first_position + s`. A verified window is written in one slice at
    slot `committed`: its accepted rows stay, its rejected rows are the carried rows, and the next window overwrites
    them. The block follows. No more than `committed + 2 (B + 1)` slots are ever in use; the buffers grow by doubling.

    Args:
        config ([`CarryoverConfig`]): Configuration of the drafter.
        dtype (`torch.dtype`), device (`torch.device`): Of the stored keys and values.
        first_position (`int`, *optional*, defaults to 0):
            Position of slot 0. Above 0 when the features of a prefix are unknown (a continued target cache).
        capacity (`int`, *optional*, defaults to 256): Slots allocated at first.
    """

    def __init__(self, config, dtype: torch.dtype, device, first_position: int = 0, capacity: int = 256):
        self.committed = 0
        self.carried = 0
        self.first_position = first_position
        self.window: torch.Tensor | None = None  # fused rows whose keys are not written yet
        self.unfused: torch.Tensor | None = None  # features of a window that is not fused yet
        self.window_start = 0
        self.window_rope: tuple[torch.Tensor, torch.Tensor] | None = None
        self.clock: Any = None  # a `PhaseClock` while times are split
        shape = (1, config.num_key_value_heads, capacity, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in layers]

    @property
    def length(self) -> int:
        """Slots that hold committed or carried rows."""
        return self.committed + self.carried

    @property
    def capacity(self) -> int:
        """Allocated slots per layer."""
        return self.keys[0].shape[2]

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots; the contents are kept."""
        if slots <= self.capacity:
            return
        extra = max(slots, 2 * self.capacity) - self.capacity
        for buffers in (self.keys, self.values):
            for i, old in enumerate(buffers):
                new = old.new_empty((*old.shape[:2], old.shape[2] + extra, old.shape[3]))
                new[:, :, : self.length] = old[:, :, : self.length]
                buffers[i] = new

    def open_window(self, features: torch.Tensor, num_committed: int, room: int) -> None:
        """
        Take in the features `(1, rows, feature_size)` of a verified window, `num_committed` of them committed, the
        others carried, and reserve `room` slots behind them. Fused, the layers write them together with the next
        block.
        """
        self.reserve(self.committed + features.shape[1] + room)
        self.unfused, self.window_start = features, self.committed
        self.committed += num_committed
        self.carried = features.shape[1] - num_committed

    def keys_and_values(self, attention: "CarryoverAttention", hidden_states: torch.Tensor, rope):
        """
        Project the open window and the block `(1, rows, hidden_size)` in one product, write them in one slice, and
        return all keys and values as views. `rope` is that of the block; `window_rope` covers both.
        """
        start = self.length
        if self.window is not None:
            start, rope = self.window_start, self.window_rope
            hidden_states = torch.cat([self.window, hidden_states], dim=1)
        key, value = attention.project_kv(hidden_states, rope)
        end = start + key.shape[2]
        keys, values = self.keys[attention.layer_idx], self.values[attention.layer_idx]
        keys[:, :, start:end] = key
        values[:, :, start:end] = value
        return keys[:, :, :end], values[:, :, :end]


class ParallelMemory:
    """
    What the blocks of many anchors see beside themselves, for training: recorded rows, and own carried rows.

    Args:
        context (`torch.Tensor` of shape `(num_sequences, length, hidden_size)`): Fused features `F(h)`.
        context_rope (`tuple[torch.Tensor, torch.Tensor]`): Cosine and sine of the recorded positions.
        sequence_index (`torch.LongTensor` of shape `(num_blocks,)`): The sequence of each block.
        carried (`torch.Tensor` of shape `(num_blocks, num_carried, hidden_size)`, *optional*): Fused carried rows.
        carried_rope (`tuple[torch.Tensor, torch.Tensor]`, *optional*): Cosine and sine of their positions.
        keep (`bool`, *optional*, defaults to `False`):
            Keep the recorded rows' keys and values for the next call, for evaluation without gradient.
    """

    def __init__(self, context, context_rope, sequence_index, carried=None, carried_rope=None, keep: bool = False):
        self.context, self.context_rope, self.sequence_index = context, context_rope, sequence_index
        self.carried, self.carried_rope = carried, carried_rope
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = {} if keep else None

    def keys_and_values(self, attention: "CarryoverAttention", hidden_states: torch.Tensor, rope):
        """Keys and values `(num_blocks, kv_heads, length + num_carried + block rows, head_dim)`."""
        # index_select: its backward is an index_add, much faster than that of advanced indexing.
        context = self._context(attention)
        parts = [tuple(states.index_select(0, self.sequence_index) for states in context)]
        if self.carried is not None:
            parts.append(attention.project_kv(self.carried, self.carried_rope))
        parts.append(attention.project_kv(hidden_states, rope))
        return torch.cat([k for k, _ in parts], dim=2), torch.cat([v for _, v in parts], dim=2)

    def _context(self, attention: "CarryoverAttention") -> tuple[torch.Tensor, torch.Tensor]:
        if self.kept is None:
            return attention.project_kv(self.context, self.context_rope)
        if attention.layer_idx not in self.kept:
            self.kept[attention.layer_idx] = attention.project_kv(self.context, self.context_rope)
        return self.kept[attention.layer_idx]


class CarryoverAttention(nn.Module):
    """Qwen3 attention whose keys come from target features and the block; never causal inside the block."""

    def __init__(self, config: CarryoverConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        self.is_causal = False
        self.heads_per_kv = config.num_attention_heads // config.num_key_value_heads
        # Query heads that share a key head are folded into the query rows, so no backend has to repeat the keys.
        self.num_key_value_groups = 1
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        # Not -1: a window may have no rows (a prompt that is masked altogether).
        return states.view(*states.shape[:-1], states.shape[-1] // self.head_dim, self.head_dim)

    def project_kv(self, states: torch.Tensor, rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, rotated) and values `(batch, kv_heads, rows, head_dim)` of states `(batch, rows, hidden)`."""
        value = self._heads(self.v_proj(states)).transpose(1, 2)
        key = self.k_norm(self._heads(self.k_proj(states))).transpose(1, 2)
        return apply_rotary(key, rope).to(value.dtype), value

    def forward(self, hidden_states: torch.Tensor, rope, memory, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(num_blocks, block_rows, hidden_size)`): The block rows.
            rope (`tuple[torch.Tensor, torch.Tensor]`): Cosine and sine of the block positions.
            memory ([`CarryoverCache`] or [`ParallelMemory`]): What the block sees beside itself.
            attention_mask (`torch.Tensor` of shape `(num_blocks, 1, block_rows, keys)`, *optional*): Added to
                the scores.
        """
        blocks, rows = hidden_states.shape[:2]
        key, value = memory.keys_and_values(self, hidden_states, rope)
        query = self.q_norm(self._heads(self.q_proj(hidden_states))).transpose(1, 2)
        query = apply_rotary(query, rope).to(value.dtype)

        query = query.reshape(blocks, -1, self.heads_per_kv * rows, self.head_dim)
        if attention_mask is not None and self.heads_per_kv > 1:
            attention_mask = attention_mask.repeat(1, 1, self.heads_per_kv, 1)
        backend = self.config._attn_implementation
        if backend == "flex_attention" and attention_mask is not None and query.device.type == "cpu":
            # torch's compiled flex kernel for CPU writes out of bounds when scores are modified (seen with torch 2.13:
            # the process dies). The result is the same.
            backend = "sdpa"
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        output, _ = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
        )
        # (blocks, groups * rows, kv_heads, head_dim) -> (blocks, rows, kv_heads * groups * head_dim)
        output = output.view(blocks, self.heads_per_kv, rows, -1, self.head_dim).permute(0, 2, 3, 1, 4)
        return self.o_proj(output.reshape(blocks, rows, -1))


class CarryoverDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm Qwen3 layer around [`CarryoverAttention`]."""

    def __init__(self, config: CarryoverConfig, layer_idx: int):
        super().__init__()
        self.self_attn = CarryoverAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, rope, memory, attention_mask=None):
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), rope, memory, attention_mask
        )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class MarkovEmbedding(nn.Embedding):
    """`W1`. A class of its own so that the initialisation, which is asked about modules with parameters, knows it."""


class MarkovProjection(nn.Linear):
    """`W2`."""


class CarryProjection(nn.Linear):
    """Linear map from a carried token's embedding; beside the states it starts at zero, and changes nothing yet."""


class MarkovHead(nn.Module):
    """Low-rank bias from the previous token, `W2 · W1[y_{k-1}]` (DSpark, arXiv 2607.05147)."""

    def __init__(self, config: CarryoverConfig):
        super().__init__()
        self.markov_w1 = MarkovEmbedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = MarkovProjection(config.markov_rank, config.output_vocab_size, bias=False)

    def forward(self, previous_ids: torch.LongTensor) -> torch.Tensor:
        """Bias `(..., output_vocab_size)` for the successors of target tokens `previous_ids` `(...)`."""
        return self.markov_w2(self.markov_w1(previous_ids))


class CarryoverPreTrainedModel(PreTrainedModel):
    """Weight initialisation and what the attention backends need to know."""

    config_class = CarryoverConfig
    base_model_prefix = "model"
    main_input_name = "anchor_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CarryoverDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        if isinstance(module, MarkovEmbedding):
            # Unit variance: with both factors small the product would take hundreds of steps to grow.
            init.normal_(module.weight, mean=0.0, std=1.0)
            return
        if isinstance(module, MarkovProjection):
            init.zeros_(module.weight)  # a fresh Markov head changes nothing
            return
        if isinstance(module, CarryProjection) and self.config.carries_states:
            init.zeros_(module.weight)
            return
        super()._init_weights(module)
        if isinstance(module, CarryoverDrafter):
            if module.carry_embedding is not None:
                init.zeros_(module.carry_embedding)
            if module.carry_gate is not None:
                init.zeros_(module.carry_gate)
            if module.lookup_embedding is not None:
                init.ones_(module.lookup_scale)
                init.zeros_(module.lookup_embedding)
                init.zeros_(module.lookup_gate)
            if module.mask_embedding is not None:
                init.normal_(module.mask_embedding, mean=0.0, std=self.config.initializer_range)
            if module.head_weight is not None:
                init.zeros_(module.head_weight)
            if module.d2t is not None:
                init.zeros_(module.d2t)
                init.copy_(module.t2d, torch.arange(self.config.vocab_size) < self.config.draft_vocab_size)


# Arguments of `from_pretrained` that say where a checkpoint is.
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

# What a drafter with carry has beyond one without.
_CARRY_TENSORS = {"carry_embedding", "carry_gate", "carry_proj.weight"}
# And one that looks up, beyond one that does not.
_LOOKUP_TENSORS = {"lookup_embedding", "lookup_gate", "lookup_scale"}


# What reading a damaged file raises; each message is passed on. Others are ours, or the file system's.
_UNREADABLE = (SafetensorError, KeyError, TypeError, AttributeError, IndexError, RecursionError, ArithmeticError)


def _check_shard_names(folder, subfolder: str, variant: str | None) -> None:
    """Raise a `ValueError` when the index of a local folder names files outside of it; the Hub's client checks its."""
    name = "model.safetensors.index.json" if variant is None else f"model.safetensors.index.{variant}.json"
    if folder is None or not (path := Path(folder, subfolder, name)).is_file():
        return
    try:
        files = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no index of a sharded checkpoint ({type(error).__name__}: {error}). Get the folder again."
        ) from error
    # Both separators, whatever the system: the same folder may be read on another one.
    good = {
        file for file in files if isinstance(file, str) and file.endswith(".safetensors") and not {*file} & {*"/\\"}
    }
    if good != files:
        wrong = _listing({repr(file) for file in files - good})
        raise ValueError(f"{path} names {wrong}, expected safetensors files of its own folder. Don't load it.")


def _listing(names: set[str], most: int = 20) -> str:
    """The first `most` names in order, and how many follow."""
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


def _check_loading(model: "CarryoverDrafter", info: dict, name, fresh: set[str], may_differ: bool = False) -> None:
    """
    Raise a `ValueError` when a checkpoint lacked a tensor, but for `fresh` ones, had others, or unless they
    `may_differ` had some of another shape.
    """
    missing, unknown = set(info["missing_keys"]) - fresh, set(info["unexpected_keys"])
    if not model.config.carry:
        unknown -= _CARRY_TENSORS
    if not model.config.points_at_carried:
        unknown -= {"carry_gate"}
    if not model.config.lookup_ngram_size:
        unknown -= _LOOKUP_TENSORS
    problems = []
    shapes = {f"{key} is {tuple(there)}, not {tuple(here)}" for key, there, here in info["mismatched_keys"]}
    if shapes and not may_differ:
        problems.append(f"{len(shapes)} tensors in it have another shape than its config says: {_listing(shapes)}.")
    if missing:
        problems.append(f"{len(missing)} of the drafter's tensors are not in it: {_listing(missing)}.")
    if unknown:
        problems.append(f"{len(unknown)} tensors in it are ones the drafter does not know: {_listing(unknown)}.")
    if problems:
        raise ValueError(
            f"The checkpoint {name} does not hold this drafter. {' '.join(problems)} "
            "Load a folder that `CarryoverDrafter.save_pretrained` wrote, with its own config."
        )


def _of_the_package(module: str, name: str):
    """
    Something of the installed package. Not by an import statement: transformers refuses remote code that imports what
    is not installed, wherever the statement stands.
    """
    return getattr(importlib.import_module(f"hf_carryover.{module}"), name)


def _other_loader(name, hub: dict):
    """What loads `name` when it is no Carryover checkpoint but one the package can read; `None` otherwise."""
    try:
        from hf_carryover.convert.loading import find_loader
    except ImportError:  # a folder loaded with remote code alone
        return None
    return find_loader(name, hub)


class CarryoverDrafter(CarryoverPreTrainedModel):
    """
    Block drafter for `model.generate(..., assistant_model=drafter)`.

    Args:
        config ([`CarryoverConfig`]): The configuration. With `carry=False` this is the plain DFlash drafter
            (`markov_rank=0`) or the Markov drafter.

    Attributes:
        last_report ([`GenerationReport`]): Report of the calling thread's last `generate` with this drafter.

    Example:

    ```python
    >>> drafter = CarryoverDrafter.from_pretrained("model_cards/smollm2-135m-markov-carryover")
    >>> model.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
    >>> drafter.last_report
    ```
    """

    is_carryover_drafter = True

    def __init__(self, config: CarryoverConfig):
        super().__init__(config)
        d, d_target = config.hidden_size, config.target_hidden_size
        self.fc = nn.Linear(config.feature_size, d, bias=False)
        self.hidden_norm = Qwen3RMSNorm(d, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(CarryoverDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(d, eps=config.rms_norm_eps)
        self.rotary_emb = CarryoverRotaryEmbedding(config)
        self.embed_proj = nn.Linear(d_target, d, bias=False) if d != d_target else None
        self.head_proj = nn.Linear(d, d_target, bias=False) if d != d_target else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.carry_embedding = nn.Parameter(torch.zeros(d)) if config.carry else None
        self.carry_proj = CarryProjection(d_target, d, bias=False) if config.carried_token else None
        pointing = (config.block_size, d_target)
        self.carry_gate = nn.Parameter(torch.zeros(pointing)) if config.points_at_carried else None
        self.mask_embedding = nn.Parameter(torch.empty(d_target)) if config.mask_token_id is None else None
        looked_up = config.lookup_ngram_size
        self.lookup_scale = nn.Parameter(torch.ones(d_target)) if looked_up else None
        self.lookup_embedding = nn.Parameter(torch.zeros(looked_up, d_target)) if looked_up else None
        self.lookup_gate = nn.Parameter(torch.zeros(looked_up, d_target)) if looked_up else None
        head = torch.zeros(config.output_vocab_size, d_target) if config.own_head else None
        self.register_buffer("head_weight", head)  # frozen: neither an optimizer nor PEFT sees a buffer
        reduced = config.draft_vocab_size is not None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if reduced else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if reduced else None)
        self.gradient_checkpointing = False
        self.compiled_draft = None
        self.post_init()
        _install_generation_hooks()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info: bool = False, **kwargs):
        """
        Like the parent, but a checkpoint that does not hold exactly this drafter's tensors is an error: transformers
        would draw the missing ones at random and go on.

        The exceptions are what carry adds (the carry embedding, the map of carried tokens, the gate of the pointer)
        and what looking up adds. They start anew when `carry=True`, `carry_pointer=True` or a `lookup_ngram_size` is
        asked of a checkpoint that was saved without, and are left out when one that has them is asked to do without.

        With the package installed, folders and repositories of other DFlash drafters (z-lab, DeepSpec, speculators)
        are read as well, carry off unless asked for, and adapters of drafters together with their base.
        Weights are read from safetensors alone, and from no file outside the folder.

        Raises:
            ValueError: Listing the missing, the unknown and the misshapen tensors, or saying what can't be read.
        """
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        if kwargs.setdefault("use_safetensors", True) is not True:
            raise ValueError(
                f"`use_safetensors` must be True, got {kwargs['use_safetensors']!r}: weights in other files are "
                "unpickled, which can run code."
            )
        load = None if "config" in kwargs else _other_loader(pretrained_model_name_or_path, hub)
        if load is not None:
            return load(cls, output_loading_info=output_loading_info, **kwargs)
        may_differ = kwargs.pop("ignore_mismatched_sizes", False)
        _check_shard_names(pretrained_model_name_or_path, kwargs.get("subfolder") or "", kwargs.get("variant"))
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *model_args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are listed below, with their names
                **kwargs,
            )
        except _UNREADABLE as error:
            raise ValueError(
                f"The checkpoint {pretrained_model_name_or_path} can't be read ({type(error).__name__}: {error}). Its "
                "files are damaged or not a drafter's, or an argument is not one of `from_pretrained`."
            ) from error
        fresh: set[str] = set()
        added = _CARRY_TENSORS | _LOOKUP_TENSORS
        if set(info["missing_keys"]) & added and pretrained_model_name_or_path is not None:
            stored, _ = cls.config_class.get_config_dict(pretrained_model_name_or_path, **hub)
            fresh |= _CARRY_TENSORS if stored.get("carry") is False else set()
            fresh |= set() if stored.get("carry") and stored.get("carry_pointer") else {"carry_gate"}
            fresh |= set() if stored.get("lookup_ngram_size") else _LOOKUP_TENSORS
        _check_loading(model, info, pretrained_model_name_or_path, fresh, may_differ)
        model.check_draft_vocabulary()
        return (model, info) if output_loading_info else model

    @classmethod
    def from_tensors(cls, config, tensors: dict, name: str = "", output_loading_info: bool = False, **kwargs):
        """
        A drafter of named tensors that were read elsewhere, as strict as [`~CarryoverDrafter.from_pretrained`]; what
        carry and looking up add may be missing.

        Args:
            config ([`CarryoverConfig`]): The configuration.
            tensors (`dict[str, torch.Tensor]`): The state, by our names.
            name (`str`, *optional*): Where it is from, for messages.
            kwargs: Of `from_pretrained`: `dtype`, `device_map`, `attn_implementation`, ...
        """
        kwargs = {key: value for key, value in kwargs.items() if key not in _HUB_ARGUMENTS}
        model, info = super().from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            output_loading_info=True,
            **{**kwargs, "ignore_mismatched_sizes": True},  # they are listed below, with their names
        )
        _check_loading(model, info, name, fresh=_CARRY_TENSORS | _LOOKUP_TENSORS)
        model.check_draft_vocabulary()
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, *args, **kwargs):
        """
        Like the parent; a drafter with an adapter writes the adapter, as PEFT does. A link in the folder (of the Hub's
        cache) is replaced, its file left as it is.
        """
        if Path(save_directory).is_dir():
            for path in Path(save_directory).iterdir():
                if path.is_symlink() and path.name.endswith((".safetensors", ".json", ".py")):
                    path.unlink()
        if not getattr(self, "peft_config", None):
            return super().save_pretrained(save_directory, *args, **kwargs)
        save_adapter = _of_the_package("adapters", "save_adapter")
        if kwargs.get("is_main_process", True):
            save_adapter(self, save_directory, kwargs.get("state_dict"))

    def compile_draft(self, **options) -> "CarryoverDrafter":
        """
        Compile the draft step of `generate` at its first use; returns the drafter. `drafter.compiled_draft = None`
        undoes it. Batches are not compiled, and a compilation that fails is reported once and done without.

        Args:
            options: Of `torch.compile`. With `mode="reduce-overhead"` on a GPU the step has fixed shapes and is
                recorded as CUDA graphs.
        """
        self.compiled_draft = _of_the_package("compiled", "CompiledDraft")(**options)
        return self

    def merge_and_unload(self) -> "CarryoverDrafter":
        """Merge the adapter into the weights and take it out, in place; returns the drafter."""
        return _of_the_package("adapters", "remove_adapter")(self, merge=True)

    def unload(self) -> "CarryoverDrafter":
        """Take the adapter out and leave the base's weights as they were, in place; returns the drafter."""
        return _of_the_package("adapters", "remove_adapter")(self, merge=False)

    def __getattr__(self, name: str):
        # The first thing `generate` asks of an assistant it does not know: without the hooks it must not go on.
        if name == "generation_config":
            raise AttributeError(
                "A Carryover drafter has no `generation_config`: it can't generate by itself. To use it as assistant, "
                "`pip install hf_carryover` and `import hf_carryover` before loading it."
            )
        return super().__getattr__(name)

    def get_input_embeddings(self):
        """`None`: the embedding is the target's."""
        return None

    def get_output_embeddings(self):
        """`None`: the head is the target's."""
        return None

    @property
    def last_report(self):
        """Report of the last `generate` of the calling thread, `None` before the first."""
        return getattr(_REPORTS, "of", {}).get(self)

    def set_report(self, report) -> None:
        """Make `report` the calling thread's `last_report`."""
        if not hasattr(_REPORTS, "of"):
            _REPORTS.of = WeakKeyDictionary()
        _REPORTS.of[self] = report

    def draft_token_ids(self) -> torch.LongTensor | None:
        """Target ids of the draft vocabulary, shape `(draft_vocab_size,)`; `None` when all tokens are drafted."""
        return None if self.d2t is None else self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def set_draft_vocabulary(self, token_ids: torch.LongTensor) -> None:
        """
        Set the reduced draft vocabulary.

        Args:
            token_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`): Increasing target ids.

        Raises:
            ValueError: If the number of ids is not `config.draft_vocab_size`, or they are not increasing target ids.
        """
        token_ids = torch.as_tensor(token_ids, dtype=torch.long, device=self.device)
        expected = self.config.draft_vocab_size
        if expected is None or token_ids.shape != (expected,):
            raise ValueError(
                f"Expected token ids of shape ({expected},) (`draft_vocab_size`), got {tuple(token_ids.shape)}."
            )
        self._check_token_ids(token_ids)
        self.d2t.copy_(token_ids - torch.arange(expected, device=self.device))
        self.t2d.zero_()
        self.t2d[token_ids] = True

    def _check_token_ids(self, token_ids: torch.LongTensor) -> None:
        if token_ids[0] < 0 or token_ids[-1] >= self.config.vocab_size or not bool((token_ids.diff() > 0).all()):
            raise ValueError(
                f"Draft token ids must increase within 0 ... {self.config.vocab_size - 1}, got "
                f"{token_ids.tolist()[:8]} ..."
            )

    def check_draft_vocabulary(self) -> None:
        """Raise a `ValueError` when the tables `d2t` and `t2d`, as loaded, are no draft vocabulary."""
        token_ids = self.draft_token_ids()
        if token_ids is None or token_ids.is_meta:
            return
        self._check_token_ids(token_ids)
        if not torch.equal(self.t2d.nonzero().flatten(), token_ids):
            raise ValueError("The tables `d2t` and `t2d` name different draft vocabularies. Get the checkpoint again.")

    def fuse(
        self,
        features: torch.Tensor,
        carried: torch.Tensor | None = None,
        carried_embeds: torch.Tensor | None = None,
        clock=None,
    ) -> torch.Tensor:
        """
        `hidden_norm(fc(h))`, and `hidden_norm(fc(h) + e)` where `carried`; there with `carry_from` other than
        `"states"` plus a map of the token's embedding, and without `fc(h)` if the states are no part of it.

        Args:
            features (`torch.Tensor` of shape `(batch, rows, feature_size)`): Concatenated target layer outputs.
            carried (`torch.BoolTensor`, broadcastable to `(batch, rows)`, *optional*): Rejected rows.
            carried_embeds (`torch.Tensor` of shape `(batch, rows, target_hidden_size)`, *optional*):
                Target embeddings of the carried tokens; what stands in other rows has no effect.
            clock ([`~hf_carryover.timing.PhaseClock`], *optional*): Told where projection ends and carry begins.

        Returns:
            `torch.Tensor` of shape `(batch, rows, hidden_size)`.
        """
        fused = self.fc(features.to(self.fc.weight.dtype))
        if clock is not None:
            clock.lap("projection")
        if carried is not None and self.carry_embedding is not None:
            where, added = carried.unsqueeze(-1), self.carry_embedding.to(fused.dtype)
            if self.carry_proj is not None:
                if carried_embeds is None:
                    raise ValueError(f'`carried_embeds` are required: `carry_from` is "{self.config.carry_from}".')
                added = added + self.carry_proj(carried_embeds.to(self.carry_proj.weight.dtype)).to(fused.dtype)
            base = fused if self.config.carries_states else fused.masked_fill(where, 0.0)
            fused = base + where.to(fused.dtype) * added
            if clock is not None:
                clock.lap("carry")
        return self.hidden_norm(fused)

    def block_states(
        self, anchor_embeds: torch.Tensor, mask_embeds: torch.Tensor | None, hints: dict | None = None
    ) -> torch.Tensor:
        """
        Block input `[emb(x_a), mask, …, mask]`, `(num_blocks, rows, hidden)`, from anchors `(num_blocks, d_t)`. With
        `config.lookup_ngram_size` the row that predicts `a + k` gets `s ⊙ emb(c_k) + v_n` on top, `c_1 … c_B` being
        the tokens that were looked up and `n` the length of the suffix that was found; nothing where `n` is 0.
        [`CarryoverDrafter.point`] is what becomes of them behind the layers.

        Args:
            anchor_embeds (`torch.Tensor` of shape `(num_blocks, target_hidden_size)`): Of the anchors.
            mask_embeds (`torch.Tensor` of shape `(target_hidden_size,)`, *optional*): Of the mask token.
            hints (`dict`, *optional*): Of [`~hf_carryover.lookup.lookup_hints`]: `lookup_embeds`, target embeddings of
                `c_1 … c_B` `(num_blocks, block_size, target_hidden_size)`, and `lookup_sizes`, `n` `(num_blocks,)`.
        """
        mask = self.mask_embedding if self.mask_embedding is not None else mask_embeds
        if mask is None:
            raise ValueError(
                f"`mask_embeds` is required: the config names mask token {self.config.mask_token_id}, whose embedding "
                "is the target's."
            )
        masks = mask.to(anchor_embeds.dtype).expand(anchor_embeds.shape[0], self.config.block_rows - 1, -1)
        block = torch.cat([anchor_embeds.unsqueeze(1), masks], dim=1).to(self.fc.weight.dtype)
        if self.lookup_embedding is not None:
            if not hints or "lookup_embeds" not in hints:
                raise ValueError(
                    "`lookup_embeds`, `lookup_rows` and `lookup_sizes` are required: the drafter looks up n-grams of "
                    f"up to {self.config.lookup_ngram_size} tokens. See `hf_carryover.lookup.lookup_hints`."
                )
            embeds, sizes = hints["lookup_embeds"], hints["lookup_sizes"]
            found = self.lookup_embedding[(sizes - 1).clamp(min=0)].unsqueeze(1)
            added = embeds.to(block.dtype) * self.lookup_scale + found
            added = torch.where((sizes > 0)[:, None, None], added, 0.0)
            block = block + nn.functional.pad(added, (0, 0, block.shape[1] - added.shape[1], 0))
        return block if self.embed_proj is None else self.embed_proj(block)

    def remember(self, features: torch.Tensor, keep: bool = True) -> ParallelMemory:
        """
        Fused recorded features `(num_sequences, length, feature_size)`, for one or, with `keep`, several calls of
        `forward` on the same sequences.
        """
        context = self.fuse(features)
        positions = torch.arange(features.shape[1], device=context.device).unsqueeze(0)
        return ParallelMemory(context, self.rotary_emb(context, positions), None, keep=keep)

    def run_layers(
        self,
        hidden_states: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        memory,
        masks: dict,
        hints: dict | None = None,
    ):
        """
        All layers, the final norm and `head_proj`, over a block, `rope` being the cosine and sine of its positions;
        returns the rows that predict, `(num_blocks, B, d_t)`: the masks, or with `anchor_first` all. `hints` are those
        of [`~hf_carryover.lookup.lookup_hints`].
        """
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(hidden_states, rope, memory, masks[layer_type])
        hidden_states = self.norm(hidden_states[:, -self.config.block_size :])
        hidden_states = hidden_states if self.head_proj is None else self.head_proj(hidden_states)
        return self.point(hidden_states, hints or {})

    def point(self, hidden_states: torch.Tensor, hints: dict) -> torch.Tensor:
        """
        Point at tokens that something else says come next: `x_k + <g, x_k> w(c_k) / |w(c_k)|²`, `w(c)` being the
        head's row of token `c`. The logit of `c_k` changes by `<g, x_k>`, those of other tokens by as much as their
        rows are alike. How much depends on the state, and so on the text.

        With `config.lookup_ngram_size`, `c_1 … c_B` are the tokens that were looked up, and there is a gate `g` for
        every length of the suffix. With `config.carry_pointer`, `c_k` is the target's likeliest token behind the
        rejected row that now stands in front of `a + k`, and there is a gate for every `k`.

        Args:
            hidden_states (`torch.Tensor` of shape `(num_blocks, block_size, target_hidden_size)`): `x_1 … x_B`.
            hints (`dict`): Of [`~hf_carryover.lookup.lookup_hints`] `lookup_rows`, `w(c) / |w(c)|²` of shape
                `(num_blocks, block_size, target_hidden_size)`, and `lookup_sizes`; of
                [`~hf_carryover.lookup.carried_hints`] `carry_rows`, of the same shape. Rows of 0 change nothing.
        """
        pointers = []
        if self.lookup_gate is not None:
            gate = self.lookup_gate[(hints["lookup_sizes"] - 1).clamp(min=0)]
            pointers.append((gate.unsqueeze(1), hints["lookup_rows"]))
        if self.carry_gate is not None and "carry_rows" in hints:
            pointers.append((self.carry_gate, hints["carry_rows"]))
        pointed = hidden_states
        for gate, rows in pointers:
            trust = (hidden_states * gate.to(hidden_states.dtype)).sum(dim=-1, keepdim=True)
            pointed = pointed + trust * rows.to(hidden_states.dtype)
        return pointed

    def additive_masks(self, visible, query_positions, key_positions, dtype, in_block=None):
        """
        Additive masks per layer type, `dict[str, torch.Tensor | None]`, from `visible` `(blocks, 1, keys)` or `None`
        (all), query positions `(blocks, rows)`, key positions `(blocks, keys)` and which keys are the block's own,
        `in_block` `(blocks, 1, keys)`: by default the last `rows`.
        """
        masks: dict[str, torch.Tensor | None] = {}
        rows = query_positions.shape[1]
        if in_block is None:
            keys = key_positions.shape[1]
            in_block = torch.arange(keys, device=key_positions.device) >= keys - rows
        for layer_type in set(self.config.layer_types):
            seen, sliding = visible, layer_type == "sliding_attention"
            if sliding:
                near = self._near(query_positions, key_positions, in_block)
                seen = near if seen is None else near & seen
            if self.config.block_attention == "causal" or (sliding and self.config.block_attention != "bidirectional"):
                past = ~in_block | (key_positions.unsqueeze(1) <= query_positions.unsqueeze(2))
                seen = past if seen is None else past & seen
            if seen is None:
                masks[layer_type] = None
                continue
            seen = seen.expand(query_positions.shape[0], rows, key_positions.shape[1])
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            masks[layer_type] = mask.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)
        return masks

    def _near(self, query_positions, key_positions, in_block) -> torch.Tensor:
        """What the window of a sliding layer shows, `(blocks, rows, keys)`."""
        keys, window = key_positions.unsqueeze(1), self.config.sliding_window
        if self.config.sliding_window_from == "anchor":
            near = in_block | (keys >= query_positions[:, :1].unsqueeze(2) - window)
            return near.expand(-1, query_positions.shape[1], -1)
        return keys > query_positions.unsqueeze(2) - window

    def forward(
        self,
        anchor_embeds: torch.Tensor | None = None,
        anchor_positions: torch.LongTensor | None = None,
        features: torch.Tensor | None = None,
        sequence_index: torch.LongTensor | None = None,
        carried_features: torch.Tensor | None = None,
        carried_positions: torch.LongTensor | None = None,
        carried_mask: torch.BoolTensor | None = None,
        carried_embeds: torch.Tensor | None = None,
        mask_embeds: torch.Tensor | None = None,
        lookup_embeds: torch.Tensor | None = None,
        lookup_rows: torch.Tensor | None = None,
        lookup_sizes: torch.LongTensor | None = None,
        carry_rows: torch.Tensor | None = None,
        previous_ids: torch.LongTensor | None = None,
        head_weight: torch.Tensor | None = None,
        head_bias: torch.Tensor | None = None,
        memory: ParallelMemory | None = None,
        row_loss: Callable[[torch.Tensor, slice], torch.Tensor] | None = None,
        max_logits: int | None = None,
        **kwargs,
    ) -> CarryoverDrafterOutput:
        """
        Draft the blocks of many anchors of many recorded sequences at once (training, evaluation).

        A block at anchor `a` sees recorded rows at positions `< a` of its own sequence, its own carried rows where
        `carried_mask`, and itself; never another block.

        Args:
            anchor_embeds (`torch.Tensor` of shape `(num_blocks, target_hidden_size)`):
                Target embeddings of the anchor tokens.
            anchor_positions (`torch.LongTensor` of shape `(num_blocks,)`): Positions `a`.
            features (`torch.Tensor` of shape `(num_sequences, length, feature_size)`):
                Target features of the recorded sequences; rows behind a sequence's end are never seen.
            sequence_index (`torch.LongTensor` of shape `(num_blocks,)`): The sequence of each block.
            carried_features (`torch.Tensor` of shape `(num_blocks, num_carried, feature_size)`, *optional*):
                Target features of rejected rows.
            carried_positions (`torch.LongTensor` of shape `(num_blocks, num_carried)`, *optional*): Theirs.
            carried_mask (`torch.BoolTensor` of shape `(num_blocks, num_carried)`, *optional*): Which exist.
            carried_embeds (`torch.Tensor` of shape `(num_blocks, num_carried, target_hidden_size)`, *optional*):
                Target embeddings of the tokens in them; needed when `config.carry_from` is not `"states"`.
            mask_embeds (`torch.Tensor` of shape `(target_hidden_size,)`, *optional*):
                Target embedding of `config.mask_token_id`.
            lookup_embeds, lookup_rows, lookup_sizes (*optional*):
                See [`CarryoverDrafter.block_states`] and [`CarryoverDrafter.point`]; needed with
                `config.lookup_ngram_size`.
            carry_rows (`torch.Tensor` of shape `(num_blocks, block_size, target_hidden_size)`, *optional*):
                See [`CarryoverDrafter.point`]; with `config.carry_pointer`.
            previous_ids (`torch.LongTensor` of shape `(num_blocks, block_size)`, *optional*):
                Tokens before each predicted position, `x_a … x_{a+B-1}`; needed for logits with a Markov head.
            head_weight (`torch.Tensor` of shape `(output_vocab_size, target_hidden_size)`, *optional*):
                Rows of the target's head. Without it no logits are returned.
            head_bias (`torch.Tensor` of shape `(output_vocab_size,)`, *optional*): Of the target's head.
            memory ([`ParallelMemory`], *optional*): Of [`CarryoverDrafter.remember`], instead of `features`.
            row_loss (`Callable`, *optional*):
                Takes logits `(rows, output_vocab_size)` and which rows of all `num_blocks * block_size` they are, and
                returns `(rows,)` losses.
            max_logits (`int`, *optional*):
                With `row_loss`, how many logits may exist at a time. Where there are more, the head runs over parts of
                the rows, and once more in the backward pass.

        Returns:
            [`CarryoverDrafterOutput`]
        """
        if anchor_embeds is None or (features is None and memory is None):
            raise ValueError(
                "A Carryover drafter drafts from target features, not from token ids. Use `import hf_carryover` and "
                "`model.generate(..., assistant_model=drafter)`, or `CarryoverTrainer` to train it."
            )
        hints = {"lookup_embeds": lookup_embeds, "lookup_rows": lookup_rows, "lookup_sizes": lookup_sizes}
        hints = {name: value for name, value in {**hints, "carry_rows": carry_rows}.items() if value is not None}
        block = self.block_states(anchor_embeds, mask_embeds, hints)
        offsets = torch.arange(block.shape[1], device=block.device)
        query_positions = anchor_positions.unsqueeze(1) + offsets
        if memory is None:
            memory = self.remember(features, keep=False)
        memory.sequence_index, memory.carried = sequence_index, None
        context_positions = torch.arange(memory.context.shape[1], device=block.device).unsqueeze(0)
        key_positions = [context_positions.expand(block.shape[0], -1)]
        visible = [context_positions < anchor_positions.unsqueeze(1)]
        if carried_features is not None:
            memory.carried = self.fuse(carried_features, torch.ones_like(carried_mask), carried_embeds)
            memory.carried_rope = self.rotary_emb(memory.carried, carried_positions)
            key_positions.append(carried_positions)
            visible.append(carried_mask)
        key_positions.append(query_positions)
        visible.append(torch.ones_like(query_positions, dtype=torch.bool))
        masks = self.additive_masks(
            torch.cat(visible, dim=1).unsqueeze(1), query_positions, torch.cat(key_positions, dim=1), block.dtype
        )
        hidden = self.run_layers(block, self.rotary_emb(block, query_positions), memory, masks, hints)
        if head_weight is None:
            return CarryoverDrafterOutput(hidden_states=hidden)
        if row_loss is not None:
            losses = self._row_losses(hidden, head_weight, head_bias, previous_ids, row_loss, max_logits)
            return CarryoverDrafterOutput(hidden_states=hidden, losses=losses)
        logits = self.logits(hidden, head_weight, head_bias, previous_ids)
        return CarryoverDrafterOutput(logits=logits, hidden_states=hidden)

    def _row_losses(self, hidden_states, head_weight, head_bias, previous_ids, row_loss, max_logits) -> torch.Tensor:
        """`row_loss` of all rows `(num_blocks, block_size)`, without more than `max_logits` logits at a time."""
        flat = hidden_states.flatten(0, 1)
        previous = None if previous_ids is None else previous_ids.flatten()
        most = len(flat) if max_logits is None else max(1, max_logits // head_weight.shape[0])

        def losses_of(states: torch.Tensor, rows: slice) -> torch.Tensor:
            part = None if previous is None else previous[rows]
            return row_loss(self.logits(states, head_weight, head_bias, part), rows)

        parts = [slice(start, min(start + most, len(flat))) for start in range(0, len(flat), most)]
        if len(parts) == 1 or not torch.is_grad_enabled():
            losses = [losses_of(flat[rows], rows) for rows in parts]
        else:
            losses = [checkpoint(losses_of, flat[rows], rows, use_reentrant=False) for rows in parts]
        return torch.cat(losses).view(hidden_states.shape[:2])

    def logits(self, hidden_states, head_weight, head_bias=None, previous_ids=None) -> torch.Tensor:
        """
        Draft logits of final states `(..., target_hidden_size)`: the head, its scale and soft cap, and the Markov bias
        when `previous_ids` `(...)` are given.
        """
        # A 2-D product: batched over more dimensions it falls off the fast path on CPU.
        flat = hidden_states.reshape(-1, hidden_states.shape[-1]).to(head_weight.dtype)
        logits = nn.functional.linear(flat, head_weight, head_bias)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.config.logit_softcapping is not None:
            logits = torch.tanh(logits / self.config.logit_softcapping) * self.config.logit_softcapping
        if self.markov_head is not None and previous_ids is not None:
            logits = logits + self.markov_head(previous_ids.reshape(-1))
        return logits.view(*hidden_states.shape[:-1], -1)

    @torch.no_grad()
    def commit_window(
        self,
        cache: CarryoverCache,
        features: torch.Tensor,
        num_committed: int,
        carried_embeds: torch.Tensor | None = None,
        fuse: bool = True,
    ) -> None:
        """
        Steps 3 and 4 of a round: fuse the verified window once. Its keys are written together with the next block's.

        Args:
            cache ([`CarryoverCache`]): Storage of this generation.
            features (`torch.Tensor` of shape `(1, rows, feature_size)`):
                Target features of all verified rows, accepted and rejected, from position `cache.committed` on.
            num_committed (`int`): Leading rows that are committed. The others are carried if `config.carry`.
            carried_embeds (`torch.Tensor` of shape `(1, rows, target_hidden_size)`, *optional*):
                Target embeddings of the tokens in the carried rows, if `config.carry_from` has tokens.
            fuse (`bool`, *optional*, defaults to `True`):
                `False` leaves fusing the window to the next draft, for drafters that carry states only.
        """
        if not self.config.carry:
            features = features[:, :num_committed]
        if cache.unfused is not None:
            self._fuse_window(cache)
        if cache.window is not None:  # nothing was drafted since the last window: it is written alone
            self._write_window(cache, cache.window[:, :0])
        cache.open_window(features, num_committed, room=self.config.block_size + 1)
        if fuse:
            self._fuse_window(cache, carried_embeds)

    def _fuse_window(self, cache: CarryoverCache, carried_embeds: torch.Tensor | None = None) -> None:
        """Fuse the open window."""
        features, cache.unfused = cache.unfused, None
        rows, num_committed = features.shape[1], cache.committed - cache.window_start
        offsets = torch.arange(rows, device=self.device)
        carried = (offsets >= num_committed).unsqueeze(0) if rows > num_committed else None
        cache.window = self.fuse(features, carried, carried_embeds, cache.clock)
        if cache.clock is not None:
            cache.clock.lap("projection")

    def _write_window(self, cache: CarryoverCache, nothing: torch.Tensor) -> None:
        """Write the open window without a block, whose states are `nothing` `(1, 0, hidden_size)`."""
        positions = torch.arange(cache.window.shape[1], device=nothing.device) + cache.window_start
        cache.window_rope = self.rotary_emb(nothing, (positions + cache.first_position).unsqueeze(0))
        for layer in self.layers:
            cache.keys_and_values(layer.self_attn, nothing, None)
        cache.window = cache.window_rope = None

    @torch.no_grad()
    def draft(
        self,
        cache: CarryoverCache,
        anchor_embeds: torch.Tensor,
        mask_embeds: torch.Tensor | None,
        **hints,
    ):
        """
        Step 1 of a round: final states of the predicting rows `(1, block_size, target_hidden_size)`, given the target
        embedding of the anchor `(1, target_hidden_size)`, which sits right behind the committed rows, and the
        `hints` of [`~hf_carryover.lookup.lookup_hints`].
        """
        if cache.unfused is not None:
            self._fuse_window(cache)
        block = self.block_states(anchor_embeds, mask_embeds, hints)
        rows = block.shape[1]
        start = cache.first_position + cache.committed
        positions = torch.arange(start, start + rows, device=block.device).unsqueeze(0)
        masks: dict = {"full_attention": None}
        if "sliding_attention" in self.config.layer_types or self.config.block_attention == "causal":
            stored = torch.arange(cache.length, device=block.device).unsqueeze(0) + cache.first_position
            masks = self.additive_masks(None, positions, torch.cat([stored, positions], dim=1), block.dtype)
        if cache.window is None:
            return self.run_layers(block, self.rotary_emb(block, positions), cache, masks, hints)
        first = cache.first_position + cache.window_start
        window = torch.arange(first, first + cache.window.shape[1], device=block.device).unsqueeze(0)
        cache.window_rope = self.rotary_emb(block, torch.cat([window, positions], dim=1))
        rope = tuple(part[:, -rows:] for part in cache.window_rope)
        hidden = self.run_layers(block, rope, cache, masks, hints)
        cache.window = cache.window_rope = None
        return hidden


def _install_generation_hooks() -> None:
    """Hook `generate` when the package is installed; a folder loaded with remote code alone can't be an assistant."""
    try:
        from hf_carryover.hooks import install
    except ImportError:
        return
    install()


CarryoverConfig.register_for_auto_class()
CarryoverDrafter.register_for_auto_class("AutoModel")

__all__ = ["CarryoverCache", "CarryoverDrafter", "CarryoverDrafterOutput", "CarryoverPreTrainedModel"]
