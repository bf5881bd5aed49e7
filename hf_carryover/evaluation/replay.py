# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Acceptance along recorded responses: the rounds that assisted generation would take, without generating.

A lossless drafter does not change what the target says, so its rounds can be replayed on a response that is known.

- Greedy: proposals are compared with the recorded tokens. That is what the verifier does.
- Sampled: given that token `x` was committed, its proposal was accepted with probability `min(1, q(x) / p(x))`, since
  accepting commits `x` with probability `min(p(x), q(x))` and the target says it with probability `p(x)`. After a
  rejection the rejected token is distributed as `max(q - p, 0)`, whatever was committed instead.

A response is taken to have ended by itself: where `generate` stops at a length limit it proposes less in front of it.

So every system is measured on the very same responses, many at a time, and rejected rows are verified by the target
itself. Neither times nor outputs come out of it: those need `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..lookup import block_hints, carried_hints
from ..modeling_carryover import CarryoverDrafter
from ..target import TargetHead, check_fit
from ..training.anchors import block_labels, response_runs
from ..training.data import RecordingCollator, prepare_recordings
from ..training.loading import load_recordings
from ..training.verification import Branches, FrozenTarget


@dataclass
class ReplayedResponse:
    """
    The rounds of one recording.

    Args:
        id (`str`): Of the recording.
        accepted, committed, carried (`list[int]`): Accepted proposals, committed tokens and carried rows per round.
    """

    id: str
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Verification rounds."""
        return len(self.accepted)


@dataclass
class _Streams:
    """Where each running response stands; one stream per response, in increasing order."""

    sequence: torch.LongTensor
    anchor: torch.LongTensor
    carried: dict
    predictions: torch.LongTensor | None = None


@dataclass
class ReplayedRound:
    """
    What an observer of a [`Replay`] sees of a round: `num_streams` responses, one anchor each.

    Args:
        names (`list[str]`): The recording of each stream.
        input_ids (`torch.LongTensor` of shape `(num_streams, length)`): Its tokens.
        anchors (`torch.LongTensor` of shape `(num_streams,)`): Positions `a`.
        left (`torch.LongTensor` of shape `(num_streams,)`): Recorded tokens of the turn behind the anchor.
        tokens, exist (of shape `(num_streams, block_size)`): Recorded `x_{a+1} … x_{a+B}`, and which exist.
        carried (`dict`): What the drafter was given, see [`CarryoverDrafter.forward`]; empty without carry.
        predictions (`torch.LongTensor` of shape `(num_streams, block_size)`, *optional*):
            The target's likeliest next token behind each carried row.
        hidden_states (`torch.Tensor` of shape `(num_streams, block_size, target_hidden_size)`): Drafted.
        proposals (`torch.LongTensor` of shape `(num_streams, block_size)`), accepted (of shape `(num_streams,)`):
            `y_1 … y_B` and `m`.
        draft (`Callable[[dict], torch.Tensor]`): Drafts the same anchors with other carried rows; hidden states.
        likeliest (`Callable[[torch.Tensor], torch.LongTensor]`): Greedy proposals of hidden states.
    """

    names: list[str]
    input_ids: torch.LongTensor
    anchors: torch.LongTensor
    left: torch.LongTensor
    tokens: torch.LongTensor
    exist: torch.BoolTensor
    carried: dict
    predictions: torch.LongTensor | None
    hidden_states: torch.Tensor
    proposals: torch.LongTensor
    accepted: torch.LongTensor
    draft: Callable[[dict], torch.Tensor]
    likeliest: Callable[[torch.Tensor], torch.LongTensor]


class Replay:
    """
    Replays recordings with one drafter.

    Args:
        drafter ([`CarryoverDrafter`]): The drafter, in the dtype it is to be measured in.
        target (`PreTrainedModel`): Its target.
        temperature (`float`, *optional*, defaults to 0.0):
            Of the recordings: 0 for greedy responses, else the temperature they were sampled at (with no top-k or
            top-p).
        seed (`int`, *optional*, defaults to 0): Of the draws, with a temperature.
        observers (`Sequence[Callable[[ReplayedRound], None]]`, *optional*): Called with every round.

    Raises:
        ValueError: If drafter and target do not fit, or the temperature is negative.
    """

    def __init__(
        self,
        drafter: CarryoverDrafter,
        target: nn.Module,
        temperature: float = 0.0,
        seed: int = 0,
        observers: Sequence[Callable[[ReplayedRound], None]] = (),
    ):
        if temperature < 0:
            raise ValueError(f"`temperature` must be 0 (greedy) or positive, got {temperature}.")
        check_fit(drafter, target)
        self.drafter, self.temperature, self.seed = drafter.eval(), temperature, seed
        self.observers = list(observers)
        self.target = FrozenTarget(target, drafter.config.target_layer_ids)
        if drafter.config.carry:
            self.target.check_branches()
        self.head = TargetHead(self.target.model, drafter)
        self.generator = torch.Generator(device=drafter.device)

    @property
    def verifies(self) -> bool:
        """Whether rejected rows are verified, which needs the target's cache."""
        return self.drafter.config.carry

    @torch.no_grad()
    def __call__(self, recordings, batch_size: int = 16) -> list[ReplayedResponse]:
        """
        Args:
            recordings (`str` or `datasets.Dataset`): Recordings in any form [`load_recordings`] reads.
            batch_size (`int`, *optional*, defaults to 16): Recordings at a time.

        Returns:
            `list[ReplayedResponse]`: in the order of the recordings; those without a round are left out.
        """
        return replay_together({"": self}, recordings, batch_size)[""]

    def rounds(self, batch: dict, recorded, names: list[str]) -> list[ReplayedResponse]:
        """
        All rounds of a group of recordings, every running response one round at a time.

        Args:
            batch (`dict`): Of [`RecordingCollator`].
            recorded: What [`FrozenTarget.record`] made of it.
            names (`list[str]`): Ids of the recordings.
        """
        device = self.drafter.device
        self.generator.manual_seed(self.seed * 1_000_003 + int(batch["example_index"][0]))
        memory = self.drafter.remember(recorded.features)
        runs = response_runs(batch["response_mask"])
        results = [ReplayedResponse(name) for name in names]
        streams = self._next(batch, runs, torch.arange(len(names), device=device), None, {})
        while streams is not None:
            left = runs[streams.sequence, streams.anchor]
            proposals, accepted = self._round(batch, memory, recorded.logits, streams, names, left)
            committed = torch.minimum(accepted + 1, left)
            held = streams.carried["carried_mask"].sum(dim=1).tolist() if streams.carried else [0] * len(left)
            rows = zip(streams.sequence.tolist(), accepted.tolist(), committed.tolist(), held, left.tolist())
            for sequence, m, count, carried, most in rows:
                results[sequence].accepted.append(min(m, most))
                results[sequence].committed.append(count)
                results[sequence].carried.append(carried)
            goes_on = left > accepted + 1
            carried, predictions = self._carry(recorded, streams, proposals, accepted, goes_on)
            streams = self._next(
                batch, runs, streams.sequence, streams.anchor + committed, carried, goes_on, predictions
            )
        return results

    def _next(self, batch, runs, sequence, anchor, carried: dict, goes_on=None, predictions=None) -> _Streams | None:
        """
        The streams' next anchors. A response, or a later turn of it, starts at its own first token, as after a
        prefill, with nothing carried.
        """
        if anchor is None:
            anchor, goes_on = sequence.new_zeros(len(sequence)), torch.zeros_like(sequence, dtype=torch.bool)
        index = torch.arange(runs.shape[1], device=runs.device)
        # First tokens of turns that have a token behind them.
        mask = batch["response_mask"].bool()
        first = mask & ~torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1) & (runs > 0)
        ahead = first[sequence] & (index >= anchor.unsqueeze(1))
        start = torch.where(ahead, index, runs.shape[1]).min(dim=1).values
        anchor = torch.where(goes_on, anchor, start)
        running = anchor < runs.shape[1]
        if not running.any():
            return None
        kept = {name: value[running] for name, value in carried.items()}
        if kept:
            kept["carried_mask"] = kept["carried_mask"] & goes_on[running].unsqueeze(1)
        predictions = None if predictions is None else predictions[running]
        return _Streams(sequence[running], anchor[running], kept, predictions)

    def _round(
        self, batch, memory, target_logits, streams: _Streams, names: list[str], left: torch.LongTensor
    ) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Draft and judge: proposals `(num_streams, block_size)` and how many are accepted, `(num_streams,)`."""
        drafter, head = self.drafter, self.head
        anchors = batch["input_ids"][streams.sequence, streams.anchor]

        hints = block_hints(head, drafter, batch["input_ids"], streams.sequence, streams.anchor)

        def draft(carried: dict) -> torch.Tensor:
            return drafter(
                anchor_embeds=head.embed(anchors, drafter.device),
                anchor_positions=streams.anchor,
                sequence_index=streams.sequence,
                mask_embeds=head.mask_embeds,
                memory=memory,
                **hints,
                **carried,
            ).hidden_states

        hidden_states = draft(streams.carried)
        logits = self._logits(hidden_states)
        tokens, exist = block_labels(
            batch["input_ids"], batch["response_mask"], streams.sequence, streams.anchor, drafter.config.block_size
        )
        accepted = torch.zeros_like(anchors)
        alive = torch.ones_like(anchors, dtype=torch.bool)
        previous, proposals = anchors, []
        for k in range(tokens.shape[1]):
            scores = self._biased(logits[:, k], previous)
            if self.temperature:
                at = (streams.anchor + k).clamp(max=target_logits.shape[1] - 1)
                p = (target_logits[streams.sequence, at].float() / self.temperature).softmax(dim=-1)
                judged = alive & exist[:, k]
                previous, passed = self._draw((scores / self.temperature).softmax(dim=-1), p, tokens[:, k], judged)
            else:
                previous = self._argmax(scores)
                passed = (previous == tokens[:, k]) & exist[:, k]
            alive = alive & passed
            accepted += alive
            proposals.append(previous)
        drawn = torch.stack(proposals, dim=1)
        for observe in self.observers:
            observe(
                ReplayedRound(
                    names=[names[i] for i in streams.sequence.tolist()],
                    input_ids=batch["input_ids"][streams.sequence],
                    anchors=streams.anchor,
                    left=left,
                    tokens=tokens,
                    exist=exist,
                    carried=streams.carried,
                    predictions=streams.predictions,
                    hidden_states=hidden_states,
                    proposals=drawn,
                    accepted=accepted,
                    draft=draft,
                    likeliest=lambda states: self.likeliest(states, anchors),
                )
            )
        return drawn, accepted

    def likeliest(self, hidden_states: torch.Tensor, anchors: torch.LongTensor) -> torch.LongTensor:
        """Greedy proposals `(num_streams, block_size)` of drafted states, behind the tokens `anchors`."""
        logits, previous, proposals = self._logits(hidden_states), anchors, []
        for k in range(logits.shape[1]):
            previous = self._argmax(self._biased(logits[:, k], previous))
            proposals.append(previous)
        return torch.stack(proposals, dim=1)

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.drafter.logits(hidden_states, self.head.weight, self.head.bias)

    def _biased(self, logits: torch.Tensor, previous: torch.LongTensor) -> torch.Tensor:
        """Logits `(num_streams, output_vocab_size)` of one position, in float32, given the tokens before it."""
        scores, markov = logits.float(), self.drafter.markov_head
        return scores if markov is None else scores + markov(previous).float()

    def _argmax(self, scores: torch.Tensor) -> torch.LongTensor:
        best = scores.argmax(dim=-1)
        return best if self.head.token_ids is None else self.head.token_ids[best]

    def _draw(self, q: torch.Tensor, p: torch.Tensor, committed: torch.LongTensor, judged: torch.BoolTensor):
        """
        One proposal per stream given what the target committed, and whether it was accepted.

        Args:
            q (`torch.Tensor` of shape `(num_streams, output_vocab_size)`): Draft distribution.
            p (`torch.Tensor` of shape `(num_streams, vocab_size)`): The target's.
            committed (`torch.LongTensor` of shape `(num_streams,)`): Recorded tokens.
            judged (`torch.BoolTensor` of shape `(num_streams,)`): Whether all proposals before were accepted.
        """
        token_ids = self.head.token_ids
        share = p.gather(1, committed.unsqueeze(1)).squeeze(1)
        if token_ids is None:
            mine, within = q.gather(1, committed.unsqueeze(1)).squeeze(1), p
        else:
            slot = torch.searchsorted(token_ids, committed.contiguous()).clamp(max=len(token_ids) - 1)
            mine = q.gather(1, slot.unsqueeze(1)).squeeze(1) * (token_ids[slot] == committed)
            within = p[:, token_ids]
        uniform = torch.rand(share.shape, generator=self.generator, device=q.device)
        passed = judged & (uniform * share < mine)
        left_over = (q - within).clamp(min=0)
        # Where q is nowhere above p (equal up to rounding) a rejection has probability 0.
        rejected = judged & ~passed & (left_over.sum(dim=1) > 0)
        drawn = torch.multinomial(torch.where(rejected.unsqueeze(1), left_over, q), 1, generator=self.generator)
        drawn = drawn.squeeze(1) if token_ids is None else token_ids[drawn.squeeze(1)]
        return torch.where(passed, committed, drawn), passed

    def _verify(self, recorded, streams: _Streams, proposals, accepted, goes_on, predict: bool):
        """Which rows are rejected in streams that go on, the target's features there, and its predictions."""
        rows = torch.arange(1, proposals.shape[1] + 1, device=proposals.device)
        rejected = (rows > accepted.unsqueeze(1)) & goes_on.unsqueeze(1)
        branches = Branches(proposals, streams.sequence, streams.anchor, accepted, rejected)
        return rejected, *self.target.verify(recorded, branches, predict=predict)

    def _carry(self, recorded, streams: _Streams, proposals, accepted, goes_on) -> tuple[dict, torch.Tensor | None]:
        """The rejected rows of the streams that go on, verified by the target, and what it predicts behind them."""
        if not self.drafter.config.carry:
            return {}, None
        config = self.drafter.config
        token = config.carried_token
        predict = token == "prediction" or config.points_at_carried or bool(self.observers)
        rejected, features, predictions = self._verify(recorded, streams, proposals, accepted, goes_on, predict)
        rows = torch.arange(1, proposals.shape[1] + 1, device=proposals.device)
        carried = {
            "carried_features": features,
            "carried_positions": streams.anchor.unsqueeze(1) + rows,
            "carried_mask": rejected,
        }
        if token is not None:
            tokens = predictions if token == "prediction" else proposals
            carried["carried_embeds"] = self.head.embed(tokens, self.drafter.device)
        if predictions is not None:
            last = torch.where(goes_on, predictions.shape[1], 0)
            carried |= carried_hints(self.head, self.drafter, predictions, accepted, last)
        return carried, predictions


@torch.no_grad()
def replay_together(
    replays: dict[str, Replay], recordings, batch_size: int = 16, batch_tokens: int = 16384
) -> dict[str, list[ReplayedResponse]]:
    """
    Several replays of one target along the same recordings, which the target reads once for all of them.

    Args:
        replays (`dict[str, Replay]`): Of the same target, each with a drafter of its own.
        recordings (`str` or `datasets.Dataset`): Recordings in any form [`load_recordings`] reads.
        batch_size (`int`, *optional*, defaults to 16): Recordings at a time.
        batch_tokens (`int`, *optional*, defaults to 16384):
            Tokens at a time, padding included: bounds the memory where recordings are long.

    Returns:
        `dict[str, list[ReplayedResponse]]`: By the names of `replays`, in the order of the recordings; those without a
        round are left out.

    Raises:
        ValueError: If the replays are of different targets.
    """
    systems = list(replays.values())
    first = systems[0]
    if any(one.target.model is not first.target.model for one in systems):
        raise ValueError("Replays of different targets can't read recordings together. Replay them one by one.")
    vocab_size = first.drafter.config.vocab_size
    dataset = load_recordings(recordings, vocab_size=vocab_size)
    dataset = dataset.select([i for i, mask in enumerate(dataset["response_mask"]) if any(mask[1:])])
    names, prepared = dataset["id"], prepare_recordings(dataset, vocab_size)
    results: dict[str, dict[int, ReplayedResponse]] = {name: {} for name in replays}
    for chosen in _groups([len(example["input_ids"]) for example in prepared], batch_size, batch_tokens):
        batch = RecordingCollator()([prepared[i] for i in chosen])
        batch = {name: value.to(first.drafter.device) for name, value in batch.items()}
        recorded: dict[tuple, object] = {}
        for name, replay in replays.items():
            key = tuple(replay.drafter.config.target_layer_ids)
            if key not in recorded:
                alike = [one for one in systems if tuple(one.drafter.config.target_layer_ids) == key]
                recorded[key] = replay.target.record(
                    batch["input_ids"],
                    batch["attention_mask"],
                    keep_cache=any(one.verifies for one in alike),
                    keep_logits=any(one.temperature > 0 for one in alike),
                )
            replayed = replay.rounds(batch, recorded[key], [names[i] for i in chosen])
            results[name].update(zip(chosen, replayed))
    return {name: [found[i] for i in sorted(found) if found[i].rounds] for name, found in results.items()}


def _groups(lengths: list[int], batch_size: int, batch_tokens: int) -> list[list[int]]:
    """Indices by descending length: little is padded, and the streams of a group end together."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        group = groups[-1] if groups else None
        if group is None or len(group) == batch_size or (len(group) + 1) * lengths[group[0]] > batch_tokens:
            groups.append([])
        groups[-1].append(i)
    return groups


def acceptance_length(responses: list[ReplayedResponse]) -> float:
    """`τ`: committed tokens per round, micro-averaged; NaN without a round."""
    rounds = sum(response.rounds for response in responses)
    return sum(sum(response.committed) for response in responses) / rounds if rounds else float("nan")


__all__ = ["Replay", "ReplayedResponse", "ReplayedRound", "acceptance_length", "replay_together"]
