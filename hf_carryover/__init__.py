# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Carryover Drafting for Hugging Face models: rejected verifier states become the drafter's next context."""

import importlib
from typing import TYPE_CHECKING

from ._registration import register_auto_classes


__version__ = "0.1.0"

# Public names and their modules: loaded on first use, so that `import hf_carryover` stays light.
_PUBLIC = {
    "CarryoverCandidateGenerator": "generation",
    "CarryoverConfig": "configuration_carryover",
    "CarryoverDrafter": "modeling_carryover",
    "CarryoverTrainer": "training.trainer",
    "CarryoverTrainingArguments": "training.arguments",
    "GenerationReport": "generation",
    "check_fit": "target",
    "convert_drafter": "convert.convert",
    "drafter_from_target": "target",
    "load_recordings": "training.loading",
    "model_card": "hub.card",
    "push_to_hub": "hub.publish",
    "reshape_drafter": "reshape",
    "split_times": "timing",
}

if TYPE_CHECKING:
    from .configuration_carryover import CarryoverConfig
    from .convert import convert_drafter
    from .generation import CarryoverCandidateGenerator, GenerationReport
    from .hub import model_card, push_to_hub
    from .modeling_carryover import CarryoverDrafter
    from .reshape import reshape_drafter
    from .target import check_fit, drafter_from_target
    from .timing import split_times
    from .training.arguments import CarryoverTrainingArguments
    from .training.loading import load_recordings
    from .training.trainer import CarryoverTrainer


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_PUBLIC])


register_auto_classes()

__all__ = [
    "CarryoverCandidateGenerator",
    "CarryoverConfig",
    "CarryoverDrafter",
    "CarryoverTrainer",
    "CarryoverTrainingArguments",
    "GenerationReport",
    "__version__",
    "check_fit",
    "convert_drafter",
    "drafter_from_target",
    "load_recordings",
    "model_card",
    "push_to_hub",
    "reshape_drafter",
    "split_times",
]
