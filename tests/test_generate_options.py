"""Every option of `generate` gives with a drafter what it gives without one, or is refused before the first pass."""

import copy

import pytest
import torch
from tiny_targets import (
    PROMPT_LENGTH,
    VOCAB,
    Recorder,
    assisted,
    follow_script,
    plain,
    prompt_ids,
    record_proposals,
    tiny_drafter,
    tiny_llama,
    tiny_target,
)
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    WatermarkingConfig,
)

from hf_carryover.generation import CarryoverCandidateGenerator


B = 4
NEW = 24


class PositionNoise(LogitsProcessor):
    """Scores that depend on the last token and the length, so a processor called at the wrong place shows."""

    def __call__(self, input_ids, scores):
        seed = int(input_ids[0, -1]) * 1000 + input_ids.shape[1]
        return scores + torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def text(target):
    """Plain greedy output, prompt and `NEW` tokens."""
    return plain(target, prompt_ids(), max_new_tokens=NEW)


def first_seen(text: torch.LongTensor) -> list[int]:
    """New tokens that did not occur before, by their place in the new text."""
    ids = text[0].tolist()
    return [i for i in range(1, NEW) if ids[PROMPT_LENGTH + i] not in ids[: PROMPT_LENGTH + i]]


def scripted(target, want, correct=(B, 2, 0, 3, 1)):
    return follow_script(tiny_drafter(target, block_size=B, markov_rank=3), want, correct)


def check_same(target, ids=None, correct=(B, 2, 0, 3, 1), **options):
    """Plain and assisted output agree, with a random drafter and with one that is right in part."""
    ids = prompt_ids() if ids is None else ids
    options = {"max_new_tokens": NEW, **options}
    want = plain(target, ids, **copy.deepcopy(options))
    random = tiny_drafter(target, block_size=B, markov_rank=3)
    assert assisted(target, ids, random, **copy.deepcopy(options)).tolist() == want.tolist()
    right = scripted(target, want, correct)
    assert assisted(target, ids, right, **copy.deepcopy(options)).tolist() == want.tolist()
    return want, right.last_report


def even_tokens(batch_id, input_ids):
    return list(range(0, VOCAB, 2))


PROCESSED = {
    "repetition_penalty": {"repetition_penalty": 1.3, "max_new_tokens": 60},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[31], [6], [8, 21]]},
    "prefix_allowed_tokens": {"prefix_allowed_tokens_fn": even_tokens},
    "custom_processor": {"logits_processor": LogitsProcessorList([PositionNoise()])},
    "suppress": {"suppress_tokens": [6, 8], "begin_suppress_tokens": [31]},
    "sequence_bias": {"sequence_bias": [[[5], 3.0], [[5, 6], 4.0]]},
    "forced_eos": {"forced_eos_token_id": 9},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 9},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0, context_width=1)},
}


@pytest.mark.compat
@pytest.mark.parametrize("options", PROCESSED.values(), ids=PROCESSED)
def test_logits_processors_change_draft_and_target_alike(target, options):
    want, report = check_same(target, **options)
    # The drafter that knows the processed text is believed: block after block as scripted.
    assert report.accepted[:3] == [B, 2, 0]
    unprocessed = plain(target, prompt_ids(), max_new_tokens=options.get("max_new_tokens", NEW))
    assert want.tolist() != unprocessed.tolist()


def test_min_new_tokens_with_an_end_token_in_the_text(target, text):
    """R9: plain text would end at once; the minimum keeps it going, in draft and target."""
    eos = int(text[0, PROMPT_LENGTH + 2])
    assert plain(target, prompt_ids(), max_new_tokens=NEW, eos_token_id=eos).shape[1] <= PROMPT_LENGTH + 3
    want, report = check_same(target, eos_token_id=eos, min_new_tokens=20)
    assert want.shape[1] >= PROMPT_LENGTH + 20
    assert report.accepted[:2] == [B, 2]


class ForbidOdd(LogitsProcessor):
    """Leaves even tokens only."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 1::2] = float("-inf")
        return scores


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sample"])
def test_processors_that_forbid_the_whole_draft_vocabulary(target, do_sample):
    """No token can be drawn: the block stays empty, and decoding goes on as plain decoding."""
    drafter = tiny_drafter(target, block_size=B, draft_token_ids=torch.arange(1, VOCAB, 2))
    options = {"logits_processor": [ForbidOdd()], "max_new_tokens": NEW, "do_sample": do_sample}
    torch.manual_seed(0)
    want = plain(target, prompt_ids(), **options)
    torch.manual_seed(0)
    assert assisted(target, prompt_ids(), drafter, **options).tolist() == want.tolist()
    assert drafter.last_report.proposed == [0] * (NEW - 1)


def test_prefix_function_that_allows_nothing_of_the_draft_vocabulary(target):
    """The library then lets the function decide alone; what it forces is proposed like anything else."""
    drafter = tiny_drafter(target, block_size=B, draft_token_ids=torch.arange(1, VOCAB, 2))
    options = {"prefix_allowed_tokens_fn": even_tokens, "max_new_tokens": NEW}
    want = plain(target, prompt_ids(), **options)
    assert assisted(target, prompt_ids(), drafter, **options).tolist() == want.tolist()


def test_ensemble_weight_gets_the_draft_logits(target, text):
    """The option relaxes greedy verification by the draft's distribution: one that is right changes nothing."""
    drafter = scripted(target, text, correct=B)
    got = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW, assistant_ensemble_weight=0.5)
    assert got.tolist() == text.tolist()
    assert drafter.last_report.accepted[:2] == [B, B]


