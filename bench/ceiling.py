# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
What is there to carry: what the target's words at rejected rows know that the drafter does not know without them.

    python -m bench.ceiling --target TARGET --recordings DIR --drafter NAME=DIR ... --output ceiling.json

A drafter without carry is replayed along recorded greedy answers, and the rows it had rejected are verified all the
same. Behind the first of them the target says a word for the position that is drafted next, and so on row by row.

- *First position*: how often that word is right, how often the first proposal is, and how often the word alone is.
- *By rank*: where both differ, the same by the place of the target's word in the drafter's own order. A drafter can
  gain by taking the word only where it is right more often than what it would have proposed.
- *Oracle*: τ if every round accepted the longer of both, the drafter's proposals or the target's words at the rejected
  rows. It never mixes the two, so it bounds nothing; it says what choosing rightly between them would be worth.
"""

from __future__ import annotations

from collections import Counter

import torch

from hf_carryover import CarryoverDrafter
from hf_carryover.evaluation.replay import Replay, ReplayedRound
from hf_carryover.evaluation.summary import pipe_table

from .along_answers import run


RANKS = (2, 4, 8, 32)


class WatchedReplay(Replay):
    """A replay without carry whose observers see the target's words for the positions drafted next, -1 for none."""

    verifies = True

    def _carry(self, recorded, streams, proposals, accepted, goes_on):
        rejected, _, predictions = self._verify(recorded, streams, proposals, accepted, goes_on, predict=True)
        return {}, aligned(predictions, rejected, accepted)


def aligned(predictions: torch.LongTensor, rejected: torch.BoolTensor, accepted: torch.LongTensor) -> torch.LongTensor:
    """
    Predictions behind verified rows `(num_streams, block_size)` by the position they are for, counted from the next
    anchor: the first rejected row's comes first. -1 where there is none.
    """
    count = predictions.shape[1]
    places = accepted.unsqueeze(1) + torch.arange(count, device=predictions.device)
    shown = torch.where(rejected, predictions, -1)
    shown = torch.cat([shown, torch.full_like(shown, -1)], dim=1)
    return shown.gather(1, places)


class Ceiling:
    """Counts over the rounds of one drafter; an observer of its replay."""

    def __init__(self, drafter: CarryoverDrafter):
        self.drafter, self.counts = drafter, Counter()
        self.replay: WatchedReplay | None = None

    def __call__(self, seen: ReplayedRound) -> None:
        self.counts["rounds"] += len(seen.names)
        self.counts["accepted"] += int(torch.minimum(seen.accepted, seen.left).sum())
        if seen.predictions is None:
            return
        anchors = seen.input_ids[torch.arange(len(seen.names)), seen.anchors]
        scores = self.replay._biased(self.replay._logits(seen.hidden_states)[:, 0], anchors)
        tokens = torch.arange(scores.shape[1]) if self.replay.head.token_ids is None else self.replay.head.token_ids
        for i, words in enumerate(seen.predictions):
            if words[0] < 0 or not bool(seen.exist[i, 0]):
                continue
            right = (words == seen.tokens[i]) & seen.exist[i]
            run = int(right.long().cumprod(dim=0).sum())
            self.counts["oracle"] += max(0, run - int(seen.accepted[i]))
            own = bool(seen.proposals[i, 0] == seen.tokens[i, 0])
            self._count("all", bool(right[0]), own)
            if words[0] == seen.proposals[i, 0]:
                self._count("same", bool(right[0]), own)
                continue
            slot = (tokens == words[0]).nonzero()
            rank = int((scores[i] > scores[i, slot[0, 0]]).sum()) if len(slot) else len(tokens)
            band = next((f"below {r}" for r in RANKS if rank < r), f"{RANKS[-1]} and more")
            self._count(band, bool(right[0]), own)

    def _count(self, kind: str, word: bool, own: bool) -> None:
        for name, value in (("n", True), ("word", word), ("own", own), ("word_alone", word and not own)):
            self.counts[f"{kind}/{name}"] += value

    def result(self) -> dict:
        """Shares by kind, and τ with and without the oracle."""
        counts = self.counts
        kinds = ["all", "same", *(f"below {r}" for r in RANKS), f"{RANKS[-1]} and more"]
        shares = {
            kind: {"rounds": counts[f"{kind}/n"]}
            | {name: counts[f"{kind}/{name}"] / max(1, counts[f"{kind}/n"]) for name in ("word", "own", "word_alone")}
            for kind in kinds
        }
        tau = 1 + counts["accepted"] / counts["rounds"]
        return {"rounds": counts["rounds"], "tau": tau, "oracle_gain": counts["oracle"] / counts["rounds"] / tau} | {
            "first_position": shares
        }


def table(report: dict) -> str:
    """All drafters, as Markdown."""
    parts = []
    for name, result in report["drafters"].items():
        head = ["rank of the target's word", "rounds", "target's word right", "first proposal right", "word alone"]
        label = {"all": "any", "same": "first: it is the proposal"}
        body = [
            [label.get(kind, kind), str(s["rounds"]), *(f"{s[key]:.3f}" for key in ("word", "own", "word_alone"))]
            for kind, s in result["first_position"].items()
        ]
        bands = [kind for kind in result["first_position"] if kind not in label]
        better = [result["first_position"][kind] for kind in bands]
        moved = sum(s["rounds"] * max(0.0, s["word"] - s["own"]) for s in better)
        share = moved / result["first_position"]["all"]["rounds"]
        parts.append(
            f"{name}: {result['rounds']} rounds, τ {result['tau']:.2f} (all rounds together); with the oracle "
            f"{result['oracle_gain']:+.1%}. Taking the word in the bands where it is right more often than the "
            f"proposal would put right the first position of {share:.1%} of the rounds with rejected rows.\n\n"
            + pipe_table(head, body)
        )
    return "\n\n".join(parts)


def measure(folder, target, recordings, batch_size: int) -> dict:
    """The entry of one drafter, whose carry, if it has one, is left out."""
    drafter = CarryoverDrafter.from_pretrained(folder, carry=False, dtype=target.dtype).eval()
    ceiling = Ceiling(drafter)
    ceiling.replay = WatchedReplay(drafter, target, observers=[ceiling])
    ceiling.replay(recordings, batch_size=batch_size)
    return ceiling.result()


def main(argv: list[str] | None = None) -> int:
    return run(argv, __doc__, measure, table)


if __name__ == "__main__":
    raise SystemExit(main())
