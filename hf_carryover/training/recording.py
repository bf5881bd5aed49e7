"""Recordings: the frozen target's own responses, which are all the supervision a drafter gets.

A recordings dataset has the columns

- `id` (string): name of the prompt; splits are made by it;
- `input_ids` (list of int): the whole token sequence, prompt and responses;
- `response_mask` (list of int, same length): 1 exactly on the tokens that the target produced, in every assistant
  turn and with their end-of-turn token, 0 on tokens of the prompt and the template.

`load_recordings` reads and checks them, `record_responses` and `record_with_vllm` make them. On the command line:

    python -m hf_carryover.training.recording --target DIR --prompts prompts.jsonl --output DIR
"""

import importlib.metadata
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, Sequence, Value, concatenate_datasets, load_from_disk
from tqdm.auto import tqdm
from transformers import GenerationConfig, HfArgumentParser
from transformers.utils import logging

from .chat import (
    ChatTemplate,
    Conversation,
    GenerateIds,
    RecordingError,
    TransformersGenerator,
    VLLMGenerator,
    derive_seed,
    import_vllm,
    iter_prompts,
    parse_prompt,
    read_rows,
    self_prompts,
    stable_hash,
    user_stop_token_ids,
)


__all__ = [
    "RecordingError",
    "RecordingSettings",
    "iter_prompts",
    "load_recordings",
    "record_responses",
    "record_with_engine",
    "record_with_vllm",
    "repetition",
    "self_prompts",
    "split_recordings",
]

logger = logging.get_logger(__name__)

FEATURES = Features(
    {"id": Value("string"), "input_ids": Sequence(Value("int32")), "response_mask": Sequence(Value("int8"))}
)
METADATA_FILE = "recording.json"
SELF_PROMPTS_FILE = "self_prompts.json"
# Key of an Arrow file's schema under which a shard keeps its counts, so that a shard and its counts appear together.
COUNTS_KEY = b"hf_carryover_counts"


