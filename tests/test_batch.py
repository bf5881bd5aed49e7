"""Batches: every sequence gets what it would get alone, whatever the others do."""

import functools
import itertools

import pytest
import torch
from tiny_targets import assisted, plain, prompt_ids, tiny_drafter, tiny_llama, tiny_target
from transformers import StoppingCriteria

from hf_carryover.batch_cache import BatchCache
from hf_carryover.batch_generation import TargetCache


NEW = 22
PAD = 0


def prompts(*lengths, vocab=60):
    """Left-padded prompts of these lengths, and their mask."""
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), PAD), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(row))
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def alone(target, batch, row, **kwargs):
    """New tokens of one sequence of the batch, decoded plainly and without padding."""
    ids = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
    return target.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=PAD, **kwargs)[
        0, ids.shape[1] :
    ].tolist()


def check(target, drafter, batch, **kwargs):
    kwargs = {"do_sample": False, "max_new_tokens": NEW, **kwargs}
    output = target.generate(**batch, assistant_model=drafter, pad_token_id=PAD, **kwargs)
    width = batch["input_ids"].shape[1]
    assert torch.equal(output[:, :width], batch["input_ids"])
    for row in range(len(output)):
        expected = alone(target, batch, row, **kwargs)
        got = output[row, width:].tolist()
        assert got == expected + [PAD] * (len(got) - len(expected)), row
    return drafter.last_report


@pytest.mark.compat
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "gemma3", "gemma4", "mixtral", "gpt_neox", "gpt2", "lora"]
)
def test_greedy_outputs_of_every_family(family):
    """R12: left-padded batches, each row as it is alone."""
    target = tiny_target(family)
    drafter = tiny_drafter(target, block_size=4, markov_rank=4)
    report = check(target, drafter, prompts(9, 4, 12, 7))
    assert len(report.sequences) == 4
    assert report.rounds == sum(r.rounds for r in report.sequences)


@pytest.mark.compat
@pytest.mark.parametrize("carry_from", [None, "states", "predictions", "proposals", "states_and_predictions"])
@pytest.mark.parametrize("options", [{}, {"assistant_confidence_threshold": 0.2}], ids=["all", "sure"])
def test_rounds_are_those_of_single_runs(carry_from, options):
    """Not the tokens alone: acceptance and carried rows of each sequence, round by round."""
    target = tiny_llama()
    carry = {"carry": False} if carry_from is None else {"carry_from": carry_from}
    drafter = tiny_drafter(target, block_size=4, markov_rank=4, std=0.5, **carry)
    batch = prompts(9, 4, 12, 7)
    report = check(target, drafter, batch, **options)
    assert ({mine.proposed[0] for mine in report.sequences} == {4}) == (options == {})
    for row, mine in enumerate(report.sequences):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
        assisted(target, ids, drafter, max_new_tokens=NEW, **options)
        single = drafter.last_report
        for name in ("proposed", "accepted", "committed"):
            assert getattr(mine, name) == getattr(single, name), (row, name)
        assert mine.carried == single.carried[: single.rounds]


@pytest.mark.compat
@pytest.mark.parametrize(
    "options",
    [
        {"anchor_first": True},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "block_attention": "causal_sliding"},
        {"block_attention": "causal"},
        {"draft_token_ids": torch.arange(0, 60, 2)},
        {"lookup_ngram_size": 3},
        {"carry_pointer": True, "lookup_ngram_size": 3},
    ],
    ids=["anchor_first", "sliding", "causal_sliding", "causal", "reduced", "lookup", "pointer"],
)
def test_rounds_of_every_kind_of_drafter(options):
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=4, **options)
    batch = prompts(9, 4, 12)
    report = check(target, drafter, batch)
    for row, mine in enumerate(report.sequences):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
        assisted(target, ids, drafter, max_new_tokens=NEW)
        assert mine.accepted == drafter.last_report.accepted, row


