# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Prompts that the target writes itself."""

import pytest
from recording_helpers import Script, encode, make_model, make_tokenizer

from hf_carryover.training.chat import ChatTemplate, RecordingError, iter_prompts
from hf_carryover.training.self_prompting import self_prompts


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def test_self_prompts_continue_the_template(tokenizer):
    engine = Script(["where is it?<|im_end|>", " where  is it?<|im_end|>", "  <|im_end|>"], ["no end", "ab<|im_end|>"])
    engine.turns += [["it<|im_start|>now<|im_end|>", "how so?<|im_end|>x"], ["what else?<|im_end|>"]]
    prompts, counts = self_prompts(engine, tokenizer, 3, seed=5)
    assert prompts == [
        {"id": f"self-5-{draw}", "messages": [{"role": "user", "content": text}]}
        for draw, text in [(0, "where is it?"), (6, "how so?"), (7, "what else?")]
    ]
    assert counts == {
        "kept": 3,
        "duplicate": 1,
        "empty": 1,
        "unfinished": 1,
        "too_short": 1,
        "special_tokens": 1,
        "drawn": 8,
    }
    assert engine.calls[0][0] == 3 * [encode("<|im_start|>user\n")]
    seeds = [seed for _, call in engine.calls for seed in call]
    assert len(set(seeds)) == 8
    assert [segment for prompt in iter_prompts(prompts, tokenizer) for segment in prompt.segments] == [
        prompt["messages"] for prompt in prompts
    ]


def test_self_prompts_openings_steer(tokenizer):
    engine = Script(["one two<|im_end|>", "one two<|im_end|>"])
    prompts, _ = self_prompts(engine, tokenizer, 2, openings=["count: ", "sing: "])
    assert [prompt["messages"][0]["content"] for prompt in prompts] == ["count: one two", "sing: one two"]
    assert engine.calls[0][0] == [encode("<|im_start|>user\ncount: "), encode("<|im_start|>user\nsing: ")]


def test_self_prompts_of_a_template_that_ends_the_user_turn_with_text():
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [end]{% endfor %}"
    tokenizer = make_tokenizer(template)
    assert ChatTemplate(tokenizer).end_of_turn("user") == (None, "[end]")
    prompts, _ = self_prompts(Script(["how so? [end] and more"]), tokenizer, 1)
    assert prompts[0]["messages"][0]["content"] == "how so?"


def test_self_prompts_from_a_model(tokenizer):
    model = make_model()
    arguments = {"max_prompt_tokens": 40, "min_prompt_tokens": 1, "batch_size": 4}
    prompts, counts = self_prompts(model, tokenizer, 4, seed=0, **arguments)
    assert self_prompts(model, tokenizer, 4, seed=0, **arguments) == (prompts, counts)
    assert len(prompts) == counts["kept"] > 0


def test_self_prompts_without_any_usable_turn(tokenizer):
    with pytest.raises(RecordingError, match=r"None of 4 user turns .* is usable: \{'unfinished': 4, 'drawn': 4\}"):
        self_prompts(lambda prompts, seeds: [encode("abc") for _ in prompts], tokenizer, 1)
    with pytest.raises(RecordingError, match="Got n=0"):
        self_prompts(Script(), tokenizer, 0)
