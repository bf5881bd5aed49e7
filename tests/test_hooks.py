"""The hook into `GenerationMixin`: absent until a drafter is built, idempotent, and transparent to everything else."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from packaging.requirements import Requirement
from tiny_targets import plain, prompt_ids, tiny_drafter, tiny_llama, tiny_target
from transformers.generation.utils import GenerationMixin

from hf_carryover import hooks


NAMES = ("_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator")


def methods() -> dict:
    return {name: getattr(GenerationMixin, name) for name in NAMES}


@pytest.fixture
def unhooked(monkeypatch):
    """`GenerationMixin` as transformers made it, for the time of a test."""
    for name, method in methods().items():
        monkeypatch.setattr(GenerationMixin, name, getattr(method, "__wrapped__", method))
    return methods()


FRESH = """
from transformers.generation.utils import GenerationMixin
names = {names!r}
before = [getattr(GenerationMixin, name) for name in names]
import hf_carryover
hf_carryover.CarryoverConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2,
                             num_key_value_heads=1, head_dim=8, num_hidden_layers=1, num_target_layers=4)
hf_carryover.CarryoverDrafter
assert [getattr(GenerationMixin, name) for name in names] == before
hf_carryover.CarryoverDrafter(hf_carryover.CarryoverConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_hidden_layers=1, num_target_layers=4))
assert all(getattr(GenerationMixin, name) is not method for name, method in zip(names, before))
assert [getattr(GenerationMixin, name).__wrapped__ for name in names] == before
"""


@pytest.mark.compat
def test_import_patches_nothing_and_the_first_drafter_does():
    paths = [path for path in sys.path if path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "error::UserWarning:hf_carryover",
    }
    run = subprocess.run(
        [sys.executable, "-c", FRESH.format(names=NAMES)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.compat
def test_install_twice_wraps_once(unhooked):
    hooks.install()
    once = methods()
    hooks.install()
    tiny_drafter(tiny_target("llama"))
    assert methods() == once
    assert {name: method.__wrapped__ for name, method in once.items()} == unhooked


def test_install_completes_what_is_half_there(unhooked, monkeypatch):
    """Another import of the package, or a patch that undid one method, is repaired without wrapping twice."""
    hooks.install()
    once = methods()
    monkeypatch.setattr(GenerationMixin, NAMES[1], unhooked[NAMES[1]])
    hooks.install()
    assert [methods()[name] is once[name] for name in NAMES] == [True, False, True]
    assert methods()[NAMES[1]].__wrapped__ is unhooked[NAMES[1]]


def test_all_methods_or_none(unhooked, monkeypatch):
    monkeypatch.delattr(GenerationMixin, NAMES[2])
    with pytest.raises(AttributeError, match=NAMES[2]):
        hooks.install()
    assert getattr(GenerationMixin, NAMES[0]) is unhooked[NAMES[0]]
    assert getattr(GenerationMixin, NAMES[1]) is unhooked[NAMES[1]]


def test_unsupported_version_warns_once(unhooked, monkeypatch):
    monkeypatch.setattr(hooks, "supported_transformers", lambda: Requirement("transformers>=4.0,<4.1"))
    found = r"(?s)tested with transformers<4.1,>=4.0, found \d+\.\d+.*Checked just now: the three wrapped methods"
    with pytest.warns(UserWarning, match=found):
        hooks.install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hooks.install()


@pytest.mark.compat
def test_signatures_are_those_that_are_read(unhooked, monkeypatch):
    """With and without the wrappers; a version that renames an argument is described in the warning."""
    assert hooks.check_signatures() == []
    hooks.install()
    assert hooks.check_signatures() == []
    monkeypatch.setattr(GenerationMixin, NAMES[2], lambda self, generation_config, model_kwargs, drafter: None)
    monkeypatch.setattr(hooks, "supported_transformers", lambda: Requirement("transformers>=4.0,<4.1"))
    missing = "`_get_candidate_generator` has no `logits_processor`, `assistant_model`"
    assert hooks.check_signatures() == [missing]
    with pytest.warns(UserWarning, match=f"Checked just now: {missing}. Not checked"):
        hooks._warn_if_unsupported()


@pytest.mark.parametrize("requirement", [None, Requirement("transformers>=4.0")], ids=["unknown", "supported"])
def test_supported_or_unknown_version_is_silent(unhooked, monkeypatch, requirement):
    monkeypatch.setattr(hooks, "supported_transformers", lambda: requirement)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hooks.install()


def test_requirement_is_that_of_the_package(monkeypatch):
    lines = ["torch>=2.8", "transformers>=5.19.0,<5.24", "peft>=0.18; extra == 'peft'"]
    monkeypatch.setattr(hooks.metadata, "requires", lambda name: lines)
    assert str(hooks.supported_transformers().specifier) == "<5.24,>=5.19.0"

    def missing(name):
        raise hooks.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(hooks.metadata, "requires", missing)
    assert hooks.supported_transformers() is None


@pytest.mark.compat
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sample"])
def test_other_assistants_and_prompt_lookup_are_unchanged(unhooked, do_sample):
    """Same seed, same text, with the hook and without it."""
    target, assistant = tiny_llama(), tiny_llama(num_hidden_layers=1)
    ways = [{"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}, {}]

    def run():
        texts = []
        for way in ways:
            torch.manual_seed(0)
            texts.append(target.generate(prompt_ids(), do_sample=do_sample, max_new_tokens=16, **way).tolist())
        return texts

    before = run()
    hooks.install()
    assert run() == before
    if not do_sample:
        assert before == [plain(target, prompt_ids(), max_new_tokens=16).tolist()] * 3


def test_wrappers_pass_everything_on():
    """Arguments and result of a call without a drafter go through untouched."""
    calls = []

    def original(self, *args, **kwargs):
        calls.append((self, args, kwargs))
        return "result"

    for wrap in (hooks._wrap_assisted_decoding, hooks._wrap_get_candidate_generator):
        assert wrap(original)("target", "ids", assistant_model="other", option=1) == "result"
        assert calls.pop() == ("target", ("ids",), {"assistant_model": "other", "option": 1})
    kwargs = {"assistant_model": "other"}
    assert hooks._wrap_validate(original)("target", "mode", "config", kwargs) == "result"
    assert calls.pop() == ("target", ("mode", "config", kwargs), {})


def test_drafter_is_known_by_its_attribute():
    """A drafter loaded with remote code is another class of the same name."""

    class Remote:
        is_carryover_drafter = True

    assert hooks.is_carryover_drafter(Remote())
    assert hooks.is_carryover_drafter(tiny_drafter(tiny_target("llama")))
    assert not hooks.is_carryover_drafter(tiny_target("llama"))
    assert not hooks.is_carryover_drafter(None)
