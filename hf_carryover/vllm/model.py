# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The drafter as a vLLM model.

Layers, fusion and the paged storage of context rows are vLLM's own DFlash (`qwen3_dflash`, the same in 0.32 and 0.33).
Added here: the carry embedding, the Markov head, block inputs embedded by their place in the block (so that a learned
mask embedding needs no token of its own), other widths than the target's, and the rows of a reduced draft vocabulary,
gathered from the target's head once the target is there.
"""

from collections.abc import Iterable
from types import MethodType

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.platforms import current_platform

from .config import expected_tensors, points_at_carried


def _frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


def _normalize_layer_by_layer(model: nn.Module, keys: torch.Tensor) -> torch.Tensor:
    """
    K-norm of context keys `(layers, rows, heads, head_dim)`. vLLM's own does all layers in one kernel call, whose CPU
    version (0.32) takes the first layer's weights for all of them. Can go when that is mended.
    """
    normed = torch.empty_like(keys)
    for i, weight in enumerate(model._k_norm_weights):
        ops.rms_norm(normed[i], keys[i], weight, model._rms_norm_eps)
    return normed


def local_head_rows(weight: torch.Tensor, start: int, end: int, token_ids: torch.Tensor) -> torch.Tensor:
    """
    Rows `token_ids` of a head of which `weight` holds rows `start … end - 1`; the others are zero, so that the sum
    over all shards is the full result.
    """
    ids = token_ids.to(weight.device)
    here = (ids >= start) & (ids < end)
    rows = weight[(ids - start).clamp(0, max(end - start - 1, 0))]
    return rows * here.unsqueeze(1).to(rows.dtype)


class CarryoverForVLLM(DFlashQwen3ForCausalLM):
    """A [`CarryoverDrafter`] checkpoint on vLLM's DFlash layers."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, dtype = self.config, vllm_config.model_config.dtype
        d, d_target = config.hidden_size, config.target_hidden_size
        # Both are the target's, see `borrow`.
        self.has_own_embed_tokens = self.has_own_lm_head = False
        self.block_rows = config.block_size + 1
        self.carry_embedding = _frozen(d, dtype=dtype) if config.carry else None
        self.carry_gate = _frozen(config.block_size, d_target, dtype=dtype) if points_at_carried(config) else None
        self.last_states: torch.Tensor | None = None  # the target's final states of the window, for a pointer
        self.mask_token_embedding = _frozen(d_target, dtype=dtype) if config.mask_token_id is None else None
        looked_up = config.lookup_ngram_size
        self.lookup_scale = _frozen(d_target, dtype=dtype) if looked_up else None
        self.lookup_embedding = _frozen(looked_up, d_target, dtype=dtype) if looked_up else None
        self.lookup_gate = _frozen(looked_up, d_target, dtype=dtype) if looked_up else None
        self.embed_proj = _frozen(d, d_target, dtype=dtype) if d != d_target else None
        self.head_proj = _frozen(d_target, d, dtype=dtype) if d != d_target else None
        self.markov_w1 = self.markov_w2 = None
        if config.markov_rank:
            # Not sharded: the factors are small beside the head, and the sum is with gathered logits.
            self.markov_w1 = _frozen(config.vocab_size, config.markov_rank, dtype=dtype)
            self.markov_w2 = _frozen(config.draft_vocab_size, config.markov_rank, dtype=dtype)
        self.reduced = self.draft_id_to_target_id is not None
        self.taps_last_layer = config.target_layer_ids[-1] == config.num_target_layers - 1
        if current_platform.is_cpu():
            self.model._normalize_context_k = MethodType(_normalize_layer_by_layer, self.model)
        self._target: tuple[nn.Module, ...] = ()  # a tuple: the target must not become a submodule

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """
        Load a folder of `CarryoverDrafter.save_pretrained`.

        Raises:
            ValueError: Listing missing and unknown tensors.
        """
        tensors = dict(weights)
        if not self.reduced:  # a "reduced" vocabulary of all tokens maps each to itself
            tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        expected = expected_tensors(self._checkpoint_config())
        missing, unknown = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
        if missing or unknown:
            raise ValueError(
                f"The checkpoint does not hold this drafter: missing {missing[:20]}, unknown {unknown[:20]}. Serve a "
                "folder that `CarryoverDrafter.save_pretrained` wrote, with its own config."
            )
        own = {
            "carry_embedding": self.carry_embedding,
            "carry_gate": self.carry_gate,
            "mask_embedding": self.mask_token_embedding,
            "lookup_scale": self.lookup_scale,
            "lookup_embedding": self.lookup_embedding,
            "lookup_gate": self.lookup_gate,
            "embed_proj.weight": self.embed_proj,
            "head_proj.weight": self.head_proj,
            "markov_head.markov_w1.weight": self.markov_w1,
            "markov_head.markov_w2.weight": self.markov_w2,
        }
        for name, parameter in own.items():
            if name in tensors:
                parameter.data.copy_(tensors.pop(name))
        super().load_weights(tensors.items())

    def _checkpoint_config(self):
        """The config as it was saved: vLLM fills in the draft vocabulary of drafters that have none."""
        return self.config if self.reduced else _Unreduced(self.config)

    def _read_mask_embedding(self) -> None:
        """vLLM would look for a pickle beside the weights; ours is in them."""
        return None

    def borrow(self, target: nn.Module) -> None:
        """
        Take from the target's language model what is its own: embedding, final norm and, for a reduced vocabulary,
        rows of the head (a full head is shared by vLLM itself).

        Raises:
            ValueError: If the target lacks one of them in a form that can be used.
        """
        if self.taps_last_layer and getattr(getattr(target, "model", None), "norm", None) is None:
            raise ValueError(
                f"The drafter reads the target's last layer ({self.config.target_layer_ids[-1]}), behind its final "
                f"norm, which {type(target).__name__} doesn't have as `model.norm`. Train it with other "
                "`target_layer_ids`."
            )
        self._target = (target,)
        # The block's embeddings are inputs of the compiled part, which has no use for an embedding of its own.
        if hasattr(self.model, "embed_tokens"):
            del self.model.embed_tokens
        if self.reduced:
            self._gather_head(target)

    def _gather_head(self, target: nn.Module) -> None:
        source = target.lm_head
        if not isinstance(source.quant_method, UnquantizedEmbeddingMethod):
            raise ValueError(
                f"A reduced draft vocabulary needs rows of the target's head, which is quantized "
                f"({type(source.quant_method).__name__}). Serve a target whose `lm_head` is not quantized."
            )
        token_ids = self.draft_token_ids()
        shard = source.shard_indices
        rows = local_head_rows(source.weight, shard.org_vocab_start_index, shard.org_vocab_end_index, token_ids)
        bias = getattr(source, "bias", None)
        if get_tensor_model_parallel_world_size() > 1:
            rows = tensor_model_parallel_all_reduce(rows)
        head = ParallelLMHead(
            rows.shape[0], rows.shape[1], bias=bias is not None, params_dtype=rows.dtype, prefix="draft_lm_head"
        ).to(rows.device)
        head.weight_loader(head.weight, rows)
        if bias is not None:
            values = local_head_rows(
                bias.unsqueeze(1), shard.org_vocab_start_index, shard.org_vocab_end_index, token_ids
            )
            if get_tensor_model_parallel_world_size() > 1:
                values = tensor_model_parallel_all_reduce(values)
            head.weight_loader(head.bias, values.squeeze(1))
        head.quant_method.process_weights_after_loading(head)
        self.lm_head = head

    def draft_token_ids(self) -> torch.Tensor | None:
        """Target ids `(draft_vocab_size,)` of the draft vocabulary; `None` when it is the full one."""
        offsets = self.draft_id_to_target_id
        return None if offsets is None else offsets.data + torch.arange(offsets.shape[0], device=offsets.device)

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        `fc(h)` of target features `(rows, feature_size)`. The output of the last layer is taken behind the final
        norm, as transformers returns it; vLLM hands it out before.
        """
        if self.taps_last_layer:
            width = self.config.target_hidden_size
            last = self._target[0].model.norm(hidden_states[..., -width:].contiguous())
            if self.carry_gate is not None:
                self.last_states = last
            hidden_states = torch.cat([hidden_states[..., :-width], last], dim=-1)
        return super().combine_hidden_states(hidden_states)

    def add_carry(self, states: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
        """`fc(h) + e` in the rows `carried` `(rows,)` of `states` `(rows, hidden_size)`."""
        if self.carry_embedding is None:
            return states
        return states + carried.unsqueeze(-1).to(states.dtype) * self.carry_embedding

    def block_embeds(self, anchors: torch.Tensor, looked_up=None) -> torch.Tensor:
        """
        Block inputs `(requests, block_rows, hidden_size)`: the anchor's embedding, then mask rows, with what was
        `looked_up`, tokens `(requests, block_size)` and sizes `(requests,)`, on top.
        """
        embed = self._target[0].embed_input_ids
        first = embed(anchors)
        if self.mask_token_embedding is not None:
            mask = self.mask_token_embedding.to(first.dtype)
        else:
            mask = embed(anchors.new_full((1,), self.config.mask_token_id))[0]
        block = mask.expand(first.shape[0], self.block_rows, -1).clone()
        block[:, 0] = first
        if looked_up is not None:
            tokens, sizes = looked_up
            hints = embed(tokens.flatten()).view(*tokens.shape, -1) * self.lookup_scale
            hints = hints + self.lookup_embedding[(sizes - 1).clamp(min=0)].unsqueeze(1)
            block[:, 1:] += torch.where((sizes > 0)[:, None, None], hints, 0.0)
        return block if self.embed_proj is None else nn.functional.linear(block, self.embed_proj)

    def embed_rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Block inputs `(rows, hidden_size)` of whole blocks of ids, each an anchor and mask tokens."""
        embeds = self._target[0].embed_input_ids(input_ids)
        if self.mask_token_embedding is not None:
            is_mask = torch.arange(input_ids.shape[0], device=input_ids.device) % self.block_rows > 0
            embeds = torch.where(is_mask.unsqueeze(1), self.mask_token_embedding.to(embeds.dtype), embeds)
        return embeds if self.embed_proj is None else nn.functional.linear(embeds, self.embed_proj)

    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[`~hf_carryover.target.TargetHead.rows`] of `token_ids` `(...)`, from a head that may be sharded."""
        token_ids = token_ids.contiguous()
        slots, drafted = token_ids, self.draft_token_ids()
        if drafted is not None:
            slots = torch.searchsorted(drafted, token_ids).clamp(max=len(drafted) - 1)
        shard = self.lm_head.shard_indices
        ids = slots.flatten()
        rows = local_head_rows(self.lm_head.weight, shard.org_vocab_start_index, shard.org_vocab_end_index, ids)
        if get_tensor_model_parallel_world_size() > 1:
            rows = tensor_model_parallel_all_reduce(rows)
        rows = rows.float().view(*token_ids.shape, -1)
        if drafted is not None:
            rows = rows * (drafted[slots] == token_ids).unsqueeze(-1)
        return rows / rows.square().sum(dim=-1, keepdim=True).clamp(min=1e-12)

    def predict(self, rows: torch.Tensor) -> torch.Tensor:
        """The target's likeliest next tokens behind the window rows `rows` `(...)`, from its final states."""
        logits = self._target[0].compute_logits(self.last_states[rows.flatten()])
        return logits.argmax(dim=-1).view(rows.shape)

    def point(self, hidden_states: torch.Tensor, looked_up=None, predicted=None) -> torch.Tensor:
        """
        [`CarryoverDrafter.point`] for states `(requests * proposals, target_hidden_size)`, at what was `looked_up`, as
        in [`~CarryoverForVLLM.block_embeds`], and `predicted`, tokens `(requests, block_size)` and which exist.
        """
        pointers = []
        if looked_up is not None:
            gate = self.lookup_gate[(looked_up[1] - 1).clamp(min=0)].unsqueeze(1)
            pointers.append((gate, looked_up[0], (looked_up[1] > 0).unsqueeze(1)))
        if predicted is not None:
            pointers.append((self.carry_gate, *predicted))
        if not pointers:
            return hidden_states
        states = hidden_states.view(pointers[0][1].shape[0], -1, hidden_states.shape[-1])
        pointed, count = states, states.shape[1]
        for gate, tokens, exist in pointers:
            rows = self.head_rows(tokens[:, :count]) * exist[:, :count].unsqueeze(-1)
            trust = (states * (gate if gate.shape[-2] == 1 else gate[:count])).sum(dim=-1, keepdim=True)
            pointed = pointed + trust * rows.to(states.dtype)
        return pointed.flatten(0, 1)

    def head_logits(self, hidden_states: torch.Tensor, **pointed_at) -> torch.Tensor:
        """
        Logits `(rows, draft vocabulary)` of final states, without the Markov bias, in the head's dtype; `pointed_at`
        are the arguments of [`~CarryoverForVLLM.point`].
        """
        if self.head_proj is not None:
            hidden_states = nn.functional.linear(hidden_states, self.head_proj)
        hidden_states = self.point(hidden_states, **pointed_at)
        bias = getattr(self.lm_head, "bias", None)
        return self.logits_processor(self.lm_head, hidden_states, bias)

    def draft_logits(self, hidden_states: torch.Tensor, **pointed_at) -> torch.Tensor:
        """[`~CarryoverForVLLM.head_logits`] in float32."""
        return self.head_logits(hidden_states, **pointed_at).float()

    def in_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits `(rows, draft vocabulary)` over the target's vocabulary, -inf where nothing can be drafted."""
        token_ids = self.draft_token_ids()
        if token_ids is None:
            return logits
        full = logits.new_full((logits.shape[0], self.config.vocab_size), float("-inf"))
        return full.index_copy_(1, token_ids, logits)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Logits `(rows, vocab_size)` without the Markov bias, for vLLM's own sampling of DFlash, which keeps them in the
        head's dtype.
        """
        return self.in_target_vocabulary(self.head_logits(hidden_states))

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Final states of the block rows. The V2 runner gives token ids, the V1 runner the embeddings."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_rows(input_ids)
        return super().forward(input_ids, positions, inputs_embeds)

    def markov_bias(self, previous: torch.Tensor) -> torch.Tensor | None:
        """`W2 · W1[y_{k-1}]` in float32 for target tokens `previous` `(requests,)`; `None` without a Markov head."""
        if self.markov_w1 is None:
            return None
        return nn.functional.linear(self.markov_w1[previous.long()], self.markov_w2).float()


class _Unreduced:
    """A view of a config with `draft_vocab_size` unset."""

    draft_vocab_size = None

    def __init__(self, config):
        self._config = config

    def __getattr__(self, name: str):
        return getattr(self._config, name)


__all__ = ["CarryoverForVLLM", "local_head_rows"]
