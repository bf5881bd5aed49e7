# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""A trained test bed as folders: target with tokenizer, drafters, prompts. What serves SmolLM2 serves it too."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ..modeling_carryover import CarryoverDrafter
from .language import Language


PROMPT_SEED = 6  # texts that nothing was trained or measured on


def language_tokenizer(language: Language) -> PreTrainedTokenizerFast:
    """
    One word a token: `<s>`, keys `k0 …`, outputs `o0 …`, free symbols `f0 …` and chained symbols `c0 …`. Its chat
    template is the message itself.
    """
    counts = {"k": language.num_states, "o": language.num_states, "f": language.num_symbols, "c": language.num_symbols}
    words = ["<s>", *(f"{kind}{i}" for kind, count in counts.items() for i in range(count))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def save_testbed(
    folder: str | Path,
    language: Language,
    target: PreTrainedModel,
    systems: dict[str, CarryoverDrafter],
    rhos: list[float],
    number: int = 64,
) -> None:
    """
    Write a trained test bed.

    Args:
        folder (`str` or `Path`): Gets `target`, a folder for each drafter, and `prompts/rho-PERCENT.jsonl`.
        language ([`Language`]): The language.
        target (`PreTrainedModel`): Its target.
        systems (`dict[str, CarryoverDrafter]`): Drafters by name.
        rhos (`list[float]`): Positions of the dial, a file of prompts each.
        number (`int`, *optional*, defaults to 64): Prompts in a file.
    """
    folder = Path(folder)
    tokenizer = language_tokenizer(language)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    for name, drafter in systems.items():
        drafter.save_pretrained(folder / name)
    (folder / "prompts").mkdir(exist_ok=True)
    for rho in rhos:
        texts = language.texts(number, rho, seed=PROMPT_SEED)[:, : language.prompt_length]
        rows = [
            {"id": f"{rho:g}-{i}", "turns": [" ".join(tokenizer.convert_ids_to_tokens(text))]}
            for i, text in enumerate(texts.tolist())
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        # In percent: a dot would end the name of the set.
        (folder / "prompts" / f"rho-{round(100 * rho)}.jsonl").write_text(lines, encoding="utf-8")


__all__ = ["language_tokenizer", "save_testbed"]
