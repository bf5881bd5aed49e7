# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Chat prompts: every usual form becomes the same segments, rendered as inference renders them."""

import gzip
import json

import pytest
from datasets import Dataset, DatasetDict
from recording_helpers import CHATML, PROMPTS, make_tokenizer

from hf_carryover.training.chat import ChatTemplate, RecordingError, iter_prompts


@pytest.fixture
def tokenizer():
    return make_tokenizer()


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "row, segments",
    [
        pytest.param("hi", [[USER]], id="text"),
        pytest.param({"prompt": "hi"}, [[USER]], id="prompt"),
        pytest.param({"prompt": [USER]}, [[USER]], id="prompt-messages"),
        pytest.param({"turns": ["hi", "hi"]}, [[USER], [USER]], id="turns"),
        pytest.param(
            {"instruction": "add", "input": "1 2"}, [[{"role": "user", "content": "add\n\n1 2"}]], id="instruction"
        ),
        pytest.param({"messages": [USER, {"role": "assistant", "content": "old"}]}, [[USER]], id="ends-with-answer"),
        pytest.param(
            {"messages": [USER, {"role": "assistant", "content": "old"}, USER]}, [[USER], [USER]], id="two-turns"
        ),
        pytest.param(
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "old"}], "system": "be"},
            [[{"role": "system", "content": "be"}, USER]],
            id="sharegpt",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "content": "hello", "name": None}, USER]}, [[USER]], id="greeting"
        ),
        pytest.param(
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [1]},
                    {"role": "tool", "content": "4"},
                    {"role": "assistant", "content": "four"},
                ]
            },
            [[USER, {"role": "assistant", "content": "", "tool_calls": [1]}, {"role": "tool", "content": "4"}]],
            id="tool-result-keeps-its-call",
        ),
    ],
)
def test_prompt_forms(tokenizer, row, segments):
    (prompt,) = iter_prompts([row], tokenizer)
    assert prompt.segments == segments
    expected = tokenizer.apply_chat_template(segments[0], add_generation_prompt=True, return_dict=False)
    assert prompt.prompt_ids.tolist() == expected
    assert tokenizer.decode(expected).endswith("<|im_start|>assistant\n")


def test_template_without_a_place_for_tools_gets_them_in_a_system_message():
    template = CHATML.partition("{% endif %}")[2]
    assert "tools" not in template
    tokenizer = make_tokenizer(template)
    tool = {"name": "add", "parameters": {"type": "dict"}}
    rows = [{"turns": ["hi"], "tools": [tool]}, {"turns": ["hi"], "tools": [tool], "system": "be kind"}]
    texts = [tokenizer.decode(prompt.prompt_ids) for prompt in iter_prompts(rows, tokenizer)]
    listing = '{"name": "add", "parameters": {"type": "object"}}'
    for text in texts:
        assert text.count("<|im_start|>system") == 1 and listing in text
        assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert "system\nbe kind\n\n" in texts[1]
    around = ChatTemplate(tokenizer).around([], "user", [], [{"name": "add", "parameters": {"type": "object"}}])
    assert listing in around[0] and around[0].endswith("<|im_start|>user\n")


def test_tools_reach_the_template_as_json_schema(tokenizer):
    function = {
        "name": "area",
        "parameters": {"type": "dict", "properties": {"type": {"type": "float", "description": None}}},
    }
    schema = {"type": "object", "properties": {"type": {"type": "number"}}}
    expected = [{"type": "function", "function": {"name": "area", "parameters": schema}}]
    for tools in ([function], json.dumps([function])):
        (prompt,) = iter_prompts([{"turns": ["hi"], "tools": tools}], tokenizer)
        assert prompt.tools == expected
    assert '"type": "object"' in tokenizer.decode(prompt.prompt_ids)


def test_nameless_prompts_are_named_by_content(tokenizer):
    names = [prompt.id for prompt in iter_prompts(["hi", "ho", "hi"], tokenizer)]
    assert names[0] == names[2] != names[1]


def test_prompts_from_files(tmp_path, tokenizer):
    lines = [json.dumps(row) for row in PROMPTS]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    expected = list(iter_prompts(PROMPTS, tokenizer))
    assert list(iter_prompts(tmp_path / "a.jsonl", tokenizer)) == expected
    assert list(iter_prompts(tmp_path, tokenizer)) == 2 * expected
    Dataset.from_list(PROMPTS).save_to_disk(tmp_path / "arrow")
    assert list(iter_prompts(tmp_path / "arrow", tokenizer)) == expected


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"text": "hi"}], r"row 0: no prompt among the columns \['text'\]; expected one of"),
        (["hi", 3], "row 1: got int, expected a JSON object or a string"),
        ([{"turns": []}], r"row 0: 'turns' is \[\], expected a non-empty list"),
        ([{"messages": [{"role": "cat", "content": "x"}]}], r"row 0, messages\[0\]: role 'cat' is unknown"),
        ([{"messages": [{"role": "user", "content": None}]}], r"content of the 'user' turn is None, expected text"),
        ([{"messages": [{"role": "system", "content": "x"}]}], "has no user turn to answer"),
        ([{"prompt": "x", "tools": "nope"}], "`tools` is text but not JSON: 'nope'"),
        (DatasetDict(train=Dataset.from_list(PROMPTS)), r"keys \['train'\].*pass one of them"),
        ("nowhere.jsonl", "'nowhere.jsonl' does not exist"),
    ],
)
def test_bad_prompts_name_the_row(tokenizer, rows, message):
    with pytest.raises(RecordingError, match=message):
        list(iter_prompts(rows, tokenizer))


def test_template_mistakes_are_named(tmp_path):
    strict = make_tokenizer("{{ raise_exception('only users') }}")
    with pytest.raises(RecordingError, match=r"row 0 \(id 'p0'\): the chat template refuses the prompt: only users"):
        list(iter_prompts(PROMPTS, strict))
    with pytest.raises(RecordingError, match="has no chat template"):
        list(iter_prompts(PROMPTS, make_tokenizer(None)))
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt"\n')
    with pytest.raises(RecordingError, match=r"a\.jsonl, line 2: not a JSON object"):
        list(iter_prompts(tmp_path / "a.jsonl", make_tokenizer()))
