# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The drafter in vLLM's V2 model runner, the default on GPUs in 0.33. Imported only where Triton runs.

vLLM's `DFlashSpeculator` prepares a step with one kernel, stores the window's keys and values (inside the captured
graph where there is one) and runs the block. Here a second kernel moves rejected rows and block to where carry has
them, the carry embedding is added where the window is stored, and a Markov head samples left to right as vLLM's DSpark
does. Shapes and addresses stay fixed, so full CUDA graphs are kept: the carried region is as long as `seq_lens` says.

Not run on a GPU by its authors. The kernel is checked against [`block_layout`] in Triton's interpreter, the parts of
vLLM that this file builds on against the sources of every supported version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as host
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from .kernels import place_carried


class CarryoverSpeculator(DFlashSpeculator):
    """Proposes a block per request and step, in the V2 runner."""

    _speculator_name = "Carryover"

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        config = vllm_config.speculative_config.draft_model_config.hf_config
        self._refuse_unsupported(vllm_config, config)
        super().__init__(vllm_config, device)
        self.carry = bool(config.carry)
        self.markov = bool(config.markov_rank)
        self.carried = torch.zeros(self.max_num_tokens, dtype=torch.bool, device=device)
        self.step_columns = torch.arange(self.num_speculative_steps, dtype=torch.int32, device=device)
        # `prepare_dflash_inputs` is given the buffers, and finds the way back to this object by them.
        self.input_buffers.carryover_speculator = self

    @staticmethod
    def _refuse_unsupported(vllm_config: VllmConfig, config) -> None:
        speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
        if speculative.num_speculative_tokens != config.block_size:
            raise ValueError(
                f"In vLLM's V2 model runner `num_speculative_tokens` must be the drafter's `block_size`, "
                f"{config.block_size}, got {speculative.num_speculative_tokens}. Set VLLM_USE_V2_MODEL_RUNNER=0 for "
                "fewer."
            )
        for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise ValueError(
                    f"`{name}` is {getattr(parallel, name)}; a Carryover drafter works with tensor parallelism only."
                )
        for name in ("lookup_ngram_size", "carry_pointer"):
            if getattr(config, name):
                raise ValueError(
                    f"`{name}` is {getattr(config, name)}; vLLM's V2 model runner does not support it. Set "
                    "VLLM_USE_V2_MODEL_RUNNER=0."
                )
        if speculative.enable_adaptive_verification:
            raise ValueError("`enable_adaptive_verification` is not supported with a Carryover drafter.")

    def load_draft_model(self, target_model, target_attn_layer_names):
        """The drafter, with what is the target's own taken from the target."""
        model = super().load_draft_model(target_model, target_attn_layer_names)
        get_language_model = getattr(target_model, "get_language_model", None)
        model.borrow(target_model if get_language_model is None else get_language_model())
        return model

    def place(self, arguments: dict[str, Any]) -> None:
        """Move rejected rows and blocks; `arguments` are those of vLLM's `prepare_dflash_inputs`."""
        if not self.carry:
            return
        batch = arguments["input_batch"]
        requests = arguments.get("num_reqs_override") or batch.num_reqs
        place_carried(
            arguments["query_slot_mapping"],
            arguments["input_buffers"].seq_lens,
            arguments["context_positions"],
            arguments["context_slot_mapping"],
            self.carried,
            batch.positions,
            batch.query_start_loc,
            arguments["num_rejected"],
            arguments["block_table"],
            requests=requests,
            page_size=arguments["block_size"],
            block_rows=self.num_query_per_req,
            limit=self.max_model_len,
            padding=PAD_SLOT_ID,
        )

    def _precompute_context_kv(self, start: int, end: int, dummy_run: bool = False) -> None:
        """As vLLM's, with the carry embedding added to the carried rows; part of a captured graph."""
        if self.carry:
            # In place: every row is written anew before each step, and `carried` is false behind the batch.
            rows = self.hidden_states[start:end]
            rows.copy_(self.model.add_carry(rows, self.carried[start:end]))
        super()._precompute_context_kv(start, end, dummy_run)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        *args,
        **kwargs,
    ) -> None:
        """The block's forward pass, then proposals: all at once, or left to right with a Markov head."""
        given = (num_reqs, num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, *args)
        if not self.markov:
            super()._generate_draft(*given, **kwargs)
            return
        hidden = self._run_model(*given[1:], **kwargs)
        self._draw(num_reqs, hidden[self.sample_indices[: num_reqs * self.num_speculative_steps]])

    def _draw(self, num_reqs: int, hidden: torch.Tensor) -> None:
        """Proposals of `hidden` `(num_reqs * proposals, hidden_size)`, `y_k` given `y_{k-1}`, `y_0` the anchor."""
        steps, model = self.num_speculative_steps, self.model
        logits = model.draft_logits(hidden).view(num_reqs, steps, -1)
        rows = self.sample_idx_mapping[: num_reqs * steps].view(num_reqs, steps)
        places = self.sample_pos[: num_reqs * steps].view(num_reqs, steps)
        token_ids = model.draft_token_ids()
        anchors = self.input_buffers.input_ids[: num_reqs * self.num_query_per_req].view(num_reqs, -1)
        previous = anchors[:, 0]
        for k in range(steps):
            scores = logits[:, k] + model.markov_bias(previous)
            if self.draft_logits is None:
                previous = scores.argmax(dim=-1)
                previous = previous if token_ids is None else token_ids[previous]
            else:
                # Drawn and verified in the target's vocabulary; a draw is keyed by the position before the token.
                scores = model.in_target_vocabulary(scores).to(self.draft_logits.dtype)
                previous = gumbel_sample(
                    scores,
                    rows[:, k],
                    self.temperature,
                    self.seeds,
                    places[:, k] - 1,
                    apply_temperature=True,
                    is_drafting=True,
                    logits_cache=self.draft_logits,
                    logits_cache_col=self.step_columns[k],
                    use_fp64=self.use_fp64_gumbel,
                )
            self.draft_tokens[:num_reqs, k] = previous


def wrap_prepare(original: Callable) -> Callable:
    """`prepare_dflash_inputs` that lets a [`CarryoverSpeculator`] move what carry moves."""
    signature = inspect.signature(original)

    @wraps(original)
    def prepare_dflash_inputs(input_buffers, *args, **kwargs):
        original(input_buffers, *args, **kwargs)
        ours = getattr(input_buffers, "carryover_speculator", None)
        if ours is not None:
            ours.place(signature.bind(input_buffers, *args, **kwargs).arguments)

    return prepare_dflash_inputs


__all__ = ["CarryoverSpeculator", "host", "wrap_prepare"]
