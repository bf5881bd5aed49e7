# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Prompts that the target writes itself, for when there are none."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from .chat import ChatTemplate, RecordingError, derive_seed
from .engines import GenerateIds, TransformersGenerator


logger = logging.get_logger(__name__)


def self_prompts(
    generate_ids: GenerateIds | PreTrainedModel,
    tokenizer,
    n: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 0.95,
    min_prompt_tokens: int = 4,
    max_prompt_tokens: int = 256,
    batch_size: int = 8,
    openings: Iterable[str] | None = None,
    keep_unfinished: bool = False,
    chat_template_kwargs: dict | None = None,
) -> tuple[list[dict], Counter]:
    """
    Lets the target write the user turns itself, for when there are no prompts.

    The chat template is rendered up to the start of a user's content, and the target goes on until it ends the turn
    (the procedure of Magpie, arXiv 2406.08464). Turns that are unfinished, too short, empty, a duplicate, or hold
    special tokens are dropped, and more are drawn, at most `4 * n` in all.

    Args:
        generate_ids (`Callable` or `PreTrainedModel`):
            The target, or a function from token ids and seeds to token ids; its sampling is then its own matter.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the target, with a chat template.
        n (`int`):
            Number of prompts wanted.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.
        temperature (`float`, *optional*, defaults to `1.0`), top_p (`float`, *optional*, defaults to `0.95`):
            Sampling of the user turns.
        min_prompt_tokens (`int`, *optional*, defaults to `4`):
            Turns for which fewer tokens were generated, end of turn not counted, are dropped.
        max_prompt_tokens (`int`, *optional*, defaults to `256`):
            Turns that do not end within so many generated tokens are dropped.
        batch_size (`int`, *optional*, defaults to `8`):
            Turns written at a time by a transformers model.
        openings (`Iterable[str]`, *optional*):
            Beginnings of user turns, used in turn to steer towards a domain, such as `"Translate to German: "`.
        keep_unfinished (`bool`, *optional*, defaults to `False`):
            Keep turns that do not end within `max_prompt_tokens`, cut there: for passages, whose end does not matter.
        chat_template_kwargs (`dict`, *optional*):
            Extra variables of the template.

    Returns:
        `tuple[list[dict], Counter]`: prompts with `id` and `messages`, and the numbers of turns drawn, kept and
        dropped, by reason.
    """
    wanted = WantedTurns(n, list(openings or [""]), seed, keep_unfinished)
    (texts,), counts = write_turns(
        generate_ids,
        tokenizer,
        [wanted],
        temperature=temperature,
        top_p=top_p,
        min_prompt_tokens=min_prompt_tokens,
        max_prompt_tokens=max_prompt_tokens,
        batch_size=batch_size,
        chat_template_kwargs=chat_template_kwargs,
    )
    rows = [
        {"id": f"self-{seed}-{draw}", "messages": [{"role": "user", "content": text}]} for draw, text in texts.items()
    ]
    return rows, counts


@dataclass
class WantedTurns:
    """
    User turns of one kind.

    Args:
        number (`int`): How many are wanted; at most four times as many are drawn.
        openings (`list[str]`): Their beginnings, used in turn.
        seed (`int`, *optional*, defaults to `0`): Seed of the draws.
        keep_unfinished (`bool`, *optional*, defaults to `False`): Whether turns that do not end are kept, cut.
    """

    number: int
    openings: list[str]
    seed: int = 0
    keep_unfinished: bool = False

    def __post_init__(self):
        if self.number < 1 or not self.openings:
            raise RecordingError(
                f"Got n={self.number} and {len(self.openings)} openings, expected at least one of each."
            )


