"""Prompts in the formats of the field, as they are."""

import json

import pytest

from hf_carryover.evaluation import bench_command, prompts
from hf_carryover.evaluation.bench_command import BenchArguments, comparisons, gather_items
from hf_carryover.evaluation.prompts import Item, choose_evenly, load_items, read_prompts


TOOL = {"name": "f", "parameters": {"type": "dict", "properties": {}}}


def write(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def user(*texts):
    """Segments of user messages alone."""
    return [[{"role": "user", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        # Spec-Bench, question.jsonl: MT-Bench's categories are one set, others are their own.
        (
            {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": []},
            Item("mt_bench", "81", user("a", "b")),
        ),
        ({"question_id": 5, "category": "translation", "turns": ["a"]}, Item("translation", "5", user("a"))),
        # HumanEval as published.
        (
            {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "", "test": "", "entry_point": "f"},
            Item("file", "HumanEval/0", user("def f():")),
        ),
        ({"id": 7, "question": "a"}, Item("file", "7", user("a"))),
        # Chats, in both spellings; the answers in them are not asked, the system message is kept.
        (
            {
                "id": "c",
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": "b"},
                ],
            },
            Item("file", "c", [[{"role": "system", "content": "s"}, *user("a")[0]], *user("b")]),
        ),
        (
            {"id": 0, "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]},
            Item("file", "0", user("a")),
        ),
        (
            {"id": "t", "turns": ["a"], "tools": [TOOL]},
            Item(
                "file",
                "t",
                user("a"),
                [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
            ),
        ),
    ],
)
def test_formats(record, expected, tmp_path):
    assert read_prompts(write(tmp_path / "file.jsonl", record)) == [expected]


def test_unnamed_prompts_have_names_of_their_own(tmp_path):
    items = read_prompts(write(tmp_path / "file.jsonl", {"turns": ["a"]}, {"turns": ["b"]}))
    assert [item.segments for item in items] == [user("a"), user("b")]
    assert len({item.name for item in items}) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": ', r"f\.jsonl, line 2: not a JSON object"),
        ("[1]", r"f\.jsonl, line 1: got list, expected a JSON object"),
        ('{"text": "a"}', r"line 1: no prompt among the columns \['text'\]; expected one of \['messages', "),
        ('{"turns": []}', r"line 1: 'turns' is \[\], expected a non-empty list"),
        ('{"prompt": 3}', r"line 1: 'prompt' is 3, expected a non-empty list"),
        ('{"messages": [{"role": "system", "content": "s"}]}', r"line 1: 'messages' has no user turn to answer"),
        ('{"messages": ["a", {"role": "user", "content": "b"}]}', r"expected an object with role and content"),
        ("\n\n", r"f\.jsonl holds no prompts"),
    ],
)
def test_refusals(text, message, tmp_path):
    (tmp_path / "f.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / "f.jsonl")


def test_sets_are_chosen_evenly(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", *({"id": f"{name}{i}", "turns": [f"Say {i}."]} for i in range(4)))
    items = load_items([str(tmp_path)], 2)
    assert [(item.set, item.name) for item in items] == [("a", "a0"), ("a", "a2"), ("b", "b0"), ("b", "b2")]
    assert choose_evenly(range(80), 10) == list(range(0, 80, 8))
    assert choose_evenly(range(5), 3) == [0, 1, 3]
    assert choose_evenly(range(3), 10) == choose_evenly(range(3), None) == [0, 1, 2]


def test_the_same_set_twice_counts_once(tmp_path):
    rows = [{"question_id": i, "category": "stem", "turns": [f"Say {i}."]} for i in range(3)]
    write(tmp_path / "question.jsonl", *rows)
    write(tmp_path / "writing.jsonl", *rows)
    assert [(item.set, item.name) for item in load_items([str(tmp_path)])] == [("mt_bench", str(i)) for i in range(3)]
    write(tmp_path / "writing.jsonl", {**rows[0], "turns": ["Another one."]})
    with pytest.raises(ValueError, match=r"'mt_bench' has two different prompts of id '0'; one is in writing.jsonl"):
        load_items([str(tmp_path)])


def test_places(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"No \.jsonl file in"):
        load_items([str(tmp_path)])
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl does not exist. Name a JSONL file, a folder, or a data"):
        load_items([str(tmp_path / "none.jsonl")])
    write(tmp_path / "qa.jsonl", {"prompt": "a"})
    asked = []
    monkeypatch.setattr(prompts, "_download", lambda name: asked.append(name) or tmp_path)
    assert [item.set for item in load_items(["RedHatAI/speculator_benchmarks"])] == ["qa"]
    assert asked == ["RedHatAI/speculator_benchmarks"]


class TestArguments:
    def test_quick_changes_what_was_not_asked_for(self):
        quick = BenchArguments(quick=True)
        assert (quick.max_new_tokens, quick.num_prompts) == (48, 8)
        assert list(quick.drafter_folders) == ["control", "carryover"]
        assert BenchArguments(quick=True, max_new_tokens=10).max_new_tokens == 10
        assert BenchArguments(target="t").drafter_folders == {}
        assert BenchArguments(target="t", drafter=["a=b/c"]).drafter_folders == {"a": "b/c"}

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({}, "Name a --target and its --drafter, or ask for --quick"),
            ({"quick": True, "dtype": "int8"}, "--dtype must be one of float32, bfloat16, float16, got 'int8'"),
            ({"quick": True, "temperature": -1.0}, r"--temperature must be 0 \(greedy\) or positive, got -1.0"),
            ({"quick": True, "max_new_tokens": 0}, "--max_new_tokens must be at least 1, got 0"),
            ({"quick": True, "output": "a.txt"}, r"--output must end in \.json, got 'a.txt'"),
        ],
    )
    def test_refusals(self, values, message):
        with pytest.raises(ValueError, match=message):
            BenchArguments(**values)

    def test_the_command_names_the_mistake(self, tmp_path, capsys):
        missing = str(tmp_path / "none")
        for flags in (["--prompts", missing], ["--recordings", missing], ["--no_such_flag"]):
            code = None
            try:
                code = bench_command.main(["--target", "t", "--output", str(tmp_path / "r.json"), *flags])
            except SystemExit as exit:
                code = exit.code
            error = capsys.readouterr().err
            assert code == 2
            assert error.startswith("error:") and flags[-1] in error
            assert "Traceback" not in error

    def test_sets_take_turns_and_recordings_come_last(self, tmp_path):
        for name in ("a", "b"):
            count = 2 if name == "a" else 1
            write(tmp_path / f"{name}.jsonl", *({"id": f"{name}{i}", "turns": ["x"]} for i in range(count)))
        rows = [{"prompt_ids": [5, 6 + i], "response_ids": [7, 8, 9]} for i in range(6)]
        (tmp_path / "r").mkdir()
        recordings = write(tmp_path / "r" / "r.jsonl", *rows)
        args = BenchArguments(
            target="t",
            prompts=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")],
            recordings=str(recordings),
            held_out=3,
            num_held_out=2,
        )
        items = gather_items(args)
        assert [item.name for item in items[:3]] == ["a0", "b0", "a1"]
        assert [item.set for item in items[3:]] == ["held_out"] * 2
        assert all(item.prompt_ids[0] == 5 and len(item.prompt_ids) == 2 for item in items[3:])
        with pytest.raises(ValueError, match="There are no prompts"):
            gather_items(BenchArguments(target="t"))

    def test_comparisons(self):
        assert comparisons(None, ["carryover", "control"]) == [("carryover", "control")]
        assert comparisons(None, ["a"]) == []
        assert comparisons(["a-b"], ["a", "b"]) == [("a", "b")]
        assert comparisons(["x-1-y-2"], ["x-1", "y-2", "x"]) == [("x-1", "y-2")]
        with pytest.raises(ValueError, match="--compare takes A-B with two of a, got 'a-c'"):
            comparisons(["a-c"], ["a"])
