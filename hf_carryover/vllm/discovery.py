# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Telling a Carryover folder from others by its `config.json` alone. Needs no vLLM."""

from __future__ import annotations

from transformers import PreTrainedConfig

from hf_carryover.configuration_carryover import CarryoverConfig


def is_carryover_folder(model: str | None, revision: str | None = None) -> bool:
    """
    Whether `model`, a folder or a Hub repository, holds a Carryover drafter. A name that can't be read is none of
    ours: vLLM says what is wrong with it.
    """
    if not model or model.startswith("["):
        return False
    try:
        config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
    except (OSError, ValueError):
        return False
    return config.get("model_type") == CarryoverConfig.model_type


__all__ = ["is_carryover_folder"]
