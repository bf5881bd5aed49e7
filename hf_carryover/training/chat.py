# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Chat prompts, and the chat template seen as tokens.

Everything that turns text into the token ids a target sees at inference is here; `engines.py` answers them, and
`recording.py` decides what to keep. Two rules hold throughout:

- tokens a target generated are never decoded and tokenised again: what was sampled is what is recorded;
- a later turn is rendered by the template itself, so the recorded prefix is the one inference sees.
"""

import gzip
import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig


# Stands for a message's content when the template is rendered to find out what it writes around that content.
SENTINEL = "CARRYOVERCONTENT"

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}

# Type names of Python-flavoured function lists (Berkeley Function Calling Leaderboard) and their JSON Schema names.
SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array"}

PROMPT_COLUMNS = ("messages", "conversations", "turns", "prompt", "question", "instruction")
# Columns that name a row, the first that is present.
ID_COLUMNS = ("id", "prompt_id", "question_id", "task_id")


class RecordingError(ValueError):
    """A prompt, a recording or a setting that the user has to change; the message says how."""


def stable_hash(*parts: Any) -> int:
    """A 64-bit integer that is the same in every process, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def derive_seed(*parts: Any) -> int:
    """A seed for one request: 31 bits, the width that every engine accepts."""
    return stable_hash(*parts) % 2**31


# --------------------------------------------------------------------------------------------------------------------
# Reading rows


def read_rows(source: Any) -> Iterator[tuple[str, Any]]:
    """Yields `(where, row)`, `where` being a file and line, or a row number, for error messages."""
    if isinstance(source, (str, os.PathLike)):
        yield from _read_path(Path(source))
    elif isinstance(source, Mapping):
        raise RecordingError(
            f"Got a dictionary with the keys {sorted(source)}, expected rows. A `DatasetDict` has several splits: "
            'pass one of them, as in `dataset["train"]`; a single prompt goes into a list.'
        )
    else:
        for index, row in enumerate(source):
            yield f"row {index}", row


