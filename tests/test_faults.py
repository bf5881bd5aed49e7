# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Faults while training: killed processes, a full disk, batches and cached files that are broken."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from safetensors.torch import load_file, save_file
from test_bank import losses
from training_helpers import losses_of, make_trainer, random_rows, weights_of
from transformers import TrainerCallback

from hf_carryover.training.checkpoints import checkpoint_problem, discard_incomplete, last_complete_checkpoint
from hf_carryover.training.files import load_tensors, save_tensors


ROWS = random_rows([14, 20, 9, 17])


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def make(target, folder, **kwargs):
    drafter = tiny_drafter(target, block_size=3, markov_rank=4)
    values = {"per_device_train_batch_size": 2, "anchors_per_response": 6, "max_steps": 4, **kwargs}
    return make_trainer(target, drafter, folder, ROWS, **values)


def equal(one, other) -> bool:
    """Bit for bit."""
    mine, theirs = weights_of(one), weights_of(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


# Killed


def kill_runs(*arguments) -> dict:
    """The report of `kill_runs.py`."""
    tests = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(tests / "kill_runs.py"), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_was(tmp_path):
    """SIGKILL at random moments and while saving: resumed, every run ends with the same weights and losses."""
    count = int(os.environ.get("HF_CARRYOVER_KILLS", "8"))
    report = kill_runs("kills", count, 0, tmp_path)
    assert report["different"] == [] and report["kills"] == count
    assert report["left_half_a_checkpoint"] > 0 and report["resumed_behind_a_checkpoint"] > 0


@pytest.mark.slow
def test_one_of_two_processes_dies(tmp_path):
    """The other ends with an error instead of waiting, and both resumed end as if nothing was."""
    report = kill_runs("worker", tmp_path)
    assert report["killed"] == -9 and report["other_ended"] and report["other"] != 0
    assert report["resumed"] == [0, 0] and report["equal"]


# Half a checkpoint


@pytest.fixture(scope="module")
def run(target, tmp_path_factory):
    """A finished run with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make(target, folder, save_strategy="steps", save_steps=1)
    trainer.train()
    return folder, trainer.drafter


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


BROKEN = {
    "no-state": (lambda folder: (folder / "trainer_state.json").unlink(), "`trainer_state.json` is missing"),
    "half-a-state": (lambda folder: cut(folder / "trainer_state.json", 0.5), "`trainer_state.json` can't be read"),
    "no-config": (lambda folder: (folder / "config.json").unlink(), "`config.json`"),
    "no-weights": (lambda folder: (folder / "model.safetensors").unlink(), "there is no `model.safetensors`"),
    "half-the-weights": (lambda folder: cut(folder / "model.safetensors", 0.7), "`model.safetensors` is not whole"),
    "header-alone": (lambda folder: cut(folder / "model.safetensors", 0.01), "`model.safetensors` is not whole"),
    "half-an-optimizer": (lambda folder: cut(folder / "optimizer.pt", 0.9), "`optimizer.pt` is not whole"),
    "no-random-state": (lambda folder: cut(folder / "rng_state.pth", 0.0), "`rng_state.pth` is not whole"),
    "no-scheduler": (lambda folder: (folder / "scheduler.pt").unlink(), "`scheduler.pt` is missing"),
}


@pytest.mark.compat
@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
def test_half_a_checkpoint_is_passed_over(target, run, tmp_path, damage, message, caplog):
    """Found by name, the last one would be resumed from; it is refused by name, and passed over otherwise."""
    shutil.copytree(run[0], tmp_path / "run")
    assert checkpoint_problem(tmp_path / "run" / "checkpoint-4") is None
    damage(tmp_path / "run" / "checkpoint-4")
    damage(tmp_path / "run" / "checkpoint-3")
    trainer = make(target, tmp_path / "run")
    with pytest.raises(ValueError, match=message.split(" ")[0]):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    with caplog.at_level("WARNING"):
        trainer.train(resume_from_checkpoint=True)
    assert f"checkpoint-4 is no whole checkpoint: {message}" in caplog.text
    assert trainer.state.global_step == 4 and len(losses_of(trainer)) == 4
    assert equal(trainer.drafter, run[1])
    left = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert left == ["checkpoint-1", "checkpoint-2"]


def test_without_a_whole_checkpoint_there_is_nothing_to_resume(target, tmp_path):
    trainer = make(target, tmp_path)
    with pytest.raises(ValueError, match="no whole checkpoint to resume from in"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.last_checkpoint() is None
    assert last_complete_checkpoint(tmp_path / "nowhere") is None


def test_random_states_of_all_processes_are_wanted(run, tmp_path):
    """A run of several processes has one each; which of them is missing is said."""
    folder = shutil.copytree(run[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    assert checkpoint_problem(folder) is None
    assert checkpoint_problem(folder, world_size=2) == "`rng_state_1.pth` is missing"


def test_shards_of_other_frameworks_are_left_alone(run, tmp_path):
    """FSDP and DeepSpeed have no `model.safetensors`: their checkpoints are neither refused nor removed."""
    folder = shutil.copytree(run[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    (folder / "model.safetensors").unlink()
    assert checkpoint_problem(folder) == "there is no `model.safetensors`"
    (folder / "pytorch_model_fsdp_0").mkdir()
    assert checkpoint_problem(folder) is None
    assert last_complete_checkpoint(tmp_path) == folder
    (folder / "config.json").unlink()
    discard_incomplete(tmp_path)
    assert folder.exists()


# A full disk


class FillDisk(TrainerCallback):
    """Lets no file grow above a size while the checkpoint of a step is written, as a full disk does."""

    def __init__(self, step: int, size: int):
        self.step, self.size = step, size

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def disk():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.compat
@pytest.mark.parametrize("what", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_disk_full_while_saving(target, run, tmp_path, disk, what):
    """The run ends with what to do; half a checkpoint makes no room scarcer, and resuming gives the same weights."""
    sizes = {path.name: path.stat().st_size for path in (run[0] / "checkpoint-3").iterdir()}
    trainer = make(target, tmp_path, save_strategy="steps", save_steps=1)
    trainer.add_callback(FillDisk(3, sizes[what] // 2))
    with pytest.raises(OSError, match=r"checkpoint-3 could not be saved \(.*Resume from checkpoint-2"):
        trainer.train()
    disk()
    left = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert left == ["checkpoint-1", "checkpoint-2"]
    again = make(target, tmp_path, save_strategy="steps", save_steps=1)
    again.train(resume_from_checkpoint=True)
    assert equal(again.drafter, run[1])


def test_an_older_checkpoint_of_the_name_is_not_mixed(target, run, tmp_path, disk):
    """Written over when half done, it holds new weights and an old state: it must not pass for whole."""
    shutil.copytree(run[0], tmp_path / "run")
    trainer = make(target, tmp_path / "run", save_strategy="steps", save_steps=1, learning_rate=1e-3)
    trainer.add_callback(FillDisk(4, (run[0] / "checkpoint-4" / "optimizer.pt").stat().st_size // 2))
    with pytest.raises(OSError, match="checkpoint-4 could not be saved"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    disk()
    assert not (tmp_path / "run" / "checkpoint-4").exists()


def test_disk_full_while_caching(target, tmp_path, disk):
    """The step fails with the system's own error, and leaves neither half a file nor a temporary one."""
    trainer = make(target, tmp_path / "run", feature_cache_dir=str(tmp_path / "features"), stage="carryover")
    trainer.drafter.config.carry = False
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(Exception, match=r"(?i)file too large|I/O"):
        save_tensors(tmp_path / "features" / "a.safetensors", {"features": torch.ones(1000)})
    disk()
    assert list((tmp_path / "features").iterdir()) == []


# Batches that are not finite


def with_bad_step(trainer, step: int):
    """`nan` in the loss of a step's last micro batch, and so in every gradient."""
    original, calls = trainer.compute_loss, []

    def compute_loss(*args, **kwargs):
        calls.append(1)
        loss = original(*args, **kwargs)
        last = len(calls) == step * trainer.args.gradient_accumulation_steps
        return loss * float("nan") if last else loss

    trainer.compute_loss = compute_loss
    return trainer


class Keep(TrainerCallback):
    """The weights, and the optimizer's count of steps, behind every step."""

    def __init__(self):
        self.weights: list[dict] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(weights_of(model))


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"max_grad_norm": 0.0},
        {"muon": True},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
        {"fc_learning_rate_scale": 0.1, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_a_step_that_is_not_finite_moves_nothing(target, tmp_path, kwargs, caplog):
    """Neither weights nor momentum nor decay, it is counted, and the run goes on."""
    trainer, keep = with_bad_step(make(target, tmp_path, lr_scheduler_type="constant", **kwargs), 3), Keep()
    trainer.add_callback(keep)
    with caplog.at_level("WARNING"):
        trainer.train()
    before, bad, after = keep.weights[1:4]
    assert all(torch.equal(bad[name], before[name]) for name in before)
    assert any(not torch.equal(after[name], bad[name]) for name in bad)
    assert all(bool(torch.isfinite(weight).all()) for weight in after.values())
    logged = [entry.get("skipped_steps") for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [None, None, 1, 1]
    assert "Skipped a step whose gradient is not finite (1 so far)." in caplog.text


def test_a_run_can_stop_there(target, tmp_path):
    trainer, keep = with_bad_step(make(target, tmp_path, non_finite_steps="stop"), 3), Keep()
    trainer.add_callback(keep)
    with pytest.raises(FloatingPointError, match='`non_finite_steps` is "stop"'):
        trainer.train()
    assert all(torch.equal(weight, keep.weights[-1][name]) for name, weight in weights_of(trainer.drafter).items())
    with pytest.raises(ValueError, match='`non_finite_steps` must be "skip" or "stop", got \'go\''):
        make(target, tmp_path, non_finite_steps="go")


def test_weights_that_are_not_finite_end_the_run(target, tmp_path):
    """Skipping every step from there on would look like training."""
    trainer = make(target, tmp_path)
    with torch.no_grad():
        trainer.drafter.fc.weight[0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match="The drafter's weights are not finite"):
        trainer.train()


# Cached files


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[min(int(len(content) * place), len(content) - 1)] ^= 0x10
    path.write_bytes(bytes(content))


def copies(path: Path) -> dict:
    """Tensors that don't go with their file: `load_file` may give views of it."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


DAMAGE = {
    "empty": lambda path, other: path.write_bytes(b""),
    "cut": lambda path, other: cut(path, 0.6),
    "longer": lambda path, other: path.write_bytes(path.read_bytes() + b"x"),
    "flipped-in-the-length": lambda path, other: flip(path, 0.0),
    "flipped-in-the-header": lambda path, other: flip(path, 0.05),
    "flipped-in-the-middle": lambda path, other: flip(path, 0.5),
    "flipped-at-the-end": lambda path, other: flip(path, 1.0),
    "another-recording's": lambda path, other: path.write_bytes(other.read_bytes()),
    "without-checksums": lambda path, other: save_file(copies(path), path),
    "text": lambda path, other: path.write_text("<html>404</html>"),
}


@pytest.mark.parametrize("cache", ["features", "bank"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cached_file_is_made_again(target, tmp_path, cache, damage, caplog):
    """Features and first drafts: the losses stay what they were, and the file is as it was, bit for bit."""
    folders = {"feature_cache_dir": str(tmp_path / "features"), "carry_cache_dir": str(tmp_path / "bank")}

    def fresh():
        return make(target, tmp_path / "run", **folders)

    want = losses(fresh())[0]
    files = sorted((tmp_path / cache).rglob("*.safetensors"))
    assert len(files) == len(ROWS)
    before = [copies(path) for path in files]
    damage(files[1], files[0])
    with caplog.at_level("WARNING"):
        found = losses(fresh())[0]
    assert torch.equal(found, want)
    assert caplog.text.count("is damaged") == 1 and files[1].name in caplog.text
    for path, tensors in zip(files, before):
        again = load_file(path)
        torch.testing.assert_close(again, tensors, rtol=0, atol=0)
    caplog.clear()
    assert torch.equal(losses(fresh())[0], found)
    assert "damaged" not in caplog.text


class Killed(BaseException):
    """Ends a run as a signal does: nothing of the package catches it."""


class KilledBehind:
    """Instead of [`save_tensors`]: writes so many files, and ends the run at the next."""

    def __init__(self, files: int):
        self.left = files

    def __call__(self, path, tensors):
        if not self.left:
            raise Killed
        self.left -= 1
        save_tensors(path, tensors)


@pytest.mark.parametrize(
    ("carry", "caches"),
    [(False, ["features"]), (True, ["bank"]), (True, ["features", "bank"])],
    ids=["features", "bank", "both"],
)
def test_killed_between_two_cached_files(target, tmp_path, carry, caches, monkeypatch):
    """
    Whichever files of a batch are there already: the resumed run ends with the same weights, bit for bit. A recording
    computed alone would round differently than beside the others of its batch.
    """
    names = {"features": "feature_cache_dir", "bank": "carry_cache_dir"}

    def fresh(name):
        folders = {names[cache]: str(tmp_path / name / cache) for cache in caches}
        trainer = make(target, tmp_path / name / "run", save_strategy="steps", save_steps=1, **folders)
        trainer.drafter.config.carry = carry
        return trainer

    whole = fresh("whole")
    whole.train()
    for cache in caches:
        assert len(list((tmp_path / "whole" / cache).rglob("*.safetensors"))) == len(ROWS)
    for last in range(1, len(ROWS) * len(caches)):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            save = KilledBehind(last)
            patch.setattr("hf_carryover.training.bank.save_tensors", save)
            patch.setattr("hf_carryover.training.verification.save_tensors", save)
            fresh(str(last)).train()
        trainer = fresh(str(last))
        trainer.train(resume_from_checkpoint=trainer.last_checkpoint())
        assert equal(trainer.drafter, whole.drafter), f"killed behind file {last}"
        assert losses_of(trainer) == losses_of(whole)


def test_cached_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "a" / "one.safetensors"
    assert load_tensors(path) is None
    save_tensors(path, {"x": torch.arange(6).view(2, 3).T, "y": torch.zeros(0, 4), "z": torch.ones(3).bfloat16()})
    found = load_tensors(path)
    assert found["x"].tolist() == [[0, 3], [1, 4], [2, 5]] and found["y"].shape == (0, 4)
    assert found["z"].dtype == torch.bfloat16
    assert set(load_tensors(path, "y")) == {"y"}
    assert [entry.name for entry in path.parent.iterdir()] == ["one.safetensors"]
