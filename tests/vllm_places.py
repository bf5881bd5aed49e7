"""
What the plugin builds on in vLLM, read from its sources without importing them: signatures, and attributes of classes.

`python tests/vllm_places.py VERSION SITE_PACKAGES` adds a version to `vllm_places.json`.
"""

import ast
import json
import sys
from pathlib import Path


RECORD = Path(__file__).with_name("vllm_places.json")

# File, then `Class.method`, function or `Class` (whose fields and attributes are listed).
PLACES = {
    "config/speculative.py": [
        "SpeculativeConfig",
        "SpeculativeConfig.__post_init__",
        "SpeculativeConfig.hf_config_override",
    ],
    "config/vllm.py": ["VllmConfig.num_lookahead_tokens"],
    "model_executor/models/qwen3_dflash.py": [
        "DFlashQwen3Model",
        "DFlashQwen3Model.precompute_and_store_context_kv",
        "DFlashQwen3Model._normalize_context_k",
        "DFlashQwen3ForCausalLM",
        "DFlashQwen3ForCausalLM.combine_hidden_states",
        "DFlashQwen3ForCausalLM.forward",
        "DFlashQwen3ForCausalLM.load_weights",
        "DFlashQwen3ForCausalLM._read_mask_embedding",
    ],
    "v1/sample/rejection_sampler.py": ["expand_batch_to_tokens"],
    "v1/spec_decode/dflash.py": [
        "DFlashProposer",
        "DFlashProposer.__init__",
        "DFlashProposer.set_inputs_first_pass",
        "DFlashProposer.build_model_inputs_first_pass",
        "DFlashProposer.dummy_run",
    ],
    "v1/spec_decode/llm_base_proposer.py": [
        "SpecDecodeBaseProposer",
        "SpecDecodeBaseProposer._maybe_share_embeddings",
        "SpecDecodeBaseProposer._maybe_share_lm_head",
        "SpecDecodeBaseProposer._sample_draft_tokens",
        "SpecDecodeBaseProposer._get_slot_mapping",
        "SpecDecodeBaseProposer._determine_batch_execution_and_padding",
    ],
    "v1/spec_decode/metrics.py": ["SpecDecodingProm.__init__", "SpecDecodingProm.observe", "SpecDecodingStats"],
    "v1/worker/gpu_model_runner.py": ["GPUModelRunner._input_fits_in_drafter"],
    "v1/worker/gpu/input_batch.py": ["InputBuffers", "InputBatch"],
    "v1/worker/gpu/sample/gumbel.py": ["gumbel_sample"],
    "v1/worker/gpu/spec_decode/speculator.py": ["DraftModelSpeculator"],
    "v1/worker/gpu/spec_decode/dflash/speculator.py": [
        "DFlashSpeculator",
        "DFlashSpeculator.__init__",
        "DFlashSpeculator.load_draft_model",
        "DFlashSpeculator._precompute_context_kv",
        "DFlashSpeculator._generate_draft",
        "DFlashSpeculator._run_model",
        "prepare_dflash_inputs",
    ],
}


def _arguments(node: ast.FunctionDef) -> list[str]:
    given = node.args
    return [a.arg for a in [*given.posonlyargs, *given.args, *given.kwonlyargs]]


def _attributes(node: ast.ClassDef) -> list[str]:
    """Fields, properties, and what any method assigns to `self`."""
    names = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef) and any(isinstance(d, ast.Name) for d in item.decorator_list):
            names.add(item.name)
        targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                names.add(target.attr)
    return sorted(names)


def read_places(package: Path) -> dict[str, list[str] | None]:
    """Arguments or attributes of every place below `package`, the folder `vllm`; `None` for what isn't there."""
    found: dict[str, list[str] | None] = {}
    for file, names in PLACES.items():
        path = package / file
        tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
        top = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        for name in names:
            owner, _, method = name.partition(".")
            node = top.get(owner)
            if node is not None and method:
                inner = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == method]
                node = inner[0] if inner else None
            if node is None:
                found[f"{file}:{name}"] = None
            else:
                found[f"{file}:{name}"] = _attributes(node) if isinstance(node, ast.ClassDef) else _arguments(node)
    return found


def main() -> None:
    version, site_packages = sys.argv[1:]
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[version] = read_places(Path(site_packages) / "vllm")
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
