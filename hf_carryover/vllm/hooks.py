# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The one file that hooks into vLLM.

vLLM chooses proposers in a closed `if/elif` and infers the method from the drafter's name, so an outside drafter has
no place to register. Each wrapper here delegates unless a Carryover drafter is in use:

- `SpeculativeConfig.__post_init__`: `method` may be left out, and a drafter that does not fit is refused;
- `SpeculativeConfig.hf_config_override`: the keys that vLLM reads from a DFlash config;
- `VllmConfig.num_lookahead_tokens`: slots for a whole block, also when fewer proposals are asked for;
- `DFlashProposer.__new__` (V1): [`CarryoverProposer`];
- `GPUModelRunner._input_fits_in_drafter` (V1): always. One request near `max_model_len` would stop the drafting of all
  others, and the rows verified meanwhile would be missing from the drafter's cache; ours handles it per request;
- `expand_batch_to_tokens` (V1, CPU): the temperature of each row when sampling, see below;
- `SpecDecodingProm`: a counter of carried rows;
- `DFlashSpeculator.__new__` and `prepare_dflash_inputs` (V2, where Triton runs): [`CarryoverSpeculator`].

All of it can go when vLLM lets a model class name its proposer and its config mapping.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.metrics import SpecDecodingProm
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from hf_carryover.configuration_carryover import CarryoverConfig

from . import metrics
from .config import adapt_config, check_serving, is_carryover, is_carryover_config
from .discovery import carryover_config_dict
from .proposer import CarryoverProposer, in_use


_MARKER = "_hf_carryover_wrapped"


def _fill_in(config: SpeculativeConfig) -> None:
    """Method and number of proposals of a Carryover drafter, where they were left out."""
    if config.method is not None and not (config.method == "dflash" and config.num_speculative_tokens is None):
        return
    found = carryover_config_dict(config.model, config.revision)
    if found is not None:
        config.method = "dflash"
        if config.num_speculative_tokens is None:
            config.num_speculative_tokens = found.get("block_size", CarryoverConfig.block_size)


def _wrap_post_init(original: Callable) -> Callable:
    @functools.wraps(original)
    def __post_init__(self, *args, **kwargs):
        _fill_in(self)
        original(self, *args, **kwargs)
        if not is_carryover(self):
            return
        if self.method != "dflash":
            raise ValueError(
                f'A Carryover drafter works with `method` "dflash", got {self.method!r}. Leave `method` out.'
            )
        if self.use_local_argmax_reduction:
            raise ValueError("`use_local_argmax_reduction` is not supported with a Carryover drafter. Leave it out.")
        check_serving(
            self.draft_model_config.hf_config,
            self.num_speculative_tokens,
            self.target_model_config.hf_text_config,
            self.target_model_config.max_model_len,
        )
        # Drafter and target share positions: only the target's limit counts.
        self.draft_model_config.max_model_len = self.target_model_config.max_model_len

    return __post_init__


def _wrap_hf_config_override(original: Callable) -> staticmethod:
    @functools.wraps(original)
    def hf_config_override(hf_config, *args, **kwargs):
        hf_config = original(hf_config, *args, **kwargs)
        return adapt_config(hf_config) if is_carryover_config(hf_config) else hf_config

    return staticmethod(hf_config_override)


def _wrap_num_lookahead_tokens(original: property) -> property:
    def num_lookahead_tokens(self) -> int:
        reserved = original.fget(self)
        if not is_carryover(self.speculative_config):
            return reserved
        return max(reserved, self.speculative_config.draft_model_config.hf_config.block_size + 1)

    return property(functools.wraps(original.fget)(num_lookahead_tokens))


def _uses_carryover(vllm_config: VllmConfig | None) -> bool:
    return is_carryover(getattr(vllm_config, "speculative_config", None))


def _replaced_by(ours: type) -> Callable:
    """Wrapper for `__new__` of vLLM's class, the parent of `ours`: of our drafters it makes an instance of `ours`."""
    host = ours.__mro__[1]

    def wrap(original: Callable) -> Callable:
        def __new__(cls, vllm_config=None, *args, **kwargs):
            if cls is host and _uses_carryover(vllm_config):
                cls = ours
            return original(cls) if original is object.__new__ else original(cls, vllm_config, *args, **kwargs)

        return __new__

    return wrap


def _wrap_input_fits(original: Callable) -> Callable:
    @functools.wraps(original)
    def _input_fits_in_drafter(self, common_attn_metadata):
        if isinstance(getattr(self, "drafter", None), CarryoverProposer):
            return common_attn_metadata is not None
        return original(self, common_attn_metadata)

    return _input_fits_in_drafter


def _wrap_expand(original: Callable) -> Callable:
    """
    vLLM's CPU build (0.32; in the sources of 0.33 too, vllm-project/vllm#55005) fills a copy of the result and returns
    memory as it was allocated: with any drafter, requests with a temperature above 0 are verified against the wrong
    distribution. Can go when that issue is closed in the oldest supported version.
    """

    @functools.wraps(original)
    def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        if x.device.type != "cpu" or not in_use():
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
        return torch.repeat_interleave(torch.where(x == replace_from, x.new_tensor(replace_to), x), counts)

    return expand_batch_to_tokens


def _wrap_prom_init(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self, speculative_config, labelnames, per_engine_labelvalues, *args, **kwargs):
        original(self, speculative_config, labelnames, per_engine_labelvalues, *args, **kwargs)
        if is_carryover(speculative_config) and speculative_config.draft_model_config.hf_config.carry:
            metrics.add_counter(self, labelnames, per_engine_labelvalues)

    return __init__


def _wrap_prom_observe(original: Callable) -> Callable:
    @functools.wraps(original)
    def observe(self, spec_decoding_stats, engine_idx=0):
        original(self, spec_decoding_stats, engine_idx)
        metrics.observe(self, spec_decoding_stats, engine_idx)

    return observe


# Class or module, attribute, wrapper.
HOOKS: tuple[tuple[Any, str, Callable], ...] = (
    (SpeculativeConfig, "__post_init__", _wrap_post_init),
    (SpeculativeConfig, "hf_config_override", _wrap_hf_config_override),
    (VllmConfig, "num_lookahead_tokens", _wrap_num_lookahead_tokens),
    (DFlashProposer, "__new__", _replaced_by(CarryoverProposer)),
    (GPUModelRunner, "_input_fits_in_drafter", _wrap_input_fits),
    (rejection_sampler, "expand_batch_to_tokens", _wrap_expand),
    (SpecDecodingProm, "__init__", _wrap_prom_init),
    (SpecDecodingProm, "observe", _wrap_prom_observe),
)


if HAS_TRITON:  # without it vLLM itself falls back to the V1 runner
    from . import speculator

    HOOKS += (
        (speculator.DFlashSpeculator, "__new__", _replaced_by(speculator.CarryoverSpeculator)),
        (speculator.host, "prepare_dflash_inputs", speculator.wrap_prepare),
    )


def _marked(value: Any) -> bool:
    return getattr(value.fget if isinstance(value, property) else value, _MARKER, False)


def _mark(value: Any) -> None:
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    setattr(inner, _MARKER, True)


def install() -> None:
    """Wrap all of [`HOOKS`], once. Every attribute exists or none is touched."""
    originals = [getattr(owner, name) for owner, name, _ in HOOKS]
    for (owner, name, wrap), original in zip(HOOKS, originals, strict=True):
        if not _marked(original):
            wrapper = wrap(original)
            _mark(wrapper)
            setattr(owner, name, wrapper)


__all__ = ["HOOKS", "install"]