@dataclass
class RecordingSettings:
    """How responses are generated and which of them are kept. Each field's `help` is its one description."""

    max_new_tokens: int = field(default=512, metadata={"help": "Most tokens of one answer."})
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens of a recording, by default the target's own limit. A prompt that leaves no room for "
            "an answer is dropped, a later turn that leaves none is not asked."
        },
    )
    do_sample: bool = field(default=False, metadata={"help": "Sample instead of taking the most likely token."})
    temperature: float = field(default=1.0, metadata={"help": "Temperature, if sampled."})
    top_p: float = field(default=1.0, metadata={"help": "Share of the probability mass to sample from, if sampled."})
    top_k: int = field(default=0, metadata={"help": "Sample among the most likely k tokens; 0 for all."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})
    batch_size: int = field(default=8, metadata={"help": "Prompts generated at a time by transformers."})
    shard_size: int = field(
        default=128, metadata={"help": "Prompts of one Arrow file; an interrupted run loses at most one file."}
    )
    min_response_tokens: int = field(
        default=1, metadata={"help": "Recordings with fewer response tokens, over all turns, are dropped."}
    )
    max_repetition: float | None = field(
        default=0.3,
        metadata={"help": "Recordings with an answer of a larger share of repeated 8-grams are dropped; 1 keeps all."},
    )
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Extra variables of the chat template; as JSON on the command line."}
    )

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size", "shard_size", "min_response_tokens"):
            if getattr(self, name) < 1:
                raise RecordingError(f"{name} is {getattr(self, name)}, expected at least 1. Raise it.")
        if self.max_length is not None and self.max_length <= self.max_new_tokens:
            raise RecordingError(
                f"max_length is {self.max_length} and leaves no room for a prompt beside max_new_tokens="
                f"{self.max_new_tokens}. Raise the one or lower the other."
            )
        if self.do_sample and not (self.temperature > 0 and 0 < self.top_p <= 1 and self.top_k >= 0):
            raise RecordingError(
                f"Sampling with temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k} is not "
                "possible: expected temperature > 0, 0 < top_p <= 1, top_k >= 0. For greedy answers use "
                "do_sample=False."
            )
        if self.max_repetition is not None and not 0 <= self.max_repetition <= 1:
            raise RecordingError(f"max_repetition is {self.max_repetition}, expected a share from 0 to 1, or None.")
        if isinstance(self.chat_template_kwargs, str):
            try:
                self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
            except json.JSONDecodeError as error:
                raise RecordingError(
                    f"chat_template_kwargs {self.chat_template_kwargs!r} is not JSON ({error}). Expected an object."
                ) from None

    @property
    def template_variables(self) -> dict | None:
        # `__post_init__` has read a string.
        return self.chat_template_kwargs if isinstance(self.chat_template_kwargs, dict) else None

    def sampling(self) -> dict:
        """The part that both engines take."""
        return {name: getattr(self, name) for name in ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k")}


# --------------------------------------------------------------------------------------------------------------------
# Loading


def load_recordings(
    source: Any,
    *,
    vocab_size: int | None = None,
    min_response_tokens: int = RecordingSettings.min_response_tokens,
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
    shards = _shards(path)
    if not shards:
        raise RecordingError(f"Recording {str(path)!r} has no finished shard yet. Run the recording again to go on.")
    if not _read_metadata(path).get("complete"):
        logger.warning(f"Recording {str(path)!r} is not complete; reading its first {len(shards)} shards.")
    return concatenate_datasets([Dataset.from_file(str(shard)) for shard in shards])


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
            f"{len(dataset) - 1} for {len(dataset)} recordings."
        )
    hashes = np.array([stable_hash(seed, name) for name in dataset["id"]], dtype=np.uint64)
    chosen = hashes < np.uint64(held_out * 2**64) if is_share else hashes <= np.sort(hashes)[int(held_out) - 1]
    if chosen.all() or not chosen.any():
        raise RecordingError(
            f"held_out={held_out!r} leaves one side of {len(set(dataset['id']))} different ids empty. Give a number "
            "of rows, another share, or more recordings."
        )
    return dataset.select(np.flatnonzero(~chosen)), dataset.select(np.flatnonzero(chosen))


# --------------------------------------------------------------------------------------------------------------------
# Recording


def record_responses(model, tokenizer, prompts: Any, output_dir: str | os.PathLike, **settings) -> Dataset:
    """
    Records a transformers model's responses. A call that was interrupted is resumed by calling it again: finished
    shards are kept, and the result equals that of an uninterrupted run.

    Args:
        model (`PreTrainedModel`):
            The frozen target.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer, with a chat template.
        prompts (`str`, `os.PathLike` or iterable):
            Prompts in any form of `iter_prompts`.
        output_dir (`str` or `os.PathLike`):
            Folder for the Arrow shards and `recording.json`, which names the target, settings, versions and counts.
        settings:
            Fields of `RecordingSettings`.

    Returns:
        `Dataset`: the recordings, as `load_recordings(output_dir)` reads them.
    """
    settings = RecordingSettings(**settings)
    stops = ChatTemplate(tokenizer, settings.template_variables).stop_token_ids(model.generation_config)
    return record_with_engine(
        TransformersGenerator(model, stop_token_ids=stops, batch_size=settings.batch_size, **settings.sampling()),
        tokenizer,
        prompts,
        output_dir,
        settings=settings,
        stop_token_ids=stops,
        context_length=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        description={"engine": "transformers", "target": _target_name(model.name_or_path), "dtype": str(model.dtype)},
    )


def record_with_vllm(
    target: Any, tokenizer, prompts: Any, output_dir: str | os.PathLike, *, llm_kwargs: dict | None = None, **settings
) -> Dataset:
    """
    The same as `record_responses`, generated by vLLM.

    Args:
        target (`str` or `vllm.LLM`):
            Name or folder of the target, or an engine that runs already.
        tokenizer (`PreTrainedTokenizerBase`), prompts, output_dir, settings:
            As in `record_responses`; `batch_size` has no effect.
        llm_kwargs (`dict`, *optional*):
            Arguments of `vllm.LLM`, such as `{"max_model_len": 4096}`.
    """
    settings = RecordingSettings(**settings)
    vllm = import_vllm()
    llm = vllm.LLM(model=str(target), **(llm_kwargs or {})) if isinstance(target, (str, os.PathLike)) else target
    model_config = llm.llm_engine.model_config
    stops = ChatTemplate(tokenizer, settings.template_variables).stop_token_ids(_generation_config(model_config.model))
    return record_with_engine(
        VLLMGenerator(llm, stop_token_ids=stops, **settings.sampling()),
        tokenizer,
        prompts,
        output_dir,
        settings=settings,
        stop_token_ids=stops,
        context_length=model_config.max_model_len,
        description={
            "engine": "vllm",
            "target": _target_name(model_config.model),
            "dtype": str(model_config.dtype),
        },
    )


def _generation_config(target: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(target)
    except OSError:  # a target need not have one
        return None


def _target_name(name: str) -> str:
    """Hub name, or a local folder's own name: where it lies on the machine is no part of a recording."""
    return Path(name).resolve().name if os.path.isdir(name) else str(name)


def record_with_engine(
    generate_ids: GenerateIds,
    tokenizer,
    prompts: Any,
    output_dir: str | os.PathLike,
    *,
    settings: RecordingSettings,
    stop_token_ids: list[int],
    context_length: int | None = None,
    description: dict | None = None,
) -> Dataset:
    """
    Records the responses of any engine.

    Args:
        generate_ids (`Callable[[list[list[int]], list[int]], list[list[int]]]`):
            Answers prompts given as token ids, with one seed each; answers may run on after a stop token.
        tokenizer, prompts, output_dir:
            As in `record_responses`.
        settings (`RecordingSettings`):
            What the engine generates with, and the filters.
        stop_token_ids (`list[int]`):
            Tokens that end an answer.
        context_length (`int`, *optional*):
            The target's own limit, used if the settings have no `max_length`.
        description (`dict`, *optional*):
            What else identifies the run, such as `target` and `engine`; a resumed run must have the same.
    """
    output_dir = Path(output_dir)
    template = ChatTemplate(tokenizer, settings.template_variables)
    prompts = list(iter_prompts(prompts, tokenizer, chat_template_kwargs=settings.template_variables))
    if not prompts:
        raise RecordingError("There are no prompts to answer, expected at least one. Check the file and the filters.")
    max_length = settings.max_length or context_length
    limit = None if max_length is None else max_length - settings.max_new_tokens
    if limit is not None and limit < 1:
        raise RecordingError(
            f"max_new_tokens={settings.max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{max_length} tokens. Lower max_new_tokens."
        )
    metadata = {
        **(description or {}),
        "settings": {**asdict(settings), "max_length": max_length},
        "stop_token_ids": list(stop_token_ids),
        "prompts": {"number": len(prompts), "fingerprint": f"{stable_hash(*map(_fingerprint, prompts)):016x}"},
    }
    _start_or_resume(output_dir, metadata)
    with tqdm(total=len(prompts), desc="prompts") as progress:
        for start in range(0, len(prompts), settings.shard_size):
            shard = output_dir / f"shard-{start // settings.shard_size:05d}.arrow"
            part = prompts[start : start + settings.shard_size]
            if not shard.exists():
                # What an answer depends on is its own prompt and shard, so it does not matter which shards are there.
                talks = [Conversation(prompt, template, stop_token_ids, limit) for prompt in part]
                _answer_all(talks, generate_ids, settings.seed, start)
                _write_shard(shard, *_collect(talks, settings))
            progress.update(len(part))
    return _finish(output_dir)


def _fingerprint(prompt) -> tuple:
    return prompt.id, prompt.prompt_ids.tolist(), prompt.segments[1:], prompt.tools


def _answer_all(talks: list[Conversation], generate_ids: GenerateIds, seed: int, first: int) -> None:
    """Asks turn by turn, all conversations of a shard at once."""
    turn = 0
    while waiting := [number for number, talk in enumerate(talks) if talk.open]:
        seeds = [derive_seed(seed, "answer", first + number, turn) for number in waiting]
        answers = generate_ids([list(talks[number].tokens) for number in waiting], seeds)
        if len(answers) != len(waiting):
            raise RecordingError(f"The engine gave {len(answers)} answers to {len(waiting)} prompts.")
        for number, ids in zip(waiting, answers):
            talks[number].add_answer(list(ids))
        turn += 1


def _collect(talks: list[Conversation], settings: RecordingSettings) -> tuple[list[dict], Counter]:
    rows, counts = [], Counter(prompts=len(talks), kept=0, response_tokens=0)
    for talk in talks:
        reason = "prompt_too_long" if talk.too_long else None
        reason = reason or drop_reason(
            sum(talk.mask), talk.answers, settings.min_response_tokens, settings.max_repetition
        )
        counts[reason or "kept"] += 1
        if reason is None:
            counts["response_tokens"] += sum(talk.mask)
            counts["turns_not_answered"] += len(talk.prompt.segments) - len(talk.answers)
            rows.append({"id": talk.prompt.id, "input_ids": talk.tokens, "response_mask": talk.mask})
    return rows, counts


def _write_shard(path: Path, rows: list[dict], counts: Counter) -> None:
    columns = {name: [row[name] for row in rows] for name in FEATURES}
    schema = FEATURES.arrow_schema
    schema = schema.with_metadata({**schema.metadata, COUNTS_KEY: json.dumps(counts).encode()})
    unfinished = path.with_suffix(".tmp")
    with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    os.replace(unfinished, path)  # a shard is there as a whole or not at all


def _shards(path: Path) -> list[Path]:
    return sorted(path.glob("shard-*.arrow"))


def _read_metadata(path: Path) -> dict:
    return json.loads((path / METADATA_FILE).read_text(encoding="utf-8"))


def _write_json(path: Path, content: dict) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _start_or_resume(path: Path, metadata: dict) -> None:
    """Writes the metadata of a new run, or refuses to mix two different runs in one folder."""
    metadata = json.loads(json.dumps(metadata))
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "datasets")}
    if not (path / METADATA_FILE).exists():
        foreign = sorted(entry.name for entry in path.glob("*") if entry.name != SELF_PROMPTS_FILE)
        if foreign:
            raise RecordingError(
                f"Folder {str(path)!r} is not a recording and not empty (it holds {foreign[0]!r}). Choose another one."
            )
        path.mkdir(parents=True, exist_ok=True)
        _write_json(path / METADATA_FILE, {**metadata, "versions": versions, "complete": False})
        return
    before = _read_metadata(path)
    _refuse_changes(str(path), {k: v for k, v in before.items() if k in metadata}, metadata)
    if before["versions"] != versions:
        logger.warning(f"The recording was started with {before['versions']} and goes on with {versions}.")


