# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Training runs that are killed, in processes forked from this one so that each starts at once.

    python tests/kill_runs.py kills N SEED FOLDER     N runs, each killed once (SIGKILL) and resumed
    python tests/kill_runs.py worker FOLDER           two processes, one of which is killed

Prints one line of JSON. Every second kill waits for a checkpoint that is being written, the others for a random
moment.
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from conftest import tiny_drafter, tiny_llama
from safetensors.torch import load_file, save_file
from training_helpers import make_trainer, random_rows
from transformers import TrainerCallback
from transformers.utils import logging

from hf_carryover.training.checkpoints import checkpoint_problem


STEPS = 8
TARGET = tiny_llama(num_hidden_layers=2)
SETTINGS = {
    "verified": {},
    "cached": {"caches": True},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "sampled": {"draft_temperature": 0.8, "muon": True, "gradient_accumulation_steps": 2},
}


class DieAt(TrainerCallback):
    """Kills this process at the end of a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, setting: str, callback: TrainerCallback | None = None) -> None:
    """A whole run, or what is left of it; its weights and losses are written at the end."""
    values = dict(SETTINGS[setting])
    if values.pop("caches", False):
        values.update(feature_cache_dir=str(folder / "features"), carry_cache_dir=str(folder / "bank"))
    drafter = tiny_drafter(TARGET, carry=True, markov_rank=4, block_size=3, num_hidden_layers=1, target_layer_ids=[1])
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "anchors_per_response": 6, **values}
    rows = random_rows([14, 22, 9, 31, 17, 12])
    trainer = make_trainer(
        TARGET, drafter, folder / "run", rows, max_steps=STEPS, per_device_train_batch_size=2, **options
    )
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=trainer.last_checkpoint())
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        weights = {**drafter.state_dict(), "losses": torch.tensor(losses, dtype=torch.float64)}
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / "result.safetensors")


def start(*arguments) -> int:
    """[`train`] in a process of its own; returns its id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        train(*arguments)
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    os._exit(code)


def end_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def equal(one: Path, other: Path) -> bool:
    """Bit for bit: weights, and the losses of all steps."""
    mine, theirs = (load_file(path / "result.safetensors") for path in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def unfinished(folder: Path) -> list[Path]:
    """Checkpoints that are not whole."""
    return [path for path in (folder / "run").glob("checkpoint-*") if checkpoint_problem(path) is not None]


def kill_in_time(process: int, folder: Path, rng: random.Random, seconds: float, saving: bool) -> bool:
    """Kills the process at a random moment behind a random step, or while it saves; `False` when it was faster."""
    step, moment = rng.randrange(STEPS), None
    while True:
        if os.waitpid(process, os.WNOHANG)[0]:
            return False
        if moment is None and (step == 0 or (folder / "run" / f"checkpoint-{step}" / "trainer_state.json").exists()):
            moment = time.monotonic() + rng.uniform(0.0, seconds / STEPS)
        if moment is not None and (bool(unfinished(folder)) if saving else time.monotonic() >= moment):
            break
    if saving:
        time.sleep(rng.uniform(0.0, 0.01))
    os.kill(process, signal.SIGKILL)
    return end_of(process) == -signal.SIGKILL


def kills(count: int, seed: int, folder: Path) -> dict:
    """Runs that are killed once each, compared with runs that are not."""
    rng, seconds = random.Random(seed), {}
    for setting in SETTINGS:
        (folder / setting).mkdir()
        begin = time.monotonic()
        assert end_of(start(folder / setting, setting)) == 0
        seconds[setting] = time.monotonic() - begin
    names = ("kills", "resumed_behind_a_checkpoint", "left_half_a_checkpoint", "too_late")
    report = {**dict.fromkeys(names, 0), "different": []}
    while report["kills"] < count:
        setting = sorted(SETTINGS)[report["kills"] % len(SETTINGS)]
        one = folder / "one"
        shutil.rmtree(one, ignore_errors=True)
        one.mkdir()
        if not kill_in_time(start(one, setting), one, rng, seconds[setting], saving=report["kills"] % 2 == 1):
            report["too_late"] += 1
            continue
        report["kills"] += 1
        broken = unfinished(one)
        report["left_half_a_checkpoint"] += bool(broken)
        report["resumed_behind_a_checkpoint"] += len(list((one / "run").glob("checkpoint-*"))) > len(broken)
        assert end_of(start(one, setting)) == 0, "the resumed run failed"
        if not equal(one, folder / setting):
            report["different"].append((report["kills"], setting, [path.name for path in broken]))
    return report


def worker(folder: Path) -> dict:
    """Two processes; the second is killed at step 4, the first must end too, and both are resumed."""

    def pair(place: Path, callback: TrainerCallback | None) -> list[int]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE="2")
        processes = []
        for rank in range(2):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            processes.append(start(place, "verified", callback if rank == 1 else None))
        return processes

    whole, broken = folder / "whole", folder / "broken"
    for place in (whole, broken):
        place.mkdir()
    assert [end_of(process) for process in pair(whole, None)] == [0, 0]
    first, second = pair(broken, DieAt(4))
    killed = end_of(second)
    begin, done = time.monotonic(), 0
    while not done and time.monotonic() - begin < 120:
        done, status = os.waitpid(first, os.WNOHANG)
        time.sleep(0.05)
    report = {"killed": killed, "other_ended": bool(done), "seconds": round(time.monotonic() - begin, 1)}
    if not done:
        os.kill(first, signal.SIGKILL)
        status = os.waitpid(first, 0)[1]
    report["other"] = os.waitstatus_to_exitcode(status)
    report["left"] = sorted(path.name for path in (broken / "run").glob("checkpoint-*"))
    report["resumed"] = [end_of(process) for process in pair(broken, None)]
    return {**report, "equal": equal(whole, broken)}


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    what, *arguments = sys.argv[1:]
    folder = Path(arguments[-1])
    folder.mkdir(parents=True, exist_ok=True)
    print(json.dumps(kills(int(arguments[0]), int(arguments[1]), folder) if what == "kills" else worker(folder)))


if __name__ == "__main__":
    main()
