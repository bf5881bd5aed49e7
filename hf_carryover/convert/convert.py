# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Reading and writing drafters of all formats."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from ..configuration_carryover import CarryoverConfig
from ..modeling_carryover import CarryoverDrafter
from ..target import head_parameters, unwrap_target
from . import deepspec, speculators, zlab
from .checkpoint import Checkpoint, read_checkpoint
from .formats import Reading, detect_format, require


logger = logging.get_logger(__name__)

_READERS = {module.NAME: module.read for module in (zlab, deepspec, speculators)}
_WRITERS = {module.NAME: module.write for module in (zlab, speculators)}
# What can be written.
FORMATS = ("carryover", *_WRITERS)

# What a drafter with carry has beyond one without.
_CARRY_NAMES = ("carry_embedding", "carry_gate", "carry_proj.")


@dataclass
class Conversion:
    """
    What [`convert_drafter`] did.

    Args:
        source_format, format (`str`): Read and written.
        folder (`Path`): Where the result is.
        notes (`list[str]`): What was dropped or changed, one sentence each.
    """

    source_format: str
    format: str
    folder: Path
    notes: list[str] = field(default_factory=list)


class _Target:
    """What a format may have to know of the target: its name, architecture, depth, embedding and head."""

    def __init__(self, target: nn.Module | str | Path | None, fallback: dict | None = None):
        self.model = unwrap_target(target) if isinstance(target, nn.Module) else None
        config = None
        if self.model is not None:
            config = self.model.config
        elif target is not None:
            config = AutoConfig.from_pretrained(target)
        fallback = fallback or {}
        self.given = config is not None
        self.name = str(target) if isinstance(target, (str, Path)) else getattr(config, "_name_or_path", None)
        self.name = self.name or fallback.get("name_or_path")
        self.architectures = list(getattr(config, "architectures", None) or fallback.get("architectures") or [])
        if self.model is not None and not self.architectures:
            self.architectures = [type(self.model).__name__]
        self.num_layers = config.get_text_config().num_hidden_layers if self.given else None

    def embedding_scale(self, notes: list[str]) -> float:
        """What the target's embedding module multiplies the rows of its weight with."""
        if self.model is None:
            notes.append("Assumed that the target's embedding module only looks up; give `target` to have it checked.")
            return 1.0
        module = self.model.get_input_embeddings()
        with torch.no_grad():
            row = module.weight.detach()[:1].float()
            given = module(torch.zeros(1, dtype=torch.long, device=row.device)).float()
        scale = float((given * row).sum() / (row * row).sum())
        if not torch.allclose(given, row * scale, rtol=1e-2, atol=1e-6):
            raise ValueError("The target's embedding module does more than scale, for which the format has no words.")
        return scale

    def load(self) -> nn.Module:
        """The model, loaded when it is first needed."""
        if self.model is None:
            if not self.given:
                raise ValueError(
                    "The head rows of the draft vocabulary are the target's: give `target` to write them."
                )
            self.model = AutoModelForCausalLM.from_pretrained(self.name)
        return self.model

    def head_rows(self, d2t: torch.LongTensor) -> torch.Tensor:
        """Rows of the target's head for a draft vocabulary."""
        weight, bias = head_parameters(self.load())
        if bias is not None:
            raise ValueError("The target's head has a bias, which a head of its own has no place for.")
        return weight.detach()[(d2t + torch.arange(len(d2t))).to(weight.device)].cpu().contiguous()


def read_drafter(checkpoint: Checkpoint, target: nn.Module | str | Path | None = None) -> Reading:
    """
    A foreign checkpoint in our terms, carry off.

    Args:
        checkpoint ([`Checkpoint`]): Of [`read_checkpoint`].
        target (`PreTrainedModel`, `str` or `Path`, *optional*):
            The target. Given as a model, dropped copies of its embedding and head are compared with it. Its depth
            completes a config that lacks it.

    Raises:
        ValueError: If the format is unknown, has parts without a counterpart, or copies differ from the target's.
    """
    kind = detect_format(checkpoint.config)
    if kind == "carryover":
        raise ValueError(f"{checkpoint.name} is a Carryover drafter already: use `CarryoverDrafter.from_pretrained`.")
    reading = _READERS[kind](checkpoint.config, checkpoint.tensors)
    about = _Target(target)
    if about.model is not None:
        _compare_copies(checkpoint, reading, about.model)
    if reading.config.get("num_target_layers") is None:
        reading.config["num_target_layers"] = about.num_layers
    depth = reading.config["num_target_layers"]
    if depth is not None and reading.config["target_layer_ids"][-1] == depth - 1:
        reading.notes.append(
            "The target's last layer is read behind the final norm, as transformers returns it. A drafter that was "
            "trained on the states in front of the norm, as engines hand them out, is accepted less."
        )
    reading.config.update(carry=False, converted_from={"format": kind, "config": copy.deepcopy(checkpoint.config)})
    return reading


