# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Keeps what a drafter is measured on out of what it is trained on: prompts that share a run of words are found."""

import re
from collections.abc import Iterable


NGRAM = 8


def ngrams(text: str, n: int = NGRAM) -> set[tuple[str, ...]]:
    """The runs of `n` words of a text, in lower case and without punctuation; a shorter text is one run as a whole."""
    words = re.findall(r"\w+", text.lower())
    if len(words) <= n:
        return {tuple(words)} if words else set()
    return {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}


class OverlapFilter:
    """
    Finds texts that share a run of words with texts that are held out.

    Args:
        held_out (`Iterable[str]`): The held-out texts.
        n (`int`, *optional*, defaults to `8`): Words of a run. Of shorter texts all words have to agree.
    """

    def __init__(self, held_out: Iterable[str], n: int = NGRAM):
        self.n = n
        self.known: set[tuple[str, ...]] = set()
        for text in held_out:
            self.known |= ngrams(text, n)

    def shared(self, text: str) -> set[tuple[str, ...]]:
        """The runs of a text that a held-out text has too."""
        return ngrams(text, self.n) & self.known
