# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
What an interrupted, abandoned or concurrent call leaves behind: nothing. Memory stays flat over a thousand of them.
"""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fresh_process import python
from test_state import SHORT, A, call, drafter_for, hooks
from tiny_targets import plain, prompt_ids, record_proposals, tiny_drafter, tiny_llama, tiny_target
from transformers import StoppingCriteria, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from hf_carryover import generation, split_times
from hf_carryover.modeling_carryover import CarryoverCache


@pytest.fixture
def stores(monkeypatch):
    """Weak references to every storage that is opened from now on."""
    opened: list[weakref.ref] = []

    class Watched(CarryoverCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            opened.append(weakref.ref(self))

    monkeypatch.setattr(generation, "CarryoverCache", Watched)
    return opened


class Raising(BaseStreamer):
    """A client that goes away: `put` raises at its `last`-th call."""

    def __init__(self, last: int, error: type[BaseException]):
        self.left, self.error = last, error

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            raise self.error("gone")

    def end(self):
        pass


def interrupt(where: str, target, drafter, error: type[BaseException], monkeypatch) -> dict:
    """Options, or a patch, that raise in the middle of a call."""
    count = {"left": 4}

    def raising(original):
        def wrapper(*args, **kwargs):
            count["left"] -= 1
            if count["left"] == 0:
                raise error("gone")
            return original(*args, **kwargs)

        return wrapper

    if where == "streamer":
        return {"streamer": Raising(4, error)}
    if where == "criterion":

        class Criterion(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                raising(lambda: None)()
                return torch.zeros(1, dtype=torch.bool)

        return {"stopping_criteria": [Criterion()]}
    owner, name = {
        "target": (target, "forward"),
        "layers": (drafter, "run_layers"),
        "commit": (drafter, "commit_window"),
        "verification": (generation.CarryoverCandidateGenerator, "update_candidate_strategy"),
    }[where]
    monkeypatch.setattr(owner, name, raising(getattr(owner, name)))
    return {}


PLACES = ["streamer", "criterion", "target", "layers", "commit", "verification"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit], ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", PLACES)
def test_interrupted_calls_leave_nothing(where, error, stores, monkeypatch):
    """R13: also by Ctrl-C, in every part of a round. No hook, no storage, and the next call is a fresh one."""
    target = tiny_llama()
    drafter = drafter_for(target)
    with monkeypatch.context() as patch:
        rounds = record_proposals(drafter, patch)
        want = call(target, drafter, A).tolist()
    fresh = (list(rounds), drafter.last_report.accepted, drafter.last_report.carried)
    before = hooks(target), hooks(drafter), target.generation_config.to_dict()
    with monkeypatch.context() as patch, pytest.raises(error):
        call(target, drafter, A, **interrupt(where, target, drafter, error, patch))
    assert (hooks(target), hooks(drafter), target.generation_config.to_dict()) == before
    gc.collect()
    assert len(stores) == 2 and all(store() is None for store in stores)
    with monkeypatch.context() as patch:
        rounds = record_proposals(drafter, patch)
        assert call(target, drafter, A).tolist() == want
    assert (list(rounds), drafter.last_report.accepted, drafter.last_report.carried) == fresh


def test_interrupted_while_times_are_split():
    """The hooks that split times are taken off, and later calls are not split."""
    target = tiny_llama()
    drafter = drafter_for(target)
    call(target, drafter, SHORT)
    before = hooks(target)
    with pytest.raises(KeyboardInterrupt), split_times(target):
        call(target, drafter, A, streamer=Raising(4, KeyboardInterrupt))
    assert hooks(target) == before
    call(target, drafter, SHORT)
    assert drafter.last_report.phases is None


class Tokenizer:
    """As much of a tokenizer as a text streamer uses."""

    def decode(self, ids, **kwargs):
        return " ".join(map(str, ids)) + " "


def test_abandoned_streams(stores):
    """Readers that stop half-way: the calls end by themselves, and so does all they held."""
    target = tiny_llama()
    drafter, want = drafter_for(target), plain(tiny_target("llama"), A["ids"], max_new_tokens=A["new"]).tolist()
    results, threads = [], []
    for _ in range(4):
        streamer = TextIteratorStreamer(Tokenizer(), timeout=60)
        thread = threading.Thread(
            target=lambda own=streamer: results.append(call(target, drafter, A, streamer=own).tolist())
        )
        thread.start()
        threads.append(thread)
        next(iter(streamer))  # and no more
        del streamer
    for thread in threads:
        thread.join()
    assert results == [want] * 4
    gc.collect()
    assert len(stores) == 4 and all(store() is None for store in stores)


def test_threads_targets_and_one_drafter():
    """R13: calls of several threads on two targets, greedy and sampled, some of which fail."""
    targets = [tiny_llama(), tiny_llama()]
    with torch.no_grad():
        for parameter in targets[1].parameters():
            parameter.mul_(1.4)
    drafter = drafter_for(targets[0])
    want = [[plain(t, c["ids"], max_new_tokens=c["new"]).tolist() for c in (A, SHORT)] for t in targets]
    assert want[0] != want[1]

    def work(number: int):
        which, case = number % 2, number // 2 % 2
        if number % 5 == 4:
            with pytest.raises(ConnectionError):
                call(targets[which], drafter, A, streamer=Raising(3, ConnectionError))
            return None
        if number % 7 == 6:
            return len(call(targets[which], drafter, SHORT, do_sample=True)[0]) == 6 + SHORT["new"]
        text = call(targets[which], drafter, (A, SHORT)[case]).tolist()
        return text == want[which][case] and sum(drafter.last_report.committed) == (A, SHORT)[case]["new"] - 1

    with ThreadPoolExecutor(max_workers=4) as pool:
        results = list(pool.map(work, range(24)))
    assert all(result in (None, True) for result in results)


def test_reports_go_with_their_drafter_and_thread():
    """A report is kept per thread and drafter, and for no longer than both live."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    call(target, drafter, SHORT)
    report = weakref.ref(drafter.last_report)
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert pool.submit(getattr, drafter, "last_report").result() is None
    del drafter
    gc.collect()
    assert report() is None


