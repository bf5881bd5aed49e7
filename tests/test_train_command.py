"""`python -m hf_carryover.train`, end to end on a tiny saved target, and its answers to mistakes."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from conftest import tiny_llama
from safetensors.torch import load_file
from training_helpers import random_rows
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_carryover import CarryoverDrafter
from hf_carryover.train import (
    SHAPE_FLAGS,
    DrafterArguments,
    build_drafter,
    main,
    parse,
    provenance,
    training_choices,
)
from hf_carryover.training.arguments import CarryoverTrainingArguments
from hf_carryover.training.trainer import CarryoverTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a saved target, its tokenizer, and recordings."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("train")
    tiny_llama().save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1", pad_token="w0")
    tokenizer.save_pretrained(folder / "target")
    lines = [json.dumps(row) for row in random_rows([14, 22, 9, 18, 17, 12, 16, 11])]
    (folder / "recordings.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def flags(folder, output, **kwargs):
    values = {
        "target": folder / "target",
        "recordings": folder / "recordings.jsonl",
        "output_dir": folder / output,
        "held_out": 2,
        "target_dtype": "float32",
        "num_hidden_layers": 1,
        "block_size": 3,
        "markov_rank": 2,
        "draft_vocab_size": 40,
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    if "drafter" in kwargs:  # which has a shape of its own
        values = {name: value for name, value in values.items() if name not in SHAPED}
    values |= kwargs
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]


def test_drafter_is_reshaped(folder, baseline):
    """Another vocabulary, and layers, of a drafter to go on from."""
    start = {"drafter": baseline / "drafter", "draft_vocab_size": 20, "block_size": 5, "markov_rank": 0}
    assert main(flags(folder, "reshaped", stage="baseline", max_steps=1, save_strategy="no", **start)) == 0
    config = CarryoverDrafter.from_pretrained(folder / "reshaped" / "drafter").config
    assert (config.draft_vocab_size, config.block_size, config.markov_rank) == (20, 5, 0)


def error_of(argv, capsys):
    """The one line that a refused command prints; it exits with 2 and without a traceback."""
    try:
        code = main(argv)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    text = capsys.readouterr().err
    lines = [line for line in text.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "Traceback" not in text
    return lines[0]


# What a drafter to go on from has already.
SHAPED = {*SHAPE_FLAGS, "draft_vocab_size"}


@pytest.fixture(scope="module")
def baseline(folder):
    """A finished baseline run."""
    assert main(flags(folder, "baseline", stage="baseline")) == 0
    return folder / "baseline"


@pytest.mark.compat
def test_run_leaves_a_drafter_and_its_record(folder, baseline):
    drafter = CarryoverDrafter.from_pretrained(baseline / "drafter", dtype="auto")
    assert drafter.dtype == torch.float32 and not drafter.config.carry
    assert (drafter.config.block_size, drafter.config.markov_rank, drafter.config.draft_vocab_size) == (3, 2, 40)
    assert AutoTokenizer.from_pretrained(baseline / "drafter").convert_tokens_to_ids("w17") == 17
    target = tiny_llama()
    ids = torch.tensor([[5, 9, 33]])
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=12, assistant_model=drafter), plain)

    text = (baseline / "training.json").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["arguments"]["target"] == "target"
    assert record["arguments"]["recordings"] == ["recordings.jsonl"]
    assert record["training_arguments"]["max_steps"] == 4
    assert record["metrics"]["eval_blocks"] > 0
    assert str(folder) not in text
    log = [json.loads(line) for line in (baseline / "training_log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4]


def test_no_record_names_a_place_of_this_machine(folder, baseline):
    """Whatever argument a path came in by."""
    places = {"carry_cache_dir": folder / "bank", "feature_cache_dir": folder / "features"}
    common = {"stage": "carryover", "max_steps": 1, "save_strategy": "no", "drafter": baseline / "drafter", **places}
    argv = flags(folder, "banked", first_drafter=baseline / "drafter", carry=True, lookup_ngram_size=2, **common)
    assert main(argv) == 0
    text = (folder / "banked" / "training.json").read_text()
    assert str(folder) not in text
    assert json.loads(text)["training_arguments"]["first_drafter"] == "baseline/drafter"


def test_carryover_and_control_go_on_from_the_baseline(folder, baseline):
    """From one checkpoint, with and without carry; without the flag a drafter stays what it is."""
    start = load_file(baseline / "drafter" / "model.safetensors")
    common = {"stage": "carryover", "drafter": baseline / "drafter", "max_steps": 1}
    common["save_strategy"] = "no"
    assert main(flags(folder, "carryover", carry=True, bf16=True, save_dtype="bfloat16", **common)) == 0
    assert main(flags(folder, "control", **common)) == 0
    carryover = CarryoverDrafter.from_pretrained(folder / "carryover" / "drafter", dtype="auto")
    assert carryover.config.carry and carryover.dtype == torch.bfloat16
    assert torch.equal(carryover.d2t, start["d2t"])
    control = load_file(folder / "control" / "drafter" / "model.safetensors")
    assert set(control) == set(start)
    record = json.loads((folder / "carryover" / "training.json").read_text())
    assert record["arguments"]["drafter"] == "baseline/drafter"
    assert not set(record["arguments"]) & SHAPED
    assert (record["config"]["block_size"], record["config"]["num_hidden_layers"]) == (3, 1)
    kept = build_drafter(DrafterArguments("t", ["r"], drafter=str(folder / "carryover" / "drafter")), None, None)
    assert kept.config.carry and kept.dtype == torch.float32


def test_interrupted_run_is_resumed(folder, baseline, monkeypatch):
    """The same command again goes on from the last checkpoint and ends at the same weights."""
    compute_loss, calls = CarryoverTrainer.compute_loss, []

    def interrupted(self, *args, **kwargs):
        calls.append(self.state.global_step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compute_loss(self, *args, **kwargs)

    monkeypatch.setattr(CarryoverTrainer, "compute_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(flags(folder, "again", stage="baseline"))
    assert not (folder / "again" / "drafter").exists()
    assert main(flags(folder, "again", stage="baseline")) == 0
    assert calls == [0, 1, 2, 3, 2, 3]
    ours, theirs = (load_file(path / "drafter" / "model.safetensors") for path in (folder / "again", baseline))
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_yaml_equals_flags(folder, tmp_path):
    """YAML reads `6e-4` as a string, has lists, booleans and nothings: the arguments are those of the flags."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "target: t\nrecordings: r\noutput_dir: o\nlearning_rate: 6e-4\ntarget_layer_ids: [0, 2]\ncarry: true\n"
        "drafter: null\nuse_cpu: true\nstage: carryover\ninit_from_target: false\n"
        'lr_scheduler_kwargs: {"num_cycles": 0.5}\nreport_to: none\n'
    )
    arguments, args = parse([str(config)])
    line = "--target t --recordings r --output_dir o --learning_rate 6e-4 --target_layer_ids 0 2 --carry true"
    line += " --use_cpu --stage carryover --init_from_target false --report_to none"
    ours, theirs = parse(line.split())
    assert arguments == ours
    assert args.learning_rate == theirs.learning_rate == 6e-4
    assert args.stage == "carryover" and args.use_cpu and args.lr_scheduler_kwargs == {"num_cycles": 0.5}
    assert arguments.target_layer_ids == [0, 2] and arguments.carry is True and arguments.init_from_target is False


