"""
Stopping criteria with a drafter: met anywhere in a block they end the text where plain decoding ends it (R2).

A criterion is asked about every committed prefix, once and in order, whatever its state or what it reads.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_targets import (
    PROMPT_LENGTH,
    Recorder,
    assisted,
    follow_script,
    plain,
    prompt_ids,
    tiny_drafter,
    tiny_llama,
    tiny_target,
)
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList


B = 5
NEW = 24


class StopAt(StoppingCriteria):
    """True behind a token."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class StopAtCall(StoppingCriteria):
    """Counts its calls, keeps what it saw, and is true at call `last`: state of the kind users write."""

    def __init__(self, last: int):
        self.last = last
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids[0].tolist())
        return torch.full((1,), len(self.seen) == self.last)


class StopAtScore(StoppingCriteria):
    """Reads the scores of the last token, as an entropy or confidence rule does: true near one highest probability."""

    def __init__(self, value: float):
        self.value = value
        self.read: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        assert len(scores) == input_ids.shape[1] - PROMPT_LENGTH
        self.read.append(float(scores[-1].softmax(dim=-1).max()))
        return torch.full((1,), abs(self.read[-1] - self.value) < 1e-4)


@pytest.fixture(scope="module")
def text(target):
    return plain(target, prompt_ids(), max_new_tokens=NEW)


def right(target, text, correct=B, **options):
    return follow_script(tiny_drafter(target, block_size=B, **options), text, correct)


def places(text) -> list[int]:
    ids = text[0].tolist()
    return [i for i in range(NEW) if ids[PROMPT_LENGTH + i] not in ids[: PROMPT_LENGTH + i]]


@pytest.mark.compat
@pytest.mark.parametrize("rank", range(8))
def test_criterion_met_in_the_middle_of_a_block(target, text, rank):
    place = places(text)[rank % len(places(text))]
    criteria = StoppingCriteriaList([StopAt(int(text[0, PROMPT_LENGTH + place]))])
    want = text[:, : PROMPT_LENGTH + place + 1].tolist()
    assert plain(target, prompt_ids(), max_new_tokens=NEW, stopping_criteria=criteria).tolist() == want
    for drafter in (right(target, text), right(target, text, (2, 4, 1)), tiny_drafter(target, block_size=B)):
        streamer = Recorder()
        got = assisted(
            target, prompt_ids(), drafter, max_new_tokens=NEW, stopping_criteria=criteria, streamer=streamer
        )
        assert got.tolist() == want
        assert streamer.ids == want[0]
        assert sum(drafter.last_report.committed) == place


@pytest.mark.parametrize("last", [1, 2, 7, 11, NEW + 5])
def test_criterion_with_a_state_sees_every_prefix_once(target, text, last):
    mine, theirs = StopAtCall(last), StopAtCall(last)
    want = plain(target, prompt_ids(), max_new_tokens=NEW, stopping_criteria=[theirs])
    got = assisted(target, prompt_ids(), right(target, text), max_new_tokens=NEW, stopping_criteria=[mine])
    assert got.tolist() == want.tolist()
    assert mine.seen == theirs.seen


def test_all_criteria_are_asked_and_the_first_to_fire_counts(target, text):
    stop, counter = StopAt(int(text[0, PROMPT_LENGTH + places(text)[6]])), StopAtCall(NEW + 1)
    got = assisted(target, prompt_ids(), right(target, text), max_new_tokens=NEW, stopping_criteria=[stop, counter])
    assert got.shape[1] == PROMPT_LENGTH + places(text)[6] + 1
    assert counter.seen[-1] == got[0].tolist()
    assert len(counter.seen) == places(text)[6] + 1


@pytest.mark.parametrize("before", [True, False], ids=["eos_first", "criterion_first"])
def test_criterion_and_end_token_in_one_block(target, text, before):
    """Whichever comes first ends the text; the criterion also sees the prefix that EOS ends."""
    # In one block of the oracle, whose first block starts at new token 1.
    early, late = next(pair for pair in pairwise(places(text)) if (pair[0] - 1) // (B + 1) == (pair[1] - 1) // (B + 1))
    eos, stop = (early, late) if before else (late, early)
    options = {"max_new_tokens": NEW, "eos_token_id": int(text[0, PROMPT_LENGTH + eos])}
    mine, theirs = StopAtCall(stop + 1), StopAtCall(stop + 1)
    want = plain(target, prompt_ids(), **options, stopping_criteria=[theirs])
    got = assisted(target, prompt_ids(), right(target, text), **options, stopping_criteria=[mine])
    assert got.tolist() == want.tolist() == text[:, : PROMPT_LENGTH + early + 1].tolist()
    assert mine.seen == theirs.seen


@pytest.mark.parametrize("penalty", [1.0, 1.2], ids=["raw", "processed"])
def test_criterion_that_reads_the_scores(target, penalty):
    options = {"max_new_tokens": NEW, "repetition_penalty": penalty}
    options.update(return_dict_in_generate=True, output_scores=True)
    probe = StopAtScore(-1.0)
    want = plain(target, prompt_ids(), **options, stopping_criteria=[probe])
    mine, theirs = StopAtScore(probe.read[9]), StopAtScore(probe.read[9])
    stopped = plain(target, prompt_ids(), **options, stopping_criteria=[theirs])
    drafter = right(target, want.sequences)
    got = assisted(target, prompt_ids(), drafter, **options, stopping_criteria=[mine])
    assert got.sequences.tolist() == stopped.sequences.tolist()
    assert stopped.sequences.shape[1] == PROMPT_LENGTH + 10
    assert mine.read == pytest.approx(theirs.read, abs=1e-5)
    assert len(got.scores) == len(stopped.scores)
    assert max(drafter.last_report.accepted) == B


@pytest.mark.compat
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_outputs_and_cache_end_at_the_stop(name):
    """Scores, logits, hidden states and the target's cache are those of plain decoding, windows included."""
    target = tiny_target(name)
    text = plain(target, prompt_ids(), max_new_tokens=NEW)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options["output_hidden_states"] = True
    for last in (8, 9, 10):
        want = plain(target, prompt_ids(), **options, stopping_criteria=[StopAtCall(last)])
        got = assisted(target, prompt_ids(), right(target, text), **options, stopping_criteria=[StopAtCall(last)])
        assert got.sequences.tolist() == want.sequences.tolist()
        for field in ("scores", "logits", "hidden_states"):
            assert len(getattr(got, field)) == len(getattr(want, field)) == last
        for mine, theirs in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            assert mine.get_seq_length() == theirs.get_seq_length() == PROMPT_LENGTH + last - 1
            torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=0)