MEMORY = """
import gc, os, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from tiny_targets import assisted, prompt_ids, tiny_drafter, tiny_llama
target = tiny_llama(num_hidden_layers=2, max_position_embeddings=512)
drafter = tiny_drafter(target, block_size=4, markov_rank=3, num_hidden_layers=1, target_layer_ids=[1])
prompts = [prompt_ids(length, seed=length) for length in (3, 12, 60, 200)]

class Gone(Exception): pass

class Client:
    def __init__(self): self.left = 3
    def put(self, value):
        self.left -= 1
        if not self.left: raise Gone
    def end(self): pass

def generate(count):
    for i in range(count):
        options = {"do_sample": i % 3 == 1, "top_k": 5} if i % 3 == 1 else {}
        try:
            assisted(target, prompts[i % 4], drafter, max_new_tokens=8, streamer=Client() if i % 10 == 9 else None,
                     **options)
        except Gone:
            pass
    gc.collect()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

generate(100)
before, objects = resident(), len(gc.get_objects())
generate(1000)
print(before, resident(), objects, len(gc.get_objects()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory from /proc")
def test_memory_over_a_thousand_generations(tmp_path):
    """Resident memory and objects of the interpreter: below 1 % more behind 1000 calls, every tenth interrupted."""
    printed = python(MEMORY, Path(__file__).parent, folder=tmp_path).splitlines()[-1]
    before, after, objects, later = map(int, printed.split())
    print(f"resident {before / 2**20:.1f} -> {after / 2**20:.1f} MiB, objects {objects} -> {later}")
    assert after < 1.01 * before
    assert later < 1.01 * objects


def test_prompt_is_left_alone():
    """A call that fails has not written into the caller's tensors."""
    target, ids = tiny_target("llama"), prompt_ids()
    mask = torch.ones_like(ids)
    with pytest.raises(ConnectionError):
        call(
            target, tiny_drafter(target), {"ids": ids, "new": 9}, attention_mask=mask,
            streamer=Raising(3, ConnectionError),
        )  # fmt: skip
    assert ids.tolist() == prompt_ids().tolist() and mask.all()