def _refuse_changes(path: str, before: dict, now: dict, prefix: str = "") -> None:
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            _refuse_changes(path, old, new, f"{prefix}{name}.")
        elif old != new:
            raise RecordingError(
                f"Cannot resume the recording {path!r}: {prefix}{name} was {old!r} and now is {new!r}. Use the old "
                "value, or another output folder."
            )


def _finish(path: Path) -> Dataset:
    counts = Counter()
    for shard in _shards(path):
        with pa.OSFile(str(shard), "rb") as file:
            counts.update(json.loads(pa.ipc.open_stream(file).schema.metadata[COUNTS_KEY]))
    _write_json(path / METADATA_FILE, {**_read_metadata(path), "complete": True, "counts": counts})
    logger.info(f"Recorded {dict(counts)} in {str(path)!r}.")
    if not counts["kept"]:
        raise RecordingError(f"No response is usable: {dict(counts)}. Check the target and the filters.")
    return load_recordings(path)


# --------------------------------------------------------------------------------------------------------------------
# Command line


@dataclass(kw_only=True)
class RecordingArguments(RecordingSettings):
    """Record a target's responses, to prompts from files or to prompts that the target writes itself."""

    target: str = field(metadata={"help": "Name or folder of the target model."})
    output: str = field(metadata={"help": "Folder for the recordings; an interrupted run is resumed."})
    prompts: list[str] | None = field(default=None, metadata={"help": "Prompt files or folders."})
    limit: int | None = field(default=None, metadata={"help": "Use only the first so many prompts."})
    self_prompts: int | None = field(default=None, metadata={"help": "Let the target write so many prompts."})
    self_prompt_temperature: float = field(default=1.0, metadata={"help": "Temperature of the prompts it writes."})
    self_prompt_top_p: float = field(default=0.95, metadata={"help": "Nucleus sampling of the prompts it writes."})
    self_prompt_max_tokens: int = field(default=256, metadata={"help": "Most tokens of a prompt it writes."})
    openings: str | None = field(default=None, metadata={"help": "Text file with a prompt's beginning on each line."})
    engine: str = field(
        default="transformers", metadata={"help": "What generates.", "choices": ["transformers", "vllm"]}
    )
    dtype: str = field(default="auto", metadata={"help": "Data type of the target's weights."})
    device: str | None = field(default=None, metadata={"help": "Device for transformers; a GPU if there is one."})
    llm_kwargs: str | None = field(default=None, metadata={"help": "Arguments of vllm.LLM, as JSON."})

    def __post_init__(self):
        super().__post_init__()
        if bool(self.prompts) == bool(self.self_prompts):
            raise RecordingError(
                f"Got --prompts {self.prompts} and --self-prompts {self.self_prompts}, expected exactly one of them."
            )

    def settings(self) -> dict:
        return {item.name: getattr(self, item.name) for item in fields(RecordingSettings)}


