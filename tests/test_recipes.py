# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Every recipe from end to end: the file as it is, under an overlay that makes the target tiny (its architecture kept),
the data local and the run short. Two processes train.
"""

import json
import sys
from pathlib import Path

import pytest
import yaml
from convert_helpers import drafter_tensors, layer_config, write
from recording_helpers import make_tokenizer
from tiny_targets import build

from hf_carryover import CarryoverDrafter
from hf_carryover.cli import main
from hf_carryover.recipes import merge, read_recipe, train_command


RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
IDS = [path.stem for path in RECIPES]
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "final_logit_softcapping": 3.0,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
}


def save_tiny(name, folder):
    """A tiny random target of the recipe's architecture, with a chat tokenizer."""
    qwen = name.startswith("qwen3")
    target = build("Qwen3", head_dim=8) if qwen else build("Gemma4Text", **GEMMA)
    target.generation_config.eos_token_id = 2
    target.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def overlay(name, folder):
    """What makes a recipe tiny. Everything else is the recipe's own."""
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": "abc"[: 1 + i % 3] * 2}]} for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    local = {"path": "json", "name": None, "split": "train", "data_files": str(folder / "prompts.jsonl"), "limit": 8}
    recipe = yaml.safe_load((RECIPES[0].parent / f"{name}.yaml").read_text())
    stages = {}
    for stage, flags in recipe["stages"].items():
        stages[stage] = {"num_train_epochs": None, "max_steps": 2}
        if "num_hidden_layers" in flags:
            stages[stage] |= {"num_hidden_layers": 1, "block_size": 3, "target_layer_ids": [0, 2], "mask_token_id": 61}
        if "draft_vocab_size" in flags:
            stages[stage]["draft_vocab_size"] = 40
        if "markov_rank" in flags:
            stages[stage]["markov_rank"] = 4
        if "drafter" in flags:
            stages[stage]["drafter"] = str(public_drafter(folder / "public"))
    short = {"save_strategy": "no", "eval_strategy": "no", "logging_steps": 1, "report_to": "none", "use_cpu": True}
    values = {
        "target": str(save_tiny(name, folder / "target")),
        "processes": 2,
        "prompts": dict.fromkeys(recipe["prompts"], local),
        "record": {
            "engine": "transformers",
            "llm_kwargs": None,
            "max_new_tokens": 10,
            "max_length": None,
            "dtype": "float32",
            "max_repetition": 1.0,
            "chat_template_kwargs": None,
        },
        "train": {
            **short,
            "held_out": 2,
            "target_dtype": "float32",
            "gradient_accumulation_steps": 1,
            "bf16": False,
            "anchors_per_response": 4,
            "save_steps": None,
            "eval_steps": None,
            "disable_tqdm": True,
        },
        "stages": stages,
        "bench": {
            "prompts": [str(folder / "prompts.jsonl")],
            "num_prompts": 1,
            "max_new_tokens": 6,
            "dtype": "float32",
            "temperature": 0.0,
        },
    }
    (folder / "overlay.yaml").write_text(yaml.safe_dump(values))
    return folder / "overlay.yaml"


