"""Loading the vLLM plugin: versions, refusals, and everything that isn't ours left alone."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_helpers import DRAFTERS, NEEDS_VLLM, build_drafter, build_target, engine


pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plugin")


@pytest.fixture(scope="module")
def target(folder):
    model = build_target()
    model.save_pretrained(folder / "target")
    return model


def save(folder, target, name="markov", **values):
    drafter = build_drafter(target, name, **values)
    drafter.save_pretrained(folder / name)
    return folder / name


def speculative(folder, drafter_folder, **options):
    """A `SpeculativeConfig`, as `vllm serve --speculative-config` builds it."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"model": str(drafter_folder), **options}
    args = EngineArgs(str(folder / "target"), skip_tokenizer_init=True, max_model_len=256, speculative_config=options)
    return args.create_engine_config().speculative_config


def test_the_method_and_the_number_of_proposals_may_be_left_out(folder, target):
    config = speculative(folder, save(folder, target))
    assert (config.method, config.num_speculative_tokens) == ("dflash", 4)
    assert speculative(folder, save(folder, target), method="dflash", num_speculative_tokens=3).method == "dflash"


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        pytest.param({}, {"num_speculative_tokens": 5}, r"must lie in 1 ... 4 .*block_size.*, got 5", id="too-many"),
        pytest.param({"carry_from": "predictions"}, {}, r'`carry_from` is "predictions"', id="carry-from"),
        pytest.param(
            {"carry_pointer": True},
            {},
            r"`carry_pointer` is True and .*needs the target's last layer \(3\)",
            id="pointer",
        ),
        pytest.param(
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8},
            {},
            r"only full attention is supported",
            id="sliding",
        ),
        pytest.param(
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
            {},
            r"`layer_types` is \['sliding_attention', 'full_attention'\]; in vLLM only full attention is supported",
            id="partly-sliding",
        ),
        pytest.param({"hidden_act": "gelu"}, {}, r'`hidden_act` is "gelu"', id="activation"),
        pytest.param({}, {"method": "eagle"}, r"works with `method` \"dflash\"|eagle|Eagle", id="method"),
        pytest.param({"num_target_layers": 9}, {}, r"`num_target_layers` is 9, the target has 4", id="other-target"),
        pytest.param({}, {"use_local_argmax_reduction": True}, "use_local_argmax_reduction", id="local-argmax"),
        pytest.param(
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
            },
            {},
            r"RoPE type 'yarn' is defined up to `max_position_embeddings` 64, `max_model_len` is 256",
            id="rope",
        ),
    ],
)
def test_what_can_not_be_served_is_refused(values, options, message, folder, target, tmp_path):
    """Case R24 among them: windows, which would count slots there, are not silently dropped."""
    drafter_folder = save(tmp_path, target, **values)
    with pytest.raises(Exception, match=message):
        speculative(folder, drafter_folder, **options)


def test_a_block_that_can_not_fit_is_refused(folder, target, tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    config = {"model": str(save(tmp_path, target, block_size=15))}
    args = EngineArgs(str(folder / "target"), skip_tokenizer_init=True, max_model_len=31, speculative_config=config)
    with pytest.raises(Exception, match=r"`max_model_len` must be at least 32"):
        args.create_engine_config()


@pytest.mark.parametrize(("change", "message"), [("missing", r"missing \['carry_embedding'\]"), ("more", "unknown")])
def test_a_checkpoint_without_exactly_the_drafters_tensors_is_refused(change, message, folder, target, tmp_path):
    drafter_folder = save(tmp_path, target)
    weights = load_file(drafter_folder / "model.safetensors")
    if change == "missing":
        del weights["carry_embedding"]
    else:
        weights["confidence_head.weight"] = torch.zeros(1, 4)
    save_file(weights, drafter_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message), engine(folder / "target", drafter_folder):
        pass


def test_hooks_are_installed_once_and_all_of_them():
    """Case R27 (d): registering twice is harmless."""
    from hf_carryover import vllm as plugin
    from hf_carryover.vllm import hooks

    plugin.register()
    before = [getattr(owner, name) for owner, name, _ in hooks.HOOKS]
    plugin.register()
    after = [getattr(owner, name) for owner, name, _ in hooks.HOOKS]
    assert before == after
    assert all(hooks._marked(value) for value in after)


@pytest.mark.parametrize("version", ["0.31.1", "0.34.0", None])
def test_other_versions_stay_untouched(version, monkeypatch, caplog):
    from packaging.version import Version

    from hf_carryover import vllm as plugin
    from hf_carryover.vllm import hooks

    monkeypatch.setattr(plugin, "installed_vllm", lambda: None if version is None else Version(version))
    monkeypatch.setattr(hooks, "install", lambda: pytest.fail("hooks installed"))
    with caplog.at_level(logging.WARNING, logger="vllm.hf_carryover"):
        plugin.register()
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert f"found {version}" in caplog.text and "untouched" in caplog.text


def test_a_hook_without_its_place_leaves_vllm_untouched(monkeypatch, caplog):
    from vllm.config import SpeculativeConfig

    from hf_carryover import vllm as plugin
    from hf_carryover.vllm import hooks

    class Moved:
        pass

    wrapped = []
    places = ((SpeculativeConfig, "__post_init__", lambda original: wrapped.append(original)), (Moved, "gone", None))
    monkeypatch.setattr(hooks, "HOOKS", places)
    with caplog.at_level(logging.WARNING, logger="vllm.hf_carryover"):
        plugin.register()
    assert not wrapped and "do not find their places" in caplog.text


@pytest.mark.parametrize("name", DRAFTERS)
def test_expected_tensors_are_those_of_the_drafter(name, target):
    from hf_carryover.vllm.config import expected_tensors

    drafter = build_drafter(target, name)
    assert expected_tensors(drafter.config) == set(drafter.state_dict())


def write_zlab_folder(folder: Path, target) -> Path:
    """A plain DFlash drafter as z-lab publishes them."""
    drafter = build_drafter(target, "dflash-control")
    config = drafter.config
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += ("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act")
    values = {name: getattr(config, name) for name in kept}
    values |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 5, "num_target_layers": 4}
    values |= {"dflash_config": {"target_layer_ids": config.target_layer_ids, "mask_token_id": 0}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    save_file(drafter.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_other_drafters_are_vllms_own(folder, target, tmp_path):
    """A plain DFlash drafter and n-gram propose and write the same with the plugin as with no plugin at all."""
    zlab = write_zlab_folder(tmp_path / "zlab", target)
    script = Path(__file__).with_name("vllm_other_drafters.py")
    results = []
    for plugins in (None, ""):
        env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
        if plugins is not None:
            env["VLLM_PLUGINS"] = plugins
        run = subprocess.run(
            [sys.executable, str(script), str(folder / "target"), str(zlab)], env=env, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr[-4000:]
        line = next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))
        results.append(json.loads(line.removeprefix("RESULT ")))
    with_plugin, without = results
    assert with_plugin.pop("plugin") and not without.pop("plugin")
    assert with_plugin == without
    assert with_plugin["dflash"]["kind"] == "vllm.v1.spec_decode.dflash.DFlashProposer"
    assert "vllm:spec_decode_num_carried_rows" not in with_plugin["dflash"]["counters"]