@pytest.mark.compat
@pytest.mark.parametrize("correct", [0, 4, (0, 4, 1, 3, 2)], ids=str)
def test_any_acceptance(correct):
    """From none to all, and unequal over the batch: each follows the text of its own script."""
    target = tiny_llama()
    batch = prompts(8, 8, 8)
    texts = [alone(target, batch, row, do_sample=False, max_new_tokens=NEW) for row in range(3)]
    drafter = tiny_drafter(target, block_size=4)
    turns = itertools.cycle([correct] if isinstance(correct, int) else correct)
    wrong = []

    def propose(self, active):
        blocks = []
        for sequence in active:
            done = len(sequence.ids) - sequence.prompt_length
            block = texts[sequence.row][done : done + min(4, max(0, sequence.left - 1))]
            for place in range(next(turns), len(block)):
                block = [*block[:place], (block[place] + 1) % 60, *block[place + 1 :]]
            blocks.append(block)
        wrong.append(blocks)
        anchors = self.generator.head.embed(torch.tensor([s.ids[-1] for s in active]), "cpu")
        self.drafts.draft(anchors, self.generator.head.mask_embeds)
        return blocks, [None] * len(active)

    from hf_carryover.batch_generation import BatchDecoding

    original = BatchDecoding._propose
    BatchDecoding._propose = propose
    try:
        report = check(target, drafter, batch)
    finally:
        BatchDecoding._propose = original
    assert wrong
    if isinstance(correct, int):
        assert all(m == min(correct, p) for r in report.sequences for m, p in zip(r.accepted, r.proposed))
    else:
        assert len({tuple(r.accepted) for r in report.sequences}) == 3


@pytest.mark.compat
def test_end_tokens_per_sequence():
    """Sequences end at different places; the others go on, undisturbed."""
    target = tiny_llama()
    batch = prompts(9, 5, 12, 7)
    texts = [alone(target, batch, row, do_sample=False, max_new_tokens=NEW) for row in range(4)]
    stops = [texts[0][3], texts[2][11]]
    report = check(target, tiny_drafter(target, block_size=4), batch, eos_token_id=stops)
    assert len({sum(r.committed) for r in report.sequences}) > 1


@pytest.mark.compat
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7], [8, 9]]},
        {"min_new_tokens": 10, "eos_token_id": list(range(2, 40))},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": 5},
    ],
    ids=str,
)
def test_processors_and_limits(options):
    """Each sequence is processed by itself: padding is never part of what a penalty sees."""
    target = tiny_llama()
    check(target, tiny_drafter(target, block_size=4, markov_rank=4), prompts(9, 4, 12), **options)


@pytest.mark.compat
def test_custom_stopping_criteria_see_every_prefix():
    class After(StoppingCriteria):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append(input_ids[0].tolist())
            return torch.tensor([int(input_ids[0, -1]) % 5 == 0])

    target, batch, criterion = tiny_llama(), prompts(9, 4, 12), After()
    drafter = tiny_drafter(target, block_size=4)
    output = target.generate(
        **batch,
        assistant_model=drafter,
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=PAD,
        stopping_criteria=[criterion],
    )
    for row in range(3):
        expected = alone(target, batch, row, do_sample=False, max_new_tokens=NEW, stopping_criteria=[After()])
        assert output[row, 12:].tolist()[: len(expected)] == expected
        assert set(output[row, 12 + len(expected) :].tolist()) <= {PAD}
        prompt = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        asked = [ids for ids in criterion.seen if ids[: len(prompt)] == prompt]
        assert asked == [prompt + expected[: i + 1] for i in range(len(expected))]


@pytest.mark.compat
@pytest.mark.parametrize(
    "options",
    [{}, {"draft_sampling": "argmax"}, {"lookup_ngram_size": 2, "carry_pointer": True}, {"std": 1.5}],
    ids=["sample", "argmax", "pointer", "unsure"],
)
def test_sampled_tokens_have_the_targets_distribution(options):
    """
    First two new tokens of 2 x 2500 sampled sequences against exact enumeration; chi-square below its 99.99 % point.
    """
    threshold = {"assistant_confidence_threshold": 0.3} if "std" in options else {}
    target = tiny_llama(vocab_size=8)
    drafter = tiny_drafter(target, block_size=3, mask_token_id=None, **options)
    batch = prompts(5, 3, vocab=8)
    count = 2500
    torch.manual_seed(0)
    many = {name: value.repeat_interleave(count, dim=0) for name, value in batch.items()}
    output = target.generate(
        **many, assistant_model=drafter, do_sample=True, top_k=0, max_new_tokens=3, pad_token_id=PAD, **threshold
    )[:, 5:]
    for row in range(2):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        with torch.no_grad():
            second = torch.stack([torch.cat([ids, torch.tensor([t])]) for t in range(8)])
            first = target(ids[None]).logits[0, -1].softmax(-1)
            joint = first[:, None] * target(second).logits[:, -1].softmax(-1)
        drawn = output[row * count : (row + 1) * count]
        found = torch.bincount(drawn[:, 0] * 8 + drawn[:, 1], minlength=64).float()
        expected = count * joint.flatten()
        rare = expected < 5
        found, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (found, expected))
        statistic = float(((found - expected) ** 2 / expected.clamp(min=1e-9)).sum())
        freedom = len(expected) - 1
        assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5, (row, statistic, freedom)