def public_drafter(folder):
    """A z-lab drafter for the tiny target."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "block_size": 4,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 61, "target_layer_ids": [0, 2]},
        **layer_config(vocab_size=64),
    }
    return write(folder, config, drafter_tensors())


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_recipe_from_end_to_end(path, tmp_path, capfd):
    output = tmp_path / "run"
    argv = ["recipe", str(path), "--output", str(output), "--overlay", str(overlay(path.stem, tmp_path))]
    assert main(argv) == 0, capfd.readouterr().err[-3000:]
    capfd.readouterr()
    recipe = read_recipe(path)
    base = None
    for stage, flags in recipe.stages.items():
        record = json.loads((output / stage / "training.json").read_text())
        drafter = CarryoverDrafter.from_pretrained(output / stage / "drafter")
        assert drafter.config.carry is flags.get("carry", False)
        assert record["training_arguments"]["max_steps"] == 2
        assert ((output / stage / "drafter" / "adapter_config.json").exists()) is ("lora_rank" in flags)
        base = base or drafter
    report = json.loads((output / "bench.json").read_text())
    assert set(report["settings"]["systems"]) == {"plain", *recipe.stages}
    equality = report["summary"]["equality"]
    assert all(counts["failures"] == [] for counts in equality.values())
    # All is done: nothing is run again.
    assert main(argv) == 0
    assert "hf_carryover.train" not in capfd.readouterr().out


@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_recipes_hold_the_papers_budget(path):
    recipe = read_recipe(path)
    text = path.read_text()
    assert recipe.stages["carryover"]["carry"] is True and "carry" not in recipe.stages["control"]
    control, carryover = recipe.stages["control"], dict(recipe.stages["carryover"])
    del carryover["carry"]
    assert control == carryover  # the control differs in carry alone
    assert "ultrachat_200k" in text and "Magpie" in text
    if path.stem.endswith("small"):
        assert recipe.processes == 1 and "lora_rank" in control
        return
    batch = (
        recipe.processes * recipe.train["per_device_train_batch_size"] * recipe.train["gradient_accumulation_steps"]
    )
    assert batch == 512
    assert sum(source["limit"] for source in recipe.prompts.values()) == 500_000
    assert (recipe.stages["baseline"]["num_train_epochs"], control["num_train_epochs"]) == (10, 3)
    assert recipe.stages["baseline"]["block_size"] == 15 and recipe.train["learning_rate"] in (6e-4, "6e-4")
    assert recipe.train["anchors_per_response"] == 512


@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_flags_are_known(path, tmp_path):
    """The flags of every stage are parsed, so a misspelt one is found without a run."""
    from hf_carryover.train import parse

    recipe = read_recipe(path)
    for stage in recipe.stages:
        command = train_command(recipe, tmp_path, stage)
        flags = command[command.index("hf_carryover.train") + 1 :]
        arguments, args = parse([*flags, "--bf16", "false", "--use_cpu", "true"])
        assert args.stage == recipe.stages[stage]["stage"]
        assert arguments.target == recipe.target


def test_dry_run_prints_commands_only(tmp_path, capsys):
    path = RECIPES[IDS.index("qwen3-4b-markov")]
    assert main(["recipe", str(path), "--output", str(tmp_path / "run"), "--dry_run", "--record_python", "other"]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("+ ")]
    assert [command.split("hf_carryover.")[1].split()[0] for command in commands] == [
        "cli",
        "train",
        "train",
        "train",
        "cli",
    ]
    assert commands[0].startswith("+ other -m hf_carryover.cli record --target Qwen/Qwen3-4B")
    assert "--nproc_per_node 8" in commands[1] and f"--drafter {tmp_path}/run/baseline/drafter" in commands[3]
    assert not (tmp_path / "run").exists()


def test_merge():
    below = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}
    assert merge(below, {"a": None, "b": {"c": 4, "x": 5}, "e": [2]}) == {"b": {"c": 4, "d": 3, "x": 5}, "e": [2]}
    assert below == {"a": 1, "b": {"c": 2, "d": 3}, "e": [1]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("target: t\n", r"missing \['stages'\]"),
        ("target: t\nstages: {a: {}}\nstage: 1\n", r"unknown \['stage'\]"),
        (
            "target: t\nstages: {a: {from: b}, b: {}}\n",
            r"Stage 'a' goes on from 'b', which is none of the stages before",
        ),
        ("target: t\nstages: {a: {}}\nprompts: {x: {url: y}}\n", "Prompt set 'x' needs `path`"),
        ("- a\n", "must hold `name: value` lines, got list"),
    ],
)
def test_what_is_no_recipe(content, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_recipe(path)


def test_a_step_that_fails(tmp_path, capfd):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"target: {tmp_path}/nowhere\nprompts: {{}}\nrecord: {{self_prompts: 1}}\nstages: {{a: {{}}}}\n")
    assert main(["recipe", str(path), "--output", str(tmp_path / "run")]) == 2
    err = capfd.readouterr().err
    assert err.splitlines()[-1].startswith("error: The step failed with exit code 2:")
    assert sys.executable.split("/")[-1] in err
