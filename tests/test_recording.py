"""Recordings: what is masked must be exactly what the target produced, and what is dropped must be counted."""

import gzip
import json
import sys
import types

import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_carryover.training import recording
from hf_carryover.training.chat import ChatTemplate, derive_seed
from hf_carryover.training.recording import (
    RecordingError,
    RecordingSettings,
    iter_prompts,
    load_recordings,
    record_responses,
    record_with_engine,
    record_with_vllm,
    repetition,
    self_prompts,
    split_recordings,
)


SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|stop|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz \n0123456789?.,:<>/_{}\"'[]-+!"
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: the reasoning of earlier answers is removed when the conversation goes on.
THINKING = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
PROMPTS = [{"id": f"p{i}", "turns": ["a" * (1 + 3 * i % 7), "and then?"][: 1 + i % 2]} for i in range(7)]
ROW = {"id": "x", "input_ids": [5, 6, 7, 8], "response_mask": [0, 0, 1, 1]}


def make_tokenizer(template=CHATML):
    vocab = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    assert len(vocab) <= 64
    characters = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|stop|>"],
        chat_template=template,
    )


def make_model():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3, generator=generator)
    return model


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def encode(text):
    return make_tokenizer()(text, add_special_tokens=False)["input_ids"]


class Script:
    """An engine that gives the answers of a script, turn by turn, and keeps what it was asked."""

    def __init__(self, *turns):
        self.turns, self.calls = list(turns), []

    def __call__(self, prompts, seeds):
        self.calls.append((prompts, seeds))
        return [encode(answer) for answer in self.turns[len(self.calls) - 1]]


def record(engine, tokenizer, prompts, folder, *, stops=(2,), context_length=None, **settings):
    settings = RecordingSettings(**{"max_new_tokens": 20, **settings})
    return record_with_engine(
        engine,
        tokenizer,
        prompts,
        folder,
        settings=settings,
        stop_token_ids=list(stops),
        context_length=context_length,
    )


def answers_of(tokenizer, row):
    """The marked runs, decoded."""
    texts, previous = [], 0
    for token, marked in zip(row["input_ids"], row["response_mask"]):
        if marked:
            texts = [*texts, []] if not previous else texts
            texts[-1].append(token)
        previous = marked
    return [tokenizer.decode(ids) for ids in texts]


# Prompts


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


# Recording


def test_multi_turn_mask_is_exactly_the_answers(tmp_path, tokenizer):
    engine = Script(["first<|im_end|><pad><pad>"], ["second<|im_end|>"])
    (row,) = record(engine, tokenizer, [{"id": "a", "turns": ["q1", "q2"]}], tmp_path / "out")
    assert answers_of(tokenizer, row) == ["first<|im_end|>", "second<|im_end|>"]
    messages = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "q2"},
    ]
    seen = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert engine.calls[1][0] == [seen]
    assert row["input_ids"] == seen + encode("second<|im_end|>")
    assert row["id"] == "a"


def test_reasoning_that_the_template_removes_stays_as_generated(tmp_path):
    """Case R30: a template without generation marks that rewrites earlier answers."""
    tokenizer = make_tokenizer(THINKING)
    engine = Script(["<think>hm</think>yes<|im_end|>"], ["no<|im_end|>"])
    (row,) = record(engine, tokenizer, [{"turns": ["q1", "q2"]}], tmp_path / "out")
    assert answers_of(tokenizer, row) == ["<think>hm</think>yes<|im_end|>", "no<|im_end|>"]
    assert tokenizer.decode(row["input_ids"]) == (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n<think>hm</think>yes<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
    )


@pytest.mark.parametrize("template", [CHATML, THINKING], ids=["same-text", "rewritten"])
def test_an_answer_cut_by_the_length_is_closed_by_the_template(tmp_path, template):
    tokenizer = make_tokenizer(template)
    first = "<think></think>abc"
    (row,) = record(Script([first], ["d<|im_end|>"]), tokenizer, [{"turns": ["q1", "q2"]}], tmp_path / "out")
    assert answers_of(tokenizer, row) == [first, "d<|im_end|>"]
    assert f"{first}<|im_end|>\n<|im_start|>user\nq2" in tokenizer.decode(row["input_ids"])


