# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Why carry helps where it does: observers of a [`Replay`] (arXiv 2609.14717, its sections on the reasons).

- [`MatchedAnchors`]: the same drafter at the same anchors, with its carried rows and without them.
- [`Reconvergence`]: how often the target's word on a rejected row is what was committed in the end.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ..modeling_carryover import CarryoverDrafter
from ..target import TargetHead
from .prompts import choose_evenly
from .replay import ReplayedRound


RECALLS = (1, 4, 16)


def prompt_set(name: str) -> str:
    """The set a recording belongs to: its id without the number at the end."""
    head, _, tail = name.rpartition("-")
    return head if tail.isdigit() and head else name


def choose_recordings(recordings, per_set: int | None):
    """`per_set` recordings of each set, at even distances; all without a number."""
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(recordings["id"]):
        groups.setdefault(prompt_set(name), []).append(index)
    return recordings.select(sorted(i for members in groups.values() for i in choose_evenly(members, per_set)))


class MatchedAnchors:
    """
    Ranks of the recorded tokens in the draft distribution, with and without carry, where something is carried.

    A Markov head is given the recorded token before each position, so that ranks at later positions do not depend on
    what was drawn at earlier ones.

    Args:
        drafter ([`CarryoverDrafter`]): The drafter that is replayed.
        head ([`TargetHead`]): Of the replay.

    Attributes:
        ranks (`dict[str, dict[str, list[torch.Tensor]]]`):
            Prompt set, then `"on"` and `"off"`: ranks `(blocks, block_size)` from 0, -1 where nothing was recorded.
    """

    def __init__(self, drafter: CarryoverDrafter, head: TargetHead):
        self.drafter, self.head = drafter, head
        self.ranks: dict[str, dict[str, list[torch.Tensor]]] = defaultdict(lambda: {"on": [], "off": []})

    def __call__(self, seen: ReplayedRound) -> None:
        """Add the blocks of a round that carry something."""
        if not seen.carried:
            return
        chosen = seen.carried["carried_mask"].any(dim=1)
        if not chosen.any():
            return
        anchors = seen.input_ids.gather(1, seen.anchors.unsqueeze(1))
        previous = torch.cat([anchors, seen.tokens[:, :-1]], dim=1)
        for name, hidden in (("on", seen.hidden_states), ("off", seen.draft({}))):
            logits = self.drafter.logits(hidden, self.head.weight, self.head.bias, previous).float()
            ranks = self._ranks(logits, seen.tokens, seen.exist).cpu()
            for row in chosen.nonzero().flatten().tolist():
                self.ranks[prompt_set(seen.names[row])][name].append(ranks[row])

    def _ranks(self, logits: torch.Tensor, tokens: torch.LongTensor, exist: torch.BoolTensor) -> torch.LongTensor:
        token_ids = self.head.token_ids
        size = logits.shape[-1]
        if token_ids is None:
            slots, known = tokens, torch.ones_like(exist)
        else:
            slots = torch.searchsorted(token_ids, tokens).clamp(max=size - 1)
            known = token_ids[slots] == tokens
        own = logits.gather(-1, slots.unsqueeze(-1))
        ranks = torch.where(known, (logits > own).sum(dim=-1), size)  # a token that can't be drafted comes last
        return torch.where(exist, ranks, -1)

    def recalls(self, group: str | None = None) -> dict:
        """
        Recall@k with and without carry, over a prompt set or all of them: `blocks`, and for each of `RECALLS` `on`,
        `off` (shares of the recorded tokens among the first k) and `by_position`, a list of `(on, off)`.
        """
        groups = self.ranks.values() if group is None else [self.ranks[group]]
        on, off = (torch.stack([rank for one in groups for rank in one[name]]) for name in ("on", "off"))
        result: dict = {"blocks": len(on)}
        exist = on >= 0
        for k in RECALLS:
            hits = [((ranks < k) & exist).float() for ranks in (on, off)]
            positions = [(hit.sum(0) / exist.sum(0).clamp(min=1)).tolist() for hit in hits]
            total = exist.sum().clamp(min=1)
            result[f"recall@{k}"] = {
                "on": float(hits[0].sum() / total),
                "off": float(hits[1].sum() / total),
                "by_position": list(zip(*positions)),
            }
        return result


class Reconvergence:
    """
    Rejected rows whose word on the next token is the one that was committed.

    Attributes:
        rows (`dict[str, torch.Tensor]`):
            Prompt set to `(2, block_size)`: of the i-th carried row, how many there were and how many re-converged.
        rounds (`dict[str, int]`): Rounds with a carried row.
    """

    def __init__(self):
        self.rows: dict[str, torch.Tensor] = {}
        self.rounds: dict[str, int] = defaultdict(int)

    def __call__(self, seen: ReplayedRound) -> None:
        """Add the carried rows of a round."""
        if seen.predictions is None or not seen.carried:
            return
        mask, size = seen.carried["carried_mask"], seen.tokens.shape[1]
        # Row i of the carried ones is at position a + i, and speaks of a + i + 1: that is label i of the block.
        place = seen.carried["carried_positions"] - seen.anchors.unsqueeze(1)
        judged = mask & (place >= 0) & (place < size)
        label = place.clamp(0, size - 1)
        judged &= seen.exist.gather(1, label)
        right = judged & (seen.predictions == seen.tokens.gather(1, label))
        for row in mask.any(dim=1).nonzero().flatten().tolist():
            group = prompt_set(seen.names[row])
            self.rounds[group] += 1
            table = self.rows.setdefault(group, torch.zeros(2, size))
            table[0].index_add_(0, label[row][judged[row]].cpu(), torch.ones(int(judged[row].sum())))
            table[1].index_add_(0, label[row][right[row]].cpu(), torch.ones(int(right[row].sum())))

    def summary(self, group: str | None = None) -> dict:
        """`rounds`; `rows` and `reconverged` per round; `share` of the rows; and `by_row`, the share of each row."""
        groups = list(self.rows) if group is None else [group]
        table = torch.stack([self.rows[name] for name in groups]).sum(dim=0)
        rounds = sum(self.rounds[name] for name in groups)
        rows, right = table.sum(dim=1).tolist()
        return {
            "rounds": rounds,
            "rows": rows / rounds,
            "reconverged": right / rounds,
            "share": right / max(rows, 1),
            "by_row": (table[1] / table[0].clamp(min=1)).tolist(),
        }


__all__ = ["RECALLS", "MatchedAnchors", "Reconvergence", "choose_recordings", "prompt_set"]
