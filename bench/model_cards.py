# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Put trained drafters into `model_cards/`: bf16 weights, config, card, training record and log.

Every number of a card is read from the training records, from a report of `hf-carryover bench`, and from reports of
`hf-carryover replay`; the results section of the repository's README.md is written from the same reports.

    python -m bench.model_cards --prefix smollm2-135m-markov --stages baseline=DIR control=DIR carryover=DIR \
        --report bench.json --replay replay.json --recordings DIR
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path

import torch
from datasets import concatenate_datasets
from huggingface_hub import ModelCard, ModelCardData

from hf_carryover import CarryoverDrafter, load_recordings
from hf_carryover.evaluation.acceptance import Acceptance, table
from hf_carryover.evaluation.replay_command import named
from hf_carryover.evaluation.summary import ALL, HELD_OUT, MEAN, cell
from hf_carryover.train import SHAPE_FLAGS
from hf_carryover.training.loading import split_recordings


BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MORE_FLAGS = ("draft_vocab_size",)
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
# What `save_pretrained` adds for remote code: the shipped folders are for users of the package.
NOT_SHIPPED = ("configuration_carryover.py", "modeling_carryover.py")

ROLE = {
    "carryover": "It reads the target's hidden states of the rows the round before rejected (carry on).",
    "control": "It is the control: the same baseline, trained as long on the same data at equally shifted anchors, "
    "but without carried rows.",
}


def command(record: dict) -> str:
    """The command line that a training record stands for, with names instead of places."""
    flags = []
    for name, value in {**record["arguments"], **record["training_arguments"]}.items():
        if value is None or value == []:
            continue
        if name in ("target", "recordings"):
            value = name.upper()
        elif name == "drafter":
            value = "runs/" + "/".join(Path(value).parts[-2:])
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        elif isinstance(value, bool):
            value = str(value).lower()
        flags.append(f"--{name} {value}")
    lines = [" ".join(flags[i : i + 4]) for i in range(0, len(flags), 4)]
    return "python -m hf_carryover.train " + " \\\n    ".join(lines)


def losses(log: list[dict]) -> tuple[float, int]:
    """Mean loss of the blocks in the last tenth of the logged steps, and the number of steps."""
    # Not `loss`: that is divided by the weights of all sampled anchors, dropped ones included.
    entries = [entry for entry in log if "block_loss" in entry]
    last = entries[-max(1, math.ceil(len(entries) / 10)) :]
    return sum(float(entry["block_loss"]) for entry in last) / len(last), int(entries[-1]["step"])


def read_run(folder: Path) -> dict:
    """Record, log and metrics of one training run."""
    record = json.loads((folder / "training.json").read_text())
    arguments = record["arguments"]
    if isinstance(arguments["recordings"], str):
        # Records of before a drafter could be reshaped: shapes meant nothing where one was continued.
        if arguments.get("drafter"):
            arguments = {key: value for key, value in arguments.items() if key not in (*SHAPE_FLAGS, *MORE_FLAGS)}
        arguments["recordings"] = [arguments["recordings"]]
    for name, parts in (("target", 1), ("drafter", 2)):
        if arguments.get(name):
            arguments[name] = "/".join(Path(arguments[name]).parts[-parts:])
    arguments["recordings"] = [Path(name).name for name in arguments["recordings"]]
    record["arguments"] = arguments
    log = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines() if line]
    seconds = next((entry["train_runtime"] for entry in reversed(log) if "train_runtime" in entry), None)
    return {"record": record, "log": log, "seconds": seconds, "folder": folder}