@pytest.mark.parametrize(
    "turns, arguments",
    [
        pytest.param([["a b c<|stop|>"]], {"stops": (2, 3)}, id="ended-by-another-token"),
        pytest.param([["a b c<|im_end|>"], ["<|im_end|>"]], {}, id="second-answer-empty"),
        pytest.param([["a b c<|im_end|>"]], {"max_length": 65}, id="no-room-for-the-second"),
    ],
)
def test_a_conversation_ends_after_its_last_answer(tmp_path, tokenizer, turns, arguments):
    engine = Script(*turns)
    (row,) = record(engine, tokenizer, [{"turns": ["q1", "q2"]}], tmp_path / "out", **arguments)
    assert len(engine.calls) == len(turns)
    assert answers_of(tokenizer, row) == [turns[0][0]]
    assert row["response_mask"][-1] == 1
    assert json.loads((tmp_path / "out" / "recording.json").read_text())["counts"]["turns_not_answered"] == 1


def test_dropped_recordings_are_counted(tmp_path, tokenizer):
    prompts = [{"id": name, "prompt": text} for name, text in zip("abcde", ["q", "q", "q", "q", "q" * 300])]
    engine = Script(["<|im_end|>", "ab<|im_end|>", "ab" * 20, "fine text<|im_end|>"])
    dataset = record(engine, tokenizer, prompts, tmp_path / "out", min_response_tokens=4, context_length=100)
    assert dataset["id"][:] == ["d"]
    metadata = json.loads((tmp_path / "out" / "recording.json").read_text())
    assert metadata["counts"] == {
        "prompts": 5,
        "kept": 1,
        "response_tokens": 10,
        "turns_not_answered": 0,
        "empty_response": 1,
        "too_short": 1,
        "too_repetitive": 1,
        "prompt_too_long": 1,
    }
    assert metadata["complete"] is True
    assert metadata["settings"]["max_length"] == 100


def test_batched_greedy_equals_single_generate(tmp_path, model, tokenizer):
    dataset = record_responses(model, tokenizer, PROMPTS, tmp_path, max_new_tokens=12, batch_size=3, max_repetition=1)
    assert dataset["id"][:] == [prompt["id"] for prompt in PROMPTS]
    for row in dataset:
        ids, mask = row["input_ids"], row["response_mask"]
        start = mask.index(1)
        end = start + sum(mask) if 0 not in mask[start:] else mask.index(0, start)
        single = model.generate(torch.tensor([ids[:start]]), max_new_tokens=12, do_sample=False)
        assert single[0].tolist() == ids[:end]


def test_generation_defaults_of_the_model_are_not_used(tmp_path, tokenizer):
    plain, penalised = make_model(), make_model()
    penalised.generation_config.repetition_penalty = 3.0
    penalised.generation_config.min_new_tokens = 12
    arguments = {"max_new_tokens": 12, "max_repetition": 1}
    own = penalised.generation_config
    expected = record_responses(plain, tokenizer, PROMPTS, tmp_path / "a", **arguments)
    assert record_responses(penalised, tokenizer, PROMPTS, tmp_path / "b", **arguments)[:] == expected[:]
    assert penalised.generation_config is own