@pytest.mark.parametrize("position", range(5, NEW))
def test_end_token_in_the_middle_of_a_block(target, text, position):
    """R1: the text ends at the end token wherever it stands in a block, in the result and in the stream."""
    if position not in first_seen(text):
        position = min(first_seen(text), key=lambda place: abs(place - position))
    eos = int(text[0, PROMPT_LENGTH + position])
    streamer = Recorder()
    drafter = scripted(target, text, correct=B)
    got = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW, eos_token_id=[eos, 61], streamer=streamer)
    assert got.tolist() == text[:, : PROMPT_LENGTH + position + 1].tolist()
    assert streamer.ids == got[0].tolist()
    assert streamer.ended == 1
    assert sum(drafter.last_report.committed) == position


@pytest.mark.compat
@pytest.mark.parametrize("new_tokens", [1, 2, B, B + 1, B + 2])
@pytest.mark.parametrize("by_length", [True, False], ids=["max_length", "max_new_tokens"])
def test_length_limits(target, text, new_tokens, by_length):
    """R1: exact lengths; never a proposal that could not be committed beside the target's own token."""
    option = {"max_length": PROMPT_LENGTH + new_tokens} if by_length else {"max_new_tokens": new_tokens}
    drafter = scripted(target, text, correct=B)
    got = assisted(target, prompt_ids(), drafter, **option)
    assert got.tolist() == text[:, : PROMPT_LENGTH + new_tokens].tolist()
    report = drafter.last_report
    assert report.proposed == {1: [], 2: [0], B: [B - 2], B + 1: [B - 1], B + 2: [B]}[new_tokens]


def test_generation_config_defaults_of_the_model():
    target = tiny_llama()
    target.generation_config.update(max_new_tokens=NEW, repetition_penalty=1.4, eos_token_id=[62, 63], pad_token_id=0)
    before = target.generation_config.to_dict()
    want = target.generate(prompt_ids())
    assert want.tolist() != tiny_llama().generate(prompt_ids(), max_new_tokens=NEW).tolist()
    drafter = tiny_drafter(target, block_size=B)
    assert target.generate(prompt_ids(), assistant_model=drafter).tolist() == want.tolist()
    own = GenerationConfig(max_new_tokens=9, do_sample=False, num_assistant_tokens=2, pad_token_id=0)
    got = target.generate(prompt_ids(), assistant_model=drafter, generation_config=own)
    assert got.shape[1] == PROMPT_LENGTH + 9
    assert max(drafter.last_report.proposed) == 2
    assert target.generation_config.to_dict() == before


def test_num_assistant_tokens_shortens_the_block_for_one_call(target):
    """R9: the length of a call does not reach the next one, the configurations stay as they are."""
    drafter = tiny_drafter(target, block_size=7)
    config, assistant_config = drafter.config.to_dict(), copy.deepcopy(getattr(drafter, "generation_config", None))
    for wanted, proposals in ((3, 3), (None, 7), (12, 7), (1, 1), (None, 7)):
        options = {} if wanted is None else {"num_assistant_tokens": wanted}
        got = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW, **options)
        assert got.tolist() == plain(target, prompt_ids(), max_new_tokens=NEW).tolist()
        assert max(drafter.last_report.proposed) == drafter.last_report.proposed[0] == proposals
    assert drafter.config.to_dict() == config
    assert getattr(drafter, "generation_config", None) == assistant_config
    with pytest.raises(ValueError, match=r"`num_assistant_tokens` must be at least 1, got 0"):
        assisted(target, prompt_ids(), drafter, max_new_tokens=NEW, num_assistant_tokens=0)


