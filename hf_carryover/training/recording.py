# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Recordings: the frozen target's own responses, which are all the supervision a drafter gets.

`record_responses` and `record_with_vllm` make them; `loading.py` reads and checks them, and says what columns they
have. On the command line:

    python -m hf_carryover.training.recording --target DIR --prompts prompts.jsonl --output DIR
"""

import importlib.metadata
import itertools
import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import GenerationConfig, HfArgumentParser
from transformers.utils import logging

from .chat import (
    ChatPrompt,
    ChatTemplate,
    Conversation,
    RecordingError,
    derive_seed,
    iter_prompts,
    parse_prompt,
    read_rows,
    stable_hash,
)
from .domains import DOMAINS, check_domains, steered_prompts
from .engines import GenerateIds, TransformersGenerator, VLLMGenerator, import_vllm, llm_defaults
from .loading import (
    FEATURES,
    METADATA_FILE,
    MIN_RESPONSE_TOKENS,
    drop_reason,
    load_recordings,
    read_metadata,
    repetition,
    shard_files,
    split_recordings,
)
from .overlap import NGRAM, OverlapFilter
from .self_prompting import WantedTurns, self_prompts, user_stop_token_ids, write_turns


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
        default=MIN_RESPONSE_TOKENS,
        metadata={"help": "Recordings with fewer response tokens, over all turns, are dropped."},
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
# Recording


def record_responses(
    model, tokenizer, prompts: Any, output_dir: str | os.PathLike, *, notes: dict | None = None, **settings
) -> Dataset:
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
        notes (`dict`, *optional*):
            More for `recording.json`, such as how the prompts were chosen; a resumed run must have the same.
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
        description={
            "engine": "transformers",
            "target": _target_name(model.name_or_path),
            "dtype": str(model.dtype),
            **(notes or {}),
        },
    )


def record_with_vllm(
    target: Any,
    tokenizer,
    prompts: Any,
    output_dir: str | os.PathLike,
    *,
    llm_kwargs: dict | None = None,
    notes: dict | None = None,
    **settings,
) -> Dataset:
    """
    The same as `record_responses`, generated by vLLM.

    Args:
        target (`str` or `vllm.LLM`):
            Name or folder of the target, or an engine that runs already.
        tokenizer (`PreTrainedTokenizerBase`), prompts, output_dir, notes, settings:
            As in `record_responses`; `batch_size` has no effect.
        llm_kwargs (`dict`, *optional*):
            Arguments of `vllm.LLM`, such as `{"max_model_len": 4096}`.
    """
    settings = RecordingSettings(**settings)
    vllm = import_vllm()
    llm = target
    if isinstance(target, (str, os.PathLike)):
        llm = vllm.LLM(model=str(target), **{**llm_defaults(), **(llm_kwargs or {})})
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
            **(notes or {}),
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
    before = read_metadata(path)
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
    for shard in shard_files(path):
        with pa.OSFile(str(shard), "rb") as file:
            counts.update(json.loads(pa.ipc.open_stream(file).schema.metadata[COUNTS_KEY]))
    _write_json(path / METADATA_FILE, {**read_metadata(path), "complete": True, "counts": counts})
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
    domains: list[str] | None = field(
        default=None, metadata={"help": f"Steer the prompts it writes: `all`, or some of {', '.join(DOMAINS)}."}
    )
    exclude: list[str] | None = field(
        default=None,
        metadata={"help": f"Prompt files or folders to keep apart: prompts that share {NGRAM} words in a row go."},
    )
    engine: str = field(
        default="transformers", metadata={"help": "What generates.", "choices": ["transformers", "vllm"]}
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Data type of the target's weights.",
            "choices": ["auto", "float32", "bfloat16", "float16"],
        },
    )
    device: str | None = field(default=None, metadata={"help": "Device for transformers; a GPU if there is one."})
    llm_kwargs: str | None = field(default=None, metadata={"help": "Arguments of vllm.LLM, as JSON."})

    def __post_init__(self):
        super().__post_init__()
        if bool(self.prompts) == bool(self.self_prompts):
            raise RecordingError(
                f"Got --prompts {self.prompts} and --self-prompts {self.self_prompts}, expected exactly one of them."
            )
        if self.domains == ["all"]:
            self.domains = list(DOMAINS)
        if self.domains:
            check_domains(self.domains)
            if self.prompts or self.openings:
                raise RecordingError(
                    f"--domains {' '.join(self.domains)} says how prompts begin that the target writes. Leave out "
                    "--prompts and --openings, or --domains."
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
        rows = _written_prompts(args, target, tokenizer, openings)[: args.limit]
        prompts = [parse_prompt(row, f"self-prompt {number}") for number, row in enumerate(rows)]
    notes = None
    if args.exclude:
        prompts, overlap = _without_overlap(prompts, args.exclude)
        notes = {"overlap": overlap}
    record = record_with_vllm if args.engine == "vllm" else record_responses
    return record(target, tokenizer, prompts, args.output, notes=notes, **args.settings())


def _load(load, *args, **kwargs):
    try:
        return load(*args, **kwargs)
    except (OSError, ValueError) as error:
        raise RecordingError(f"Cannot load the target {args[0]!r}: {error}") from error


def _load_target(args: RecordingArguments):
    if args.engine == "vllm":
        kwargs = {**llm_defaults(), **json.loads(args.llm_kwargs or "{}")}
        return import_vllm().LLM(model=args.target, dtype=args.dtype, **kwargs)
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
    if args.domains:
        how["domains"] = args.domains
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        _refuse_changes(args.output, before["settings"], how)
        return before["prompts"]
    if args.engine == "vllm":
        template = ChatTemplate(tokenizer, args.template_variables)
        stops = user_stop_token_ids(template, _generation_config(args.target))
        most = args.self_prompt_max_tokens
        target = VLLMGenerator(target, stop_token_ids=stops, max_new_tokens=most, do_sample=True, top_k=0, **sampling)
    common: dict[str, Any] = {"chat_template_kwargs": args.template_variables, **sampling, **limits}
    if args.domains:
        prompts, counts = _steered_prompts(args, target, tokenizer, common)
    else:
        prompts, counts = self_prompts(
            target, tokenizer, args.self_prompts, seed=args.seed, openings=openings, **common
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_json(path, {"settings": how, "counts": counts, "prompts": prompts})
    return prompts


def _steered_prompts(args: RecordingArguments, target, tokenizer, common: dict) -> tuple[list[dict], Counter]:
    counts: Counter = Counter()

    def write(kinds: list[WantedTurns]) -> list[list[str]]:
        written, own = write_turns(target, tokenizer, kinds, **common)
        counts.update(own)
        return [list(texts.values()) for texts in written]

    return steered_prompts(write, args.self_prompts or 0, args.domains or DOMAINS, args.seed), counts


def _without_overlap(prompts: list[ChatPrompt], held_out: list[str]) -> tuple[list[ChatPrompt], dict]:
    """Drops prompts that share a run of words with held-out ones, and says how many."""
    rows = itertools.chain.from_iterable(map(read_rows, held_out))
    known = OverlapFilter(text for where, row in rows for text in _user_texts(parse_prompt(row, where)))
    kept = [prompt for prompt in prompts if not any(map(known.shared, _user_texts(prompt)))]
    overlap = {"words": known.n, "dropped": len(prompts) - len(kept), "of": len(prompts)}
    logger.warning(
        f"{overlap['dropped']} of {overlap['of']} prompts share {known.n} words in a row with held-out ones."
    )
    return kept, overlap


def _user_texts(prompt: ChatPrompt) -> list[str]:
    messages = itertools.chain.from_iterable(prompt.segments)
    return [message["content"] for message in messages if isinstance(message["content"], str)]


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""
    parser = HfArgumentParser(RecordingArguments, description=RecordingArguments.__doc__, allow_abbrev=False)
    # One line instead of the usage text: it has some forty flags, and --help prints them.
    parser.error = lambda message: parser.exit(2, f"error: {message} (--help lists the flags)\n")
    # First: a misspelt flag would otherwise be reported as one that is missing.
    _, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}")
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
