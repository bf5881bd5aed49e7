# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Why carry helps: matched anchors and re-convergence, against what is computed one text at a time."""

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from training_helpers import random_rows

from hf_carryover.evaluation.analysis import MatchedAnchors, Reconvergence, prompt_set
from hf_carryover.evaluation.replay import Replay


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def rows():
    return [{**row, "id": f"{'ab'[i % 2]}-{i}"} for i, row in enumerate(random_rows([22, 30, 26]))]


@pytest.mark.parametrize("reduced", [False, True])
def test_predictions_and_ranks_one_text_at_a_time(target, reduced):
    options = {"draft_token_ids": torch.arange(0, 64, 3)} if reduced else {}
    drafter = tiny_drafter(target, markov_rank=4, **options)
    replay = Replay(drafter, target)
    matched, reconvergence, last, checked = MatchedAnchors(drafter, replay.head), Reconvergence(), {}, []
    expected_rows, expected_right = torch.zeros(2, 4), torch.zeros(2, 4)

    def check(seen):
        for i, name in enumerate(seen.names):
            text, anchor = seen.input_ids[i], int(seen.anchors[i])
            if seen.carried and seen.carried["carried_mask"][i].any():
                before, proposals = last[name]
                said = target(torch.cat([text[: before + 1], proposals]).unsqueeze(0)).logits[0].argmax(dim=-1)
                group = "ab".index(name[0])
                for row in seen.carried["carried_mask"][i].nonzero().flatten().tolist():
                    position = before + 1 + row
                    assert seen.predictions[i, row] == said[position]
                    label = position - anchor
                    if label < 4 and seen.exist[i, label]:
                        expected_rows[group, label] += 1
                        expected_right[group, label] += said[position] == text[position + 1]
                check_ranks(seen, i, name)
                checked.append(name)
            last[name] = (anchor, seen.proposals[i])

    def check_ranks(seen, i, name):
        hidden = seen.draft({})[i]
        previous = torch.cat([seen.input_ids[i, seen.anchors[i]].unsqueeze(0), seen.tokens[i, :-1]])
        logits = drafter.logits(hidden, replay.head.weight, None, previous)
        ids = torch.arange(64) if drafter.draft_token_ids() is None else drafter.draft_token_ids()
        found = matched.ranks[prompt_set(name)]["off"]
        assert any(ranks_equal(ranks, logits, ids, seen, i) for ranks in found[-len(seen.names) :])

    def ranks_equal(ranks, logits, ids, seen, i):
        for k in range(4):
            if not seen.exist[i, k]:
                expected = -1
            else:
                order = ids[logits[k].argsort(descending=True)].tolist()
                token = int(seen.tokens[i, k])
                expected = order.index(token) if token in order else len(order)
            if ranks[k] != expected:
                return False
        return True

    replay.observers = [matched, reconvergence, check]
    with torch.no_grad():
        replay(rows())
    assert len(checked) > 20
    for group, name in enumerate("ab"):
        assert torch.equal(reconvergence.rows[name], torch.stack([expected_rows[group], expected_right[group]]))
    both = matched.recalls()
    assert both["blocks"] == len(checked) == matched.recalls("a")["blocks"] + matched.recalls("b")["blocks"]
    assert 0 <= both["recall@1"]["on"] <= both["recall@4"]["on"] <= both["recall@16"]["on"] <= 1
    summary = reconvergence.summary()
    assert summary["rounds"] == len(checked)
    assert summary["share"] == pytest.approx(float(expected_right.sum() / expected_rows.sum()))


def test_recalls_count_recorded_tokens_alone():
    matched = MatchedAnchors(None, None)
    matched.ranks["a"] = {
        "on": [torch.tensor([0, 5, -1]), torch.tensor([3, 0, 20])],
        "off": [torch.tensor([1, 0, -1]), torch.tensor([3, 4, 16])],
    }
    found = matched.recalls("a")
    assert found["blocks"] == 2
    assert (found["recall@1"]["on"], found["recall@1"]["off"]) == (pytest.approx(2 / 5), pytest.approx(1 / 5))
    assert (found["recall@4"]["on"], found["recall@4"]["off"]) == (pytest.approx(3 / 5), pytest.approx(3 / 5))
    assert found["recall@16"]["by_position"] == [(1.0, 1.0), (1.0, 1.0), (0.0, 0.0)]


def test_without_carry_there_is_nothing_to_see(target):
    drafter = tiny_drafter(target, carry=False)
    replay = Replay(drafter, target)
    matched, reconvergence = MatchedAnchors(drafter, replay.head), Reconvergence()
    replay.observers = [matched, reconvergence]
    replay(rows())
    assert not matched.ranks and not reconvergence.rows


def test_observers_change_nothing(target):
    drafter = tiny_drafter(target)
    plain = Replay(drafter, target)(rows())
    replay = Replay(drafter, target)
    replay.observers = [MatchedAnchors(drafter, replay.head), Reconvergence()]
    assert [vars(one) for one in replay(rows())] == [vars(one) for one in plain]