@pytest.mark.parametrize("options", [{}, {"markov_rank": 4}, {"markov_rank": 4, "carry": False}], ids=str)
def test_a_block_ends_behind_the_first_unsure_proposal(target, options, monkeypatch):
    """`assistant_confidence_threshold`, for one call; the unsure proposal is verified too, as in transformers."""
    drafter = tiny_drafter(target, block_size=7, std=0.5, **options)
    text = plain(target, prompt_ids(), max_new_tokens=NEW).tolist()
    seen, original = [], CarryoverCandidateGenerator._base_logits

    def watch(self, *args):
        base, tokens = original(self, *args)
        seen.append((base.clone(), args[0][0, -1:]))
        return base, tokens

    monkeypatch.setattr(CarryoverCandidateGenerator, "_base_logits", watch)
    counts = {}
    for threshold in (None, 0.0, 1e-9, 0.1, 0.2, 1.0):
        seen.clear()
        value = {} if threshold is None else {"assistant_confidence_threshold": threshold}
        assert assisted(target, prompt_ids(), drafter, max_new_tokens=NEW, **value).tolist() == text
        counts[threshold] = list(drafter.last_report.proposed)
        for proposed, (base, anchor) in zip(counts[threshold], seen):
            expected, previous = 0, anchor
            for row in base:  # one by one, as drawn
                logits = row if drafter.markov_head is None else row + drafter.markov_head(previous)[0]
                expected, previous = expected + 1, logits.argmax().view(1)
                if float(logits.softmax(dim=-1).max()) < (threshold or 0.0):
                    break
            assert proposed == expected
    assert counts[None] == counts[0.0] == counts[1e-9] and max(counts[None]) == 7
    assert set(counts[1.0]) <= {0, 1}  # 0: the last token needs none
    assert len(set(counts[0.1])) > 2 and counts[0.1] != counts[0.2]


def test_the_librarys_threshold_counts_as_unset(target):
    """As with `num_assistant_tokens`, 0.4 can't be told from nothing."""
    default = GenerationConfig._get_default_generation_params()["assistant_confidence_threshold"]
    drafter = tiny_drafter(target, block_size=7)
    assisted(target, prompt_ids(), drafter, max_new_tokens=NEW, assistant_confidence_threshold=default)
    assert drafter.last_report.proposed[0] == 7
    for wrong in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"`assistant_confidence_threshold` must be a probability.*got {wrong}"):
            assisted(target, prompt_ids(), drafter, max_new_tokens=NEW, assistant_confidence_threshold=wrong)


def test_streamer_gets_the_ids_of_the_sequences(target, text):
    for drafter in (tiny_drafter(target, block_size=B), scripted(target, text)):
        streamer = Recorder()
        got = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW, streamer=streamer)
        assert streamer.ids == got[0].tolist() == text[0].tolist()
        assert streamer.ended == 1


def check_outputs(want, got):
    """Everything `return_dict_in_generate` returns, token by token."""
    assert got.sequences.tolist() == want.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(getattr(got, name)) == len(getattr(want, name))
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-4, rtol=0)
    for name in ("hidden_states", "attentions"):
        for mine, theirs in zip(getattr(got, name), getattr(want, name), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.compat
@pytest.mark.parametrize("correct", [B, 0, (1, 3, 0)], ids=["oracle", "rejected", "mixed"])
def test_return_dict_holds_what_plain_decoding_returns(correct):
    target = tiny_llama(attn_implementation="eager")
    options = {
        "max_new_tokens": NEW,
        "repetition_penalty": 1.2,
        "return_dict_in_generate": True,
        **dict.fromkeys(("output_scores", "output_logits", "output_hidden_states", "output_attentions"), True),
    }
    want = plain(target, prompt_ids(), **options)
    got = assisted(target, prompt_ids(), scripted(target, want.sequences, correct), **options)
    check_outputs(want, got)
    assert got.past_key_values.get_seq_length() == want.past_key_values.get_seq_length()
    for mine, theirs in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=0)


@pytest.mark.compat
def test_left_padding_with_a_mask_drafts_as_the_bare_prompt(target, monkeypatch):
    """R12: the text and every proposal are those of the unpadded run."""
    drafter = tiny_drafter(target, block_size=B, markov_rank=3)
    rounds = record_proposals(drafter, monkeypatch)
    bare = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW)
    unpadded, rounds[:] = list(rounds), []
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt_ids()], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 5).long().unsqueeze(0)
    got = assisted(target, padded, drafter, max_new_tokens=NEW, attention_mask=mask)
    assert got[0, 5:].tolist() == bare[0].tolist()
    assert got.tolist() == plain(target, padded, max_new_tokens=NEW, attention_mask=mask).tolist()
    assert rounds == unpadded
    assert len(rounds) > 10


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_short_prompts(name, length):
    check_same(tiny_target(name), prompt_ids(length))


def test_no_prompt_but_the_start_token():
    target = tiny_llama(bos_token_id=5)
    want = target.generate(max_new_tokens=NEW, do_sample=False)
    got = target.generate(max_new_tokens=NEW, do_sample=False, assistant_model=tiny_drafter(target))
    assert got.tolist() == want.tolist()
    assert want[0, 0] == 5


def test_inference_mode_and_grad_mode(target, text):
    drafter = tiny_drafter(target, block_size=B, markov_rank=3)
    with torch.inference_mode():
        inside = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW)
    with torch.enable_grad():
        outside = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW)
    assert inside.tolist() == outside.tolist() == text.tolist()
    assert not outside.requires_grad
