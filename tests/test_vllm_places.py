"""
What the vLLM plugin builds on is where it expects it, in every supported version.

vLLM's sources were read once per version (`vllm_places.py`); the installed one is read again here. An upgrade that
moves something fails these tests: record the new version, and see whether the plugin still fits.
"""

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from vllm_places import RECORD, _arguments, read_places


RECORDED = json.loads(RECORD.read_text())
PLUGIN = Path(__file__).parents[1] / "hf_carryover" / "vllm"

# Attributes of vLLM's objects that the plugin reads or writes.
ATTRIBUTES = {
    "config/speculative.py:SpeculativeConfig": {
        "draft_model_config",
        "draft_sample_method",
        "enable_adaptive_verification",
        "method",
        "model",
        "num_speculative_tokens",
        "revision",
        "target_model_config",
        "use_local_argmax_reduction",
    },
    "model_executor/models/qwen3_dflash.py:DFlashQwen3Model": {
        "_k_norm_weights",
        "_rms_norm_eps",
        "embed_tokens",
        "fc",
    },
    "model_executor/models/qwen3_dflash.py:DFlashQwen3ForCausalLM": {
        "config",
        "draft_id_to_target_id",
        "lm_head",
        "logits_processor",
        "model",
    },
    "v1/spec_decode/llm_base_proposer.py:SpecDecodeBaseProposer": {
        "_draft_attn_layer_names",
        "_enable_probabilistic_draft_probs",
        "_slot_mapping_buffer",
        "arange",
        "block_size",
        "device",
        "draft_model_config",
        "dtype",
        "hidden_states",
        "input_ids",
        "max_batch_size",
        "max_model_len",
        "max_num_tokens",
        "max_query_tokens",
        "model",
        "num_speculative_tokens",
        "positions",
        "vllm_config",
    },
    "v1/spec_decode/dflash.py:DFlashProposer": {"_context_positions_buffer", "max_padded_query_tokens"},
    "v1/spec_decode/metrics.py:SpecDecodingStats": {"num_accepted_tokens", "num_draft_tokens"},
    "v1/worker/gpu/input_batch.py:InputBuffers": {"input_ids", "seq_lens"},
    "v1/worker/gpu/input_batch.py:InputBatch": {"num_reqs", "positions", "query_start_loc"},
    "v1/worker/gpu/spec_decode/speculator.py:DraftModelSpeculator": {
        "draft_logits",
        "draft_tokens",
        "input_buffers",
        "max_model_len",
        "max_num_tokens",
        "model",
        "num_speculative_steps",
        "seeds",
        "temperature",
        "use_fp64_gumbel",
    },
    "v1/worker/gpu/spec_decode/dflash/speculator.py:DFlashSpeculator": {
        "hidden_states",
        "num_query_per_req",
        "sample_idx_mapping",
        "sample_indices",
        "sample_pos",
    },
}
# Arguments the plugin passes or reads by name.
ARGUMENTS = {
    "v1/worker/gpu/sample/gumbel.py:gumbel_sample": {
        "apply_temperature",
        "is_drafting",
        "logits_cache",
        "logits_cache_col",
        "use_fp64",
    },
    "v1/worker/gpu/spec_decode/dflash/speculator.py:prepare_dflash_inputs": {
        "block_size",
        "block_table",
        "context_positions",
        "context_slot_mapping",
        "input_batch",
        "input_buffers",
        "num_rejected",
        "query_slot_mapping",
    },
    "v1/sample/rejection_sampler.py:expand_batch_to_tokens": {"x", "cu_num_tokens", "num_tokens", "replace_from"},
    "v1/spec_decode/metrics.py:SpecDecodingProm.__init__": {
        "speculative_config",
        "labelnames",
        "per_engine_labelvalues",
    },
}
# Methods the plugin overrides: our file and class, vLLM's file and class.
OVERRIDES = [
    ("proposer.py", "CarryoverProposer", "v1/spec_decode/dflash.py:DFlashProposer"),
    ("proposer.py", "CarryoverProposer", "v1/spec_decode/llm_base_proposer.py:SpecDecodeBaseProposer"),
    ("speculator.py", "CarryoverSpeculator", "v1/worker/gpu/spec_decode/dflash/speculator.py:DFlashSpeculator"),
    ("model.py", "CarryoverForVLLM", "model_executor/models/qwen3_dflash.py:DFlashQwen3ForCausalLM"),
]


def supported_minors() -> list[str]:
    """`0.32`, `0.33`: the range of the extra in pyproject.toml."""
    text = (PLUGIN.parents[1] / "pyproject.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("vllm = "))
    specifier = Requirement(ast.literal_eval(line.removeprefix("vllm = "))[0]).specifier
    return [f"0.{minor}" for minor in range(100) if specifier.contains(f"0.{minor}.0")]


def test_every_supported_version_is_recorded():
    assert sorted(RECORDED) == supported_minors()


@pytest.mark.parametrize("version", RECORDED)
def test_everything_is_in_its_place(version):
    places = RECORDED[version]
    assert [name for name, found in places.items() if found is None] == []
    for name, needed in {**ATTRIBUTES, **ARGUMENTS}.items():
        assert needed - set(places[name]) == set(), name


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.parametrize(("file", "ours", "host"), OVERRIDES)
def test_overrides_take_what_vllm_passes(file, ours, host, version):
    tree = ast.parse((PLUGIN / file).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == ours).body
    methods = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    shared = [name for name in methods if f"{host}.{name}" in RECORDED[version]]
    assert shared, "nothing to compare"
    for name in shared:
        theirs, mine = RECORDED[version][f"{host}.{name}"], _arguments(methods[name])
        open_ended = methods[name].args.vararg is not None
        assert theirs[: len(mine)] == mine if open_ended else theirs == mine, name


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: `make test-vllm`")
def test_the_installed_version_is_as_recorded():
    from hf_carryover.vllm import installed_vllm

    installed = installed_vllm()
    package = Path(importlib.util.find_spec("vllm").origin).parent
    assert read_places(package) == RECORDED[f"{installed.major}.{installed.minor}"]