def run(args: RecordingArguments) -> Dataset:
    """What the command does once its arguments are read."""
    from transformers import AutoTokenizer

    if args.self_prompts:
        prompts = None
    else:  # mistakes in files show before the model is loaded
        rows = itertools.chain.from_iterable(map(read_rows, args.prompts))
        prompts = [parse_prompt(row, where) for where, row in itertools.islice(rows, args.limit)]
    openings = _openings(args.openings)
    tokenizer = _load(AutoTokenizer.from_pretrained, args.target)
    target = _load_target(args)
    if prompts is None:
        prompts = _written_prompts(args, target, tokenizer, openings)[: args.limit]
    record = record_with_vllm if args.engine == "vllm" else record_responses
    return record(target, tokenizer, prompts, args.output, **args.settings())


def _load(load, *args, **kwargs):
    try:
        return load(*args, **kwargs)
    except (OSError, ValueError) as error:
        raise RecordingError(f"Cannot load the target {args[0]!r}: {error}") from error


def _load_target(args: RecordingArguments):
    if args.engine == "vllm":
        return import_vllm().LLM(model=args.target, dtype=args.dtype, **json.loads(args.llm_kwargs or "{}"))
    from transformers import AutoModelForCausalLM

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _load(AutoModelForCausalLM.from_pretrained, args.target, dtype=args.dtype).to(device)


