# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Numbers at their limits: huge logits, masks of `-inf`, temperatures near 0, long texts, and a float64 oracle."""

import copy

import pytest
import torch
from test_sampling import PROMPT, STEPS, WARPERS, V, check_marginal, enumerate_target, soft_drafter, soft_target
from tiny_targets import PROMPT_LENGTH, VOCAB, assisted, follow_script, plain, prompt_ids, tiny_drafter, tiny_llama
from transformers import LogitsProcessor, LogitsProcessorList


NEW = 24


def both(target, drafter, **options):
    """The two texts, or the errors that take their place, from the same seed."""
    results = []
    for extra in ({}, {"assistant_model": drafter}):
        torch.manual_seed(0)
        try:
            results.append(target.generate(prompt_ids(), max_new_tokens=NEW, **options, **extra).tolist())
        except (RuntimeError, ValueError) as error:
            results.append(type(error))
    return results


def scaled_head(scale: float, dtype=torch.float32):
    target = tiny_llama()
    with torch.no_grad():
        target.lm_head.weight.mul_(scale)
    return target.to(dtype)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e4, 1e12, 1e30], ids=str)
@pytest.mark.parametrize("script", [None, [4, 1, 0, 2]], ids=["random", "partial"])
def test_logits_of_any_size(scale, script):
    """The order of the logits is what counts, at 1e30 as at 1; large ones make sampling certain."""
    target = scaled_head(scale)
    want = plain(target, prompt_ids(), max_new_tokens=NEW)
    drafter = tiny_drafter(target, block_size=4, markov_rank=3)
    if script:
        follow_script(drafter, want, script)
    assert assisted(target, prompt_ids(), drafter, max_new_tokens=NEW).tolist() == want.tolist()
    if scale >= 1e4:
        mine, theirs = both(target, drafter, do_sample=True, top_k=0)
        assert mine == theirs == want.tolist()


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-10])
@pytest.mark.parametrize("sampling", ["sample", "argmax"])
def test_temperature_near_zero(temperature, sampling):
    """Draws are the greedy text, by drafters that are wrong, right, and right in part."""
    target = tiny_llama()
    want = plain(target, prompt_ids(), max_new_tokens=NEW)
    for script in (None, [4], [1, 3, 0]):
        drafter = tiny_drafter(target, block_size=4, markov_rank=3, draft_sampling=sampling)
        if script:
            follow_script(drafter, want, script)
        mine, theirs = both(target, drafter, do_sample=True, temperature=temperature, top_k=0)
        assert mine == theirs == want.tolist()


class Only(LogitsProcessor):
    """Leaves `count` tokens that depend on the last one; everything else is `-inf`."""

    def __init__(self, count: int, fill: float = float("-inf")):
        self.count, self.fill = count, fill

    def __call__(self, input_ids, scores):
        kept = torch.full_like(scores, self.fill)
        for k in range(self.count):
            token = (int(input_ids[0, -1]) * 7 + 11 * k + 3) % VOCAB
            kept[:, token] = scores[:, token]
        return kept


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_masks_of_minus_infinity(count, reduced):
    """One token left: every draw is that one. Two: greedy takes the better, and the draft may lack both."""
    target = tiny_llama()
    ids = torch.arange(0, VOCAB, 2) if reduced else None
    drafter = tiny_drafter(target, block_size=5, markov_rank=3, draft_token_ids=ids)
    for do_sample in (False, True) if count == 1 else (False,):
        mine, theirs = both(target, drafter, logits_processor=LogitsProcessorList([Only(count)]), do_sample=do_sample)
        assert mine == theirs and isinstance(mine, list)
    if count == 1 and not reduced:
        # The draft goes through the mask too, so it is right throughout.
        assert drafter.last_report.accepted == drafter.last_report.proposed