def letters() -> PreTrainedTokenizerFast:
    """Token `i` is one letter or digit, so strings of the text are known."""
    alphabet = [chr(ord("0") + i) for i in range(64)]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, merges=[], unk_token="0"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0", pad_token="0")


@pytest.mark.compat
@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_strings(target, text, length):
    tokenizer = letters()
    place = places(text)[5]
    stop = "".join(chr(ord("0") + token) for token in text[0, PROMPT_LENGTH + place - length + 1 :][:length].tolist())
    options = {"max_new_tokens": NEW, "stop_strings": [stop], "tokenizer": tokenizer}
    want = plain(target, prompt_ids(), **options)
    assert want.shape[1] == PROMPT_LENGTH + place + 1
    for drafter in (right(target, text), tiny_drafter(target, block_size=B)):
        assert assisted(target, prompt_ids(), drafter, **options).tolist() == want.tolist()


@pytest.mark.slow
def test_stop_string_of_a_real_tokenizer():
    """R2: SmolLM2 goes through the alphabet; the text ends behind " E", two tokens on, however much is accepted."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_carryover import CarryoverDrafter
    from hf_carryover.smollm2 import prepare_smollm2

    folder = prepare_smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("A B C D E F G H " * 3 + "A B C", return_tensors="pt").input_ids
    options = {"stop_strings": [" E"], "tokenizer": tokenizer, "max_new_tokens": 20}
    want = plain(model, ids, **options)
    assert want.shape[1] == ids.shape[1] + 2 and tokenizer.decode(want[0]).endswith("A B C D E")
    beyond = plain(model, ids, max_new_tokens=20)
    shipped = Path(__file__).parents[1] / "model_cards" / "smollm2-135m-markov-carryover"
    for knows in (False, True):
        drafter = CarryoverDrafter.from_pretrained(shipped, dtype=torch.float32)
        if knows:
            follow_script(drafter, beyond, 7)
        assert assisted(model, ids, drafter, **options).tolist() == want.tolist()


def test_no_criterion_leaves_the_arguments_alone(target):
    from hf_carryover.stopping import watch_stopping_criteria

    assert watch_stopping_criteria(prompt_ids(), target.generation_config, StoppingCriteriaList(), []) == {}


def test_loop_that_cuts_in_another_way_is_noticed(target):
    """A transformers version whose loop does not ask for EOS places must not pass over a criterion in silence."""
    from hf_carryover.stopping import StopVerdict, StopWatch

    watch = StopWatch(prompt_ids(), [StopAt(3)])
    verdict = StopVerdict(watch)
    longer = torch.cat([prompt_ids(), torch.tensor([[3, 4]])], dim=1)
    assert torch.isin(torch.tensor([7, 3, 4]), watch.to("cpu")).tolist() == [False, True, False]
    with pytest.raises(RuntimeError, match=r"committed 12 tokens.* asked about 14"):
        verdict(prompt_ids(), None)
    assert verdict(longer, None).tolist() == [True]


def test_stop_in_sampling_keeps_the_distribution():
    """
    Proposals must not be cut by their value: with `p = q` over two tokens, one of which stops, cutting in front of
    the stopping proposal would make it a quarter instead of a half.
    """
    target = tiny_llama(vocab_size=2, pad_token_id=0, num_hidden_layers=2)
    prompt = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad():
        target.lm_head.weight.zero_()  # p is one half everywhere
    drafter = tiny_drafter(target, block_size=3, target_layer_ids=[1])  # and so is q: the head is the target's
    torch.manual_seed(0)
    draws, stopped = 300, 0
    for _ in range(draws):
        got = assisted(
            target, prompt, drafter, do_sample=True, top_k=0, max_new_tokens=3, stopping_criteria=[StopAt(1)]
        )
        stopped += int(got.shape[1] == 4 and got[0, 3] == 1) if got[0, 2] == 0 else 0
    # P(first is 0, second is 1) = 1/4; four standard deviations of 300 draws are 30, and 1/8 is 37 away.
    assert abs(stopped - draws / 4) < 30
