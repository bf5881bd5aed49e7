# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The committed text of every request, for drafters that look up n-grams in it.

The runner's own table is behind by a round where scheduling is asynchronous, so the text is kept here: what the table
holds in front of a request's first window (a prefix that was cached), then every window as it is verified.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_carryover.lookup import look_up


class Texts:
    """
    Texts by request.

    Args:
        limit (`int`): Longest text, in tokens.
        ngram_size (`int`), count (`int`): `config.lookup_ngram_size`, and the tokens wanted.
    """

    def __init__(self, limit: int, ngram_size: int, count: int):
        self.limit, self.ngram_size, self.count = limit, ngram_size, count
        self._texts: dict[str, np.ndarray] = {}

    def look_up(
        self,
        names: list[str],
        known: np.ndarray,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_rejected: torch.Tensor | None,
        anchors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write this step's windows, and look up what follows each anchor.

        Args:
            names (`list[str]`): The requests of the batch, in its order. All others are forgotten.
            known (`np.ndarray` of shape `(requests or more, length)`): The runner's table.
            tokens, positions (`torch.Tensor` of shape `(rows,)`): Of all window rows.
            query_start_loc (`torch.Tensor` of shape `(requests + 1,)`): Where each request's rows begin.
            num_rejected (`torch.Tensor` of shape `(requests,)`, *optional*): Its last rows, which are rejected.
            anchors (`torch.Tensor` of shape `(requests,)`): Tokens behind the accepted rows.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: tokens `(requests, count)` and sizes `(requests,)`, on the CPU; see
            [`~hf_carryover.lookup.look_up`].
        """
        tokens, positions, starts, anchors = (t.cpu().numpy() for t in (tokens, positions, query_start_loc, anchors))
        rejected = np.zeros(len(names), dtype=np.int64) if num_rejected is None else num_rejected.cpu().numpy()
        self._texts = {name: self._texts[name] for name in names if name in self._texts}
        found = np.zeros((len(names), self.count), dtype=np.int64)
        sizes = np.zeros(len(names), dtype=np.int64)
        for i, name in enumerate(names):
            start, end = int(starts[i]), int(starts[i + 1]) - int(rejected[i])
            first = int(positions[start])
            text = self._texts.get(name)
            if text is None:
                text = self._texts[name] = np.zeros(self.limit + 1, dtype=np.int64)
                text[:first] = known[i, :first]
            anchor = first + end - start
            if anchor > self.limit:
                continue
            text[first:anchor] = tokens[start:end]
            text[anchor] = anchors[i]
            tail, sizes[i] = look_up(text[: anchor + 1], self.ngram_size, self.count)
            if tail is not None:
                found[i] = tail
        return torch.from_numpy(found), torch.from_numpy(sizes)


__all__ = ["Texts"]