def _openings(path: str | None) -> list[str] | None:
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RecordingError(f"Cannot read the openings {path!r}: {error.strerror}. Expected a text file.") from error
    return [line for line in lines if line.strip()]


def _written_prompts(args: RecordingArguments, target, tokenizer, openings: list[str] | None) -> list[dict]:
    """The target's own prompts, written once and kept beside the recordings so that a resumed run has the same."""
    path = Path(args.output) / SELF_PROMPTS_FILE
    sampling = {"temperature": args.self_prompt_temperature, "top_p": args.self_prompt_top_p}
    limits = {"max_prompt_tokens": args.self_prompt_max_tokens, "batch_size": args.batch_size}
    how: dict[str, Any] = {"n": args.self_prompts, "seed": args.seed, "openings": openings, **sampling, **limits}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        _refuse_changes(args.output, before["settings"], how)
        return before["prompts"]
    if args.engine == "vllm":
        template = ChatTemplate(tokenizer, args.template_variables)
        stops = user_stop_token_ids(template, _generation_config(args.target))
        most = args.self_prompt_max_tokens
        target = VLLMGenerator(target, stop_token_ids=stops, max_new_tokens=most, do_sample=True, top_k=0, **sampling)
    prompts, counts = self_prompts(target, tokenizer, chat_template_kwargs=args.template_variables, **how)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_json(path, {"settings": how, "counts": counts, "prompts": prompts})
    return prompts


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""
    parser = HfArgumentParser(RecordingArguments, description=RecordingArguments.__doc__)
    # One line instead of the usage text: it has some forty flags, and --help prints them.
    parser.error = lambda message: parser.exit(2, f"error: {message} (--help lists the flags)\n")
    try:
        (args,) = parser.parse_args_into_dataclasses(argv)
        dataset = run(args)
    except (RecordingError, ImportError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(f"{len(dataset)} recordings in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
