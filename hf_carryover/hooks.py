# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The one file that hooks into transformers' `GenerationMixin`.

`generate` picks its candidate generator in a closed `if/elif`, so an outside generator has no place to register.
Three methods are wrapped; each wrapper delegates unless the assistant is a Carryover drafter:

- `_validate_generation_mode`: refuse what can't work, and a drafter that does not fit, before any forward pass;
- `_assisted_decoding`: refuse inputs that can't work, have the stopping criteria asked about every token, and decode
  batches, which the library's loop does not;
- `_get_candidate_generator`: return [`CarryoverCandidateGenerator`], which asks for the target's hidden states.

The wrappers can go when transformers lets an assistant name its own candidate generator. The supported versions are
those of the package metadata.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from importlib import metadata

import transformers
from packaging.requirements import Requirement
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.utils import GenerationMixin

from .batch_generation import batch_decoding
from .generation import CarryoverCandidateGenerator
from .stopping import watch_stopping_criteria
from .target import check_fit, unwrap_target


_MARKER = "_hf_carryover_wrapped"
# Options that choose another way to draft.
_OTHER_DRAFTING = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")
# They keep a state from call to call, which proposals that are then rejected would spoil.
_STATEFUL_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    SynthIDTextWatermarkLogitsProcessor: "watermarking_config (SynthID)",
}


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


# The parameters of the wrapped methods that the wrappers and the generator read.
_PARAMETERS = {
    "_validate_generation_mode": ("generation_mode", "generation_config", "generation_mode_kwargs"),
    "_assisted_decoding": (
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "assistant_model",
    ),
    "_get_candidate_generator": ("generation_config", "logits_processor", "model_kwargs", "assistant_model"),
}


def check_signatures() -> list[str]:
    """What the wrappers rely on in `GenerationMixin` and do not find there, as text; empty when all is there."""
    problems = []
    for name, wanted in _PARAMETERS.items():
        found = inspect.signature(getattr(GenerationMixin, name)).parameters
        missing = [parameter for parameter in wanted if parameter not in found]
        if missing:
            problems.append(f"`{name}` has no {', '.join(f'`{parameter}`' for parameter in missing)}")
    return problems


def _warn_if_unsupported() -> None:
    requirement = supported_transformers()
    if requirement is not None and not requirement.specifier.contains(transformers.__version__, prereleases=True):
        fine = "the three wrapped methods of `GenerationMixin` are there, with the arguments that are read"
        checked = "; ".join(check_signatures()) or fine
        warnings.warn(
            f"hf_carryover was tested with {requirement}, found {transformers.__version__}. Assisted generation with "
            f"a Carryover drafter may fail; the rest of transformers is untouched. Checked just now: {checked}. Not "
            "checked: what they do. Compare once with plain `generate`, or use a tested version.",
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
        _refuse_other_modes(generation_mode, generation_config)
        check_fit(drafter, self)
        # The tokenizer comparison for assistants is replaced by `check_fit`; every other check still runs.
        others = {key: value for key, value in generation_mode_kwargs.items() if key != "assistant_model"}
        return original(self, generation_mode, generation_config, others)

    return _validate_generation_mode


def _refuse_other_modes(generation_mode, generation_config) -> None:
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"A Carryover drafter works with greedy search and sampling, not with {generation_mode.value!r}. Set "
            "`num_beams=1`, or call `generate` without `assistant_model`."
        )
    for name in _OTHER_DRAFTING:
        value = getattr(generation_config, name, None)
        if value:
            raise ValueError(
                f"`{name}` ({value!r}) chooses another way to draft than the Carryover drafter in `assistant_model`. "
                "Pass only one of them."
            )


def _refuse_inputs(target, input_ids, kwargs) -> None:
    if input_ids.shape[1] == 0 or kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "`inputs_embeds` is not supported with a Carryover drafter, which needs the ids of the prompt. Pass "
            "`input_ids`."
        )
    wanted = kwargs["generation_config"]
    attention = target.config.get_text_config()._attn_implementation
    if wanted.return_dict_in_generate and wanted.output_attentions and attention != "eager":
        raise ValueError(
            f"`output_attentions` needs a target with `attn_implementation='eager'` here, got {attention!r}: the "
            "assisted loop can't do without the weights, which no other implementation returns."
        )
    for processor in kwargs.get("logits_processor") or []:
        option = _STATEFUL_PROCESSORS.get(type(processor))
        if option is not None:
            raise ValueError(
                f"`{option}` is not supported with a Carryover drafter: {type(processor).__name__} keeps a state that "
                "rejected proposals would change. Call `generate` without `assistant_model`."
            )
    # PEFT lends its own `prepare_inputs_for_generation` to the target while it generates.
    peft_model = getattr(target.prepare_inputs_for_generation, "__self__", None)
    peft_config = getattr(peft_model, "active_peft_config", None)
    if getattr(peft_config, "is_prompt_learning", False):
        raise ValueError(
            f"PEFT's prompt learning ({type(peft_config).__name__}) is not supported with a Carryover drafter: it "
            "feeds the target one token per pass. Call `generate` without `assistant_model`."
        )


def _wrap_assisted_decoding(original):
    @functools.wraps(original)
    def _assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        if not is_carryover_drafter(assistant_model):
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        _refuse_inputs(self, input_ids, kwargs)
        if input_ids.shape[0] > 1:
            return batch_decoding(self, input_ids, unwrap_target(assistant_model), *args, **kwargs)
        kwargs.update(
            watch_stopping_criteria(
                input_ids, kwargs["generation_config"], kwargs["stopping_criteria"], kwargs["logits_processor"]
            )
        )
        return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)

    return _assisted_decoding


def _wrap_get_candidate_generator(original):
    @functools.wraps(original)
    def _get_candidate_generator(self, *args, assistant_model=None, **kwargs):
        if not is_carryover_drafter(assistant_model):
            return original(self, *args, assistant_model=assistant_model, **kwargs)
        return CarryoverCandidateGenerator(
            target=self,
            drafter=unwrap_target(assistant_model),  # PEFT may have wrapped it
            generation_config=kwargs["generation_config"],
            logits_processor=kwargs.get("logits_processor"),
            attention_mask=kwargs.get("model_kwargs", {}).get("attention_mask"),
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


__all__ = ["check_signatures", "install", "is_carryover_drafter", "supported_transformers"]
