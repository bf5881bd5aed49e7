# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
One generation, round by round: what was accepted, rejected and corrected, what of the rejected rows re-converged, and
what the carry changed.

```python
>>> rounds = trace(model, drafter, inputs["input_ids"], max_new_tokens=64)
>>> print(to_text(rounds, tokenizer))          # for a terminal
>>> Path("view.html").write_text(to_html(rounds, tokenizer))
```
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field

import torch

from ..modeling_carryover import CarryoverDrafter
from .replay import Replay, ReplayedRound


@dataclass
class TracedRound:
    """
    One verification round.

    Args:
        anchor (`int`): The token that the block follows.
        proposals (`list[int]`): `y_1 … y_B`, those behind the end of the text left out.
        accepted (`int`): `m`.
        correction (`int`, *optional*): The target's token behind the accepted ones; `None` where the text ends.
        carried (`list[int]`): Proposals of the round before whose rejected rows this draft could read.
        predictions (`list[int]`): The target's word behind each of them.
        reconverged (`list[bool]`): Whether that word is what the text has there.
        without (`list[int]`, *optional*): What the same drafter proposes at the same anchor with nothing carried.
        without_accepted (`int`, *optional*): How many of those would have been accepted.
    """

    anchor: int
    proposals: list[int]
    accepted: int
    correction: int | None
    carried: list[int] = field(default_factory=list)
    predictions: list[int] = field(default_factory=list)
    reconverged: list[bool] = field(default_factory=list)
    without: list[int] | None = None
    without_accepted: int | None = None


class RoundTracer:
    """An observer of a [`Replay`]; `rounds` maps the id of a recording to its [`TracedRound`]s."""

    def __init__(self):
        self.rounds: dict[str, list[TracedRound]] = {}
        self._before: dict[str, list[int]] = {}

    def __call__(self, seen: ReplayedRound) -> None:
        without = seen.likeliest(seen.draft({})) if seen.carried else None
        for row, name in enumerate(seen.names):
            self.rounds.setdefault(name, []).append(self._round(seen, row, name, without))
            self._before[name] = seen.proposals[row].tolist()

    def _round(self, seen: ReplayedRound, row: int, name: str, without: torch.Tensor | None) -> TracedRound:
        left = int(seen.exist[row].sum())
        tokens = seen.tokens[row, :left].tolist()
        accepted = min(int(seen.accepted[row]), left)
        anchor = int(seen.anchors[row])
        traced = TracedRound(
            anchor=int(seen.input_ids[row, anchor]),
            proposals=seen.proposals[row, :left].tolist(),
            accepted=accepted,
            correction=tokens[accepted] if accepted < left else self._behind(seen, row, left),
        )
        if not seen.carried or not seen.carried["carried_mask"][row].any():
            return traced
        for slot in seen.carried["carried_mask"][row].nonzero().flatten().tolist():
            # The row at position p speaks of p + 1; the anchor's own position is the first that is not committed.
            label = int(seen.carried["carried_positions"][row, slot]) - anchor
            prediction = int(seen.predictions[row, slot])
            traced.carried.append(self._before[name][slot])
            traced.predictions.append(prediction)
            traced.reconverged.append(0 <= label < left and tokens[label] == prediction)
        traced.without = without[row, :left].tolist()
        same = [a == b for a, b in zip(traced.without, tokens)]
        traced.without_accepted = same.index(False) if False in same else left
        return traced

    @staticmethod
    def _behind(seen: ReplayedRound, row: int, left: int) -> int | None:
        """The bonus token of a block that was accepted as a whole, if the text goes on."""
        if int(seen.left[row]) <= left:
            return None
        return int(seen.input_ids[row, int(seen.anchors[row]) + left + 1])


def trace(target, drafter: CarryoverDrafter, input_ids: torch.LongTensor, max_new_tokens: int = 64):
    """
    The rounds of a greedy generation.

    Args:
        target (`PreTrainedModel`): The target.
        drafter ([`CarryoverDrafter`]): Its drafter.
        input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): The prompt.
        max_new_tokens (`int`, *optional*, defaults to 64): Length limit.

    Returns:
        `list[TracedRound]`: Without the last round where it is cut by the limit, as [`Replay`] sees it.
    """
    output = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    prompt, response = input_ids[0].tolist(), output[0, input_ids.shape[1] :].tolist()
    tracer = RoundTracer()
    Replay(drafter, target, observers=[tracer])([{"id": "trace", "prompt_ids": prompt, "response_ids": response}])
    return tracer.rounds.get("trace", [])


