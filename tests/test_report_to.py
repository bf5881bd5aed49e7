# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""`report_to`: TensorBoard, Trackio and Weights & Biases, off line, get what the trainer logs."""

import json
import sqlite3

import pytest
from conftest import tiny_drafter
from training_helpers import make_trainer, random_rows


# Of every logger: what training and evaluation log beside the loss.
LOGGED = {"loss", "block_loss", "accepted_first", "carried"}
MEASURED = {"loss", "tau", "acceptance_1"}


def trained(target, tmp_path, report_to, **kwargs):
    rows = random_rows([14, 18, 22])
    options = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": rows, **kwargs}
    trainer = make_trainer(target, tiny_drafter(target), tmp_path / "run", rows, report_to=report_to, **options)
    trainer.train()
    return trainer


def test_tensorboard(target, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    trainer = trained(target, tmp_path, "tensorboard")
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"train/{name}" for name in LOGGED} | {f"eval/{name}" for name in MEASURED} <= tags
    values = [event.value for event in events.Scalars("eval/tau")]
    logged = [entry["eval_tau"] for entry in trainer.state.log_history if "eval_tau" in entry]
    assert values == pytest.approx(logged)
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


def test_trackio(target, tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    from trackio import utils

    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    for module in ("sqlite_storage", "media.utils"):
        monkeypatch.setattr(f"trackio.{module}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr(trackio, "show", lambda *args, **kwargs: None)
    trained(target, tmp_path, "trackio", project="carryover", trackio_space_id=None)
    (database,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(database) as connection:
        rows = [json.loads(row[0]) for row in connection.execute("select metrics from metrics")]
    names = set().union(*rows)
    assert {f"train/{name}" for name in LOGGED} | {f"eval/{name}" for name in MEASURED} <= names


def test_wandb(target, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "wandb"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "wandb").mkdir()
    logged = {}
    original = wandb.Run.log

    def log(self, data, *args, **kwargs):
        logged.update(data)
        return original(self, data, *args, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", log)
    trained(target, tmp_path, "wandb", run_name="carryover")
    config = dict(wandb.run.config)
    wandb.finish()
    assert {f"train/{name}" for name in LOGGED} | {f"eval/{name}" for name in MEASURED} <= set(logged)
    assert config["stage"] == "carryover" and config["block_size"] == 4
    assert list((tmp_path / "wandb").rglob("*.wandb"))
