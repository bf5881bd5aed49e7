# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What a measurement ran on, without names of hosts or places of files."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch

from ..train import provenance


def cpu_model() -> str:
    """Name of the processor as Linux reports it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_machine() -> dict:
    """Processor, cores, threads, operating system and accelerator."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def weights_digest(folder: str | os.PathLike) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a checkpoint's safetensors files, by name."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"No safetensors file in {folder}, expected a saved drafter.")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


__all__ = ["cpu_model", "describe_machine", "provenance", "weights_digest"]
