# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Reading recordings: every row is checked, unusable ones are dropped and counted, and splits go by the prompt.

A recordings dataset has the columns

- `id` (string): name of the prompt; splits are made by it;
- `input_ids` (list of int): the whole token sequence, prompt and responses;
- `response_mask` (list of int, same length): 1 exactly on the tokens that the target produced, in every assistant
  turn and with their end-of-turn token, 0 on tokens of the prompt and the template.
"""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, Sequence, Value, concatenate_datasets, load_from_disk
from transformers.utils import logging

from .chat import RecordingError, read_rows, stable_hash


logger = logging.get_logger(__name__)

FEATURES = Features(
    {"id": Value("string"), "input_ids": Sequence(Value("int32")), "response_mask": Sequence(Value("int8"))}
)
METADATA_FILE = "recording.json"
MIN_RESPONSE_TOKENS = 1


def load_recordings(
    source: Any,
    *,
    vocab_size: int | None = None,
    min_response_tokens: int = MIN_RESPONSE_TOKENS,
    max_repetition: float | None = None,
    return_counts: bool = False,
):
    """
    Reads recordings, checks every row, and drops rows without a usable response.

    Args:
        source (`str`, `os.PathLike`, `Dataset` or iterable of `dict`):
            A folder written by `record_responses` or `save_to_disk`, JSON Lines (also gzipped), a folder of them, a
            `Dataset`, or rows. Columns are `input_ids` and `response_mask`, or `prompt_ids` and `response_ids`.
        vocab_size (`int`, *optional*):
            Number of the target's tokens; ids outside are an error.
        min_response_tokens (`int`, *optional*, defaults to `1`):
            Rows with fewer response tokens are dropped.
        max_repetition (`float`, *optional*):
            Rows with an answer whose share of repeated 8-grams is larger are dropped. Not applied by default, since
            recordings made by this module are filtered already.
        return_counts (`bool`, *optional*, defaults to `False`):
            Return `(dataset, counts)`.

    Returns:
        `Dataset`: columns `id`, `input_ids`, `response_mask`; with `return_counts` also a `Counter` of `rows`, `kept`,
        `response_tokens`, and the dropped rows by reason.
    """
    dataset = _open(source)
    keep, counts = _check_rows(dataset, vocab_size, min_response_tokens, max_repetition)
    dropped = counts["rows"] - counts["kept"]
    if counts["rows"] and counts["empty_response"] == counts["rows"]:
        raise RecordingError(
            f"All {counts['rows']} recordings have an empty response mask, so nothing would be trained. The likely "
            "cause is a chat template without `{% generation %}` marks, for which "
            "`apply_chat_template(return_assistant_tokens_mask=True)` returns zeros. Make the recordings with "
            "`record_responses`, which marks what it generates, or give `prompt_ids` and `response_ids`."
        )
    if not counts["kept"]:
        raise RecordingError(
            f"No recording is left: {dict(counts)}. Loosen min_response_tokens={min_response_tokens} or "
            f"max_repetition={max_repetition}, or record more."
        )
    level = logger.warning if dropped else logger.info
    level(f"Recordings: {counts['kept']} kept, {dropped} dropped ({dict(counts)}).")
    dataset = dataset.select(keep) if dropped else dataset
    return (dataset, counts) if return_counts else dataset


def _open(source: Any) -> Dataset:
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if (path / METADATA_FILE).exists():
            return _open_folder(path)
        if (path / "state.json").exists():
            source = load_from_disk(str(path))
    if isinstance(source, Dataset) and {"input_ids", "response_mask"} <= set(source.column_names):
        if "id" not in source.column_names:
            names = [_prompt_name(row["input_ids"], row["response_mask"]) for row in source]
            source = source.add_column("id", names)
        elif source.features["id"].dtype != "string":
            source = source.cast_column("id", Value("string"))
        return source.select_columns(list(FEATURES))
    return _from_rows(read_rows(source))


def _open_folder(path: Path) -> Dataset:
    shards = shard_files(path)
    if not shards:
        raise RecordingError(f"Recording {str(path)!r} has no finished shard yet. Run the recording again to go on.")
    if not read_metadata(path).get("complete"):
        logger.warning(f"Recording {str(path)!r} is not complete; reading its first {len(shards)} shards.")
    return concatenate_datasets([Dataset.from_file(str(shard)) for shard in shards])


def shard_files(path: Path) -> list[Path]:
    """Finished shards of a recording, in order."""
    return sorted(path.glob("shard-*.arrow"))


def read_metadata(path: Path) -> dict:
    """How a recording was made, and whether it is complete."""
    return json.loads((path / METADATA_FILE).read_text(encoding="utf-8"))


def _from_rows(rows: Iterable[tuple[str, Any]]) -> Dataset:
    """Builds the dataset in memory, 1000 rows at a time so that Python's own integers do not pile up."""
    schema, tables = FEATURES.arrow_schema, []
    normalised = (_normalise(row, where) for where, row in rows)
    while chunk := list(itertools.islice(normalised, 1000)):
        columns = [pa.array([row[item.name] for row in chunk], item.type) for item in schema]
        tables.append(pa.table(columns, schema=schema))
    if not tables:
        raise RecordingError("The recordings have no rows; expected at least one. Check the path or the filter used.")
    return Dataset(pa.concat_tables(tables))


