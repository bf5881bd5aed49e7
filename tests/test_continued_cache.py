"""
Continuing from `past_key_values`: with a drafter as without, whichever call made the cache.

The assisted loop of transformers feeds the whole text a second time (prompt lookup gives another text than plain
decoding in this case), so this holds only because the candidate generator corrects the first pass.
"""

import copy

import pytest
import torch
from tiny_targets import (
    assisted,
    count_forwards,
    follow_script,
    prompt_ids,
    tiny_drafter,
    tiny_target,
)


B = 5
FIRST, SECOND = 10, 16  # new tokens of the two calls
PADDING = 4


def first_call(target, by_drafter: bool, padded: bool):
    """Text and cache of an earlier call, with three more tokens of a user behind it, and the mask of all."""
    ids = prompt_ids()
    if padded:
        ids = torch.cat([torch.zeros(1, PADDING, dtype=torch.long), ids], dim=1)
    pads = PADDING if padded else 0
    mask = (torch.arange(ids.shape[1]) >= pads).long().unsqueeze(0)
    options = {"attention_mask": mask, "max_new_tokens": FIRST, "do_sample": False, "return_dict_in_generate": True}
    if by_drafter:
        text = target.generate(ids, **options).sequences[:, pads:]
        options["assistant_model"] = follow_script(tiny_drafter(target, block_size=B), text, [B, 2])
    out = target.generate(ids, **options)
    more = torch.cat([out.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    mask = (torch.arange(more.shape[1]) >= pads).long().unsqueeze(0)
    return out.past_key_values, more, mask, pads


@pytest.mark.compat
@pytest.mark.parametrize("padded", [False, True], ids=["bare", "padded"])
@pytest.mark.parametrize("by_drafter", [False, True], ids=["plain_cache", "assisted_cache"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_whole_text_and_cache(name, by_drafter, padded, monkeypatch):
    target = tiny_target(name)
    cache, text, mask, pads = first_call(target, by_drafter, padded)
    options = {"attention_mask": mask, "max_new_tokens": SECOND, "do_sample": False}
    want = target.generate(text, **options)
    assert target.generate(text, past_key_values=copy.deepcopy(cache), **options).tolist() == want.tolist()
    for drafter in (
        tiny_drafter(target, block_size=B),
        follow_script(tiny_drafter(target, block_size=B), want[:, pads:], [B, 0, 3]),
    ):
        with monkeypatch.context() as patch:
            rows = count_forwards(target, patch)
            got = target.generate(text, past_key_values=copy.deepcopy(cache), assistant_model=drafter, **options)
        assert got.tolist() == want.tolist()
        assert rows[0] == 4  # three new tokens, and the last of the first call, whose states the cache lacks
    assert drafter.last_report.accepted[:3] == [B, 0, 3]


@pytest.mark.compat
@pytest.mark.parametrize("padded", [False, True], ids=["bare", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_new_tokens_with_the_mask_of_the_whole_text(name, padded):
    target = tiny_target(name)
    cache, text, mask, pads = first_call(target, True, padded)
    want = target.generate(text, attention_mask=mask, max_new_tokens=SECOND, do_sample=False)[0, text.shape[1] :]
    new = text[:, -4:]
    options = {"attention_mask": mask, "max_new_tokens": SECOND, "do_sample": False}
    without = target.generate(new, past_key_values=copy.deepcopy(cache), **options)
    assert without[0, 4:].tolist() == want.tolist()
    script = torch.cat([text[:, pads:], want.unsqueeze(0)], dim=1)
    drafter = follow_script(tiny_drafter(target, block_size=B), script, [B, 0, 3])
    got = target.generate(new, past_key_values=copy.deepcopy(cache), assistant_model=drafter, **options)
    assert got[0].tolist() == new[0].tolist() + want.tolist()
    assert drafter.last_report.accepted[:3] == [B, 0, 3]


def test_cache_as_long_as_the_text_is_refused(monkeypatch):
    target = tiny_target("llama")
    cache, text, _, _ = first_call(target, False, False)
    assert cache.get_seq_length() == 21
    drafter = tiny_drafter(target, block_size=B)
    forwards = count_forwards(target, monkeypatch)
    with pytest.raises(ValueError, match=r"`past_key_values` hold 21 tokens, `input_ids` only 21"):
        assisted(target, text[:, :21], drafter, past_key_values=cache, max_new_tokens=4)
    assert forwards == []


def test_attentions_need_the_whole_text(monkeypatch):
    target = tiny_target("llama")
    cache, text, mask, _ = first_call(target, False, False)
    # Undone after the test: the target is shared.
    monkeypatch.setattr(target.config, "_attn_implementation_internal", "eager")
    options = {"return_dict_in_generate": True, "output_attentions": True, "attention_mask": mask}
    forwards = count_forwards(target, monkeypatch)
    with pytest.raises(ValueError, match=r"need the whole text in `input_ids`, got the last 4 tokens"):
        assisted(target, text[:, -4:], tiny_drafter(target), past_key_values=cache, max_new_tokens=4, **options)
    assert forwards == []


def test_conversation_of_three_turns():
    """Each turn continues the cache that the turn before returned, all of them with one drafter."""
    target = tiny_target("gemma3")
    drafter = tiny_drafter(target, block_size=B)
    text, caches = {True: prompt_ids(), False: prompt_ids()}, {True: None, False: None}
    for turn in range(3):
        for with_drafter in (True, False):
            ids = text[with_drafter]
            out = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=caches[with_drafter],
                assistant_model=drafter if with_drafter else None,
                max_new_tokens=8,
                do_sample=False,
                return_dict_in_generate=True,
            )
            caches[with_drafter] = out.past_key_values
            text[with_drafter] = torch.cat([out.sequences, torch.tensor([[11 + turn, 12]])], dim=1)
        assert text[True].tolist() == text[False].tolist()
    assert caches[True].get_seq_length() == caches[False].get_seq_length() == text[True].shape[1] - 3
