# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""`hf-carryover convert`, `push` and `info`, and YAML files of flags."""

import json
import re

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from convert_helpers import deepspec_folder, save_target, speculators_folder, zlab_folder
from hub_server import TOKEN, HubServer, on_line
from recording_helpers import Script, make_tokenizer, record

from hf_carryover import CarryoverDrafter, cli
from hf_carryover.adapters import add_adapter
from hf_carryover.command import expand_config


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target") / "target")


def run(capsys, *argv):
    """Exit code, standard output, standard error."""
    code = cli.main([str(arg) for arg in argv])
    return code, *capsys.readouterr()


# convert


def test_convert(pair, tmp_path, capsys):
    target, at = pair
    deepspec_folder(tmp_path / "source", target)
    code, out, _ = run(capsys, "convert", tmp_path / "source", tmp_path / "ours")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"deepspec -> carryover: {tmp_path / 'ours'}"
    assert any(line.startswith("note: Dropped confidence_head.proj.bias") for line in lines)
    code, out, _ = run(capsys, "convert", tmp_path / "ours", tmp_path / "out", "--to", "speculators", "--target", at)
    assert (code, out.splitlines()) == (0, [f"carryover -> speculators: {tmp_path / 'out'}"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["speculators_model_type"] == "dspark"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out"], "error: nowhere is no folder, and can't be fetched from the Hub"),
        (["source", "out", "--to", "eagle"], "error: argument --to: invalid choice: 'eagle'"),
        (["source", "source"], "error: source exists. Choose another folder"),
        (["source", "out", "--overwite"], "error: unrecognized arguments: --overwite"),
        (["source", "out", "--to", "speculators"], r"error: .* names the target \(verifier\)"),
        (["source"], "error: the following arguments are required: folder"),
    ],
)
def test_convert_mistakes(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zlab_folder(tmp_path / "source")
    try:
        code = cli.main(["convert", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    err = capsys.readouterr().err
    assert code == 2 and "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert re.search(message, line)


def test_yaml_and_flags(tmp_path, capsys):
    zlab_folder(tmp_path / "source")
    (tmp_path / "convert.yaml").write_text("to: z-lab\noverwrite: true\n")
    argv = ["convert", tmp_path / "source", tmp_path / "out", "--config", tmp_path / "convert.yaml"]
    code, out, _ = run(capsys, *argv)
    assert (code, out.split(":")[0]) == (0, "z-lab -> z-lab")
    code, out, _ = run(capsys, *argv, "--to", "carryover")
    assert (code, out.split(":")[0]) == (0, "z-lab -> carryover")
    assert run(capsys, *argv, "--overwrite", "false")[0] == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [("- a\n- b\n", "must hold `name: value` lines, got list"), ("a: [", "is not YAML"), (None, "No such file")],
)
def test_yaml_mistakes(content, message, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    code, _, err = run(capsys, "convert", "a", "b", "--config", path)
    assert code == 2 and message in err and err.startswith("error: ")
    code, _, err = run(capsys, "convert", "a", "b", "--config")
    assert (code, err) == (2, "error: `--config` needs a YAML file.\n")


def test_expansion(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text('learning_rate: 6e-4\ntarget_layer_ids: [1, 2]\nbf16: true\nnothing: null\nllm_kwargs: {"a": 1}\n')
    flags = ["--learning_rate", "6e-4", "--target_layer_ids", "1", "2", "--bf16", "true", "--llm_kwargs", '{"a": 1}']
    assert expand_config([str(path)]) == flags
    assert expand_config(["--seed", "1", f"--config={path}"]) == [*flags, "--seed", "1"]
    assert expand_config(["--seed", "1"]) == ["--seed", "1"]


# info


@pytest.fixture
def llama(tmp_path):
    target = tiny_llama()
    target.save_pretrained(tmp_path / "llama")
    return target, tmp_path / "llama"


def test_info_of_a_drafter(llama, tmp_path, capsys):
    target, at = llama
    drafter = tiny_drafter(target, markov_rank=3, draft_token_ids=torch.arange(0, 64, 2))
    drafter.save_pretrained(tmp_path / "drafter")
    code, out, _ = run(capsys, "info", tmp_path / "drafter", "--target", at)
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    values = {name.strip(): value.strip() for name, value in lines.items()}
    size = sum(p.numel() for p in drafter.parameters()) / 1e6
    assert code == 0
    assert values == {
        "kind": "drafter",
        "format": "carryover",
        "carry": "on, from states",
        "proposals": "4 a round, own position",
        "lookup": "off",
        "layers": "2 of width 32",
        "target": "4 layers of width 32, tapped at [1]",
        "vocabulary": "32 of 64 tokens",
        "markov rank": "3",
        "mask": "learned embedding",
        "parameters": f"{size:.2f} M, float32",
        "fits": "yes",
    }


def test_info_of_a_misfit(llama, pair, tmp_path, capsys):
    _, at = pair
    tiny_drafter(llama[0]).save_pretrained(tmp_path / "drafter")
    code, out, _ = run(capsys, "info", tmp_path / "drafter", "--target", at)
    assert code == 1
    assert "drafter `vocab_size` is 64, the target has 5" in out.splitlines()[-1]
    code, _, err = run(capsys, "info", tmp_path / "drafter", "--target", tmp_path / "drafter")
    assert code == 2 and "is a drafter, not a target" in err


def test_info_of_other_folders(llama, pair, tmp_path, capsys):
    speculators_folder(tmp_path / "spec", pair[1], "dspark", reduced=True)
    assert "speculators" in run(capsys, "info", tmp_path / "spec")[1]
    drafter = tiny_drafter(llama[0])
    drafter.save_pretrained(tmp_path / "base")
    peft = pytest.importorskip("peft")
    adapted = add_adapter(CarryoverDrafter.from_pretrained(tmp_path / "base"), peft.LoraConfig(r=2))
    adapted.save_pretrained(tmp_path / "adapter")
    out = run(capsys, "info", tmp_path / "adapter")[1]
    assert out.startswith("kind") and "adapter" in out.splitlines()[0]
    assert f"on {tmp_path / 'base'}" in out
    record(Script(["abc"] * 3), make_tokenizer(), [{"id": str(i), "turns": ["a"]} for i in range(3)], tmp_path / "rec")
    lines = run(capsys, "info", tmp_path / "rec")[1].splitlines()
    assert lines[0].split() == ["kind", "recordings"] and lines[-1].split() == ["prompts", "3"]
    code, _, err = run(capsys, "info", tmp_path / "rec", "--target", llama[1])
    assert code == 2 and "is no drafter, so it fits no target: recordings" in err
    code, _, err = run(capsys, "info", tmp_path)
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err


# push


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with HubServer() as server, on_line(server, monkeypatch, tmp_path / "cache"):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def training_run(folder, drafter, stage="carryover", **arguments):
    drafter.save_pretrained(folder / "drafter")
    record = {
        "arguments": {"target": "t", "recordings": ["r"]},
        "config": drafter.config.to_diff_dict(),
        "training_arguments": {"stage": stage, "seed": 0, **arguments},
        "metrics": {"eval_loss": 2.5, "eval_tau": 1.75},
        "versions": {"hf_carryover": "0"},
        "commit": None,
    }
    (folder / "training.json").write_text(json.dumps(record))
    (folder / "training_log.jsonl").write_text('{"step": 3, "block_loss": 2.0}\n{"train_runtime": 120.0}\n')
    return folder


def test_push(hub, llama, tmp_path, capsys):
    drafter = tiny_drafter(llama[0])
    base = training_run(tmp_path / "baseline", tiny_drafter(llama[0], carry=False), "baseline")
    run_folder = training_run(tmp_path / "carryover", drafter)
    argv = ["push", run_folder, "user/drafter", "--base_model", "user/target", "--run", f"baseline={base}"]
    code, out, _ = run(capsys, *argv, "--dry_run")
    assert code == 0 and out.startswith("---\nbase_model: user/target") and hub.repos == {}
    code, out, _ = run(capsys, *argv, "--license", "apache-2.0", "--private")
    assert (code, out) == (0, f"{hub.endpoint}/user/drafter/commit/{hub.repos['user/drafter'].refs['main']}\n")
    files = hub.files("user/drafter")
    assert hub.repos["user/drafter"].private
    assert {"training.json", "training_log.jsonl", "baseline_training.json", "baseline_training_log.jsonl"} <= set(
        files
    )
    card = files["README.md"].decode()
    assert "| baseline | 3 | 2 | 2.000 | 2.500 | 1.750 |" in card and "| carryover | 3 |" in card
    code, out, _ = run(capsys, *argv, "--create_pr", "--license", "mit")
    assert (code, out) == (0, f"{hub.endpoint}/user/drafter/discussions/1\n")
    assert CarryoverDrafter.from_pretrained("user/drafter").config.carry


def test_push_mistakes(hub, llama, tmp_path, capsys, monkeypatch):
    drafter = tiny_drafter(llama[0])
    drafter.save_pretrained(tmp_path / "drafter")
    code, _, err = run(capsys, "push", tmp_path / "nowhere", "user/drafter")
    assert code == 2 and "is no folder" in err
    code, _, err = run(capsys, "push", tmp_path / "drafter", "user/drafter", "--run", tmp_path)
    assert code == 2 and "`--run` takes STAGE=FOLDER" in err
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    code, _, err = run(capsys, "push", tmp_path / "drafter", "user/drafter")
    assert code == 2 and "401" in err and "Traceback" not in err
    assert hub.repos == {}