def _normalise(row: Any, where: str) -> dict:
    columns = sorted(row) if isinstance(row, dict) else type(row).__name__
    if isinstance(row, dict) and {"input_ids", "response_mask"} <= set(row):
        ids = _integers(row["input_ids"], "input_ids", where)
        mask = _integers(row["response_mask"], "response_mask", where)
    elif isinstance(row, dict) and {"prompt_ids", "response_ids"} <= set(row):
        prompt = _integers(row["prompt_ids"], "prompt_ids", where)
        response = _integers(row["response_ids"], "response_ids", where)
        if not len(prompt):
            raise RecordingError(
                f"{where}: `prompt_ids` is empty, expected at least one token before the response. Add the BOS token."
            )
        ids = np.concatenate([prompt, response])
        mask = np.repeat([0, 1], [len(prompt), len(response)])
    else:
        raise RecordingError(
            f"{where}: got {columns}, expected the columns `input_ids` and `response_mask`, or `prompt_ids` and "
            "`response_ids`. For prompts without responses call `record_responses`."
        )
    if len(ids) != len(mask):
        raise RecordingError(f"{where}: {_unequal(len(mask), len(ids))}")
    name = row.get("id")
    return {
        "id": _prompt_name(ids, mask) if name is None else str(name),
        "input_ids": ids.astype(np.int32),
        # Values other than 0 and 1 must reach the check, so they are clipped to what int8 holds, not wrapped.
        "response_mask": np.clip(mask, -1, 2).astype(np.int8),
    }


def _integers(values: Any, column: str, where: str) -> np.ndarray:
    try:
        array = np.asarray(values if len(values) else np.zeros(0, np.int64))
        if array.ndim == 1 and array.dtype.kind in "iub" and not (array.size and int(array.max()) > 2**31 - 1):
            return array.astype(np.int64)
    except (TypeError, ValueError):
        pass
    raise RecordingError(f"{where}: `{column}` is {str(values)[:60]}, expected a flat list of 32-bit integers.")


def _prompt_name(ids, mask) -> str:
    """A name for a nameless row: equal prompts get equal names, so a split keeps them on one side."""
    mask = np.asarray(mask)
    prompt = ids[: int(mask.argmax())] if mask.any() else ids
    return f"{stable_hash([int(token) for token in prompt]):016x}"


def _check_rows(dataset: Dataset, vocab_size, min_response_tokens, max_repetition) -> tuple[np.ndarray, Counter]:
    """Row numbers to keep, and counts; raises on the first row that is structurally wrong."""
    keep, counts = [], Counter(rows=len(dataset), kept=0, response_tokens=0)
    first = 0
    for batch in dataset.with_format("arrow").iter(batch_size=1000):
        ids, ends = _flat(batch, "input_ids", first)
        mask, mask_ends = _flat(batch, "response_mask", first)
        problem = _first_problem(ids, ends, mask, mask_ends, vocab_size)
        if problem is not None:
            row, text = problem
            raise RecordingError(f"row {first + row} (id {batch['id'][row].as_py()!r}): {text}")
        starts = np.concatenate([[0], ends[:-1]])
        for row, (start, end) in enumerate(zip(starts, ends)):
            tokens = int(mask[start:end].sum())
            answers = _answers(ids[start:end], mask[start:end]) if max_repetition is not None else []
            reason = drop_reason(tokens, answers, min_response_tokens, max_repetition)
            counts[reason or "kept"] += 1
            if reason is None:
                keep.append(first + row)
                counts["response_tokens"] += tokens
        first += len(ends)
    return np.array(keep, dtype=np.int64), counts


