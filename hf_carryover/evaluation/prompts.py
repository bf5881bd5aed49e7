# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Prompts to measure on, in the formats of the field.

Rows are read and parsed as for recording, see [`~hf_carryover.training.chat.iter_prompts`]: `turns` (Spec-Bench's
`question.jsonl`, DeepSpec's `eval_datasets`, MT-Bench), `messages` or `conversations`, `prompt` (HumanEval,
`RedHatAI/speculator_benchmarks`), and optionally `id`, `tools`. A row belongs to the set that its `category` names,
MT-Bench's eight categories being one set, and without a category to the set of its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..training.chat import parse_prompt, read_rows


MT_BENCH = "mt_bench"
_MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


@dataclass(frozen=True)
class Item:
    """
    One prompt.

    Args:
        set (`str`): Its prompt set.
        name (`str`): Its id, unique within the set.
        segments (`list[list[dict]]`, *optional*):
            The messages given before each answer, to be put through the chat template.
        tools (`list[dict]`, *optional*): Function schemas.
        prompt_ids (`list[int]`, *optional*): Token ids instead of messages.
    """

    set: str
    name: str
    segments: list[list[dict]] | None = None
    tools: list[dict] | None = None
    prompt_ids: list[int] | None = None

    @property
    def num_turns(self) -> int:
        return 1 if self.segments is None else len(self.segments)


def choose_evenly(items: Sequence, count: int | None) -> list:
    """`count` items at even distances, the first among them; all if there are no more than that (or no `count`)."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def read_prompts(path: str | Path) -> list[Item]:
    """
    The prompts of one file.

    Args:
        path (`str` or `Path`): JSON Lines, also gzipped, or Parquet.

    Raises:
        ValueError: Naming the line that is no prompt.
    """
    path = Path(path)
    items = []
    for where, row in read_rows(path):
        prompt = parse_prompt(row, where)
        items.append(Item(_set(row, path.name.split(".")[0]), prompt.id, prompt.segments, prompt.tools))
    if not items:
        raise ValueError(f"{path.name} holds no prompts.")
    return items


def _set(row, stem: str) -> str:
    category = row.get("category") if isinstance(row, dict) else None
    if not isinstance(category, str) or not category:
        return stem
    return MT_BENCH if category in _MT_BENCH_CATEGORIES else category


def prompt_files(paths: Sequence[str]) -> list[Path]:
    """
    JSONL files of the given files, folders, and datasets on the Hub (`owner/name`, downloaded once).

    Raises:
        FileNotFoundError: If something is neither there nor the name of a dataset.
    """
    files: list[Path] = []
    for text in paths:
        path = Path(text)
        if not path.exists():
            if text.count("/") != 1 or text.startswith((".", "/")) or text.endswith(".jsonl"):
                raise FileNotFoundError(
                    f"{text} does not exist. Name a JSONL file, a folder, or a dataset `owner/name`."
                )
            path = _download(text)
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise FileNotFoundError(f"No .jsonl file in {text}.")
        files += found
    return files


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo_id, repo_type="dataset", allow_patterns="*.jsonl"))


def load_items(paths: Sequence[str], per_set: int | None = None) -> list[Item]:
    """
    Prompts of files, folders and datasets, `per_set` of each set at even distances. Where a set comes twice
    (Spec-Bench ships MT-Bench as `question.jsonl` and as `writing.jsonl`), equal prompts count once.

    Raises:
        ValueError: If there are no prompts, or different ones of a set share an id.
    """
    sets: dict[str, dict[str, Item]] = {}
    for file in prompt_files(paths):
        for item in read_prompts(file):
            before = sets.setdefault(item.set, {}).setdefault(item.name, item)
            if before != item:
                raise ValueError(
                    f"Set {item.set!r} has two different prompts of id {item.name!r}; one is in {file.name}."
                )
    return [item for members in sets.values() for item in choose_evenly(list(members.values()), per_set)]


__all__ = ["Item", "choose_evenly", "load_items", "prompt_files", "read_prompts"]