def test_sampling_is_decided_by_the_seed_alone(tmp_path, model, tokenizer):
    def sampled(name, seed):
        state = torch.get_rng_state()
        folder = tmp_path / name
        dataset = record_responses(
            model, tokenizer, PROMPTS, folder, max_new_tokens=12, do_sample=True, top_p=0.9, seed=seed
        )
        assert torch.equal(state, torch.get_rng_state())
        torch.rand(1)
        return dataset["input_ids"][:]

    assert sampled("a", 1) == sampled("b", 1) != sampled("c", 2)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_resumed_recording_equals_uninterrupted(tmp_path, model, tokenizer, monkeypatch, do_sample):
    arguments = {"max_new_tokens": 8, "batch_size": 2, "shard_size": 3, "do_sample": do_sample, "max_repetition": 1}
    whole = record_responses(model, tokenizer, PROMPTS, tmp_path / "whole", **arguments)
    real, calls = recording._answer_all, []

    def third_fails(*args):
        calls.append(args)
        if len(calls) == 3:
            raise Interrupted
        real(*args)

    monkeypatch.setattr(recording, "_answer_all", third_fails)
    with pytest.raises(Interrupted):
        record_responses(model, tokenizer, PROMPTS, tmp_path / "twice", **arguments)
    partial = load_recordings(tmp_path / "twice")
    assert partial[:] == whole[: len(partial)] and 0 < len(partial) < len(whole)
    resumed = record_responses(model, tokenizer, PROMPTS, tmp_path / "twice", **arguments)
    assert len(calls) == 4  # the two finished shards were not made again
    assert resumed[:] == whole[:] == load_recordings(tmp_path / "twice")[:]
    metadata = [json.loads((tmp_path / name / "recording.json").read_text()) for name in ("whole", "twice")]
    assert metadata[0] == metadata[1] and metadata[0]["complete"] is True


def test_resume_with_other_settings_is_refused(tmp_path, tokenizer):
    record(Script(["yes<|im_end|>"]), tokenizer, ["hi"], tmp_path / "out", seed=1)
    with pytest.raises(RecordingError, match=r"settings\.seed was 1 and now is 2"):
        record(Script(["yes<|im_end|>"]), tokenizer, ["hi"], tmp_path / "out", seed=2)
    with pytest.raises(RecordingError, match=r"prompts\.fingerprint was '.*' and now is"):
        record(Script(["yes<|im_end|>"]), tokenizer, ["ho"], tmp_path / "out", seed=1)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RecordingError, match=r"is not a recording and not empty \(it holds 'notes.txt'\)"):
        record(Script(["yes<|im_end|>"]), tokenizer, ["hi"], tmp_path)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"max_length": 512}, "max_length is 512 and leaves no room"),
        ({"do_sample": True, "temperature": 0.0}, "temperature=0.0"),
        ({"max_repetition": 30}, "max_repetition is 30, expected a share from 0 to 1"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs '{' is not JSON"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(RecordingError, match=message):
        RecordingSettings(**settings)


def test_recording_mistakes(tmp_path, model, tokenizer):
    with pytest.raises(RecordingError, match="There are no prompts to answer"):
        record(Script(), tokenizer, [], tmp_path / "a")
    with pytest.raises(RecordingError, match="max_new_tokens=300 leaves no room for a prompt in the target's context"):
        record_responses(model, tokenizer, ["hi"], tmp_path / "b", max_new_tokens=300)
    with pytest.raises(RecordingError, match="The engine gave 2 answers to 1 prompts"):
        record(Script(["a", "b"]), tokenizer, ["hi"], tmp_path / "c")
    with pytest.raises(RecordingError, match=r"No response is usable: .*'empty_response': 1"):
        record(Script(["<|im_end|>"]), tokenizer, ["hi"], tmp_path / "d")
    with pytest.raises(TypeError, match="max_tokens"):
        record_responses(model, tokenizer, ["hi"], tmp_path / "e", max_tokens=3)


# vLLM, by a stub that keeps its arguments


class StubLLM:
    def __init__(self, **kwargs):
        self.kwargs, self.calls = kwargs, []
        config = types.SimpleNamespace(model=kwargs["model"], max_model_len=128, dtype=torch.bfloat16)
        self.llm_engine = types.SimpleNamespace(model_config=config)

    def generate(self, prompts, sampling_params, use_tqdm):
        self.calls.append((prompts, sampling_params))
        outputs = [types.SimpleNamespace(token_ids=tuple(encode("yes<|im_end|>")))]
        return [types.SimpleNamespace(outputs=outputs) for _ in prompts]


@pytest.fixture
def vllm(monkeypatch):
    made = []
    stub = types.ModuleType("vllm")
    stub.LLM = lambda **kwargs: made.append(StubLLM(**kwargs)) or made[-1]
    stub.SamplingParams = lambda **kwargs: kwargs
    stub.made = made
    monkeypatch.setitem(sys.modules, "vllm", stub)
    return stub


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, {"temperature": 0.0, "top_p": 1.0, "top_k": -1}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        ),
    ],
    ids=["greedy", "sampled"],
)
def test_vllm_gets_token_ids_and_a_seed_per_request(tmp_path, tokenizer, vllm, settings, expected):
    (tmp_path / "target").mkdir()
    prompts = [{"turns": ["a", "b"]}, {"turns": ["c"]}]
    arguments = {"llm_kwargs": {"max_model_len": 128}, "max_new_tokens": 9, "seed": 4, **settings}
    dataset = record_with_vllm(str(tmp_path / "target"), tokenizer, prompts, tmp_path / "out", **arguments)
    (llm,) = vllm.made
    assert llm.kwargs == {"model": str(tmp_path / "target"), "max_model_len": 128}
    common = {"max_tokens": 9, "stop_token_ids": [2], "detokenize": False, **expected}
    first, second = [prompt.prompt_ids.tolist() for prompt in iter_prompts(prompts, tokenizer)]
    assert llm.calls[0] == (
        [{"prompt_token_ids": first}, {"prompt_token_ids": second}],
        [{**common, "seed": derive_seed(4, "answer", 0, 0)}, {**common, "seed": derive_seed(4, "answer", 1, 0)}],
    )
    assert [len(prompts) for prompts, _ in llm.calls] == [2, 1]
    assert [answers_of(tokenizer, row) for row in dataset] == [2 * ["yes<|im_end|>"], ["yes<|im_end|>"]]
    metadata = json.loads((tmp_path / "out" / "recording.json").read_text())
    assert (metadata["engine"], metadata["target"]) == ("vllm", "target")


