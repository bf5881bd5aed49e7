"""Peers of transformers' own beside our drafters: same outputs, rounds counted alike."""

import pytest
import torch
from conftest import tiny_drafter, tiny_llama

from hf_carryover.evaluation.benchmark import Evaluation
from hf_carryover.evaluation.journal import Journal
from hf_carryover.evaluation.prompts import Item
from hf_carryover.evaluation.summary import summarize
from hf_carryover.evaluation.systems import System, peer, transformers_dflash


NEW = 20


@pytest.fixture(scope="module")
def models():
    target = tiny_llama()
    return target, tiny_drafter(target, mask_token_id=3, carry=True)


def items(count=2):
    return [Item("qa", str(i), prompt_ids=[5 + i, *range(6, 17)] * 2) for i in range(count)]


@pytest.mark.compat
def test_all_systems_write_the_same_and_count_alike(models, tmp_path):
    target, drafter = models
    small = tiny_llama(num_hidden_layers=2)
    small.save_pretrained(tmp_path / "small")
    words = ("prompt_lookup:3", f"assistant:{tmp_path / 'small'}", "dflash:ours")
    systems = [System("ours", drafter), *(peer(word, target, {"ours": drafter}) for word in words)]
    evaluation = Evaluation(target, None, systems, max_new_tokens=NEW)
    records = evaluation.run(items(), [0], Journal(tmp_path / "j.jsonl", evaluation.settings()), log=lambda line: None)
    for record in records:
        assert list(record["systems"]) == ["plain", "ours", "prompt_lookup:3", "assistant", "dflash:ours"]
        for name, numbers in record["systems"].items():
            assert numbers["new_tokens"] == NEW
            if name != "plain":
                assert numbers["difference"] is None
                assert numbers["rounds"] == len(numbers["committed"])
                assert sum(numbers["committed"]) <= NEW - 1
    numbers = summarize(records, [])["groups"]["qa"]["systems"]
    assert all(numbers[name]["tau"]["value"] >= 1 for name in list(numbers)[1:])


@pytest.mark.compat
def test_rounds_are_counted_as_our_own_report_counts_them(models):
    """What is streamed gives the same rounds as the report of the drafter."""
    target, drafter = models
    inputs = {"input_ids": torch.arange(5, 17)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    streamed = System("other", arguments={"assistant_model": drafter}).generate(target, inputs, NEW)
    reported = System("ours", drafter).generate(target, inputs, NEW)
    assert streamed["committed"] == reported["committed"]
    assert streamed["rounds"] == reported["rounds"]


@pytest.mark.compat
def test_the_dflash_twin_drafts_the_same_without_carry(models):
    """Same weights, same rounds: the twin leaves the carry embedding out."""
    target, drafter = models
    plain = tiny_drafter(target, mask_token_id=3, carry=False)
    plain.load_state_dict({k: v for k, v in drafter.state_dict().items() if not k.startswith("carry_")})
    inputs = {"input_ids": torch.arange(5, 17)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    twin = peer("dflash:ours", target, {"ours": drafter}).generate(target, inputs, NEW)
    ours = System("ours", plain).generate(target, inputs, NEW)
    assert twin["committed"] == ours["committed"]


def test_refusals(models):
    target, drafter = models
    markov = tiny_drafter(target, markov_rank=4, draft_vocab_size=32, draft_token_ids=torch.arange(32))
    with pytest.raises(ValueError, match="it has a Markov head, a reduced draft vocabulary, a learned mask embedding"):
        transformers_dflash(markov)
    for word, message in {
        "eagle": "Unknown peer 'eagle', expected prompt_lookup",
        "assistant": "Unknown peer 'assistant'",
        "prompt_lookup:0": "takes a number of tokens, got '0'",
        "dflash:theirs": r"dflash:theirs names no drafter, expected one of \['ours'\]",
    }.items():
        with pytest.raises(ValueError, match=message):
            peer(word, target, {"ours": drafter})


def test_names_are_not_taken_twice(models):
    target, drafter = models
    with pytest.raises(ValueError, match=r"got \['a'\]"):
        Evaluation(target, None, [System("a", drafter), System("a", drafter)], max_new_tokens=4)