def _compare_copies(checkpoint: Checkpoint, reading: Reading, target: nn.Module) -> None:
    """Refuse a checkpoint whose own embedding or full head, which are dropped, are not the target's."""
    theirs = {
        "embed_tokens.weight": target.get_input_embeddings().weight,
        "lm_head.weight": head_parameters(target)[0],
    }
    for name, weight in theirs.items():
        copied = checkpoint.tensors.get(name)
        if copied is None or (name == "lm_head.weight" and reading.config.get("own_head")):
            continue
        weight = weight.detach().to(device=copied.device, dtype=copied.dtype)
        if copied.shape != weight.shape or not torch.equal(copied, weight):
            raise ValueError(
                f"`{name}` of {checkpoint.name} ({tuple(copied.shape)}) is not the target's ({tuple(weight.shape)}). "
                "The drafter was made for another target, or trained its copy, which is not supported."
            )


def write_drafter(
    drafter: CarryoverDrafter,
    folder: str | Path,
    to: str = "carryover",
    target: nn.Module | str | Path | None = None,
    overwrite: bool = False,
) -> Conversion:
    """
    Write a drafter in another format.

    What a drafter was converted from is written back as it was where nothing changed, config included. Carry has no
    place in the other formats: it is left out, and noted.

    Args:
        drafter ([`CarryoverDrafter`]): The drafter.
        folder (`str` or `Path`): Where to; it appears as a whole.
        to (`str`, *optional*, defaults to `"carryover"`): `"carryover"`, `"z-lab"` or `"speculators"`.
        target (`PreTrainedModel`, `str` or `Path`, *optional*):
            The target, for what a format says about it: speculators its name, and the head rows of a reduced
            vocabulary. Not needed where the drafter was converted from that format.
        overwrite (`bool`, *optional*, defaults to `False`): Whether to replace a folder that is there.

    Raises:
        ValueError: If the format has no place for something the drafter has.
        FileExistsError: If the folder exists and is not to be replaced.
    """
    if to not in FORMATS:
        raise ValueError(f"`to` must be one of {', '.join(FORMATS)}, got {to!r}.")
    notes: list[str] = []
    config, origin = drafter.config, drafter.config.converted_from or {}
    if to == "carryover":
        with _appearing(Path(folder), overwrite) as scratch:
            drafter.save_pretrained(scratch)
        return Conversion("carryover", to, Path(folder), notes)
    tensors = {name: value.detach().cpu().contiguous() for name, value in drafter.state_dict().items()}
    for name in [name for name in tensors if name.startswith(_CARRY_NAMES)]:
        del tensors[name]
        notes.append(f"Dropped {name}: the format {to!r} has no carried rows.")
    unnamed = "Train with a mask token."
    require(config.mask_token_id is not None, "a learned mask embedding", "`mask_token_id` None", to, unnamed)
    lookup = f"`lookup_ngram_size` {config.lookup_ngram_size}"
    without = "Load the drafter with `lookup_ngram_size=0` to write it without; it proposes less then."
    require(not config.lookup_ngram_size, "a drafter that looks up n-grams", lookup, to, without)
    widths = f"{config.hidden_size} and {config.target_hidden_size}"
    require(config.hidden_size == config.target_hidden_size, "a width other than the target's", widths, to, "")
    same = origin.get("format") == to
    verifier = (origin["config"].get("speculators_config") or {}).get("verifier") if same else None
    about = _Target(target, verifier)
    written, tensors = _WRITERS[to](_completed(config, about, to, notes), tensors, about)
    written["dtype"] = str(drafter.dtype).removeprefix("torch.")
    if same and _equal_drafters(to, written, origin["config"], tensors):
        written = origin["config"]
    elif to == "speculators" and about.name is None:
        raise ValueError("The format 'speculators' names the target (verifier): give `target`.")
    with _appearing(Path(folder), overwrite) as scratch:
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return Conversion("carryover", to, Path(folder), notes)