def test_missing_vllm_names_the_pip_line(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_carryover\[vllm\]'"):
        record_with_vllm("target", tokenizer, ["hi"], tmp_path)


# Prompts from the target itself


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


def test_self_prompts_from_a_model(model, tokenizer):
    arguments = {"max_prompt_tokens": 40, "min_prompt_tokens": 1, "batch_size": 4}
    prompts, counts = self_prompts(model, tokenizer, 4, seed=0, **arguments)
    assert self_prompts(model, tokenizer, 4, seed=0, **arguments) == (prompts, counts)
    assert len(prompts) == counts["kept"] > 0


def test_self_prompts_without_any_usable_turn(tokenizer):
    with pytest.raises(RecordingError, match=r"None of 4 user turns .* is usable: \{'unfinished': 4, 'drawn': 4\}"):
        self_prompts(lambda prompts, seeds: [encode("abc") for _ in prompts], tokenizer, 1)
    with pytest.raises(RecordingError, match="Got n=0"):
        self_prompts(Script(), tokenizer, 0)


# Loading


PAIRS = [{"prompt_ids": [5, 6], "response_ids": [7, 8]}, {"id": "y", "prompt_ids": [9], "response_ids": [10]}]


def test_both_row_forms_load_alike(tmp_path):
    dataset = load_recordings(PAIRS)
    assert dataset.column_names == ["id", "input_ids", "response_mask"]
    assert dataset["input_ids"][:] == [[5, 6, 7, 8], [9, 10]]
    assert dataset["response_mask"][:] == [[0, 0, 1, 1], [0, 1]]
    assert dataset["id"][1] == "y"
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, PAIRS)))
    dataset.save_to_disk(tmp_path / "arrow")
    nameless = dataset.remove_columns("id")
    sources = [
        tmp_path / "a.jsonl.gz",
        str(tmp_path / "arrow"),
        Dataset.from_list([{"id": None, **PAIRS[0]}, PAIRS[1]]),
        dataset.add_column("n", [1, 2]),
    ]
    for source in sources:
        assert load_recordings(source)[:] == dataset[:]
    assert load_recordings(nameless)["id"][0] == dataset["id"][0]
    assert load_recordings(Dataset.from_list([{**ROW, "id": 17}]))["id"][0] == "17"
    wide = Dataset.from_list([{**ROW, "response_mask": [False, False, True, True]}])  # int64 ids, bool mask
    assert load_recordings(wide, return_counts=True)[1] == {"rows": 1, "kept": 1, "response_tokens": 2}


