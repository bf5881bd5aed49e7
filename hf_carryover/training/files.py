# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Tensors kept on disk between steps and runs: written whole or not at all, and read back only if they are intact."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


logger = logging.getLogger(__name__)

# Metadata of a file: `sha256.NAME` is the digest of one tensor, so that a part can be read and checked on its own.
_DIGEST = "sha256."


def _digest(path: Path, name: str, tensor: torch.Tensor) -> str:
    """Of a tensor in its place: a file that was renamed, which is another recording's, does not pass either."""
    digest = hashlib.sha256(f"{path.stem} {name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """
    Write tensors and their checksums. Several processes may write the same file: each writes its own and renames it
    into place, so that a reader finds a whole file or none.

    Args:
        path (`Path`): The file; folders are made.
        tensors (`Mapping[str, torch.Tensor]`): What to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        digests = {f"{_DIGEST}{name}": _digest(path, name, part) for name, part in held.items()}
        save_file(held, temporary, metadata=digests)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # of a disk that is full


def load_tensors(path: Path, *names: str) -> dict[str, torch.Tensor] | None:
    """
    Read back what [`save_tensors`] wrote.

    Args:
        path (`Path`): The file.
        names (`str`): Tensors to read; all of the file without any.

    Returns:
        `dict[str, torch.Tensor]`, or `None` when the file is missing, or damaged: then it is removed, with a warning,
        and is to be made again.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in names or file.keys()}
        wrong = [
            name for name, part in tensors.items() if metadata.get(f"{_DIGEST}{name}") != _digest(path, name, part)
        ]
        reason = f"the checksum of {', '.join(wrong)} does not match" if wrong else None
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError) as error:
        reason = str(error)
    if reason is None:
        return tensors
    logger.warning("The cached file %s is damaged (%s). It is made again.", path, reason)
    path.unlink(missing_ok=True)
    return None


__all__ = ["load_tensors", "save_tensors"]
