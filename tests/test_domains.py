# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Prompts steered by domain, and prompts kept apart from what a drafter is measured on."""

import ast
import json
from collections import Counter

import pytest
from recording_helpers import PROMPTS, Script, encode, make_tokenizer, save_target

from hf_carryover.training import domains, recording
from hf_carryover.training.chat import RecordingError
from hf_carryover.training.overlap import OverlapFilter, ngrams
from hf_carryover.training.self_prompting import WantedTurns, self_prompts, write_turns


def test_openings_are_filled_and_decided_by_the_seed():
    for domain in domains.DOMAINS:
        openings = domains.domain_openings(domain, 60, seed=1)
        assert len(openings) == 60
        assert not any("{" in opening or "}" in opening for opening in openings)
        assert openings == domains.domain_openings(domain, 60, seed=1)
        if "{" in "".join(domains.PASSAGES if domain == "rag" else domains.OPENINGS[domain]):
            assert openings != domains.domain_openings(domain, 60, seed=2)


def test_questions_end_behind_their_passage():
    passages = ["one", "two", "three"]
    for passage, opening in zip(passages, domains.question_openings(passages, seed=0)):
        lines = opening.split("\n")
        assert lines[-2] == passage and lines[-1] in domains.QUESTION_WORDS
        assert set(lines[:-1]) <= set(passages)


def write(kinds):
    return [
        [f"{opening} [{kind.seed}] [{kind.keep_unfinished}]" for opening in kind.openings[: kind.number]]
        for kind in kinds
    ]


def test_domains_have_equal_shares_all_along():
    rows = domains.steered_prompts(write, 83, seed=3)
    assert len(rows) == 83 == len({row["id"] for row in rows})
    for part in (rows, rows[:40], rows[-40:]):
        shares = Counter(row["id"].rpartition("-")[0] for row in part)
        assert set(shares) == set(domains.DOMAINS)
        assert max(shares.values()) - min(shares.values()) <= 2
    assert rows == domains.steered_prompts(write, 83, seed=3)
    turns = [len(row["turns"]) for row in rows if row["id"].startswith("chat")]
    assert turns == [2 if number % 3 == 0 else 1 for number in range(len(turns))]


def test_passages_alone_may_be_cut():
    rows = domains.steered_prompts(write, 16, seed=0)
    for row in rows:
        domain = row["id"].rpartition("-")[0]
        expected = {"summarization": ["True"], "rag": ["True", "False"]}.get(domain, ["False"])
        found = [word for word in ("True", "False") if f"[{word}]" in row["turns"][0]]
        assert found == expected or row["turns"][0].endswith("```")  # of the library: nothing was written


def test_function_calls_have_a_function():
    for row in domains.steered_prompts(write, 16, seed=0):
        assert ("tools" in row) == row["id"].startswith("tool_call")
    assert domains.function_for("Find the area of a triangle with base 10. Please.") == {
        "name": "find_area_triangle",
        "description": "Find the area of a triangle with base 10.",
        "parameters": {
            "type": "object",
            "properties": {"base": {"type": "integer", "description": "The base of the triangle."},
                           "please": {"type": "string", "description": "The please of the triangle."}},
            "required": ["base"],
        },
    }  # fmt: skip
    assert domains.function_for("?")["name"] == "answer"


def test_chosen_domains_alone():
    rows = domains.steered_prompts(write, 5, ["math", "qa"], seed=0)
    assert [row["id"] for row in rows] == ["math-0", "qa-0", "math-1", "math-2", "qa-1"]
    with pytest.raises(RecordingError, match="Unknown domain 'maths', expected some of code, tool_call"):
        domains.steered_prompts(write, 5, ["maths"])