def test_bad_rows_are_dropped_and_counted():
    varied = list(range(10, 30))
    rows = [
        {"id": "good", "prompt_ids": [5], "response_ids": varied},
        {"id": "empty", "prompt_ids": [5], "response_ids": []},
        {"id": "short", "prompt_ids": [5], "response_ids": [6]},
        {"id": "loop", "prompt_ids": [5], "response_ids": [6, 7] * 10},
        {"id": "nothing", "input_ids": [], "response_mask": []},
        {"id": "last", "input_ids": [5, *varied, 5, *varied], "response_mask": [0] + [1] * 20 + [0] + [1] * 20},
    ]
    dataset, counts = load_recordings(rows, min_response_tokens=2, max_repetition=0.3, return_counts=True)
    assert dataset["id"][:] == ["good", "last"]  # two equal answers do not make either of them repetitive
    assert counts == {
        "rows": 6,
        "kept": 2,
        "response_tokens": 60,
        "empty_response": 2,
        "too_short": 1,
        "too_repetitive": 1,
    }


def test_all_zero_masks_are_an_error():
    """Case R30: with a stock template the mask is all zeros, and training would "work"."""
    zero = {**ROW, "response_mask": [0, 0, 0, 0]}
    with pytest.raises(RecordingError, match=r"All 2 recordings have an empty response mask.*% generation %"):
        load_recordings([zero, zero])
    assert len(load_recordings([zero, ROW])) == 1
    with pytest.raises(RecordingError, match=r"No recording is left: .*'too_short': 1.*min_response_tokens=3"):
        load_recordings([ROW], min_response_tokens=3)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([ROW, {**ROW, "id": "b", "input_ids": [1, 2, 64, 3]}], r"row 1 \(id 'b'\): token id 64, .*vocab_size=64"),
        ([{**ROW, "input_ids": [1, -1, 2, 3]}], r"row 0 \(id 'x'\): token id -1, expected 0 <= id"),
        ([{**ROW, "response_mask": [0, 0, 2, 1]}], "`response_mask` holds 2, expected 0 or 1"),
        ([{**ROW, "response_mask": [0, 1]}], "row 0: `response_mask` has 2 values for 4 `input_ids`"),
        (Dataset.from_list([{**ROW, "response_mask": [0, 1]}]), r"\(id 'x'\): `response_mask` has 2 values for 4"),
        (Dataset.from_list([ROW, {**ROW, "input_ids": None}]), "row 1: `input_ids` is null"),
        (Dataset.from_list([ROW, {**ROW, "input_ids": [1, None, 2, 3]}]), "row 1: `input_ids` has a null among"),
        (Dataset.from_list([{**ROW, "input_ids": "abcd"}]), "Column `input_ids` has the type string"),
        ([{**ROW, "input_ids": [1.5, 2, 3, 4]}], r"`input_ids` is \[1.5, 2, 3, 4\], expected a flat list of 32-bit"),
        ([{**ROW, "input_ids": [2**31, 1, 1, 1]}], "expected a flat list of 32-bit integers"),
        ([{"prompt_ids": [], "response_ids": [1]}], "row 0: `prompt_ids` is empty"),
        ([{"prompt": "hi"}], r"row 0: got \['prompt'\], expected the columns `input_ids`.*call `record_responses`"),
        ([], "The recordings have no rows"),
    ],
)
def test_structural_errors_name_the_row(rows, message):
    with pytest.raises(RecordingError, match=message):
        load_recordings(rows, vocab_size=64)


def test_rows_beyond_the_first_batch_are_named_by_their_own_number():
    rows = [{**ROW, "id": str(i)} for i in range(1500)]
    rows[1234]["input_ids"] = [1, 2, 3, 99]
    with pytest.raises(RecordingError, match=r"row 1234 \(id '1234'\): token id 99"):
        load_recordings(rows, vocab_size=64)