_ANSI = {
    "accepted": "32",
    "rejected": "31;9",
    "correction": "34;1",
    "reconverged": "33;1",
    "other": "2",
    "gain": "35;1",
}
_CSS = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;color:#222}
table{border-collapse:collapse;width:100%}td,th{padding:.3em .6em;border-bottom:1px solid #ddd;text-align:left;
vertical-align:top}code{font:13px ui-monospace,monospace;white-space:pre;border-radius:3px;padding:1px 2px;
margin-right:2px;display:inline-block}
.accepted{background:#d3f0d3}.rejected{background:#f7d4d4;text-decoration:line-through}
.correction{background:#d6e4fb}.reconverged{background:#fdeeb5}.other{color:#888}
.gain{color:#7a1fa2;font-weight:bold}.loss{color:#a33}
"""


def _pieces(traced: TracedRound) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The block as (kind, token), and what the target said behind the carried rows."""
    block = [("accepted" if k < traced.accepted else "rejected", y) for k, y in enumerate(traced.proposals)]
    if traced.correction is not None:
        block.insert(traced.accepted, ("correction", traced.correction))
    said = [("reconverged" if good else "other", y) for y, good in zip(traced.predictions, traced.reconverged)]
    return block, said


def _word(tokenizer, token: int) -> str:
    return tokenizer.decode([token]).replace("\n", "⏎") or "∅"


def _change(traced: TracedRound) -> int | None:
    return None if traced.without_accepted is None else traced.accepted - traced.without_accepted


def to_text(rounds: list[TracedRound], tokenizer, color: bool = True) -> str:
    """
    For a terminal: a line a round; green accepted, red struck through rejected, blue the target's own token, behind
    `|` what the target said behind the rejected rows that were carried into the round, yellow where the text has it.
    """

    def paint(kind: str, text: str) -> str:
        return f"\x1b[{_ANSI[kind]}m{text}\x1b[0m" if color else f"{kind[0]}:{text}"

    lines = []
    for number, traced in enumerate(rounds, start=1):
        block, said = _pieces(traced)
        words = " ".join(paint(kind, _word(tokenizer, token)) for kind, token in block)
        line = f"{number:>3}  {_word(tokenizer, traced.anchor)} → {words}"
        if said:
            line += "  |  " + " ".join(paint(kind, _word(tokenizer, token)) for kind, token in said)
        change = _change(traced)
        if change:
            line += "  " + paint("gain", f"{change:+d} by carry")
        lines.append(line)
    return "\n".join(lines)


def to_html(rounds: list[TracedRound], tokenizer, title: str = "Rounds of one generation") -> str:
    """A page of its own, without scripts or anything from elsewhere."""

    def mark(pieces: list[tuple[str, int]]) -> str:
        return "".join(f'<code class="{kind}">{html.escape(_word(tokenizer, token))}</code>' for kind, token in pieces)

    body = []
    for number, traced in enumerate(rounds, start=1):
        block, said = _pieces(traced)
        change = _change(traced)
        note = "" if change is None else "±0" if change == 0 else f"{change:+d}"
        kind = "gain" if (change or 0) > 0 else "loss" if (change or 0) < 0 else "other"
        without = "" if traced.without is None else mark([("other", token) for token in traced.without])
        body.append(
            f"<tr><td>{number}</td><td>{mark([('other', traced.anchor)])}</td><td>{mark(block)}</td>"
            f'<td>{mark(said)}</td><td>{without}</td><td class="{kind}">{note}</td></tr>'
        )
    committed = sum(traced.accepted + (traced.correction is not None) for traced in rounds)
    tau = f"{committed / len(rounds):.2f}" if rounds else "–"
    gain = sum(_change(traced) or 0 for traced in rounds)
    legend = "".join(
        f'<code class="{kind}">{text}</code> '
        for kind, text in {
            "accepted": "accepted",
            "rejected": "rejected",
            "correction": "the target's own token",
            "reconverged": "said behind a rejected token, and right",
        }.items()
    )
    head = "".join(
        f"<th>{text}</th>"
        for text in ("round", "anchor", "block", "carried rows say", "block without carry", "accepted by carry")
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_CSS}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<p>{len(rounds)} rounds, τ = {tau}; carry changed the number of accepted tokens by {gain:+d}.</p>"
        f"<p>{legend}</p><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></body></html>\n"
    )


__all__ = ["RoundTracer", "TracedRound", "to_html", "to_text", "trace"]
