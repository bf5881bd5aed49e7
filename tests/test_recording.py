# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Recordings: what is masked must be exactly what the target produced, and what is dropped must be counted."""

import json
import sys
import types

import pytest
import torch
from recording_helpers import (
    CHATML,
    PROMPTS,
    THINKING,
    Script,
    answers_of,
    encode,
    make_model,
    make_tokenizer,
    record,
    save_target,
)

from hf_carryover.training import recording
from hf_carryover.training.chat import RecordingError, derive_seed, iter_prompts
from hf_carryover.training.engines import llm_defaults
from hf_carryover.training.loading import load_recordings
from hf_carryover.training.recording import RecordingSettings, record_responses, record_with_vllm


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def tokenizer():
    return make_tokenizer()


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
    assert llm.kwargs == {"model": str(tmp_path / "target"), "max_model_len": 128, **llm_defaults()}
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


# Command line


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


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
    assert llm.kwargs == {"model": target, "dtype": "auto", "seed": 1, **llm_defaults()}
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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--self-promts", "3"], "error: unknown: --self-promts 3"),
        (["--self-prompts", "3", "--max-new-token", "4"], "error: unknown: --max-new-token 4"),
        (["--self-prompts", "3", "--dtype", "bf16"], "error: argument --dtype: invalid choice: 'bf16'"),
    ],
)
def test_command_names_a_misspelt_flag(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        recording.main(["--target", "x", "--output", "y", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith(message) and error.count("\n") == 1


def test_command_without_arguments(capsys):
    with pytest.raises(SystemExit) as stopped:
        recording.main([])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: the following arguments are required: --target")