MISTAKES = [
    pytest.param({"stage": "both"}, '`stage` must be "baseline" or "carryover", got \'both\'', id="stage"),
    pytest.param({"target": "missing"}, "`target` 'missing' is no folder or Hub id", id="no-target"),
    pytest.param({"recordings": "missing.jsonl"}, "'missing.jsonl' does not exist", id="no-recordings"),
    pytest.param({"drafter": "missing"}, "`drafter` 'missing' is no folder or Hub id", id="no-drafter"),
    pytest.param({"carry": True}, "trains a drafter without carry, but `config.carry` is True", id="carry"),
    pytest.param({"target_dtype": "int8"}, "must be one of float32, bfloat16, float16, got 'int8'", id="dtype"),
    pytest.param({"held_out": 8}, "held_out is 8, expected a share", id="all-held-out"),
    pytest.param({"held_out": -1}, "`held_out` must be 0 or a number of recordings, got -1", id="negative"),
    pytest.param(
        {"drafter": "any", "num_hidden_layers": 5},
        "`num_hidden_layers` shape a new drafter, but `drafter` names one",
        id="shape",
    ),
    pytest.param({"block_size": 0}, "`block_size` must be at least 1, got 0", id="block"),
    pytest.param({"draft_vocab_size": 65}, "A draft vocabulary has 1 ... 64 tokens", id="vocab"),
    pytest.param({"target_layer_ids": 9}, "must be distinct increasing ids in 0 ... 3", id="layers"),
    pytest.param({"resume_from_checkpoint": "nowhere"}, "'nowhere' is no checkpoint to resume from", id="resume"),
    pytest.param({"max_steps": "many"}, "invalid int value: 'many'", id="type"),
    pytest.param({"no_such_flag": 1}, "no_such_flag", id="unknown"),
    pytest.param({"target": None}, "the following arguments are required: --target", id="required"),
]


