"""
Greedy output with a drafter equals plain greedy output, token for token, in float32.

Drafters: `random` (almost every proposal rejected), `oracle` (every proposal accepted) and `partial` (the first `j`
right, then wrong, `j` running through `0 … B`, so that every number of accepted proposals occurs with carried rows).
The full product of targets, block sizes and options is slow; a selection that holds every pair is quick.
"""

import pytest
from tiny_targets import (
    TARGETS,
    follow_script,
    pairwise,
    prompt_ids,
    tiny_drafter,
    tiny_target,
)


LENGTH = 40  # new tokens; five windows of the sliding-window targets
BLOCKS = [1, 4, 15]
SCRIPTS = ["random", "oracle", "partial"]
CASES = (TARGETS, BLOCKS, [True, False], [0, 4], SCRIPTS)
QUICK = pairwise(*CASES)


def case_id(case) -> str:
    name, block_size, carry, rank, script = case
    return f"{name}-B{block_size}-{'carry' if carry else 'plain'}-{'markov' if rank else 'dflash'}-{script}"


def expected_rounds(block_size: int, plan, length: int) -> tuple[list[int], list[int]]:
    """Proposals and accepted ones per round for a script, from the definition: `m + 1` tokens each, cut at the end."""
    left, proposed, accepted = length - 1, [], []
    for right in plan:
        if left == 0:
            return proposed, accepted
        proposed.append(min(block_size, left - 1))
        accepted.append(min(right, proposed[-1]))
        left -= accepted[-1] + 1


def check_lossless(case, target=None, **drafter_options):
    name, block_size, carry, rank, script = case
    target = tiny_target(name) if target is None else target
    ids = prompt_ids()
    want = greedy(target, ids)
    drafter = tiny_drafter(target, block_size=block_size, carry=carry, markov_rank=rank, **drafter_options)
    plan = {"oracle": [block_size], "partial": list(range(block_size + 1))}.get(script)
    if plan:
        follow_script(drafter, want, plan)
    got = greedy(target, ids, assistant_model=drafter)
    assert got.tolist() == want.tolist()
    report = drafter.last_report
    if plan:
        proposed, accepted = expected_rounds(block_size, plan * LENGTH, LENGTH)
        assert report.proposed == proposed
        assert report.accepted == accepted
    rejected = [proposed - accepted for proposed, accepted in zip(report.proposed, report.accepted)]
    # Round 1 follows the prefill; then the rejected rows of the round before, and no others (R14).
    assert report.carried == ([0] + rejected[:-1] if carry else [0] * report.rounds)
    assert sum(report.committed) == LENGTH - 1


def greedy(target, ids, **options):
    return target.generate(input_ids=ids, do_sample=False, max_new_tokens=LENGTH, **options)


@pytest.mark.parametrize("case", QUICK, ids=case_id)
def test_pairwise_matrix(case):
    check_lossless(case)