@pytest.mark.compat
def test_holes_are_closed_and_change_nothing():
    """Kept columns move together in order; what belongs to no sequence is gone from the mask."""
    cache = TargetCache(tiny_llama(), torch.tensor([[0, 1, 1], [1, 1, 1]]))
    states = torch.arange(2 * 7, dtype=torch.float).view(2, 1, 7, 1)
    cache.cache.update(states, states + 100, 0)
    cache.keep(3, torch.tensor([1, 4]))
    assert cache.mask.tolist() == [[0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]  # 4 of 14 are holes, none is common
    cache.mask = torch.tensor([[0, 1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0, 1]])
    cache._close(4)
    assert cache.mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    keys = cache.cache.layers[0].keys[:, 0, :, 0]
    assert keys[0, 1:].tolist() == [1, 2, 3]
    assert keys[1].tolist() == [7, 8, 10, 13]
    assert (cache.cache.layers[0].values[:, 0, :, 0] - keys == 100).all()


@pytest.mark.compat
def test_storage_grows_and_keeps_what_is_there():
    drafter = tiny_drafter(tiny_llama(), block_size=4)
    cache = BatchCache(drafter, 2, capacity=4)
    cache.keys[0][:, :, 1] = 3.0
    cache._reserve(9)
    assert cache.capacity == 9
    assert (cache.keys[0][:, :, 1] == 3.0).all() and (cache.keys[0][:, :, 5:] == 0).all()


@pytest.mark.compat
def test_reports_and_return_dict():
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=4)
    batch = prompts(9, 4)
    output = target.generate(
        **batch,
        assistant_model=drafter,
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=PAD,
        return_dict_in_generate=True,
    )
    report = drafter.last_report
    assert output.sequences.shape == (2, 9 + NEW)
    for mine in report.sequences:
        assert sum(mine.committed) == NEW - 1
        assert len(mine.draft_times) == len(mine.target_times) == len(mine.carried) == mine.rounds
        assert mine.prefill_ms > 0
    assert report.tau == pytest.approx(2 * (NEW - 1) / report.rounds)


def continued_cache():
    """A cache that holds something, under whatever name `generate` hands it on."""
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), 0)
    return cache


REFUSED = {
    "cache": ({"past_key_values": continued_cache()}, "continued `past_key_values`"),
    "streamer": ({"streamer": type("Streamer", (), {"put": lambda *a: None, "end": lambda *a: None})()}, "a streamer"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "`output_scores`"),
    "prefix": ({"prefix_allowed_tokens_fn": lambda batch_id, ids: [1, 2]}, "`prefix_allowed_tokens_fn`"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_batch_can_not_do_is_refused_before_any_pass(name, monkeypatch):
    target = tiny_llama()
    drafter = tiny_drafter(target)
    options, message = REFUSED[name]
    monkeypatch.setattr(target, "forward", functools.wraps(target.forward)(lambda **kwargs: pytest.fail("a pass")))
    with pytest.raises(
        ValueError, match=f"does not support {message} for a batch of 2 sequences. Call `generate` once"
    ):
        target.generate(**prompts(5, 4), assistant_model=drafter, max_new_tokens=4, pad_token_id=PAD, **options)


def test_right_padding_is_refused():
    target = tiny_llama()
    batch = prompts(5, 4)
    batch = {name: value.flip(1) for name, value in batch.items()}
    with pytest.raises(ValueError, match="padded on the right"):
        target.generate(**batch, assistant_model=tiny_drafter(target), max_new_tokens=4, pad_token_id=PAD)


def test_one_sequence_still_goes_through_the_librarys_loop(monkeypatch):
    target = tiny_llama()
    drafter = tiny_drafter(target)
    monkeypatch.setattr("hf_carryover.hooks.batch_decoding", lambda *a, **k: pytest.fail("not a batch"))
    assert torch.equal(
        assisted(target, prompt_ids(), drafter, max_new_tokens=6), plain(target, prompt_ids(), max_new_tokens=6)
    )
