"""`drafter.last_report`: exact numbers, defined as in R34, per thread."""

import copy
import gc
import math
import pickle
import threading
import weakref

import pytest
import torch
from tiny_targets import (
    PROMPT_LENGTH,
    assisted,
    count_forwards,
    follow_script,
    plain,
    prompt_ids,
    tiny_drafter,
    tiny_llama,
    tiny_target,
)

from hf_carryover import GenerationReport


B = 4
NEW = 24


def scripted(target, text, correct, **options):
    return follow_script(tiny_drafter(target, block_size=B, **options), text, correct)


@pytest.mark.compat
@pytest.mark.parametrize("carry", [True, False], ids=["carry", "plain"])
@pytest.mark.parametrize("correct", [0, 2, B, (0, 1, 2, 3, 4)], ids=str)
def test_numbers_equal_those_of_a_counting_target(correct, carry, monkeypatch):
    """R34: τ is new tokens over verification passes, without prefill and its token, the cut round as it counts."""
    target = tiny_llama()
    text = plain(target, prompt_ids(), max_new_tokens=NEW)
    drafter = scripted(target, text, correct, carry=carry)
    rows = count_forwards(target, monkeypatch)
    got = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW)
    report = drafter.last_report
    new_tokens = got.shape[1] - PROMPT_LENGTH
    assert rows[0] == PROMPT_LENGTH
    assert report.rounds == len(rows) - 1
    assert report.proposed == [count - 1 for count in rows[1:]]
    assert sum(report.committed) == new_tokens - 1
    assert report.tau == (new_tokens - 1) / (len(rows) - 1)
    assert all(c == m + 1 for c, m in zip(report.committed[:-1], report.accepted[:-1]))
    left = [0] + [p - m for p, m in zip(report.proposed, report.accepted)]
    assert report.carried == (left[:-1] if carry else [0] * report.rounds)
    assert len(report.draft_times) == len(report.target_times) == report.rounds
    assert min(report.draft_times + report.target_times) > 0
    assert report.draft_ms == sum(report.draft_times)
    assert report.target_ms == sum(report.target_times)
    assert report.prefill_ms > 0


def test_round_cut_by_an_end_token():
    """The proposals behind the end token were not judged; the round counts the tokens it committed."""
    target = tiny_llama()
    text = plain(target, prompt_ids(), max_new_tokens=NEW)
    ids = text[0].tolist()
    place = next(
        i for i in range(7, NEW) if ids[PROMPT_LENGTH + i] not in ids[: PROMPT_LENGTH + i] and i % 5 in (2, 3)
    )
    drafter = scripted(target, text, B)
    got = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW, eos_token_id=ids[PROMPT_LENGTH + place])
    assert got.shape[1] == PROMPT_LENGTH + place + 1
    report = drafter.last_report
    cut = place % 5  # rounds of B + 1 = 5 tokens from new token 1 on
    assert report.committed == [5] * (place // 5) + [cut]
    assert report.accepted == [4] * (place // 5) + [cut]
    assert report.proposed == [4] * (place // 5 + 1)
    assert report.acceptance == [1.0] * 4
    assert report.tau == place / (place // 5 + 1)


def test_acceptance_by_hand():
    """Blocks with leading correct runs 3, 1, 2 and 0, a block cut to its second token, and an empty one."""
    report = GenerationReport(
        proposed=[3, 3, 3, 3, 3, 0],
        accepted=[3, 1, 2, 0, 2, 0],
        committed=[4, 2, 3, 1, 2, 1],
        carried=[0, 0, 2, 1, 3, 1],
        draft_times=[1.0] * 6,
        target_times=[2.0] * 6,
        prefill_ms=5.0,
    )
    # y_1: five blocks, wrong in one. y_2: four blocks, wrong in one. y_3: the cut block did not judge it; two left.
    assert report.acceptance == [4 / 5, 3 / 4, 1 / 2]
    assert report.tau == 13 / 6
    assert report.rounds == 6
    assert repr(report) == (
        "GenerationReport(rounds=6, tau=2.167, accepted=8/15, acceptance=[0.80, 0.75, 0.50], "
        "carried_per_round=1.17, draft=6.0 ms, target=12.0 ms, prefill=5.0 ms)"
    )


def test_report_without_a_round(target):
    drafter = tiny_drafter(target)
    assert drafter.last_report is None
    assisted(target, prompt_ids(), drafter, max_new_tokens=1)
    report = drafter.last_report
    assert (report.rounds, report.acceptance, report.draft_ms) == (0, [], 0)
    assert math.isnan(report.tau)
    assert repr(report) == "GenerationReport(no verification round)"


def test_position_no_block_reached_is_not_a_number():
    report = GenerationReport(proposed=[2, 2], accepted=[0, 0], committed=[1, 1], carried=[0, 2])
    assert report.acceptance[0] == 0.0
    assert math.isnan(report.acceptance[1])


def test_generate_returns_what_it_always_returns(target):
    got = assisted(target, prompt_ids(), tiny_drafter(target), max_new_tokens=6)
    assert type(got) is torch.Tensor


def test_each_thread_has_its_own_report(target):
    """Threads that share a drafter see their own last call, and none before they made one."""
    drafter = tiny_drafter(target, block_size=B)
    lengths = {"a": 6, "b": 9, "c": None}
    seen, barrier = {}, threading.Barrier(len(lengths), timeout=60)

    def work(name, new_tokens):
        before = drafter.last_report
        barrier.wait()
        if new_tokens:
            assisted(target, prompt_ids(), drafter, max_new_tokens=new_tokens)
        barrier.wait()
        seen[name] = (before, drafter.last_report)

    assisted(target, prompt_ids(), drafter, max_new_tokens=4)
    threads = [threading.Thread(target=work, args=item) for item in lengths.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen["a"][0] is seen["b"][0] is None
    assert sum(seen["a"][1].committed) == 5
    assert sum(seen["b"][1].committed) == 8
    assert seen["c"] == (None, None)
    assert sum(drafter.last_report.committed) == 3


def test_new_thread_never_sees_the_report_of_a_finished_one(target):
    """The system gives identities of finished threads to new ones."""
    drafter = tiny_drafter(target, block_size=B)
    seen = []

    def work():
        seen.append((threading.get_ident(), drafter.last_report))
        assisted(target, prompt_ids(), drafter, max_new_tokens=3)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [report for _, report in seen] == [None] * 3


def test_reports_go_with_the_drafter_and_do_not_hinder_copies():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=B)
    assisted(target, prompt_ids(), drafter, max_new_tokens=4)
    twin = copy.deepcopy(drafter)
    assert twin.last_report is None
    assert pickle.loads(pickle.dumps(drafter)).config.block_size == B
    report = weakref.ref(drafter.last_report)
    assert report() is not None
    del drafter
    gc.collect()
    assert report() is None
