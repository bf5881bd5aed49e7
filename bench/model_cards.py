# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Put a trained pair into `model_cards/`: bf16 weights, config, card, training records and logs.

Every number of a card is read from the training records, from a report of `hf-carryover bench`, and from a report of
`hf-carryover replay`. README and RESULTS.md get theirs from `bench.results_page`.

    python -m bench.model_cards --prefix smollm2-135m-markov --stages baseline=DIR control=DIR carryover=DIR \\
        --report bench.json --replay replay.json --recordings DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from datasets import concatenate_datasets

from hf_carryover import CarryoverDrafter, load_recordings
from hf_carryover.evaluation.acceptance import Acceptance, table
from hf_carryover.evaluation.replay_command import named
from hf_carryover.evaluation.summary import HELD_OUT, MEAN, cell
from hf_carryover.hub.card import model_card
from hf_carryover.hub.results import read_report
from hf_carryover.hub.run import Run
from hf_carryover.training.loading import split_recordings


BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PAIR = ("control", "carryover")
# What `save_pretrained` adds for remote code: the shipped folders are for users of the package.
NOT_SHIPPED = ("configuration_carryover.py", "modeling_carryover.py")
LIMITS = (
    "Trained for an hour or two on two CPU cores, on little data of one kind (self-prompted English text), so that "
    "acceptance is low. The output is the target's in every case; a weak drafter only makes it slower."
)


def acceptance(replay: dict) -> str:
    """What carry changes along recorded answers, in a sentence for each kind of them, and the tables."""
    found = []
    for kind, systems in replay["results"].items():
        change = Acceptance(systems, (HELD_OUT,)).change("carryover", "control", MEAN).to_dict()
        said = "no difference is shown" if change["low"] <= 0 <= change["high"] else None
        said = said or ("a gain" if change["low"] > 0 else "a loss")
        found.append(f"{cell(change, '{:+.1%}')} on {kind.partition(':')[0]} answers ({said})")
    return (
        "Along recorded answers of the target, on which every system is measured alike (`hf-carryover replay`), carry "
        f"changes τ against the control, mean of the sets, by {' and '.join(found)}.\n\n"
        + table(replay, [("carryover", "control")], (HELD_OUT,)).rstrip()
    )


def data_line(recordings: list[str], held_out: int) -> str:
    """How much the drafters were trained on, counted with the split of `hf-carryover train`."""
    parts = split_recordings(concatenate_datasets([load_recordings(path) for path in recordings]), held_out, seed=0)
    train, rest = ((len(part), sum(map(sum, part["response_mask"]))) for part in parts)
    return (
        "Recorded greedy responses of the target to user turns it wrote itself, steered to eight kinds of requests: "
        f"{train[0]} recordings with {train[1]:,} response tokens; {rest[0]} recordings held out. No prompt of the "
        "sets above. A baseline first, in one stage or two (the first saw fewer recordings), then control and "
        "carryover from it with equal steps, data, seeds and anchors. The commands give float32 files, converted to "
        "bfloat16 for shipping. Three layers, B = 7 and the reduced vocabulary are chosen for two CPU cores, where "
        "verifying 8 rows costs little more than a plain step and a head over all 49152 tokens would cost more than "
        "the layers. `training.json` and `training_log.jsonl` are the records of this stage, others are prefixed."
    )


def ship(name: str, prefix: str, runs: dict[str, Run], report: dict, replay: dict, data: str, output: Path) -> Path:
    """Write one folder; returns it."""
    folder = output / f"{prefix}-{name}"
    own = {stage: run for stage, run in runs.items() if stage not in PAIR or stage == name}
    drafter = CarryoverDrafter.from_pretrained(runs[name].folder / "drafter", dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        drafter.save_pretrained(temporary)
        for file in Path(temporary).iterdir():
            if file.name not in NOT_SHIPPED:
                shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for stale in folder.glob("*training*.json*"):
        stale.unlink()
    for stage, run in own.items():
        start = "" if stage == name else f"{stage}_"
        (folder / f"{start}training.json").write_text(json.dumps(run.record, indent=2) + "\n")
        lines = "\n".join(json.dumps(entry) for entry in run.log)
        (folder / f"{start}training_log.jsonl").write_text(lines + "\n")
    model_card(
        drafter,
        folder.name,
        base_model=BASE_MODEL,
        runs=own,
        report=report,
        system=name,
        license="apache-2.0",
        language="en",
        place=f"model_cards/{folder.name}",
        data=data,
        limits=LIMITS,
        more_results=acceptance(replay),
    ).save(folder / "README.md")
    return folder


def replace_between(path: Path, begin: str, end: str, body: str) -> None:
    """Replace what stands between two markers of a file."""
    text = path.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path.name} needs each of {begin} and {end} exactly once.")
    head, rest = text.split(begin)
    path.write_text(f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", required=True, help="of the folders' names")
    parser.add_argument(
        "--stages", nargs="+", required=True, metavar="NAME=DIR", help="runs in order, control and carryover last"
    )
    parser.add_argument("--report", type=Path, required=True, help="of `hf-carryover bench` over the pair")
    parser.add_argument("--replay", type=Path, required=True, help="of `hf-carryover replay` over the pair")
    parser.add_argument("--output", type=Path, default=Path("model_cards"))
    parser.add_argument("--recordings", nargs="+", required=True, help="what was trained on, to count it")
    arguments = parser.parse_args(argv)
    runs = {name: Run.read(folder) for name, folder in named(arguments.stages, "--stages").items()}
    (report, _), replay = read_report(arguments.report), json.loads(arguments.replay.read_text())
    data = data_line(arguments.recordings, runs["control"].record["arguments"]["held_out"])
    for name in PAIR:
        folder = ship(name, arguments.prefix, runs, report, replay, data, arguments.output)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
        print(f"{folder.name}: {size:.1f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