def _first_problem(ids, ends, mask, mask_ends, vocab_size: int | None) -> tuple[int, str] | None:
    """The first row of a batch that is structurally wrong, and what is wrong with it."""
    lengths, mask_lengths = np.diff(ends, prepend=0), np.diff(mask_ends, prepend=0)
    for row in np.flatnonzero(lengths != mask_lengths)[:1]:
        return int(row), _unequal(mask_lengths[row], lengths[row])
    for place in np.flatnonzero((mask != 0) & (mask != 1))[:1]:
        row = int(np.searchsorted(ends, place, side="right"))
        return row, f"`response_mask` holds {mask[place]}, expected 0 or 1. Write 1 for tokens of the response."
    for place in np.flatnonzero((ids < 0) | (ids >= (vocab_size or np.inf)))[:1]:
        row = int(np.searchsorted(ends, place, side="right"))
        expected = f"0 <= id < vocab_size={vocab_size}" if vocab_size else "id >= 0"
        return row, f"token id {ids[place]}, expected {expected}. Record with the tokenizer of this very target."
    return None


def _unequal(mask_length: int, length: int) -> str:
    return (
        f"`response_mask` has {mask_length} values for {length} `input_ids`, expected equal lengths. Truncate or pad "
        "both together."
    )


def _flat(batch: pa.Table, column: str, first: int) -> tuple[np.ndarray, np.ndarray]:
    """All values of a list column of integers, and the place where each row ends."""
    values = batch[column]
    if values.null_count:
        row = first + pc.index(pc.is_null(values), True).as_py()
        raise RecordingError(f"row {row}: `{column}` is null, expected a list of integers. Drop the row.")
    is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    kind = values.type.value_type if is_list else values.type
    if not is_list or not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise RecordingError(f"Column `{column}` has the type {values.type}, expected a list of integers.")
    ends, flat = np.cumsum(pc.list_value_length(values).to_numpy(), dtype=np.int64), pc.list_flatten(values)
    if flat.null_count:
        row = first + int(np.searchsorted(ends, pc.index(pc.is_null(flat), True).as_py(), side="right"))
        raise RecordingError(f"row {row}: `{column}` has a null among its values, expected integers. Drop the row.")
    return flat.to_numpy().astype(np.int64), ends


def _answers(ids: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """The runs of response tokens in one row."""
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    return [ids[start:end] for start, end in zip(edges[::2], edges[1::2])]


def repetition(ids: Iterable[int], n: int = 8) -> float:
    """Share of the `n`-grams of `ids` that occurred before in it; 0 for fewer than `n + 1` tokens."""
    ids = [int(token) for token in ids]
    grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def drop_reason(response_tokens: int, answers, min_response_tokens: int, max_repetition: float | None) -> str | None:
    """Why a recording is not used, or None."""
    if not response_tokens:
        return "empty_response"
    if response_tokens < min_response_tokens:
        return "too_short"
    if max_repetition is not None and any(repetition(answer) > max_repetition for answer in answers):
        return "too_repetitive"
    return None


def split_recordings(dataset: Dataset, held_out: float | int, seed: int = 0) -> tuple[Dataset, Dataset]:
    """
    Splits by a hash of `id`: the side of a row depends on its id and the seed only, so it stays when rows are added
    (for a share), and rows with the same id are never torn apart.

    Args:
        dataset (`Dataset`):
            Recordings.
        held_out (`float` or `int`):
            Share of the ids to hold out, between 0 and 1, or the least number of rows.
        seed (`int`, *optional*, defaults to `0`):
            Another seed gives another split.

    Returns:
        `tuple[Dataset, Dataset]`: the training part and the held-out part.
    """
    is_share = isinstance(held_out, float)
    if not (0 < held_out < 1 if is_share else 1 <= held_out < len(dataset)):
        raise RecordingError(
            f"held_out is {held_out!r}, expected a share between 0 and 1, or a number of rows from 1 to "
            f"{len(dataset) - 1} for {len(dataset)} recordings. Training without held-out recordings: `--held_out 0`."
        )
    hashes = np.array([stable_hash(seed, name) for name in dataset["id"]], dtype=np.uint64)
    chosen = hashes < np.uint64(held_out * 2**64) if is_share else hashes <= np.sort(hashes)[int(held_out) - 1]
    if chosen.all() or not chosen.any():
        raise RecordingError(
            f"held_out={held_out!r} leaves one side of {len(set(dataset['id']))} different ids empty. Give a number "
            "of rows, another share, or more recordings."
        )
    return dataset.select(np.flatnonzero(~chosen)), dataset.select(np.flatnonzero(chosen))