def stage_table(runs: dict[str, dict]) -> str:
    """Losses of every stage, one row each."""
    rows = [
        "| stage | steps | minutes | training loss | held-out loss | held-out τ, simulated |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, run in runs.items():
        loss, steps = losses(run["log"])
        metrics = run["record"]["metrics"] or {}
        minutes = "–" if run["seconds"] is None else f"{float(run['seconds']) / 60:.0f}"
        held_out = " | ".join(
            "–" if metrics.get(k) is None else f"{metrics[k]:.3f}" for k in ("eval_loss", "eval_tau")
        )
        rows.append(f"| {name} | {steps} | {minutes} | {loss:.3f} | {held_out} |")
    return "\n".join(rows)


def result_tables(report: dict) -> str:
    """τ, what carry changes against the control, and speed, with their intervals."""
    summary = report["summary"]
    groups, pair = summary["groups"], summary["comparisons"]["carryover - control"]
    names = [name for name in ("baseline", "control", "carryover") if name in groups[ALL]["systems"]]
    lines = ["| set | prompts | " + " | ".join(f"τ {name}" for name in names) + " | carryover − control | speedup |"]
    lines.append("| --- " * (len(names) + 4) + "|")
    order = [name for name in groups if name not in (ALL, MEAN, HELD_OUT)]
    for group in [*order, ALL, MEAN, *([HELD_OUT] if HELD_OUT in groups else [])]:
        systems = groups[group]["systems"]
        taus = " | ".join(f"{systems[name]['tau']['value']:.2f}" for name in names)
        lines.append(
            f"| {group.replace('_', ' ')} | {groups[group]['prompts']} | {taus} | "
            f"{cell(pair[group]['tau_difference'], '{:+.3f}')} | {cell(systems['carryover']['speedup'])} |"
        )
    equal = [
        f"{name}: {counts['identical']} of {counts['compared']} identical to plain decoding, "
        f"{len(counts['near_ties'])} differ at a near tie, {len(counts['failures'])} otherwise"
        for name, counts in summary["equality"].items()
    ]
    settings, machine = report["settings"], report["machine"]
    return (
        "\n".join(lines) + f"\n\nGreedy, {settings['dtype']}, at most {settings['max_new_tokens']} new tokens, "
        f"{machine['cpu']}, {machine['cores']} cores; plain decoding and all drafters interleaved prompt by prompt. "
        "τ is committed tokens / verification rounds; speedup is the carryover drafter's over plain `generate`, "
        "prefill apart. Brackets: 95 % paired bootstrap over prompts. Outputs: " + "; ".join(equal) + "."
    )


def verdict(report: dict, replay: dict) -> str:
    """What the intervals allow to say: of carry, along recorded answers, and of speed."""
    summary = report["summary"]
    parts = []
    for kind, systems in replay["results"].items():
        change = Acceptance(systems, (HELD_OUT,)).change("carryover", "control", MEAN).to_dict()
        if change["low"] <= 0 <= change["high"]:
            found = "no difference is shown"
        else:
            found = "a gain" if change["low"] > 0 else "a loss"
        parts.append(f"{cell(change, '{:+.1%}')} {kind.partition(':')[0]} ({found})")
    text = "Carry changes τ against the control, on the mean over the sets, by " + " and ".join(parts) + "."
    speed = cell(summary["groups"][MEAN]["systems"]["carryover"]["speedup"])
    text += (
        f" With the carryover drafter decoding is {speed} times as fast as plain `generate` on the mean over the sets"
    )
    if HELD_OUT in summary["groups"]:
        held_out = cell(summary["groups"][HELD_OUT]["systems"]["carryover"]["speedup"])
        text += f", {held_out} on held-out prompts of the kind it was trained on"
    return text + "."


def data_line(recordings: list[str], held_out: int) -> str:
    """How much the drafters were trained on, counted with the split of `hf_carryover.train`."""
    parts = split_recordings(concatenate_datasets([load_recordings(path) for path in recordings]), held_out, seed=0)
    train, rest = ((len(part), sum(map(sum, part["response_mask"]))) for part in parts)
    return f"{train[0]} recordings with {train[1]:,} response tokens; {rest[0]} recordings held out"


def card(
    name: str, prefix: str, runs: dict, report: dict, replay: dict, drafter: CarryoverDrafter, data_size: str
) -> str:
    """The README.md of one folder."""
    config = drafter.config
    data = ModelCardData(
        license="apache-2.0",
        base_model=BASE_MODEL,
        base_model_relation="adapter",
        library_name="hf_carryover",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "dflash", "carryover", "hf_carryover"],
        language="en",
    )
    parameters = sum(p.numel() for p in drafter.parameters()) / 1e6
    markov = f"Markov head of rank {config.markov_rank}" if config.markov_rank else "no Markov head (DFlash)"
    carried = f"; carried rows are made of {config.carry_from.replace('_', ' ')}" if config.carry else ""
    shape = (
        f"{config.num_hidden_layers} Qwen3-style layers of width {config.hidden_size}, B = {config.block_size} "
        f"proposals a round, {markov}, draft vocabulary of "
        f"{config.output_vocab_size} tokens, features from target layers {config.target_layer_ids}; "
        f"{parameters:.1f} M parameters, bfloat16{carried}."
    )
    stages = "\n".join(
        f"```bash\n{command(runs[stage]['record'])} --output_dir runs/{stage}\n```"
        for stage in [stage for stage in runs if stage not in ROLE or stage == name]
    )
    versions = ", ".join(f"{key} {value}" for key, value in runs[name]["record"]["versions"].items())
    return f"""---
{data.to_yaml()}
---

# {prefix}-{name}

A block drafter for [{BASE_MODEL}](https://huggingface.co/{BASE_MODEL}), for lossless speculative decoding with
[Carryover Drafting](https://arxiv.org/abs/2609.14717). {ROLE[name]}

{shape} Embedding and head are the target's and are not part of it.

```python
from hf_carryover import CarryoverDrafter

# `model` is the target and `inputs` a tokenized prompt; the path is that of this folder.
drafter = CarryoverDrafter.from_pretrained("model_cards/{prefix}-{name}", dtype=model.dtype)
model.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
```

## Results

{verdict(report, replay)}

{result_tables(report)}

Along recorded answers of the target, which every system is measured on alike (`hf-carryover replay`):

{table(replay, [("carryover", "control")], (HELD_OUT,))}
## Training

Recorded greedy responses of the target to user turns it wrote itself: {data_size}. No prompt of the sets above.
A baseline first, in one stage or two, then control and carryover from it with equal steps, data, seeds and anchors:

{stage_table(runs)}

{stages}

`TARGET` is the target, `RECORDINGS` the recordings (those of the first stage were fewer). The commands give float32
files, converted to bfloat16 for shipping. Losses are the position-weighted cross entropy (γ = 4) in nats;
the training loss is the mean of the last tenth of the steps; simulated τ is 1 + accepted proposals at sampled anchors
of held-out recordings, for control and carryover at their shifted anchors. Three layers, B = 7 and the reduced
vocabulary are chosen for two CPU cores, where verifying 8 rows costs little more than a plain step and the head's
product over all 49152 tokens would cost more than the three layers. `training.json` and `training_log.jsonl` are the
records of this stage, `baseline_*` those of the first. {versions}.

## Limits

Trained for minutes on little data of one kind (self-prompted English chat), so acceptance on other text is low. The
output is the target's in every case; a weak drafter only makes it slower.

## Citation

Koo et al., *Carryover Drafting*, arXiv 2609.14717; DFlash, arXiv 2602.06036; DSpark (the Markov head),
arXiv 2607.05147.
"""