def test_split_depends_on_the_id_alone():
    rows = [{**ROW, "id": f"r{i % 40}"} for i in range(80)]
    train, test = split_recordings(load_recordings(rows), 0.25, seed=3)
    assert len(train) + len(test) == 80 and not set(train["id"]) & set(test["id"])
    again = split_recordings(load_recordings(rows[::-1][:60]), 0.25, seed=3)[1]
    assert set(again["id"]) == set(test["id"])
    assert set(split_recordings(load_recordings(rows), 0.25, seed=4)[1]["id"]) != set(test["id"])
    assert len(split_recordings(load_recordings(rows), 7)[1]) == 8  # both rows of the fourth id
    for wrong in (0.0, 1.0, 0, 80):
        with pytest.raises(RecordingError, match=f"held_out is {wrong}, expected a share"):
            split_recordings(load_recordings(rows), wrong)
    with pytest.raises(RecordingError, match="leaves one side of 1 different ids empty"):
        split_recordings(load_recordings([ROW, ROW]), 0.5)


def test_repetition_is_the_share_of_grams_seen_before():
    assert repetition(range(30)) == 0
    assert repetition([1] * 8) == 0
    assert repetition([1] * 17) == 0.9
    assert repetition([1, 2, 1, 2, 1], n=2) == 0.5


# Command line


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def test_command_records_files(tmp_path, target, capsys):
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    arguments = ["--target", target, "--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out")]
    arguments += ["--max-new-tokens", "8", "--max-repetition", "1", "--limit", "5", "--device", "cpu"]
    assert recording.main(arguments) == 0
    assert capsys.readouterr().out == f"5 recordings in {tmp_path / 'out'}\n"
    assert len(load_recordings(tmp_path / "out", vocab_size=64)) == 5
    assert recording.main([*arguments, "--seed", "1"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: Cannot resume") and "settings.seed was 0 and now is 1" in error


def test_command_lets_the_target_write_prompts(tmp_path, target, capsys):
    (tmp_path / "openings.txt").write_text("tell me \n\nwhy ")
    arguments = ["--target", target, "--self-prompts", "3", "--output", str(tmp_path / "out"), "--device", "cpu"]
    arguments += ["--openings", str(tmp_path / "openings.txt"), "--self-prompt-max-tokens", "60"]
    arguments += ["--max-new-tokens", "8", "--max-repetition", "1"]
    assert recording.main(arguments) == 0
    written = json.loads((tmp_path / "out" / "self_prompts.json").read_text())
    assert all(prompt["messages"][0]["content"].startswith(("tell me", "why")) for prompt in written["prompts"])
    assert recording.main(arguments) == 0
    assert recording.main([*arguments, "--self-prompt-top-p", "0.5"]) == 2
    assert "top_p was 0.95 and now is 0.5" in capsys.readouterr().err


def test_command_writes_prompts_with_vllm(tmp_path, target, vllm, capsys):
    arguments = ["--target", target, "--self-prompts", "1", "--output", str(tmp_path / "out"), "--engine", "vllm"]
    assert recording.main([*arguments, "--llm-kwargs", '{"seed": 1}']) == 2  # "yes" is too short a prompt
    assert "None of 4 user turns" in capsys.readouterr().err
    (llm,) = vllm.made
    assert llm.kwargs == {"model": target, "dtype": "auto", "seed": 1}
    assert llm.calls[0][1][0]["temperature"] == 1.0 and llm.calls[0][1][0]["top_p"] == 0.95


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--target", "x", "--output", "y"], "expected exactly one of them"),
        (["--target", "x", "--output", "y", "--prompts", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
        (["--target", "x", "--output", "y", "--self-prompts", "1", "--openings", "none"], "Cannot read the openings"),
        (["--target", "x", "--output", "y", "--self-prompts", "1", "--batch-size", "0"], "batch_size is 0"),
    ],
)
def test_command_answers_mistakes_in_one_line(capsys, arguments, message):
    assert recording.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_command_without_arguments(capsys):
    with pytest.raises(SystemExit) as stopped:
        recording.main([])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: the following arguments are required: --target")
