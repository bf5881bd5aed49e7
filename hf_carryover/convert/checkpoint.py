# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints as they are: a config dictionary and tensors by name, from a folder or the Hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file


# What is fetched of a repository.
_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "mask_embedding.pt")


@dataclass
class Checkpoint:
    """
    A folder that was read.

    Args:
        name (`str`): Where it is from: a folder or a Hub id.
        config (`dict`): Its `config.json`.
        tensors (`dict[str, torch.Tensor]`): All tensors by name.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def fetch(source: str | Path, *, subfolder: str = "", **hub: Any) -> Path:
    """The local folder of `source`: itself, or a snapshot of a Hub repository (`revision`, `token`, ... in `hub`)."""
    folder = Path(source)
    if not folder.is_dir():
        hub = {name: value for name, value in hub.items() if value is not None}
        pattern = [f"{subfolder}/{name}" for name in _FILES] if subfolder else list(_FILES)
        try:
            folder = Path(snapshot_download(str(source), allow_patterns=pattern, **hub))
        except (OSError, ValueError) as error:
            raise OSError(f"{source} is no folder, and can't be fetched from the Hub: {error}") from error
    return folder / subfolder if subfolder else folder


def read_checkpoint(source: str | Path, **hub: Any) -> Checkpoint:
    """
    Read a drafter's folder.

    Args:
        source (`str` or `Path`): A folder or a Hub id.
        hub: `revision`, `subfolder`, `token`, `cache_dir`, `force_download`, `local_files_only`.

    Raises:
        ValueError: If the folder has no config, no safetensors weights, or a mask embedding that is a pickle.
    """
    folder = fetch(source, **hub)
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{source} has no `config.json`: it is not a drafter's folder.")
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            f"{source} keeps a mask embedding in `mask_embedding.pt`, which is not read: no pickled file is. "
            "Save it as the tensor `mask_embedding` of a safetensors file."
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.glob("*.bin"))
        raise ValueError(
            f"{source} has no safetensors weights{f', only {others}' if others else ''}. Pickled weights are not "
            "read: save them with `safe_serialization`."
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    return Checkpoint(str(source), json.loads(config.read_text(encoding="utf-8")), tensors)
