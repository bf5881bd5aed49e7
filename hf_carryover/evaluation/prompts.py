# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Prompts to measure on, in the formats of the field.

A JSONL record holds one of

- `turns`: user messages in order (Spec-Bench's `question.jsonl`, DeepSpec's `eval_datasets`, MT-Bench, this project);
- `messages` or `conversations`: a chat; its user messages are asked, a leading system message is kept;
- `prompt` or `question`: one user message (HumanEval, `RedHatAI/speculator_benchmarks`);

and optionally `id` (or `question_id`, `task_id`), `category`, `tools`. A record belongs to the set that its category
names, MT-Bench's eight categories being one set, and without a category to the set of its file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..training.chat import normalize_tools


_IDS = ("id", "question_id", "task_id", "prompt_id")
_CHATS = ("messages", "conversations")
_SINGLE = ("prompt", "question")
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
        turns (`list[str]`, *optional*): User messages, to be put through the chat template.
        tools (`list[dict]`, *optional*): Function schemas.
        prompt_ids (`list[int]`, *optional*): Token ids instead of messages.
        system (`str`, *optional*): System message.
    """

    set: str
    name: str
    turns: list[str] | None = None
    tools: list[dict] | None = None
    prompt_ids: list[int] | None = None
    system: str | None = None

    @property
    def num_turns(self) -> int:
        return 1 if self.turns is None else len(self.turns)


def choose_evenly(items: Sequence, count: int | None) -> list:
    """`count` items at even distances, the first among them; all if there are no more than that (or no `count`)."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def read_prompts(path: str | Path) -> list[Item]:
    """
    The prompts of one JSONL file.

    Args:
        path (`str` or `Path`): The file.

    Raises:
        ValueError: Naming the line that is no JSON or has none of the fields above.
    """
    path = Path(path)
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where} holds {type(record).__name__}, expected an object.")
        items.append(_item(record, path.stem, number, where))
    if not items:
        raise ValueError(f"{path.name} holds no prompts.")
    return items


def _item(record: dict, stem: str, number: int, where: str) -> Item:
    system, turns = _turns(record, where)
    name = next((str(record[key]) for key in _IDS if record.get(key) is not None), f"{stem}-{number}")
    return Item(_set(record, stem), name, turns, normalize_tools(record.get("tools"), where), system=system)


def _turns(record: dict, where: str) -> tuple[str | None, list[str]]:
    """System message and user messages of a record."""
    system = None
    if "turns" in record:
        turns = record["turns"]
    elif any(key in record for key in _CHATS):
        chat = next(record[key] for key in _CHATS if key in record)
        system, turns = _chat(chat, where)
    elif any(key in record for key in _SINGLE):
        turns = [next(record[key] for key in _SINGLE if key in record)]
    else:
        expected = ", ".join(("turns", *_CHATS, *_SINGLE))
        raise ValueError(f"{where} has the fields {sorted(record)}, expected one of {expected}.")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where} needs user messages, a non-empty list of texts, got {turns!r}.")
    return system, turns


def _chat(chat, where: str) -> tuple[str | None, list[str]]:
    """A chat's leading system message and user messages; both spellings of role and content are known."""
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        raise ValueError(f"{where} needs a chat, a list of messages, got {chat!r}.")
    pairs = [(m.get("role", m.get("from")), m.get("content", m.get("value"))) for m in chat]
    system = pairs[0][1] if pairs and pairs[0][0] == "system" else None
    return system, [content for role, content in pairs if role in ("user", "human")]


def _set(record: dict, stem: str) -> str:
    category = record.get("category")
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
