# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Carryover adapters: PEFT layers on a frozen drafter, and what carry adds to it, in a few megabytes.

The layers are injected into the drafter, which stays a [`CarryoverDrafter`] and works as assistant, in the trainer and
in benchmarks as any other. Its `save_pretrained` then writes a PEFT folder: `adapter_config.json` and
`adapter_model.safetensors` with the adapter's tensors and the carry embedding, under names that PEFT itself loads too.
The file also says which base it belongs to, by name and by a digest of the base's weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file

from .modeling_carryover import CarryoverDrafter


if TYPE_CHECKING:
    from peft import PeftConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# How the names of what carry and looking up add to a drafter begin.
ADDED = ("carry_", "lookup_")
# What PEFT puts in front of the names of the model it wraps.
PREFIX = "base_model.model."
# The linear maps of a drafter; adapted where a config does not choose.
LINEAR_MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")


def _peft():
    try:
        import peft
    except ImportError as error:
        raise ImportError("Adapters need PEFT: `pip install 'hf_carryover[peft]'`.") from error
    return peft


def has_adapter(drafter) -> bool:
    """Whether a drafter has an adapter injected."""
    return bool(getattr(drafter, "peft_config", None))


def add_adapter(drafter: CarryoverDrafter, peft_config: PeftConfig) -> CarryoverDrafter:
    """
    Inject an adapter into a drafter, in place; all else but what carry and looking up add is frozen.

    Args:
        drafter ([`CarryoverDrafter`]): The base. With `config.carry` its carry embedding is trained with the adapter.
        peft_config (`peft.PeftConfig`): Such as `peft.LoraConfig`. Without `target_modules` all linear maps of the
            drafter's layers and the fusion are adapted.

    Returns:
        [`CarryoverDrafter`]: The same object.

    Raises:
        ValueError: If it has an adapter already, or PEFT refuses the config.
    """
    peft = _peft()
    if has_adapter(drafter):
        raise ValueError("The drafter has an adapter already. Merge or unload it first.")
    if getattr(peft_config, "target_modules", ...) is None:
        peft_config.target_modules = set(LINEAR_MAPS)
    name = str(getattr(drafter.config, "_name_or_path", "") or "")
    peft_config.base_model_name_or_path = name or None
    drafter.adapter_base = {"base": name, "base_digest": digest(drafter)}
    drafter.requires_grad_(False)
    peft.inject_adapter_in_model(peft_config, drafter)
    for parameter in added_tensors(drafter).values():
        parameter.requires_grad_(True)
    return drafter


def train_adapter(drafter: CarryoverDrafter) -> None:
    """Let an adapter that was loaded, and so is frozen, be trained on, with the carry embedding."""
    state = {name.removeprefix(PREFIX) for name in adapter_state(drafter)}
    (adapter,) = drafter.peft_config
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name.replace(f".{adapter}", "") in state or name in state)
    _config_of(drafter).inference_mode = False


def added_tensors(drafter: CarryoverDrafter) -> dict[str, torch.nn.Parameter]:
    """The parameters that carry and looking up add."""
    return {name: value for name, value in drafter.named_parameters() if name.startswith(ADDED)}