def ship(name: str, prefix: str, runs: dict, report: dict, replay: dict, output: Path, data_size: str) -> Path:
    """Write one folder; returns it."""
    folder = output / f"{prefix}-{name}"
    drafter = CarryoverDrafter.from_pretrained(runs[name]["folder"] / "drafter", dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        drafter.save_pretrained(temporary)
        for file in Path(temporary).iterdir():
            if file.name not in NOT_SHIPPED:
                shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stages = {f"{stage}_": run for stage, run in runs.items() if stage not in ROLE}
    for stage, run in {"": runs[name], **stages}.items():
        (folder / f"{stage}training.json").write_text(json.dumps(run["record"], indent=2) + "\n")
        lines = "\n".join(json.dumps(entry) for entry in run["log"])
        (folder / f"{stage}training_log.jsonl").write_text(lines + "\n")
    ModelCard(card(name, prefix, runs, report, replay, drafter, data_size)).save(folder / "README.md")
    return folder


def replace_between(path: Path, begin: str, end: str, body: str) -> None:
    """Replace what stands between two markers of a file."""
    text = path.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path.name} needs each of {begin} and {end} exactly once.")
    head, rest = text.split(begin)
    path.write_text(f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}")


def update_readme(path: Path, runs: dict[str, dict], report: dict, replay: dict) -> None:
    """Replace the results section."""
    parts = [verdict(report, replay), result_tables(report), stage_table(runs)]
    replace_between(path, BEGIN, END, "\n\n".join(parts))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", required=True, help="Of the folders' names.")
    parser.add_argument(
        "--stages",
        nargs="+",
        required=True,
        metavar="NAME=DIR",
        help="Runs in order, control and carryover among them.",
    )
    parser.add_argument(
        "--report", type=Path, required=True, help="Report of `hf-carryover bench` over the three drafters."
    )
    parser.add_argument("--output", type=Path, default=Path("model_cards"))
    parser.add_argument("--replay", type=Path, required=True, help="Report of `hf-carryover replay` over them.")
    parser.add_argument("--readme", type=Path, help="Whose results section is written too.")
    parser.add_argument("--recordings", nargs="+", required=True, help="What was trained on, to count it.")
    arguments = parser.parse_args(argv)
    runs = {name: read_run(Path(folder)) for name, folder in named(arguments.stages, "--stages").items()}
    report, replay = (json.loads(path.read_text()) for path in (arguments.report, arguments.replay))
    data_size = data_line(arguments.recordings, runs["control"]["record"]["arguments"]["held_out"])
    for name in ROLE:
        folder = ship(name, arguments.prefix, runs, report, replay, arguments.output, data_size)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
        print(f"{folder.name}: {size:.1f} MiB")
    if arguments.readme is not None:
        update_readme(arguments.readme, runs, report, replay)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
