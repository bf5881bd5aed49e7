# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The drafter in vLLM's V1 model runner.

vLLM's own `DFlashProposer` stores every row of the verified window and then overwrites the rejected ones with the
block. This one adds the carry embedding to the rejected rows and puts the block behind them ([`block_layout`]). No
more slots are needed than vLLM reserves already: window, `1 + num_speculative_tokens`, and block.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from .layout import BlockLayout, block_layout
from .sampling import draw_blocks
from .texts import Texts


_ALIVE: WeakSet[CarryoverProposer] = WeakSet()


def in_use() -> bool:
    """Whether an engine of this process drafts with a Carryover drafter."""
    return len(_ALIVE) > 0


class CarryoverProposer(DFlashProposer):
    """
    Proposes a block per request and step.

    Attributes:
        carried_rows (`int`): Carried rows that the drafts of this engine could read, in all; counted only when
            `count_carried` is set, since reading the number waits for the device.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner=None):
        super().__init__(vllm_config, device, runner)
        config = self.draft_model_config.hf_config
        if get_pp_group().world_size > 1:
            raise ValueError(
                f"A Carryover drafter needs the target's embedding and head on one rank, `pipeline_parallel_size` is "
                f"{get_pp_group().world_size}. Use tensor parallelism."
            )
        self.block_rows = config.block_size + 1
        _ALIVE.add(self)
        self.carry = bool(config.carry)
        self.texts: Texts | None = None
        self.pointed_at: dict[str, tuple[torch.Tensor, ...]] = {}
        self._runner = runner
        if config.lookup_ngram_size:
            self.texts = Texts(self.limit, config.lookup_ngram_size, config.block_size)
        self.count_carried = False
        self.carried_rows = 0
        # The whole block runs whatever part of it is asked for, as in training.
        self.max_query_tokens = self.max_batch_size * self.block_rows
        largest_graph = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self.max_padded_query_tokens = max(self.max_query_tokens, largest_graph)
        size, d = self.max_padded_query_tokens, config.hidden_size
        self.input_ids = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._slot_mapping_buffer = torch.zeros(size, dtype=torch.int64, device=device)
        self._block_embeds = torch.zeros((size, d), dtype=self.dtype, device=device)
        self.arange = torch.arange(self.max_num_tokens + size + 1, device=device, dtype=torch.int32)

    @property
    def limit(self) -> int:
        """Slots, and positions, a request can have."""
        return min(self.max_model_len, self.draft_model_config.max_model_len)

    def _maybe_share_embeddings(self, target_language_model: nn.Module) -> None:
        self.model.borrow(target_language_model)

    def _maybe_share_lm_head(self, target_language_model: nn.Module) -> None:
        if not self.model.reduced:
            super()._maybe_share_lm_head(target_language_model)

    def set_inputs_first_pass(
        self,
        target_token_ids: torch.Tensor,
        next_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: torch.Tensor | None,
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """Lay out window and block; `target_hidden_states` are `fc(h)` of all window rows."""
        requests = cad.batch_size()
        if target_positions.dim() > 1:  # M-RoPE: the axes agree on text
            target_positions = target_positions[0]
        layout = block_layout(
            cad.query_start_loc[: requests + 1],
            cad.seq_lens[:requests],
            target_positions,
            num_rejected_tokens_gpu,
            cad.block_table_tensor,
            page_size=self.block_size,
            block_rows=self.block_rows,
            carry=self.carry,
            limit=self.limit,
        )
        if self.count_carried:
            self.carried_rows += int(layout.carried.sum())
        self._anchors = next_token_ids
        self._window = self.model.add_carry(target_hidden_states, layout.carried)
        self._window_positions, self._window_slots = target_positions, layout.window_slots
        rows = requests * self.block_rows
        self.positions[:rows] = layout.positions.flatten().clamp(max=self.limit - 1)
        self.pointed_at = {}
        if self.texts is not None:
            batch, starts = self._runner.input_batch, cad.query_start_loc[: requests + 1]
            window = (target_token_ids, target_positions, starts, num_rejected_tokens_gpu, next_token_ids)
            found = self.texts.look_up(batch.req_ids[:requests], batch.token_ids_cpu, *window)
            self.pointed_at["looked_up"] = tuple(part.to(self.device) for part in found)
        if self.model.carry_gate is not None:
            self.pointed_at["predicted"] = self._predictions(cad.query_start_loc[1 : requests + 1], layout)
        looked_up = self.pointed_at.get("looked_up")
        self._block_embeds[:rows] = self.model.block_embeds(next_token_ids, looked_up).flatten(0, 1)
        wanted = torch.arange(1, self.num_speculative_tokens + 1, device=self.device)
        starts = torch.arange(0, rows, self.block_rows, device=self.device)
        return rows, (starts.unsqueeze(1) + wanted).flatten(), self._block_metadata(cad, layout, requests)

    def _predictions(self, ends: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's tokens behind each request's carried rows, `(requests, block_size)`, and which exist."""
        ends = ends.long()
        before = torch.cat([ends.new_zeros(1), layout.carried.long().cumsum(dim=0)])
        carried = before[ends] - before[torch.cat([ends.new_zeros(1), ends[:-1]])]
        rows = (ends - carried).unsqueeze(1) + torch.arange(self.block_rows - 1, device=ends.device)
        exist = rows < ends.unsqueeze(1)
        return self.model.predict(torch.where(exist, rows, 0)), exist

    def _block_metadata(self, cad: CommonAttentionMetadata, layout: BlockLayout, requests: int):
        upper = cad.seq_lens_cpu_upper_bound
        starts = torch.arange(requests + 1, dtype=torch.int32) * self.block_rows
        return CommonAttentionMetadata(
            query_start_loc=self.arange[: requests + 1] * self.block_rows,
            query_start_loc_cpu=starts,
            seq_lens=layout.seq_lens,
            seq_lens_cpu_upper_bound=None if upper is None else (upper + self.block_rows).clamp(max=self.limit),
            num_reqs=cad.num_reqs,
            num_actual_tokens=requests * self.block_rows,
            max_query_len=self.block_rows,
            max_seq_len=min(cad.max_seq_len + self.block_rows, self.limit),
            block_table_tensor=cad.block_table_tensor,
            slot_mapping=layout.slots.flatten(),
            causal=False,
        )

    def build_model_inputs_first_pass(
        self, num_tokens: int, num_input_tokens: int, mm_embed_inputs
    ) -> tuple[dict[str, Any], int]:
        """Store the window's keys and values, then hand out the block."""
        self.model.precompute_and_store_context_kv(self._window, self._window_positions, self._window_slots)
        return self._model_inputs(num_input_tokens), num_input_tokens

    def _model_inputs(self, rows: int) -> dict[str, Any]:
        return {
            "input_ids": self.input_ids[:rows],
            "positions": self.positions[:rows],
            "inputs_embeds": self._block_embeds[:rows],
        }

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        requests, model = self._anchors.shape[0], self.model
        logits = model.draft_logits(hidden_states, **self.pointed_at).view(requests, self.num_speculative_tokens, -1)
        draws = self._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy
        tokens, probs = draw_blocks(
            logits,
            self._anchors,
            model.markov_bias,
            model.draft_token_ids(),
            model.config.vocab_size,
            temperature=sampling_metadata.temperature if draws else None,
            generators=sampling_metadata.generators if draws else None,
        )
        return tokens.flatten(), None if probs is None else probs.flatten(0, 1)

    @torch.inference_mode()
    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """One window and one block of `num_tokens` rows, for profiling, compilation and graph capture."""
        mode, rows, across_dp = self._determine_batch_execution_and_padding(
            min(num_tokens, self.max_query_tokens), use_cudagraphs=use_cudagraphs
        )
        slots = slot_mappings or {}
        if slots and self._draft_attn_layer_names and next(iter(self._draft_attn_layer_names)) in slots:
            slots = self._get_slot_mapping(rows)
        self.model.precompute_and_store_context_kv(
            self.hidden_states[:num_tokens], self._context_positions_buffer[:num_tokens]
        )
        with set_forward_context(
            None,
            self.vllm_config,
            num_tokens=rows,
            num_tokens_across_dp=across_dp,
            cudagraph_runtime_mode=mode,
            slot_mapping=slots,
        ):
            self.model(**self._model_inputs(rows))


__all__ = ["CarryoverProposer", "in_use"]