def _completed(config: CarryoverConfig, about: _Target, to: str, notes: list[str]) -> CarryoverConfig:
    """The config with what other formats must name, and ours takes from the target: depth and embedding scale."""
    values = config.to_dict()
    if config.embedding_scale is None:
        values["embedding_scale"] = about.embedding_scale(notes)
    if config.num_target_layers is None and to == "z-lab":
        if about.num_layers is None:
            raise ValueError(
                "The format 'z-lab' names the number of target layers, which is not known: give `target`."
            )
        values["num_target_layers"] = about.num_layers
    return CarryoverConfig(**values)


def _equal_drafters(kind: str, written: dict, original: dict, tensors: dict) -> bool:
    """Whether two configs of a format read as the same drafter: then the original's words are kept."""
    ours, theirs = (_READERS[kind](config, tensors).config for config in (written, original))
    skipped = ("dtype",)
    confident = bool(original.get("enable_confidence_head", original.get("speculators_model_type") == "dspark"))
    same_dtype = theirs["dtype"] in (None, written["dtype"])
    plain = {k: v for k, v in ours.items() if k not in skipped} == {
        k: v for k, v in theirs.items() if k not in skipped
    }
    return plain and same_dtype and not (kind == "speculators" and confident)


@contextmanager
def _appearing(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A scratch folder beside `folder` that takes its place when the block ends well, and is removed when not."""
    if folder.exists() and not overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists. Choose another folder, or overwrite it (`overwrite=True`).")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield scratch
        scratch.chmod(0o755)
        if folder.exists():
            old = scratch.with_suffix(".old")
            os.replace(folder, old)
            os.replace(scratch, folder)
            shutil.rmtree(old)
        else:
            os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def convert_drafter(
    source: str | Path,
    folder: str | Path,
    to: str = "carryover",
    target: nn.Module | str | Path | None = None,
    overwrite: bool = False,
    **hub: Any,
) -> Conversion:
    """
    Convert a drafter's folder or repository.

    Args:
        source (`str` or `Path`): A folder or a Hub id, of any format; it is recognised.
        folder (`str` or `Path`), to, target, overwrite: As in [`write_drafter`].
        hub: `revision`, `subfolder`, `token`, `cache_dir`, ... of the source.

    Returns:
        [`Conversion`], whose notes say what was dropped.

    Example:

    ```python
    >>> from hf_carryover import convert_drafter

    >>> convert_drafter("z-lab/Qwen3-4B-DFlash-b16", "qwen3-4b-drafter").notes
    []
    ```
    """
    checkpoint = read_checkpoint(source, **hub)
    kind, notes = detect_format(checkpoint.config), []
    if kind == "carryover":
        drafter = CarryoverDrafter.from_pretrained(source, **hub)
    else:
        reading = read_drafter(checkpoint, target)
        notes = reading.notes
        drafter = drafter_of(reading, str(source))
    done = write_drafter(drafter, folder, to, target, overwrite)
    return Conversion(kind, to, done.folder, notes + done.notes)


def drafter_of(
    reading: Reading, name: str, cls: type[CarryoverDrafter] = CarryoverDrafter, **kwargs: Any
) -> CarryoverDrafter:
    """
    The drafter of a reading.

    Args:
        reading ([`Reading`]): Of [`read_drafter`].
        name (`str`): Where it is from, for messages and `config._name_or_path`.
        cls (`type`, *optional*): The class to build.
        kwargs: Of `from_pretrained` (`dtype`, `device_map`, ...), and [`CarryoverConfig`] fields, which win.
    """
    overrides = {key: kwargs.pop(key) for key in list(kwargs) if key in CarryoverConfig.__annotations__}
    config = CarryoverConfig(**{**reading.config, **overrides})
    for note in reading.notes:
        logger.warning(f"{name}: {note}")
    loaded = cls.from_tensors(config, reading.tensors, name=name, **kwargs)
    drafter = loaded[0] if isinstance(loaded, tuple) else loaded
    drafter.name_or_path = drafter.config._name_or_path = name
    return loaded