def test_a_mask_that_leaves_nothing_ends_as_in_plain_decoding():
    """Sampling from no token at all is an error there and here."""
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=5)
    mine, theirs = both(target, drafter, logits_processor=LogitsProcessorList([Only(0)]), do_sample=True)
    assert mine is theirs is RuntimeError
    mine, theirs = both(target, drafter, logits_processor=LogitsProcessorList([Only(0)]), do_sample=False)
    assert mine == theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_at_its_limits(dtype):
    """Logits near the largest number of float16, and beyond it: the same text, or the same error."""
    for scale in (1e2, 1e4):
        target = scaled_head(scale, dtype)
        drafter = tiny_drafter(target, block_size=4).to(dtype)
        for do_sample in (False, True):
            mine, theirs = both(target, drafter, do_sample=do_sample, top_k=0)
            if mine != theirs:  # rounding of a pass over several rows: a tie, as everywhere in half precision
                place = next(i for i, pair in enumerate(zip(mine[0], theirs[0])) if pair[0] != pair[1])
                with torch.no_grad():
                    logits = target(torch.tensor([theirs[0][:place]])).logits[0, -1].float()
                gap = float(logits[theirs[0][place]] - logits[mine[0][place]])
                assert not gap > 0.02 * float(logits.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 64], ids=["full", "sliding"])
def test_four_thousand_tokens(window):
    """Rounds by the thousand, storage that grows by doubling, positions far behind the drafter's window."""
    length = 4096
    target = tiny_llama(num_hidden_layers=2, max_position_embeddings=8192)
    want = plain(target, prompt_ids(), max_new_tokens=length)
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": window} if window else {}
    drafter = tiny_drafter(target, block_size=7, num_hidden_layers=1, target_layer_ids=[1], **sliding)
    follow_script(drafter, want, [7, 3, 0, 5, 1])
    assert assisted(target, prompt_ids(), drafter, max_new_tokens=length).tolist() == want.tolist()
    assert want.shape[1] == PROMPT_LENGTH + length
    assert drafter.last_report.accepted[:5] == [7, 3, 0, 5, 1]
    assert sum(drafter.last_report.committed) == length - 1


ORACLE = {
    "top_k_4": {"top_k": 4},
    "temperature_and_top_p": {"temperature": 0.7, "top_p": 0.8},
    "unprocessed": {},
}


@torch.no_grad()
def exact(options: dict) -> torch.Tensor:
    """The target's distribution over all continuations, in float64 from its weights on."""
    target = copy.deepcopy(soft_target()).double()
    warpers = LogitsProcessorList([WARPERS[name](value) for name, value in options.items()])
    prefixes, probability = PROMPT, torch.ones(1, dtype=torch.float64)
    for _ in range(STEPS):
        logits = target(prefixes, attention_mask=torch.ones_like(prefixes)).logits[:, -1]
        assert logits.dtype == torch.float64
        probability = (probability.unsqueeze(1) * warpers(prefixes, logits).softmax(dim=-1)).flatten()
        following = torch.arange(V).repeat(len(prefixes)).unsqueeze(1)
        prefixes = torch.cat([prefixes.repeat_interleave(V, dim=0), following], dim=1)
    return probability.view((V,) * STEPS)


@pytest.mark.parametrize("options", ORACLE.values(), ids=ORACLE)
def test_the_sampling_tests_compare_with_the_truth(options):
    """R3: what they enumerate in float32 is the float64 distribution."""
    oracle = exact(options)
    assert float(oracle.sum()) == pytest.approx(1.0, abs=1e-12)
    found = enumerate_target(soft_target(), options).double()
    assert float((found - oracle).abs().sum()) / 2 < 1e-5
    assert torch.equal(found == 0, oracle == 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", ORACLE.values(), ids=ORACLE)
def test_draws_follow_the_float64_oracle(options):
    """R3: 3000 draws, the first two tokens; total variation below 0.05, nothing outside the support."""
    oracle = exact(options).sum(dim=(2, 3))
    drafter, counts = soft_drafter(markov_rank=2), torch.zeros(V, V)
    torch.manual_seed(99)
    mask = torch.ones_like(PROMPT)
    for _ in range(3000):
        text = soft_target().generate(
            PROMPT,
            attention_mask=mask,
            assistant_model=drafter,
            do_sample=True,
            max_new_tokens=STEPS - 1,
            **{"top_k": 0, **options},
        )
        counts[tuple(text[0, PROMPT.shape[1] : PROMPT.shape[1] + 2].tolist())] += 1
    check_marginal(counts, oracle)
    assert float((counts / counts.sum() - oracle).abs().sum()) / 2 < 0.05