def write_turns(
    generate_ids: GenerateIds | PreTrainedModel,
    tokenizer,
    kinds: list[WantedTurns],
    *,
    temperature: float = 1.0,
    top_p: float = 0.95,
    min_prompt_tokens: int = 4,
    max_prompt_tokens: int = 256,
    batch_size: int = 8,
    chat_template_kwargs: dict | None = None,
) -> tuple[list[dict[int, str]], Counter]:
    """
    Lets the target write user turns of several kinds, all of them at once. A kind's turns do not depend on the others.

    Args:
        kinds (`list[WantedTurns]`): What is wanted.
        generate_ids, tokenizer, temperature, top_p, min_prompt_tokens, max_prompt_tokens, batch_size,
        chat_template_kwargs: As in `self_prompts`.

    Returns:
        `tuple[list[dict[int, str]], Counter]`: of each kind the usable turns by the number of their draw; and the
        numbers of turns drawn, kept and dropped, by reason.
    """
    template = ChatTemplate(tokenizer, chat_template_kwargs)
    before = template.around([], "user", [])[0]
    stop_text = template.end_of_turn("user")[1]
    stops = user_stop_token_ids(template)
    if isinstance(generate_ids, PreTrainedModel):
        stops = user_stop_token_ids(template, generate_ids.generation_config)
        generate_ids = TransformersGenerator(
            generate_ids,
            stop_token_ids=stops,
            max_new_tokens=max_prompt_tokens,
            batch_size=batch_size,
            do_sample=True,
            temperature=temperature,
            top_p=top_p,
            top_k=0,
        )
    written: list[dict[int, str]] = [{} for _ in kinds]
    seen: list[set[str]] = [set() for _ in kinds]
    drawn, counts = [0] * len(kinds), Counter[str]()
    while draws := [
        (kind, draw)
        for kind, wanted in enumerate(kinds)
        for draw in range(drawn[kind], min(drawn[kind] + wanted.number - len(written[kind]), 4 * wanted.number))
    ]:
        openings = [kinds[kind].openings[draw % len(kinds[kind].openings)] for kind, draw in draws]
        answers = generate_ids(
            [template.encode(before + opening) for opening in openings],
            [derive_seed(kinds[kind].seed, "user turn", draw) for kind, draw in draws],
        )
        for (kind, draw), opening, ids in zip(draws, openings, answers):
            text, reason = _user_turn(template, ids, stops, stop_text, min_prompt_tokens)
            text = (opening + text).strip()
            if reason == "unfinished" and kinds[kind].keep_unfinished and not template.special_ids.intersection(ids):
                reason = None
            same = " ".join(text.lower().split())
            if reason is None and same in seen[kind]:
                reason = "duplicate"
            counts[reason or "kept"] += 1
            if reason is None:
                seen[kind].add(same)
                written[kind][draw] = text
            drawn[kind] = draw + 1
        counts["drawn"] += len(draws)
    if not counts["kept"]:
        raise RecordingError(
            f"None of {counts['drawn']} user turns the target wrote is usable: {dict(counts)}. Raise "
            f"max_prompt_tokens={max_prompt_tokens} if they are unfinished, or give prompts."
        )
    missing = sum(wanted.number - len(texts) for wanted, texts in zip(kinds, written))
    if missing:
        total = sum(wanted.number for wanted in kinds)
        logger.warning(
            f"Only {total - missing} of {total} user turns are usable after {counts['drawn']} draws: {dict(counts)}."
        )
    return written, counts


def user_stop_token_ids(template: ChatTemplate, generation_config: GenerationConfig | None = None) -> list[int]:
    """Every token that ends a user turn that the target writes."""
    return sorted({*template.stop_token_ids(generation_config), template.end_of_turn("user")[0]} - {None})


def _user_turn(template: ChatTemplate, ids: list[int], stops: list[int], stop_text: str, minimum: int):
    """Text of one written user turn, and why it is dropped, if it is."""
    end = next((position for position, token in enumerate(ids) if token in stops), None)
    content = ids if end is None else ids[:end]
    text = template.decode(content)
    if stop_text and stop_text in text:  # a template that ends a user turn with ordinary text
        text, end = text.split(stop_text)[0], len(content)
    if end is None:
        return text, "unfinished"
    if not text.strip():
        return text, "empty"
    if len(content) < minimum:
        return text, "too_short"
    if template.special_ids.intersection(content):
        return text, "special_tokens"
    return text, None