def _read_path(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            from datasets import load_from_disk

            yield from read_rows(load_from_disk(str(path)))
            return
        files = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")])
        if not files:
            raise RecordingError(
                f"Folder {str(path)!r} holds neither `*.jsonl` or `*.jsonl.gz` files nor a dataset written by "
                "`save_to_disk`. Pass a file, or save the dataset with one of the two."
            )
        for file in files:
            yield from _read_path(file)
    elif not path.exists():
        raise RecordingError(
            f"{str(path)!r} does not exist; expected a file or folder. To use a dataset of the Hub, load it with "
            "`datasets.load_dataset` and pass the split, or write it with `save_to_disk` and pass the folder."
        )
    elif path.suffix == ".parquet":
        from datasets import Dataset

        yield from read_rows(Dataset.from_parquet(str(path)))
    elif path.suffix == ".json":
        yield from _read_written_prompts(path)
    else:
        yield from _read_json(path)


def _read_written_prompts(path: Path) -> Iterator[tuple[str, Any]]:
    """The prompts of an earlier recording, which the target wrote; or rows in one JSON list."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise RecordingError(
            f"{path.name}: not JSON ({error.msg} in line {error.lineno}). JSON Lines need the ending `.jsonl`."
        ) from None
    rows = content.get("prompts") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise RecordingError(f"{path.name}: expected a list of rows, or an object with a list `prompts`.")
    for number, row in enumerate(rows):
        yield f"{path.name}, row {number}", row


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path.name}, line {number}"
            try:
                yield where, json.loads(line)
            except json.JSONDecodeError as error:
                raise RecordingError(
                    f"{where}: not a JSON object ({error.msg} at column {error.colno}). Expected JSON Lines, one "
                    "object on each line."
                ) from None


# --------------------------------------------------------------------------------------------------------------------
# Prompts


@dataclass(frozen=True)
class ChatPrompt:
    """
    A conversation whose assistant turns are left to the target.

    Args:
        id (`str`):
            Name of the prompt; recordings keep it, and splits are made by it.
        segments (`list[list[dict]]`):
            The messages given before each answer: the target answers after `segments[0]`, again after `segments[1]`.
        tools (`list[dict]`, *optional*):
            Function schemas handed to the chat template.
        prompt_ids (`array`, *optional*):
            Token ids of the first turn, up to the place where the target starts to answer.
    """

    id: str
    segments: list[list[dict]]
    tools: list[dict] | None = None
    prompt_ids: array | None = field(default=None, repr=False)


def iter_prompts(source: Any, tokenizer, *, chat_template_kwargs: dict | None = None) -> Iterator[ChatPrompt]:
    """
    Reads chat prompts in the usual forms and renders their first turn with the chat template.

    A row has one of the columns, the first of this list that is present: `messages` (role and content),
    `conversations` (from and value, or role and content), `turns` (user turns in order), `prompt` or `question` (text
    or messages), `instruction` (with `input`). `tools`, `system` and a name (`ID_COLUMNS`) are used where present. The
    content of assistant turns is dropped: the target writes them anew. Only an assistant turn followed by a tool's
    result stays as it is, since the result belongs to that very call.

    Args:
        source (`str`, `os.PathLike` or iterable of `dict`):
            JSON Lines (also gzipped), Parquet, a folder of them or of `save_to_disk`, a `Dataset`, or rows.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the target, with a chat template.
        chat_template_kwargs (`dict`, *optional*):
            Extra variables of the template, such as `{"enable_thinking": False}`.
    """
    template = ChatTemplate(tokenizer, chat_template_kwargs)
    for where, row in read_rows(source):
        prompt = row if isinstance(row, ChatPrompt) else parse_prompt(row, where)
        try:
            ids = template.ids(prompt.segments[0], prompt.tools)
        except RecordingError:
            raise
        except Exception as error:  # a template raises whatever its Jinja code raises
            raise RecordingError(
                f"{where} (id {prompt.id!r}): the chat template refuses the prompt: {error}. Change the roles or "
                "contents of this row, or leave it out."
            ) from error
        yield ChatPrompt(prompt.id, prompt.segments, prompt.tools, array("i", ids))


def parse_prompt(row: Any, where: str) -> ChatPrompt:
    """Brings one row of any supported form into a `ChatPrompt`, without its token ids."""
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise RecordingError(f"{where}: got {type(row).__name__}, expected a JSON object or a string with the prompt.")
    column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise RecordingError(
            f"{where}: no prompt among the columns {sorted(row)}; expected one of {list(PROMPT_COLUMNS)}. Rename the "
            "column that holds the prompt."
        )
    value = row[column]
    if column == "instruction":
        value = f"{value}\n\n{row['input']}" if row.get("input") else value
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RecordingError(f"{where}: {column!r} is {value!r}, expected a non-empty list. Fill it or drop the row.")
    if all(isinstance(turn, str) for turn in value):
        segments = [[{"role": "user", "content": turn}] for turn in value]
    else:
        segments = _split_at_answers([_message(item, f"{where}, {column}[{i}]") for i, item in enumerate(value)])
    if not segments:
        raise RecordingError(f"{where}: {column!r} has no user turn to answer. Add one or drop the row.")
    if row.get("system") and segments[0][0]["role"] != "system":
        segments[0].insert(0, {"role": "system", "content": row["system"]})
    tools = normalize_tools(row.get("tools"), where)
    name = next((row[key] for key in ID_COLUMNS if row.get(key) is not None), None)
    # Equal prompts get equal names, and so always stand on the same side of a split.
    name = f"{stable_hash(segments, tools):016x}" if name is None else str(name)
    return ChatPrompt(name, segments, tools)


def _message(item: Any, where: str) -> dict:
    if not isinstance(item, Mapping):
        raise RecordingError(f"{where}: got {item!r}, expected an object with role and content.")
    role = item.get("role", item.get("from"))
    content = item.get("content", item.get("value"))
    if role not in ROLES:
        raise RecordingError(f"{where}: role {role!r} is unknown; expected one of {sorted(ROLES)}. Rename the role.")
    if ROLES[role] != "assistant" and not isinstance(content, (str, list)):
        raise RecordingError(f"{where}: content of the {role!r} turn is {content!r}, expected text. Fill or drop it.")
    # Arrow fills keys that other rows have with None, which templates would print.
    rest = {k: v for k, v in item.items() if k not in ("role", "from", "content", "value") and v is not None}
    return {"role": ROLES[role], "content": "" if content is None else content, **rest}


def _split_at_answers(messages: list[dict]) -> list[list[dict]]:
    """Cuts a conversation where the target answers. A greeting before the first user turn answers nothing: dropped."""
    segments, current = [], []
    for position, message in enumerate(messages):
        followed_by = messages[position + 1]["role"] if position + 1 < len(messages) else None
        if message["role"] != "assistant" or followed_by == "tool":
            current.append(message)
        elif any(given["role"] in ("user", "tool") for given in current):
            segments.append(current)
            current = []
    if any(given["role"] in ("user", "tool") for given in current):
        segments.append(current)
    return segments


def normalize_tools(tools: Any, where: str) -> list[dict] | None:
    """Function schemas in the one form that templates know."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError:
            raise RecordingError(f"{where}: `tools` is text but not JSON: {tools[:60]!r}. Expected a list.") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RecordingError(f"{where}: `tools` is {str(tools)[:60]!r}, expected a list of function schemas.")
    tools = [_schema(tool) for tool in tools]
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def place_tools(chat_template: str | None, messages: list[dict], tools: list[dict] | None):
    """
    Messages and tools as a chat template takes them: one without a place for tools gets them in a system message.

    Args:
        chat_template (`str`, *optional*): The template's text.
        messages (`list[dict]`): The conversation.
        tools (`list[dict]`, *optional*): Function schemas.

    Returns:
        `tuple[list[dict], list[dict] | None]`: messages, and the tools if the template knows them.
    """
    if not tools or "tools" in (chat_template or ""):
        return messages, tools or None
    listing = "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
    system = f"You can call these functions. Answer with one call as JSON, with name and arguments.\n{listing}"
    if messages and messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        system, messages = f"{messages[0]['content']}\n\n{system}", messages[1:]
    return [{"role": "system", "content": system}, *messages], None


def _schema(node: Any) -> Any:
    if isinstance(node, list):
        return [_schema(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    # `type` is a type's name only where it is text: a parameter may itself be called "type", with a schema below it.
    return {
        key: SCHEMA_TYPES.get(value, value) if key == "type" and isinstance(value, str) else _schema(value)
        for key, value in node.items()
        if value is not None
    }


# --------------------------------------------------------------------------------------------------------------------
# The chat template as token ids


class ChatTemplate:
    """
    What a tokenizer's chat template writes around the contents of a conversation.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the target.
        variables (`dict`, *optional*):
            Extra variables of the template.
    """

    def __init__(self, tokenizer, variables: dict | None = None):
        if not getattr(tokenizer, "chat_template", None):
            raise RecordingError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template; expected one, since recordings must "
                "look like inference. Use the tokenizer of the chat model, or set `tokenizer.chat_template`."
            )
        self.tokenizer = tokenizer
        self.variables = dict(variables or {})
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = set(tokenizer.all_special_ids) | {i for i, token in added if token.special}

    def ids(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """Token ids up to the place where the target starts to answer."""
        messages, tools = place_tools(self.tokenizer.chat_template, messages, tools)
        return list(
            self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **self.variables
            )
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of text that the template wrote, which brings its own special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def around(self, before: list[dict], role: str, after: list[dict], tools=None) -> tuple[str, str]:
        """The text before and after the content of one message of `role`."""
        messages, tools = place_tools(
            self.tokenizer.chat_template, [*before, {"role": role, "content": SENTINEL}, *after], tools
        )
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=bool(after),
            tokenize=False,
            **self.variables,
        )
        if text.count(SENTINEL) != 1:
            raise RecordingError(
                f"The chat template writes the content of a {role!r} turn {text.count(SENTINEL)} times, expected once."
                " Give single-turn prompts, or a template that renders earlier turns."
            )
        left, right = text.split(SENTINEL)
        return left, right

    def end_of_turn(self, role: str) -> tuple[int | None, str]:
        """The special token that ends a turn of `role`, or None with the text that ends it."""
        before = [] if role == "user" else [{"role": "user", "content": "x"}]
        text = self.around(before, role, [])[1].strip()
        ids = self.encode(text)
        return (ids[0], "") if ids and ids[0] in self.special_ids else (None, text)

    def stop_token_ids(self, generation_config: GenerationConfig | None = None) -> list[int]:
        """Every token that ends an answer: of the generation config, the tokenizer, and the template itself."""
        eos = getattr(generation_config, "eos_token_id", None)
        stops = set(eos if isinstance(eos, (list, tuple)) else [eos])
        stops |= {self.tokenizer.eos_token_id, self.end_of_turn("assistant")[0]}
        stops.discard(None)
        if not stops:
            raise RecordingError(
                f"No token ends an answer: the tokenizer {self.tokenizer.name_or_path!r} has no `eos_token` and its "
                "template writes no special token after an answer. Set `tokenizer.eos_token`."
            )
        return sorted(stops)


class Conversation:
    """
    One prompt while the target answers it, turn by turn.

    Args:
        prompt (`ChatPrompt`):
            The prompt, with `prompt_ids`.
        template (`ChatTemplate`):
            Renders the later turns.
        stop_token_ids (`list[int]`):
            Tokens that end an answer.
        max_prompt_length (`int`, *optional*):
            A turn whose context is longer is not asked.
    """

    def __init__(self, prompt: ChatPrompt, template: ChatTemplate, stop_token_ids, max_prompt_length: int | None):
        self.prompt, self.template = prompt, template
        self.stops = set(stop_token_ids)
        self.limit = max_prompt_length
        self.messages = list(prompt.segments[0])
        self.tokens = list(prompt.prompt_ids)
        self.mask = [0] * len(self.tokens)
        self.answers: list[list[int]] = []
        self.too_long = self.limit is not None and len(self.tokens) > self.limit
        self.open = not self.too_long

    def add_answer(self, ids: list[int]) -> None:
        """Appends what the target generated, unchanged, and the template's text up to the next answer."""
        end = next((position for position, token in enumerate(ids) if token in self.stops), None)
        finished = end is not None
        answer = ids if not finished else ids[: end + 1]
        content = answer[:-1] if finished else answer
        if not content:
            self._stop()
            return
        self.answers.append(answer)
        self.tokens += answer
        self.mask += [1] * len(answer)
        turn = len(self.answers)
        if turn == len(self.prompt.segments):
            self.open = False
            return
        following = self.prompt.segments[turn]
        added = self._next_turn(self.template.decode(content), following, finished)
        if added is None or (self.limit is not None and len(self.tokens) + len(added) > self.limit):
            self._stop()
            return
        self.tokens += added
        self.mask += [0] * len(added)

    def _next_turn(self, content: str, following: list[dict], finished: bool) -> list[int] | None:
        given, tools, template = self.messages, self.prompt.tools, self.template
        self.messages = [*given, {"role": "assistant", "content": content}, *following]
        rendered = template.ids(self.messages, tools)
        if rendered[: len(self.tokens)] == self.tokens:
            return rendered[len(self.tokens) :]
        # The template changed the answer (trimmed it, removed its reasoning) or the text tokenises differently: keep
        # the generated ids and add only what the template writes after an answer.
        added = template.encode(template.around(given, "assistant", following, tools)[1])
        if not finished:
            return added
        # The end-of-turn token is there already. An answer that ended with another token than the template's has no
        # continuation that inference could produce.
        return added[1:] if added and added[0] == self.tokens[-1] else None

    def _stop(self) -> None:
        """Ends the conversation after its last answer: text of a turn nobody answered is cut."""
        self.open = False
        while self.mask and not self.mask[-1]:
            self.mask.pop()
            self.tokens.pop()