@pytest.mark.parametrize("change, message", MISTAKES)
def test_mistakes_exit_with_two_and_one_line(folder, monkeypatch, capsys, change, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no waiting for a name that does not exist
    assert message in error_of(flags(folder, "mistake", **{"stage": "baseline", **change}), capsys)


@pytest.mark.parametrize(
    "text, message",
    [
        pytest.param("- a\n- b\n", "must hold `name: value` lines, got list", id="list"),
        pytest.param("a: [1\n", "config.yaml is not YAML", id="syntax"),
        pytest.param("target: t\nrecordings: r\noutput_dir: o\nstag: x\n", "'--stag', 'x'", id="unknown"),
        pytest.param(None, "config.yaml", id="missing"),
    ],
)
def test_mistakes_in_yaml(tmp_path, capsys, text, message):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    assert message in error_of([str(tmp_path / "config.yaml")], capsys)


def test_output_folder_of_another_run_is_refused(folder, baseline, capsys):
    """Not resumed with half of its weights."""
    message = error_of(flags(folder, "baseline", stage="carryover", carry=True, markov_rank=0), capsys)
    assert "`carry` is False there and True here, `markov_rank` is 2 there and 0 here" in message


def test_record_without_git(monkeypatch):
    """A finished run does not fail for want of git."""
    monkeypatch.setenv("PATH", "")
    found = provenance()
    assert found["commit"] is None
    assert found["versions"]["torch"] == metadata.version("torch")


@pytest.mark.slow
def test_module_runs_as_a_command(tmp_path):
    """`python -m hf_carryover.train` in a process of its own."""
    command = [sys.executable, "-m", "hf_carryover.train", "--target", "t"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: the following arguments are required: --recordings")


def test_choices_are_read_without_touching_the_state_of_several_processes(monkeypatch):
    # A second instance of the arguments resets accelerate's state: the first of two processes then passes every
    # barrier alone and leaves, and the other fails.
    args = CarryoverTrainingArguments(
        output_dir="x", max_steps=3, report_to="tensorboard", stage="carryover", disable_tqdm=True
    )
    state = dict(PartialState._shared_state)
    monkeypatch.setattr(AcceleratorState, "_reset_state", lambda *_: pytest.fail("the state was reset"))
    assert training_choices(args) == {"max_steps": 3, "report_to": ["tensorboard"], "stage": "carryover", "seed": 42}
    assert PartialState._shared_state == state