def test_functions_of_the_library(tmp_path):
    (tmp_path / "good.py").write_text(
        'def double(x, by=2):\n    """Return x times two, or whatever you say."""\n    return x * by\n\n\n'
        'def _private(x):\n    """Return x, which nobody should ever have to see."""\n\n\n'
        'def short(x):\n    """Return x."""\n\n\n'
        'def nothing():\n    """Return nothing at all, at some length."""\n\n\ndef bare(x):\n    return x\n'
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    (turn,) = domains.stdlib_functions(5, folder=tmp_path)
    assert 'def double(x, by=2):\n    """Return x times two, or whatever you say.\n    """\n```' in turn
    code = turn.partition("```python\n")[2].removesuffix("\n```")
    assert ast.get_docstring(ast.parse(code).body[0]).strip() == "Return x times two, or whatever you say."


def test_this_interpreters_library():
    turns = domains.stdlib_functions(40, seed=1)
    assert len(set(turns)) == 40 and turns == domains.stdlib_functions(40, seed=1)
    for turn in turns:
        ast.parse(turn.partition("```python\n")[2].removesuffix("\n```"))


def test_unfinished_turns_are_kept_on_request():
    engine = Script(["no end", "with end<|im_end|>", "odd<|im_start|>"])
    prompts, counts = self_prompts(engine, make_tokenizer(), 2, keep_unfinished=True, openings=["a: "])
    assert [prompt["messages"][0]["content"] for prompt in prompts] == ["a: no end", "a: with end"]
    assert counts["kept"] == 2


def test_kinds_are_written_together_and_do_not_depend_on_each_other():
    answers = {"a: ": ["one<|im_end|>", "endless", "three<|im_end|>"], "b: ": ["long enough<|im_end|>"]}

    class Engine:
        calls = 0

        def __call__(self, prompts, seeds):
            self.calls += 1
            texts = [make_tokenizer().decode(ids).removeprefix("<|im_start|>user\n") for ids in prompts]
            assert len(set(seeds)) == len(seeds)
            return [encode(answers[text].pop(0)) for text in texts]

    engine = Engine()
    kinds = [WantedTurns(2, ["a: "], seed=1), WantedTurns(1, ["b: "], seed=2)]
    written, counts = write_turns(engine, make_tokenizer(), kinds, min_prompt_tokens=1)
    assert written == [{0: "a: one", 2: "a: three"}, {0: "b: long enough"}]
    assert engine.calls == 2, "one for all, one for what is missing"
    assert counts == {"kept": 3, "unfinished": 1, "drawn": 4}


# Overlap


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("One, two THREE.", 2, {("one", "two"), ("two", "three")}),
        ("one two", 3, {("one", "two")}),
        ("one two three", 3, {("one", "two", "three")}),
        ("?!", 3, set()),
    ],
)
def test_ngrams(text, n, expected):
    assert ngrams(text, n) == expected


def test_filter_finds_shared_runs():
    held_out = OverlapFilter(["What is the area of a triangle with a base of ten?", "Who sang it?"], n=4)
    assert held_out.shared("tell me the AREA of a square") == {("the", "area", "of", "a")}
    assert held_out.shared("who sang it") and not held_out.shared("who sang it first and why")
    assert not held_out.shared("the area of the triangle")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


def test_command_drops_what_overlaps(tmp_path, target, capsys):
    held_out = [{"turns": [PROMPTS[0]["turns"][0]]}, {"turns": ["something else"]}]
    for name, rows in (("held_out.jsonl", held_out), ("prompts.jsonl", PROMPTS)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--target", target, "--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out")]
    arguments += ["--exclude", str(tmp_path / "held_out.jsonl"), "--max-new-tokens", "8", "--max-repetition", "1"]
    assert recording.main(arguments) == 0
    same = sum(PROMPTS[0]["turns"][0] in prompt["turns"] for prompt in PROMPTS)
    assert json.loads((tmp_path / "out" / "recording.json").read_text())["overlap"] == {
        "words": 8,
        "dropped": same,
        "of": len(PROMPTS),
    }
    assert f"{len(PROMPTS) - same} recordings" in capsys.readouterr().out


def test_command_steers_and_another_recording_reuses_the_prompts(tmp_path, target, capsys, monkeypatch):
    def written_by_target(model, tokenizer, kinds, **kwargs):
        texts = [dict(enumerate(text + " so" for text in kind.openings[: kind.number])) for kind in kinds]
        return texts, Counter()

    monkeypatch.setattr(recording, "write_turns", written_by_target)
    first = tmp_path / "greedy"
    arguments = ["--target", target, "--max-new-tokens", "8", "--max-repetition", "1", "--device", "cpu"]
    steered = ["--self-prompts", "4", "--domains", "qa", "math", "--self-prompt-max-tokens", "60"]
    assert recording.main([*arguments, *steered, "--output", str(first)]) == 0
    written = json.loads((first / "self_prompts.json").read_text())
    assert written["settings"]["domains"] == ["qa", "math"]
    kept = {row["id"] for row in written["prompts"]}
    again = ["--prompts", str(first / "self_prompts.json"), "--output", str(tmp_path / "sampled"), "--do-sample"]
    assert recording.main([*arguments, *again]) == 0
    assert {row["id"] for row in recording.load_recordings(tmp_path / "sampled")} <= kept
    capsys.readouterr()
    assert recording.main([*arguments, "--self-prompts", "4", "--domains", "all", "--output", str(first)]) == 2
    assert "domains" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "prompts.json: not JSON"), ('{"prompts": 3}', "expected a list of rows"), ("3", "expected a list of rows")],
)
def test_prompt_files_that_are_none(tmp_path, target, capsys, content, message):
    (tmp_path / "prompts.json").write_text(content)
    arguments = ["--target", target, "--prompts", str(tmp_path / "prompts.json"), "--output", str(tmp_path / "out")]
    assert recording.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_domains_with_openings_are_refused(capsys):
    arguments = ["--target", "x", "--output", "y", "--self-prompts", "1", "--domains", "all", "--openings", "z"]
    assert recording.main(arguments) == 2
    assert "Leave out --prompts and --openings" in capsys.readouterr().err
