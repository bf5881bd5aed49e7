# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The language with a dial.

A text is a source `s_1 … s_N`, a key, and an output `o_1 … o_N`. One random table `T` fixes the output:

- every fourth output is a free choice, which nobody can predict;
- where `s_i` is a *free* symbol, `o_i = T[key, s_i]`: right or wrong tokens before it make no difference;
- where `s_i` is a *chained* symbol, `o_i = T[o_{i-1}, s_i]`: after a wrong token it is another one.

The key comes after the source, so no state of the source tells the outputs: they are computed where they are said, by
a target that has learned the table. A drafter too small to hold the table gets some of them wrong. What the target
then says at the rejected rows is still right where the symbols are free, and not where they are chained. The dial `ρ`
is the share of free symbols: the probability that the target's word on a position survives a wrong token before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset


@dataclass(frozen=True)
class Language:
    """
    Shape and seed of a language.

    Args:
        num_states (`int`): Keys and outputs there are; rows of the table.
        num_symbols (`int`): Free symbols, and as many chained ones; columns of the table are both.
        num_choices (`int`): Outputs that a free choice is among.
        choice_every (`int`): Every how many outputs there is a free choice.
        length (`int`): Symbols of a source.
        seed (`int`): Of the table.
    """

    num_states: int = 16
    num_symbols: int = 16
    num_choices: int = 16
    choice_every: int = 4
    length: int = 24
    seed: int = 0

    # Token 0 starts a text; then come keys, outputs, free symbols and chained symbols.
    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return 1 + 2 * self.num_states + 2 * self.num_symbols

    @property
    def prompt_length(self) -> int:
        """Tokens before the output: start, source and key."""
        return self.length + 2

    @property
    def table(self) -> np.ndarray:
        """`T`, of shape `(num_states, 2 * num_symbols)`: outputs, free symbols first."""
        generator = np.random.default_rng([self.seed, 17])
        return generator.integers(self.num_states, size=(self.num_states, 2 * self.num_symbols))

    def texts(self, number: int, rho: float | None, seed: int) -> np.ndarray:
        """
        Texts of the language.

        Args:
            number (`int`): How many.
            rho (`float`, *optional*): The dial, from 0 to 1; `None` draws one for each text.
            seed (`int`): Of the texts.

        Returns:
            `np.ndarray` of shape `(number, 2 * length + 2)`: token ids.

        Raises:
            ValueError: If `rho` is out of range.
        """
        if rho is not None and not 0 <= rho <= 1:
            raise ValueError(f"`rho` must lie in 0 ... 1, got {rho}.")
        generator = np.random.default_rng([self.seed, seed, 29])
        dial = generator.random(number) if rho is None else np.full(number, rho)
        chained = generator.random((number, self.length)) >= dial[:, None]
        symbols = generator.integers(self.num_symbols, size=(number, self.length)) + chained * self.num_symbols
        keys = generator.integers(self.num_states, size=number)
        choices = generator.integers(self.num_choices, size=(number, self.length))
        table, before = self.table, keys
        outputs = np.empty((number, self.length), dtype=np.int64)
        for i in range(self.length):
            outputs[:, i] = table[np.where(chained[:, i], before, keys), symbols[:, i]]
            if i % self.choice_every == 0:
                outputs[:, i] = choices[:, i]
            before = outputs[:, i]
        states, symbols = 1 + self.num_states, 1 + 2 * self.num_states + symbols
        start = np.zeros((number, 1), dtype=np.int64)
        return np.concatenate([start, symbols, 1 + keys[:, None], states + outputs], axis=1)

    def recordings(self, number: int, rho: float | None, seed: int) -> Dataset:
        """[`Language.texts`] as recordings: what a target that knows the language says when it samples."""
        texts = self.texts(number, rho, seed)
        mask = [0] * self.prompt_length + [1] * self.length
        rows = {"id": [str(i) for i in range(number)], "input_ids": texts.tolist(), "response_mask": [mask] * number}
        return Dataset.from_dict(rows)

    def fixed(self, texts: torch.Tensor) -> torch.BoolTensor:
        """Which outputs are no free choices, `(length,)`."""
        return torch.arange(self.length, device=texts.device) % self.choice_every != 0
