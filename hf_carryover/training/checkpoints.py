# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Which checkpoints of a run are whole.

transformers writes a checkpoint file by file into its final folder, and resumes from the one with the highest number.
A process that is killed meanwhile, or a disk that is full, leaves a folder that looks like the last checkpoint and
holds half of one.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import zipfile
from pathlib import Path


logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"  # written last
_FOLDER = re.compile(r"checkpoint-(\d+)")


def checkpoint_problem(folder: str | Path, world_size: int = 1) -> str | None:
    """
    What is wrong with a checkpoint.

    Args:
        folder (`str` or `Path`): The checkpoint.
        world_size (`int`, *optional*, defaults to 1): Processes that wrote it, if more than one did.

    Returns:
        `str`: A missing or unfinished file, and `None` for a whole checkpoint. What DeepSpeed and FSDP write into
        folders of their own is not looked at.
    """
    try:
        return _first_problem(Path(folder), world_size)
    except OSError as error:  # removed meanwhile, by a run that keeps its last checkpoints alone
        return f"it can't be read ({error})"


def _first_problem(folder: Path, world_size: int) -> str | None:
    for name in ("config.json", STATE_FILE):
        try:
            json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return f"`{name}` is missing"
        except ValueError as error:
            return f"`{name}` can't be read ({error})"
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and not _is_sharded(folder):
        return "there is no `model.safetensors`"
    for path in weights:
        if not _whole_safetensors(path):
            return f"`{path.name}` is not whole"
    for path in [*folder.glob("*.pt"), *folder.glob("*.pth")]:
        if not zipfile.is_zipfile(path):
            return f"`{path.name}` is not whole"
    if (folder / "optimizer.pt").exists() and not (folder / "scheduler.pt").exists():
        return "`scheduler.pt` is missing"
    if world_size > 1 and (folder / "rng_state_0.pth").exists():
        missing = [rank for rank in range(world_size) if not (folder / f"rng_state_{rank}.pth").exists()]
        if missing:
            return f"`rng_state_{missing[0]}.pth` is missing"
    return None


def _is_sharded(folder: Path) -> bool:
    """Whether FSDP or DeepSpeed wrote it: they keep shards in folders of their own, or FSDP one file."""
    return (folder / "pytorch_model_fsdp.bin").exists() or any(path.is_dir() for path in folder.iterdir())


def _whole_safetensors(path: Path) -> bool:
    """Whether a file is as long as its header says."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if length > size:
                return False
            header = json.loads(file.read(length))
        ends = [part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"]
    except (ValueError, OSError, KeyError, TypeError, AttributeError, IndexError):
        return False
    return 8 + length + max(ends, default=0) == size


def last_complete_checkpoint(folder: str | Path, world_size: int = 1) -> Path | None:
    """
    The checkpoint of a run to go on from: the last that is whole. A warning names those that are not.

    Args:
        folder (`str` or `Path`): The run's `output_dir`.
        world_size (`int`, *optional*, defaults to 1): Its processes.

    Returns:
        `Path`, or `None` when there is none.
    """
    folder = Path(folder)
    found = []
    if folder.is_dir():
        found = [path for path in folder.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name)]
    for path in sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        problem = checkpoint_problem(path, world_size)
        if problem is None:
            return path
        logger.warning("%s is no whole checkpoint: %s. It is passed over.", path.name, problem)
    return None


def discard_incomplete(folder: str | Path, world_size: int = 1) -> None:
    """
    Remove the checkpoints of a run that are not whole: with `save_total_limit` they would take the places of good
    ones, and on a full disk the room. What FSDP or DeepSpeed wrote is left for them to judge.
    """
    for path in Path(folder).glob("checkpoint-*"):
        if not path.is_dir() or not _FOLDER.fullmatch(path.name) or _is_sharded(path):
            continue
        if checkpoint_problem(path, world_size) is not None:
            shutil.rmtree(path, ignore_errors=True)


__all__ = ["checkpoint_problem", "discard_incomplete", "last_complete_checkpoint"]
