# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What [`CarryoverDrafter.from_pretrained`] loads beside Carryover checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path

from transformers import PreTrainedConfig

from ..adapters import find_adapter, load_adapter_drafter
from .checkpoint import read_checkpoint
from .convert import drafter_of, read_drafter
from .formats import detect_format


def find_loader(name, hub: dict):
    """
    The loader for a folder or Hub id that is not a Carryover checkpoint: called with the class to load and the
    arguments of `from_pretrained`. `None` for a Carryover checkpoint, and for what `from_pretrained` had better refuse
    itself.
    """
    if name is None:
        return None
    try:
        config, _ = PreTrainedConfig.get_config_dict(name, **hub)
    except (OSError, ValueError, TypeError, AttributeError):  # the last two: JSON, but no object
        config = {}
    if not config:  # none there, or that of an adapter's folder
        folder = find_adapter(name, hub)
        return None if folder is None else functools.partial(_load_adapter, folder, name, hub)
    if detect_format(config) == "carryover":
        return None
    return functools.partial(_load_foreign, name, hub)


def _load_adapter(folder: Path, name: str | Path, hub: dict, cls, **kwargs):
    """An adapter and its base, which the arguments that say where the adapter is do not concern."""
    kept = ("token", "cache_dir", "local_files_only", "force_download")
    kwargs = {key: value for key, value in kwargs.items() if key not in hub or key in kept}
    return load_adapter_drafter(folder, name, cls=cls, **kwargs)


def _load_foreign(name: str | Path, hub: dict, cls, **kwargs):
    """A drafter of another format, carry off unless it is asked for."""
    kwargs = {key: value for key, value in kwargs.items() if key not in hub}
    reading = read_drafter(read_checkpoint(name, **hub), kwargs.pop("target", None))
    return drafter_of(reading, str(name), cls=cls, **kwargs)
