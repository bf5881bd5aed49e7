# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
What a drafter reads of its target, and what it misses.

    python -m bench.reading --target TARGET --recordings DIR --drafter NAME=DIR ... --output reading.json

- *Taps*: the fused state is a sum, `fc(h) = Σ_l W_l h_l` over the tapped layers. Root mean squares of the features
  `h_l` and of their parts `W_l h_l`, medians over rows: a part that is small is not read.
- *Copies*: the anchors of all rounds along recorded answers, by what looking up the last two tokens in the text so far
  says the next one is (prompt lookup): the right token, a wrong one, or nothing. For each kind its share of the rounds
  and how often the first proposal is accepted. A drafter that can copy accepts nearly all where the lookup is right.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_carryover import CarryoverDrafter
from hf_carryover.evaluation.analysis import prompt_set
from hf_carryover.evaluation.bootstrap import PairedBootstrap, ratio
from hf_carryover.evaluation.replay import Replay, ReplayedResponse
from hf_carryover.evaluation.summary import cell, pipe_table
from hf_carryover.lookup import look_up
from hf_carryover.training.verification import FrozenTarget

from .along_answers import run
from .carry_size import rms


KINDS = ("right", "wrong", "none")


@torch.no_grad()
def taps(drafter: CarryoverDrafter, target, recordings) -> list[dict]:
    """For each tapped layer `layer`, and the medians over rows of `feature` and `part`."""
    layers = list(drafter.config.target_layer_ids)
    frozen, width = FrozenTarget(target, layers), drafter.config.target_hidden_size
    weights = drafter.fc.weight.float().split(width, dim=1)
    seen: list[tuple[list, list]] = [([], []) for _ in layers]
    for ids in recordings["input_ids"]:
        tokens = torch.tensor([ids])
        features = frozen.record(tokens, torch.ones_like(tokens), keep_cache=False, keep_logits=False).features[0]
        for (own, parts), states, weight in zip(seen, features.float().split(width, dim=-1), weights, strict=True):
            own.append(rms(states))
            parts.append(rms(states @ weight.T))
    return [
        {"layer": k, "feature": float(torch.cat(own).median()), "part": float(torch.cat(parts).median())}
        for k, (own, parts) in zip(layers, seen, strict=True)
    ]


def count_copies(response: ReplayedResponse, ids: list[int], mask: list[int]) -> dict[str, list[int]]:
    """Rounds of a response, and first proposals accepted, by kind: `{kind: [rounds, accepted]}`."""
    counts = {kind: [0, 0] for kind in KINDS}
    anchor = mask.index(1)
    for accepted, committed in zip(response.accepted, response.committed, strict=True):
        if anchor + 1 >= len(ids):
            break
        found, size = look_up(np.array(ids[: anchor + 1]), 2, 1)
        kind = "none" if size < 2 else "right" if found[0] == ids[anchor + 1] else "wrong"
        counts[kind][0] += 1
        counts[kind][1] += accepted > 0
        anchor += committed
    return counts


def copies(drafter: CarryoverDrafter, target, recordings, batch_size: int) -> dict:
    """By kind its `share` of the rounds and the `accepted` share of its first proposals, all sets together."""
    texts = {row["id"]: row for row in recordings}
    responses = [r for r in Replay(drafter, target)(recordings, batch_size=batch_size) if r.rounds]
    counts = [count_copies(r, list(texts[r.id]["input_ids"]), list(texts[r.id]["response_mask"])) for r in responses]
    bootstrap = PairedBootstrap([prompt_set(r.id) for r in responses])
    rounds = np.array([sum(count[kind][0] for kind in KINDS) for count in counts])
    result = {}
    for kind in KINDS:
        own, accepted = (np.array([count[kind][i] for count in counts]) for i in (0, 1))
        result[kind] = {
            "share": bootstrap(lambda w, own=own: ratio(w, own, rounds)).to_dict(),
            "accepted": bootstrap(lambda w, own=own, accepted=accepted: ratio(w, accepted, own)).to_dict(),
        }
    return result


def tables(report: dict) -> str:
    """Both, as Markdown."""
    parts = []
    for name, result in report["drafters"].items():
        body = [[str(t["layer"]), f"{t['feature']:.1f}", f"{t['part']:.2f}"] for t in result["taps"]]
        parts.append(f"{name}:\n\n" + pipe_table(["tapped layer", "feature", "its part of the fused state"], body))
    names = list(report["drafters"])
    head = ["looking up two tokens gives", "share of rounds", *(f"first proposal accepted, {name}" for name in names)]
    words = {"right": "the right next token", "wrong": "a wrong one", "none": "nothing"}
    body = [
        [words[kind], cell(report["drafters"][names[-1]]["copies"][kind]["share"])]
        + [cell(report["drafters"][name]["copies"][kind]["accepted"]) for name in names]
        for kind in KINDS
    ]
    return "\n\n".join([*parts, pipe_table(head, body)])


def measure(folder, target, recordings, batch_size: int) -> dict:
    """The entry of one drafter."""
    drafter = CarryoverDrafter.from_pretrained(folder, dtype=target.dtype).eval()
    return {"taps": taps(drafter, target, recordings), "copies": copies(drafter, target, recordings, batch_size)}


def main(argv: list[str] | None = None) -> int:
    return run(argv, __doc__, measure, tables)


if __name__ == "__main__":
    raise SystemExit(main())
