# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Loading recordings: what is structurally wrong is an error that names the row, what is unusable is counted."""

import gzip
import json

import pytest
from datasets import Dataset

from hf_carryover.training.chat import RecordingError
from hf_carryover.training.loading import load_recordings, repetition, split_recordings


ROW = {"id": "x", "input_ids": [5, 6, 7, 8], "response_mask": [0, 0, 1, 1]}
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