def digest(drafter: CarryoverDrafter) -> str:
    """Of the base's weights, as bfloat16: the same whatever dtype they were loaded in."""
    found = hashlib.sha256()
    for name, value in sorted(drafter.state_dict().items()):
        if name.startswith(ADDED):
            continue
        value = value.detach().cpu()
        value = value.to(torch.bfloat16).view(torch.int16) if value.is_floating_point() else value.to(torch.int64)
        found.update(f"{name} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def adapter_state(drafter: CarryoverDrafter, state_dict: dict | None = None) -> dict[str, torch.Tensor]:
    """The adapter's tensors and those of carry, by PEFT's names."""
    peft = _peft()
    state = peft.get_peft_model_state_dict(drafter, state_dict=state_dict, save_embedding_layers=False)
    source = drafter.state_dict() if state_dict is None else state_dict
    state.update({name: source[name] for name in added_tensors(drafter)})
    return {PREFIX + name: value.detach().cpu().contiguous() for name, value in state.items()}


def save_adapter(drafter: CarryoverDrafter, folder: str | Path, state_dict: dict | None = None) -> None:
    """Write the adapter's folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "format": "pt",
        **drafter.adapter_base,
        "carry": json.dumps(drafter.config.carry),
        "carry_from": drafter.config.carry_from,
        **{name: json.dumps(getattr(drafter.config, name)) for name in ("carry_pointer", "lookup_ngram_size")},
    }
    save_file(adapter_state(drafter, state_dict), folder / WEIGHTS_FILE, metadata=about)
    _config_of(drafter).save_pretrained(str(folder))


def _config_of(drafter: CarryoverDrafter):
    (config,) = drafter.peft_config.values()
    config.inference_mode = True
    return config


def load_adapter_state(drafter: CarryoverDrafter, folder: str | Path) -> None:
    """
    Set the tensors of an injected adapter, and those of carry, to what a folder holds.

    Raises:
        ValueError: If the folder has other tensors than the drafter.
    """
    peft = _peft()
    with safe_open(Path(folder) / WEIGHTS_FILE, framework="pt") as file:
        state = {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = {name.removeprefix(PREFIX) for name in adapter_state(drafter)}
    if set(state) != expected:
        odd = sorted(set(state) ^ expected)
        raise ValueError(f"The adapter in {folder} does not fit this drafter: {odd[:8]} are in one of them only.")
    peft.set_peft_model_state_dict(drafter, state)


def find_adapter(name: str | Path, hub: dict) -> Path | None:
    """The folder of an adapter, fetched where `name` is a Hub id; `None` where it is no adapter."""
    if Path(name).is_dir():
        folder = Path(name) / (hub.get("subfolder") or "")
        return folder if (folder / CONFIG_FILE).is_file() else None
    arguments = {key: value for key, value in hub.items() if value is not None}
    try:
        path = hf_hub_download(str(name), CONFIG_FILE, **arguments)
        hf_hub_download(str(name), WEIGHTS_FILE, **arguments)
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError):
        return None
    return Path(path).parent


def load_adapter_drafter(
    folder: Path,
    name: str | Path,
    cls: type[CarryoverDrafter] = CarryoverDrafter,
    base: str | Path | CarryoverDrafter | None = None,
    dtype: Any = None,
    output_loading_info: bool = False,
    **kwargs,
):
    """
    Base and adapter: what `CarryoverDrafter.from_pretrained(adapter)` gives.

    Args:
        folder (`Path`): The adapter's folder.
        name (`str` or `Path`): What the user called it.
        base (`str`, `Path` or [`CarryoverDrafter`], *optional*): The base, by default the one that the adapter names.
        dtype (`torch.dtype` or `str`, *optional*): Of base and adapter.
        kwargs: Of `from_pretrained`, for the base.

    Raises:
        ValueError: If the base is another one than the adapter was trained on.
    """
    peft = _peft()
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{name} has no `{WEIGHTS_FILE}`: it is no adapter of a drafter.")
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        about = file.metadata() or {}
    if "base_digest" not in about:
        raise ValueError(
            f"{name} does not say which drafter it belongs to: it was not written by `save_pretrained` of a Carryover "
            "drafter. Load it with PEFT, onto a drafter of your choice."
        )
    base = about["base"] if base is None else base
    if isinstance(base, CarryoverDrafter):
        drafter, called = base, str(getattr(base.config, "_name_or_path", "") or "the given drafter")
    else:
        if not base:
            raise ValueError(f"The adapter {name} does not name its base: give `base`.")
        added = {"carry": json.loads(about["carry"]), "carry_from": about["carry_from"]}
        # Adapters of older versions look nothing up and point at nothing.
        added |= {name: json.loads(about[name]) for name in ("carry_pointer", "lookup_ngram_size") if name in about}
        kwargs = {key: value for key, value in kwargs.items() if key not in added}
        # In the dtype it is stored in, so that the comparison does not depend on the one asked for.
        drafter, called = cls.from_pretrained(base, **added, **kwargs), str(base)
    if digest(drafter) != about["base_digest"]:
        raise ValueError(
            f"The adapter {name} was trained on the drafter {about['base'] or 'without a name'}, {called} holds other "
            "weights. Load it with its own base: `from_pretrained(adapter, base=...)`."
        )
    if dtype not in (None, "auto"):
        drafter = drafter.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    add_adapter(drafter, peft.PeftConfig.from_pretrained(str(folder)))
    drafter.adapter_base = {"base": about["base"], "base_digest": about["base_digest"]}
    load_adapter_state(drafter, folder)
    for parameter in drafter.parameters():
        parameter.requires_grad_(False)
    drafter.eval()
    info: dict = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    return (drafter, info) if output_loading_info else drafter


def remove_adapter(drafter: CarryoverDrafter, merge: bool) -> CarryoverDrafter:
    """
    Take the adapter out, in place.

    Args:
        drafter ([`CarryoverDrafter`]): With an adapter.
        merge (`bool`): Whether the base keeps what the adapter learned. The carry embedding stays either way.

    Returns:
        [`CarryoverDrafter`]: The same object, without adapter and with all parameters trainable.
    """
    if not has_adapter(drafter):
        raise ValueError("The drafter has no adapter.")
    _peft()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for name, module in list(drafter.named_modules()):
        if isinstance(module, BaseTunerLayer):
            if merge:
                module.merge(safe_merge=True)
            drafter.set_submodule(name, module.get_base_layer())
        elif isinstance(module, ModulesToSaveWrapper):
            active = module.modules_to_save[module.active_adapters[0]]
            drafter.set_submodule(name, active if merge else module.original_module)
    del drafter.peft_config, drafter.adapter_base
    return drafter.requires_grad_(True)


__all__ = [
    "add_adapter",
    "find_adapter",
    "has_adapter",
    "load_adapter_drafter",
    "load_adapter_state",
    "remove_adapter",
    "save_adapter",
]
