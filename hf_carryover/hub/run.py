# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What a card says about training, read from the records of a run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


# What shapes of a new drafter a training record may name; see `hf_carryover.train`.
_OLD_SHAPES = (
    "num_hidden_layers",
    "block_size",
    "markov_rank",
    "target_layer_ids",
    "init_from_target",
    "draft_vocab_size",
)


@dataclass
class Run:
    """
    One training run.

    Args:
        record (`dict`): `training.json`: arguments, versions, commit and metrics.
        log (`list[dict]`): Everything that was logged, `training_log.jsonl`.
        folder (`Path`, *optional*): Where it is from.
    """

    record: dict[str, Any]
    log: list[dict[str, Any]] = field(default_factory=list)
    folder: Path | None = None

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        """
        The run whose output folder this is.

        Raises:
            ValueError: If it has no `training.json`.
        """
        folder = Path(folder)
        if not (folder / "training.json").is_file():
            raise ValueError(f"{folder} is no training run: it has no `training.json`.")
        record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        arguments = record["arguments"]
        if isinstance(arguments.get("recordings"), str):
            # Records of before a drafter could be reshaped: shapes meant nothing where one was continued.
            if arguments.get("drafter"):
                arguments = {key: value for key, value in arguments.items() if key not in _OLD_SHAPES}
            arguments["recordings"] = [arguments["recordings"]]
        for name, parts in (("target", 1), ("drafter", 2)):
            if arguments.get(name):
                arguments[name] = "/".join(Path(arguments[name]).parts[-parts:])
        if "recordings" in arguments:
            arguments["recordings"] = [Path(name).name for name in arguments["recordings"]]
        record["arguments"] = arguments
        path = folder / "training_log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return cls(record, [json.loads(line) for line in lines if line], folder)

    @classmethod
    def of_trainer(cls, trainer) -> Run:
        """The run of a [`CarryoverTrainer`] so far."""
        from ..train import provenance, training_choices

        log = [dict(entry) for entry in trainer.state.log_history]
        metrics: dict[str, Any] = {}
        for entry in log:
            metrics.update({key: value for key, value in entry.items() if key.startswith("eval_")})
        record = {
            "arguments": {},
            "config": trainer.drafter.config.to_diff_dict(),
            "training_arguments": training_choices(trainer.args),
            "metrics": metrics,
            **provenance(),
        }
        return cls(record, log)

    @property
    def seconds(self) -> float | None:
        """Wall time of training, `None` where it was not logged."""
        return next((entry["train_runtime"] for entry in reversed(self.log) if "train_runtime" in entry), None)

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return max((int(entry.get("step", 0)) for entry in self.log), default=0)

    @property
    def loss(self) -> float | None:
        """Mean loss of the blocks in the last tenth of the logged steps."""
        # Not `loss`: that is divided by the weights of all sampled anchors, dropped ones included.
        entries = [entry for entry in self.log if entry.get("block_loss") is not None]
        last = entries[-max(1, math.ceil(len(entries) / 10)) :]
        return sum(float(entry["block_loss"]) for entry in last) / len(last) if last else None

    def command(self) -> str:
        """The command line that the record stands for, with names instead of places."""
        flags = []
        for name, value in {**self.record["arguments"], **self.record["training_arguments"]}.items():
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
        return "hf-carryover train " + " \\\n    ".join(lines)


def stage_table(runs: dict[str, Run]) -> str:
    """Losses of every stage, one row each."""
    rows = [
        "| stage | steps | minutes | training loss | held-out loss | held-out τ, simulated |",
        "| --- | --- | --- | --- | --- | --- |",
    ]

    def number(value, form="{:.3f}") -> str:
        return "–" if value is None else form.format(float(value))

    for name, run in runs.items():
        metrics = run.record.get("metrics") or {}
        minutes = number(None if run.seconds is None else run.seconds / 60, "{:.0f}")
        held_out = f"{number(metrics.get('eval_loss'))} | {number(metrics.get('eval_tau'))}"
        rows.append(f"| {name} | {run.steps} | {minutes} | {number(run.loss)} | {held_out} |")
    return "\n".join(rows)


__all__ = ["Run", "stage_table"]
