# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Telling a Carryover folder from others by its `config.json` alone. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from hf_carryover.configuration_carryover import CarryoverConfig


def carryover_config_dict(model: str | None, revision: str | None = None) -> dict | None:
    """
    The `config.json` of `model`, a folder or a Hub repository, if it holds a Carryover drafter. A name that can't be
    read is none of ours: vLLM says what is wrong with it.
    """
    # Neither: "ngram", "suffix", the dotted path of a custom proposer.
    if not model or not ("/" in model or Path(model).is_dir()):
        return None
    try:
        config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
    except (OSError, ValueError):
        return None
    return config if config.get("model_type") == CarryoverConfig.model_type else None


__all__ = ["carryover_config_dict"]
