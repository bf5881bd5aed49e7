"""One drafter object serves any number of calls, targets and threads; nothing of a call is left behind (R13)."""

import copy
import threading

import pytest
import torch
from tiny_targets import (
    assisted,
    plain,
    prompt_ids,
    record_proposals,
    tiny_drafter,
    tiny_llama,
    tiny_target,
)
from transformers import StoppingCriteria

from hf_carryover.generation import CarryoverCandidateGenerator


B = 4
A = {"ids": prompt_ids(20, seed=5), "new": 30}
SHORT = {"ids": prompt_ids(6, seed=6), "new": 9}


def drafter_for(target):
    return tiny_drafter(target, block_size=B, markov_rank=3)


def call(target, drafter, case, **options):
    return assisted(target, case["ids"], drafter, max_new_tokens=case["new"], **options)


@pytest.fixture
def proposals(monkeypatch):
    """A function that runs a call and returns text, proposals and report numbers."""

    def run(target, drafter, case, **options):
        with monkeypatch.context() as patch:
            rounds = record_proposals(drafter, patch)
            text = call(target, drafter, case, **options).tolist()
        report = drafter.last_report
        return text, list(rounds), report.accepted, report.carried

    return run


class FailAt(StoppingCriteria):
    """Raises at its `last`-th call."""

    def __init__(self, last: int):
        self.left = last

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise KeyError("the caller's own trouble")
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.compat
def test_calls_do_not_know_of_each_other(target, proposals):
    fresh = proposals(target, drafter_for(target), A)
    assert len(fresh[1]) > 20 and max(fresh[3]) == B
    drafter = drafter_for(target)
    assert proposals(target, drafter, A) == fresh
    call(target, drafter, SHORT)
    call(target, drafter, SHORT, do_sample=True, repetition_penalty=1.2)
    assert proposals(target, drafter, A) == fresh


def test_an_interrupted_call_leaves_nothing(target, proposals):
    fresh = proposals(target, drafter_for(target), A)
    drafter = drafter_for(target)
    for last in (1, 2, 7):
        with pytest.raises(KeyError, match="own trouble"):
            call(target, drafter, A, stopping_criteria=[FailAt(last)])
        assert proposals(target, drafter, A) == fresh


def test_one_drafter_between_two_targets(proposals):
    """Two targets of the same shape and other weights, in turns: embedding and head are those of the call."""
    first = tiny_llama()
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.5).add_(0.01)
    fresh = [proposals(target, drafter_for(first), A) for target in (first, second)]
    assert fresh[0][1] != fresh[1][1]
    drafter = drafter_for(first)
    for _ in range(2):
        assert [proposals(target, drafter, A) for target in (first, second)] == fresh


class Turns(StoppingCriteria):
    """Lets threads go on token by token."""

    def __init__(self, barrier):
        self.barrier = barrier

    def __call__(self, input_ids, scores, **kwargs):
        self.barrier.wait()
        return torch.zeros(1, dtype=torch.bool)


def test_threads_that_alternate_token_by_token(target, monkeypatch):
    """Two calls with one drafter, in step: proposals of each are those of a fresh drafter on its own."""
    cases = [{"ids": prompt_ids(20, seed=5), "new": 20}, {"ids": prompt_ids(9, seed=7), "new": 20}]
    rounds: dict[int, list] = {}
    original = CarryoverCandidateGenerator._propose

    def _propose(self, input_ids, limit):
        candidates, logits = original(self, input_ids, limit)
        rounds.setdefault(threading.get_ident(), []).append(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, logits

    monkeypatch.setattr(CarryoverCandidateGenerator, "_propose", _propose)
    fresh = []
    for case in cases:
        text = call(target, drafter_for(target), case).tolist()
        fresh.append((text, rounds.pop(threading.get_ident())))
    drafter, barrier, got = drafter_for(target), threading.Barrier(2, timeout=60), {}

    def work(number):
        text = call(target, drafter, cases[number], stopping_criteria=[Turns(barrier)]).tolist()
        got[number] = (text, rounds[threading.get_ident()])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[0], got[1]] == fresh


def hooks(model) -> list:
    """Everything that can be hung on a module."""
    return [
        (name, sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks), module.training)
        for name, module in model.named_modules()
    ]


@pytest.mark.compat
def test_target_and_drafter_are_left_as_they_were():
    """No hook, attribute, weight or configuration of either changes; gradients and modes stay the caller's."""
    target = tiny_llama()
    plain(target, prompt_ids(), max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    drafter = drafter_for(target)
    drafter.train()
    target.lm_head.weight.requires_grad_(False)
    before = [
        (
            hooks(model),
            copy.deepcopy(model.state_dict()),
            model.config.to_dict(),
            [p.requires_grad for p in model.parameters()],
        )
        for model in (target, drafter)
    ]
    generation_config = target.generation_config.to_dict()
    call(target, drafter, A)
    call(target, drafter, SHORT, do_sample=True, stopping_criteria=[FailAt(100)], num_assistant_tokens=2)
    after = [
        (hooks(model), model.state_dict(), model.config.to_dict(), [p.requires_grad for p in model.parameters()])
        for model in (target, drafter)
    ]
    for old, new in zip(before, after):
        assert new[0] == old[0]
        assert all(torch.equal(new[1][key], old[1][key]) for key in old[1])
        assert new[2:] == old[2:]
    assert target.generation_config.to_dict() == generation_config
    assert all(parameter.grad is None for parameter in drafter.parameters())


def test_callers_arguments_are_left_as_they_were(target):
    criteria, processors, config = [FailAt(1000)], [], copy.deepcopy(target.generation_config)
    config.update(max_new_tokens=6, do_sample=False)
    before = config.to_dict()
    ids = prompt_ids()
    target.generate(
        ids,
        generation_config=config,
        stopping_criteria=criteria,
        logits_processor=processors,
        assistant_model=drafter_for(target),
    )
    assert len(criteria) == 1 and processors == [] and config.to_dict() == before
    assert ids.tolist() == prompt_ids().tolist()


def test_calls_inside_a_call(target, proposals):
    """A criterion that itself generates with the same drafter (a judge, a tool) disturbs nothing."""
    fresh = proposals(target, drafter_for(target), A)
    drafter = drafter_for(target)

    class Nested(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] % 10 == 0:
                call(target, drafter, SHORT, stopping_criteria=[FailAt(1000)])
            return torch.zeros(1, dtype=torch.bool)

    text = call(target, drafter, A, stopping_criteria=[Nested()]).tolist()
    assert text == fresh[0]
    assert proposals(target, drafter, A) == fresh
    assert tiny_target("llama") is not target
