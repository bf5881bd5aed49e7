# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Publishing drafters: cards that are written from the run, and one atomic commit to the Hub."""

from .card import Run, model_card
from .publish import push_to_hub


__all__ = ["Run", "model_card", "push_to_hub"]
