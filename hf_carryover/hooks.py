# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The one file that hooks into transformers' `GenerationMixin`.

`generate` picks its candidate generator in a closed `if/elif`, so an outside generator has no place to register.
Three methods are wrapped; each wrapper delegates unless the assistant is a Carryover drafter:

- `_validate_generation_mode`: refuse what can't work, and a drafter that does not fit, before any forward pass;
- `_assisted_decoding`: remember the call's stopping criteria, which the factory below is not given;
- `_get_candidate_generator`: return [`CarryoverCandidateGenerator`], which asks for the target's hidden states.

The wrappers can go when transformers lets an assistant name its own candidate generator. The supported versions are
those of the package metadata.
"""

from __future__ import annotations

import functools
import warnings
from contextvars import ContextVar
from importlib import metadata

import transformers
from packaging.requirements import Requirement
from transformers.generation.utils import GenerationMixin

from .generation import CarryoverCandidateGenerator
from .target import check_fit

_MARKER = "_hf_carryover_wrapped"
_stopping_criteria: ContextVar = ContextVar("hf_carryover_stopping_criteria", default=None)


def is_carryover_drafter(model) -> bool:
    """Whether `model` is a Carryover drafter, loaded from this package or with remote code."""
    return getattr(model, "is_carryover_drafter", False) is True


def supported_transformers() -> Requirement | None:
    """The transformers requirement of the installed package; `None` when the package is not installed."""
    try:
        lines = metadata.requires("hf_carryover") or []
    except metadata.PackageNotFoundError:
        return None
    found = [Requirement(line) for line in lines if line.startswith("transformers")]
    return found[0] if found else None


def _warn_if_unsupported() -> None:
    requirement = supported_transformers()
    if requirement is not None and not requirement.specifier.contains(transformers.__version__, prereleases=True):
        warnings.warn(
            f"hf_carryover was tested with {requirement}, found {transformers.__version__}. Assisted generation with a "
            "Carryover drafter may fail; the rest of transformers is untouched.",
            stacklevel=4,
        )


def _wrap_validate(original):
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = generation_mode_kwargs.get("assistant_model")
        if not is_carryover_drafter(drafter):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        if generation_mode_kwargs.get("assistant_tokenizer") is not None:
            raise ValueError("`assistant_tokenizer` has no use here: a Carryover drafter speaks the target's tokens.")
        check_fit(drafter, self)
        # The tokenizer comparison for assistants is replaced by `check_fit`; every other check still runs.
        others = {key: value for key, value in generation_mode_kwargs.items() if key != "assistant_model"}
        return original(self, generation_mode, generation_config, others)

    return _validate_generation_mode


def _wrap_assisted_decoding(original):
    @functools.wraps(original)
    def _assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        if not is_carryover_drafter(assistant_model):
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        if input_ids.shape[0] > 1:
            raise ValueError(
                f"assisted generate is only supported for batch_size = 1, got {input_ids.shape[0]} sequences. Call "
                "`generate` once per prompt."
            )
        if input_ids.shape[1] == 0 or kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "`inputs_embeds` is not supported with a Carryover drafter, which needs the ids of the prompt. Pass "
                "`input_ids`."
            )
        token = _stopping_criteria.set(kwargs.get("stopping_criteria"))
        try:
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        finally:
            _stopping_criteria.reset(token)

    return _assisted_decoding


def _wrap_get_candidate_generator(original):
    @functools.wraps(original)
    def _get_candidate_generator(self, *args, assistant_model=None, **kwargs):
        if not is_carryover_drafter(assistant_model):
            return original(self, *args, assistant_model=assistant_model, **kwargs)
        return CarryoverCandidateGenerator(
            target=self,
            drafter=assistant_model,
            generation_config=kwargs["generation_config"],
            logits_processor=kwargs.get("logits_processor"),
            attention_mask=kwargs.get("model_kwargs", {}).get("attention_mask"),
            stopping_criteria=_stopping_criteria.get(),
        )

    return _get_candidate_generator


_WRAPPERS = {
    "_validate_generation_mode": _wrap_validate,
    "_assisted_decoding": _wrap_assisted_decoding,
    "_get_candidate_generator": _wrap_get_candidate_generator,
}


def install() -> None:
    """Wrap the three methods, once. All of them exist or none is touched."""
    originals = {name: getattr(GenerationMixin, name) for name in _WRAPPERS}
    if all(getattr(method, _MARKER, False) for method in originals.values()):
        return
    _warn_if_unsupported()
    for name, original in originals.items():
        if not getattr(original, _MARKER, False):
            wrapper = _WRAPPERS[name](original)
            setattr(wrapper, _MARKER, True)
            setattr(GenerationMixin, name, wrapper)


__all__ = ["install", "is_carryover_drafter", "supported_transformers"]
