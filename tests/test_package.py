# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The package itself: what importing it costs and changes, and that what it announces is there."""

import importlib
import pkgutil
import re
from importlib import metadata
from pathlib import Path

import pytest
from fresh_process import python

import hf_carryover


ROOT = Path(hf_carryover.__file__).parents[1]


LIGHT = """
import sys
before = list(sys.meta_path)
import hf_carryover
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy", "datasets", "peft"}))
print(len(sys.meta_path) - len(before), sys.meta_path[1:] == before)
"""


def test_importing_is_light(tmp_path):
    assert python(LIGHT, folder=tmp_path).splitlines() == ["[]", "1 True"]


HOOKS = """
from transformers.generation.utils import GenerationMixin
names = ["_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator", "generate"]
before = dict(vars(GenerationMixin))
import sys, hf_carryover
from hf_carryover import CarryoverConfig, CarryoverDrafter
import hf_carryover.training.trainer, hf_carryover.target
assert dict(vars(GenerationMixin)) == before, "patched without a drafter"
shapes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
CarryoverDrafter(CarryoverConfig(vocab_size=8, head_dim=8, num_target_layers=1, **shapes))
first = dict(vars(GenerationMixin))
print([name for name in names if first[name] is not before[name]])
print({name for name in first if first[name] is not before.get(name)} <= set(names))
assert all(first[name].__wrapped__ is before[name] for name in names[:3])
from hf_carryover.hooks import install
install()
assert dict(vars(GenerationMixin)) == first, "wrapped twice"
"""


@pytest.mark.compat
def test_nothing_is_patched_before_there_is_a_drafter(tmp_path):
    printed = python(HOOKS, folder=tmp_path).splitlines()
    assert printed == ["['_validate_generation_mode', '_assisted_decoding', '_get_candidate_generator']", "True"]


def modules():
    return [
        name
        for _, name, _ in pkgutil.walk_packages(hf_carryover.__path__, "hf_carryover.")
        if not name.endswith("__main__") and not name.startswith("hf_carryover.vllm")
    ]


@pytest.mark.slow
def test_no_module_needs_an_optional_package(tmp_path):
    missing = {"gguf", "peft", "tensorboard", "vllm"}
    code = f"import sys, importlib\nsys.modules.update(dict.fromkeys({missing!r}))\n"
    code += f"for name in {modules()!r}: importlib.import_module(name)\nprint('fine')"
    assert python(code, folder=tmp_path) == "fine\n"


# Names


def test_every_public_name_resolves():
    assert sorted([*hf_carryover._PUBLIC, "__version__"]) == hf_carryover.__all__
    for name, module in hf_carryover._PUBLIC.items():
        value = getattr(hf_carryover, name)
        assert value is getattr(importlib.import_module(f"hf_carryover.{module}"), name)
        # The real place, not one that passes the name on.
        assert value.__module__ == f"hf_carryover.{module}"
        assert value.__doc__, name
    assert set(hf_carryover.__all__) <= set(dir(hf_carryover))


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'hf_carryover' has no attribute 'CarryOverDrafter'"):
        hf_carryover.CarryOverDrafter  # noqa: B018


def test_every_module_exports_what_it_lists():
    for name in modules():
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", [])
        assert [entry for entry in listed if not hasattr(module, entry)] == [], name
        assert len(set(listed)) == len(listed), name


def test_recording_passes_on_what_moved():
    from hf_carryover.training import chat, loading, recording, self_prompting

    assert recording.load_recordings is loading.load_recordings
    assert recording.split_recordings is loading.split_recordings
    assert recording.repetition is loading.repetition
    assert recording.iter_prompts is chat.iter_prompts
    assert recording.self_prompts is self_prompting.self_prompts


# Metadata


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", hf_carryover.__version__)
    try:
        installed = metadata.version("hf_carryover")
    except metadata.PackageNotFoundError:
        pytest.skip("runs from a checkout that is not installed, so there is no metadata to compare with")
    assert installed == hf_carryover.__version__


@pytest.mark.compat
def test_the_running_transformers_is_supported():
    import transformers
    from packaging.requirements import Requirement

    text = (ROOT / "pyproject.toml").read_text()
    (line,) = re.findall(r'^ *"(transformers[^"]*)"', text, flags=re.MULTILINE)
    requirement = Requirement(line)
    assert str(requirement.specifier) in ("<5.24,>=5.19.0", ">=5.19.0,<5.24")
    assert requirement.specifier.contains(transformers.__version__)


def test_every_module_has_a_docstring():
    for name in modules():
        module = importlib.import_module(name)
        if not hasattr(module, "__path__"):
            assert module.__doc__, name
