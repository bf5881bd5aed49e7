"""The split of a round's time: whole, and honest about which part a delay is in."""

import time

import pytest
import torch
from conftest import tiny_drafter, tiny_llama

from hf_carryover import generation, split_times, timing
from hf_carryover.evaluation import systems
from hf_carryover.evaluation.systems import System
from hf_carryover.modeling_carryover import CarryoverDrafter
from hf_carryover.timing import PHASES


PROMPT = {"input_ids": torch.arange(5, 17)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
NEW = 25


@pytest.fixture(scope="module")
def models():
    target = tiny_llama()
    return target, tiny_drafter(target, markov_rank=4)


def measure(models, max_new_tokens=NEW):
    target, drafter = models
    return System("ours", drafter).generate(target, PROMPT, max_new_tokens)


class Clock:
    """A clock that stands still but for what a delay adds: exact on a machine with other work."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        return self.seconds


def delayed(monkeypatch, owner, name, clock, seconds):
    original = getattr(owner, name)

    def slow(*args, **kwargs):
        clock.seconds += seconds
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("phase", "owner", "name"),
    [
        ("draft", CarryoverDrafter, "run_layers"),
        ("projection", "fc", "forward"),
        ("target", "target", "forward"),
        ("sampling", "markov_head", "forward"),
    ],
)
def test_a_delay_shows_in_its_own_column(phase, owner, name, models, monkeypatch):
    """Of a delay in one part its column grows by exactly that, no other does, and the sum is the time of decoding."""
    target, drafter = models
    clock, seconds = Clock(), 0.25
    for module in (timing, systems, generation):
        monkeypatch.setattr(module, "time", clock)
    owner = target if owner == "target" else getattr(drafter, owner) if isinstance(owner, str) else owner
    before = measure(models)
    assert sum(before["phases"].values()) == 0
    delayed(monkeypatch, owner, name, clock, seconds)
    after = measure(models)
    assert after["token_ids"] == before["token_ids"]
    # One call a round, but the Markov head's one for every proposal, and no draft where nothing may be proposed.
    drafts = sum(count > 0 for count in after["proposed"])
    calls = {"sampling": sum(after["proposed"]), "draft": drafts}.get(phase, after["rounds"])
    expected = {key: 1000 * seconds * calls if key == phase else 0.0 for key in PHASES}
    assert after["phases"] == pytest.approx(expected)
    assert sum(after["phases"].values()) == pytest.approx(after["decode_ms"])


@pytest.mark.compat
def test_the_sum_is_the_wall_time(models):
    """With the real clock, of the best of some runs: another process may take the core between two readings."""
    runs = [measure(models) for _ in range(12)]
    gaps = [abs(sum(run["phases"].values()) / run["decode_ms"] - 1) for run in runs]
    assert min(gaps) < 0.02


@pytest.mark.compat
def test_the_parts_are_all_there_and_prefill_is_none_of_them(models, monkeypatch):
    target, _ = models
    numbers = measure(models)
    assert list(numbers["phases"]) == list(PHASES)
    assert all(value > 0 for value in numbers["phases"].values())
    # A slow prefill is in no column.
    forward = target.forward

    def slow_prefill(*args, **kwargs):
        if kwargs["input_ids"].shape[1] == 12:
            time.sleep(1.0)
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", slow_prefill)
    slow = measure(models)
    assert slow["prefill_ms"] > 1000
    assert sum(slow["phases"].values()) < 1000


@pytest.mark.compat
def test_nothing_is_split_outside_and_nothing_stays_behind(models):
    target, drafter = models
    arguments = {"assistant_model": drafter, "do_sample": False, "max_new_tokens": 4}
    target.generate(**PROMPT, **arguments)
    assert drafter.last_report.phases is None
    with pytest.raises(RuntimeError, match="inside"), split_times(target):
        target.generate(**PROMPT, **arguments)
        assert sum(drafter.last_report.phases.values()) > 0
        raise RuntimeError("inside")
    assert not target._forward_hooks and not target._forward_pre_hooks
    target.generate(**PROMPT, **arguments)
    assert drafter.last_report.phases is None


@pytest.mark.compat
def test_sampling_is_split_too(models, monkeypatch):
    target, drafter = models
    clock = Clock()
    for module in (timing, systems, generation):
        monkeypatch.setattr(module, "time", clock)
    delayed(monkeypatch, target, "forward", clock, 0.25)
    numbers = System("ours", drafter).generate(target, PROMPT, 12, temperature=1.0, seed=3)
    assert numbers["phases"]["target"] == pytest.approx(250.0 * numbers["rounds"])
    assert sum(numbers["phases"].values()) == pytest.approx(numbers["decode_ms"])
