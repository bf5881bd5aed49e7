# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The Auto classes, in fresh processes: whatever was imported first, and from the folder's own code alone."""

import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from drafter_helpers import FULL, block_inputs, run
from fresh_process import python
from transformers import AutoConfig, AutoModel

import hf_carryover
from hf_carryover import CarryoverConfig, CarryoverDrafter


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with a drafter, what it makes of `block_inputs`, and its target."""
    folder = tmp_path_factory.mktemp("checkpoint")
    target = tiny_llama()
    drafter = tiny_drafter(target, **FULL)
    drafter.save_pretrained(folder / "drafter")
    target.save_pretrained(folder / "target")
    inputs = block_inputs(drafter)
    torch.save({"inputs": inputs, "logits": run(drafter, inputs).logits}, folder / "expected.pt")
    return folder


# Registered here


def test_auto_classes_give_our_classes(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint / "drafter")
    assert type(config) is CarryoverConfig
    assert type(AutoConfig.for_model("carryover", vocab_size=7)) is CarryoverConfig
    drafter = AutoModel.from_pretrained(checkpoint / "drafter", dtype=torch.float32)
    assert type(drafter) is CarryoverDrafter
    assert type(AutoModel.from_config(config)) is CarryoverDrafter
    expected = torch.load(checkpoint / "expected.pt")
    assert torch.equal(run(drafter, expected["inputs"]).logits, expected["logits"])
    assert AutoModel.from_pretrained(checkpoint / "drafter", carry=False).carry_embedding is None


# In fresh processes

# What is imported first, and in the middle of what the Auto classes are then loaded.
FIRST = {
    "package": "import hf_carryover",
    "transformers": "import torch; from transformers import AutoConfig, AutoModel; import hf_carryover",
    "package-then-model": "import hf_carryover; from transformers import LlamaForCausalLM",
    "drafter": "import hf_carryover.configuration_carryover; from hf_carryover import CarryoverDrafter",
}
FIRST_SLOW = {
    "lazy-transformers": "import transformers; import hf_carryover",
    "torch": "import torch; import hf_carryover",
    "drafter-only": "from hf_carryover import CarryoverDrafter",
    "layers": "import hf_carryover; from transformers.modeling_layers import GradientCheckpointingLayer",
    "generation": "import hf_carryover; from transformers.generation.utils import GenerationMixin",
    "configs": "import hf_carryover; import transformers.models.auto.configuration_auto",
    "trainer": "import hf_carryover.training.trainer",
    "hooks": "import hf_carryover.hooks",
    "reloaded": "import importlib; import hf_carryover; importlib.reload(hf_carryover)",
}
CHECK = """
import sys
from transformers import AutoConfig, AutoModel
config = AutoConfig.from_pretrained(sys.argv[1])
drafter = AutoModel.from_pretrained(sys.argv[1])
import hf_carryover
assert type(config) is hf_carryover.CarryoverConfig, type(config)
assert type(drafter) is hf_carryover.CarryoverDrafter, type(drafter)
assert not [f for f in sys.meta_path if type(f).__module__.startswith("hf_carryover")], "still waiting"
for name, module in sys.modules.items():
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    assert not type(loader).__module__.startswith("hf_carryover"), name
print("fine")
"""


@pytest.mark.parametrize(
    "first",
    [
        *(pytest.param(code, id=name) for name, code in FIRST.items()),
        *(pytest.param(code, id=name, marks=pytest.mark.slow) for name, code in FIRST_SLOW.items()),
    ],
)
def test_every_import_order(first, checkpoint, tmp_path):
    """An earlier version imported our model from the middle of modules that it needs, and broke their import."""
    assert python(first + CHECK, checkpoint / "drafter", folder=tmp_path).endswith("fine\n")


REMOTE = """
import json, sys
sys.modules["hf_carryover"] = None  # as if it were not installed
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder = sys.argv[1]
assert type(AutoConfig.from_pretrained(folder + "/drafter", trust_remote_code=True)).__name__ == "CarryoverConfig"
drafter = AutoModel.from_pretrained(folder + "/drafter", trust_remote_code=True)
expected = torch.load(folder + "/expected.pt")
with torch.no_grad():
    equal = torch.equal(drafter(**expected["inputs"]).logits, expected["logits"])
drafter.save_pretrained(sys.argv[2])
result = {"module": type(drafter).__module__, "equal": equal}
target = AutoModelForCausalLM.from_pretrained(folder + "/target")
prompt = torch.arange(2, 14).unsqueeze(0)
for name, options in {"greedy": {"do_sample": False}, "sampled": {"do_sample": True}}.items():
    try:
        target.generate(prompt, assistant_model=drafter, max_new_tokens=8, **options)
        result[name] = None
    except Exception as error:
        result[name] = [type(error).__name__, str(error)]
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def remote(checkpoint, tmp_path_factory):
    """What a process without the package makes of the folder, and the folder it saves in turn."""
    folder = tmp_path_factory.mktemp("remote")
    printed = python(REMOTE, checkpoint, folder / "again", folder=folder)
    return json.loads(printed.splitlines()[-1]), folder / "again"


@pytest.mark.compat
def test_the_folder_loads_with_its_own_code(remote, checkpoint):
    """Case R37: with the package hidden, `trust_remote_code=True` gives the same drafter, which saves itself again."""
    result, again = remote
    assert result["module"].startswith("transformers_modules.")
    assert result["equal"] is True
    assert sorted(path.name for path in again.iterdir()) == sorted(
        path.name for path in (checkpoint / "drafter").iterdir()
    )
    for name in ("configuration_carryover.py", "modeling_carryover.py"):
        ours = Path(hf_carryover.__file__).parent / name
        assert (again / name).read_text() == (checkpoint / "drafter" / name).read_text() == ours.read_text()
    expected = torch.load(checkpoint / "expected.pt")
    loaded = CarryoverDrafter.from_pretrained(again)
    assert torch.equal(run(loaded, expected["inputs"]).logits, expected["logits"])


@pytest.mark.compat
def test_without_the_package_it_cannot_assist(remote):
    """Not silently something else: `generate` refuses before the first token."""
    for name in ("greedy", "sampled"):
        assert remote[0][name] is not None, "generate went on without the package"


def test_without_the_package_the_error_names_it(remote):
    for name in ("greedy", "sampled"):
        assert "pip install hf_carryover" in remote[0][name][1]


VISIBLE = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM
drafter = AutoModel.from_pretrained(sys.argv[1] + "/drafter", trust_remote_code=True)
target = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/target")
prompt = torch.arange(2, 14).unsqueeze(0)
plain = target.generate(prompt, max_new_tokens=8, do_sample=False)
assert torch.equal(plain, target.generate(prompt, assistant_model=drafter, max_new_tokens=8, do_sample=False))
print(type(drafter).__module__, drafter.last_report.rounds > 0)
"""


@pytest.mark.slow
def test_remote_code_beside_the_package_can_assist(checkpoint, tmp_path):
    """Installed but never imported by the user: the folder's own class finds the hooks."""
    module, drafted = python(VISIBLE, checkpoint, folder=tmp_path).splitlines()[-1].split()
    assert module.startswith("transformers_modules.")
    assert drafted == "True"
