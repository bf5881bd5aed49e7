# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The blocks a carryover step takes its loss of: first draft, verification, shift, and the rows that are carried.

Three ways lead to them: computed on the spot, read from disk where an earlier step or run has computed them, and for
the warm-up taken from the recording.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from transformers import Trainer

from ..lookup import block_hints, carried_hints
from ..modeling_carryover import CarryoverDrafter
from ..target import TargetHead
from .anchors import (
    Blocks,
    accepted_prefix,
    block_labels,
    response_runs,
    sample_anchors,
    sample_draws,
    to_draft_labels,
)
from .arguments import CarryoverTrainingArguments
from .bank import DraftBank, FirstDrafts
from .verification import Branches, FrozenTarget, RecordedPass


logger = logging.getLogger(__name__)


class DraftVerifyDraft(Trainer):
    """The part of [`CarryoverTrainer`] that drafts; what it uses of the trainer is declared here."""

    args: CarryoverTrainingArguments
    target: FrozenTarget
    drafter: CarryoverDrafter
    head: TargetHead
    bank: DraftBank | None
    first_drafter: CarryoverDrafter
    skipped_sequences: int
    skipped_blocks: int

    def add_anchors(self, batch: dict, step: int) -> None:
        """
        Sample anchors into `batch` as `sequence_index` and `anchor_positions`, and with a `draft_temperature` the
        `draws` of their first drafts.
        """
        args, examples = self.args, batch["example_index"]
        batch["sequence_index"], batch["anchor_positions"] = sample_anchors(
            batch["response_mask"], examples, args.anchors_per_response, args.seed, step
        )
        if args.draft_temperature > 0:
            block_size = self.drafter.config.block_size
            batch["draws"] = sample_draws(batch["sequence_index"], examples, block_size, args.seed, step)

    def _label_weights(self, batch: dict, sequence_index, positions):
        """
        Draft labels and weights of blocks, and the recorded tokens and whether they exist, each
        `(num_blocks, block_size)`. A token that the draft vocabulary lacks exists with weight 0.
        """
        block_size = self.drafter.config.block_size
        tokens, exist = block_labels(batch["input_ids"], batch["response_mask"], sequence_index, positions, block_size)
        token_ids = self.head.token_ids
        labels, valid = to_draft_labels(tokens, exist, None if token_ids is None else token_ids.to(tokens.device))
        return labels, valid * self.weights.to(valid.device), tokens, exist

    def _drop_non_finite(self, recorded: RecordedPass, attention_mask: torch.Tensor) -> torch.BoolTensor:
        """Zero and count sequences whose features or logits are not finite; returns which sequences are healthy."""
        finite = torch.isfinite(recorded.features).all(dim=-1)
        if recorded.logits is not None:  # -inf is a token that the target never produces
            finite &= ~(recorded.logits.isnan() | recorded.logits.isposinf()).any(dim=-1)
        healthy = (finite | (attention_mask == 0)).all(dim=1)
        if not bool(finite.all()):
            # Padding too: nothing sees it, but a weight of 0 times NaN is NaN. Where it counts, 0 has no gradient.
            keep = (healthy.unsqueeze(1) & finite).unsqueeze(-1)
            recorded.features = torch.where(keep, recorded.features, 0.0)
            if recorded.logits is not None:
                recorded.logits = torch.where(keep, recorded.logits, 0.0)
        if not bool(healthy.all()):
            bad = int((~healthy).sum())
            self.skipped_sequences += bad
            logger.warning(
                f"Skipped {bad} recordings whose target features are not finite ({self.skipped_sequences} so far). "
                "Run the target in a wider dtype, or remove them."
            )
        return healthy

    def _carry_recorded(self, batch: dict, recorded: RecordedPass, blocks: Blocks) -> None:
        """
        Warm-up: let blocks carry recorded rows instead of rejected ones, `a … a + B - 1 - m` for an `m` drawn at
        random. Their states do predict what is to be drafted, so that a drafter soon learns where to look; how far
        rejected rows are to be trusted it learns afterwards.
        """
        config = self.drafter.config
        if not config.carry:
            return
        offsets = torch.arange(config.block_size, device=blocks.positions.device)
        _, exist = block_labels(
            batch["input_ids"], batch["response_mask"], blocks.sequence_index, blocks.positions, config.block_size
        )
        rng = np.random.default_rng([self.args.seed, self.state.global_step, *batch["example_index"].tolist()])
        rows = torch.from_numpy(rng.integers(0, config.block_size + 1, size=(len(exist), 1))).to(exist.device)
        places = (blocks.positions.unsqueeze(1) + offsets).clamp(max=batch["input_ids"].shape[1] - 1)
        sequences = blocks.sequence_index.unsqueeze(1)
        blocks.carried = {
            "carried_features": recorded.features[sequences, places],
            "carried_positions": blocks.positions.unsqueeze(1) + offsets,
            "carried_mask": exist & (offsets < rows) & blocks.counted.unsqueeze(1),
        }
        if config.carried_token is not None:
            # A recorded row's own token is the proposal there, the recorded next one what the target said.
            shift = 1 if config.carried_token == "prediction" else 0
            places = (places + shift).clamp(max=batch["input_ids"].shape[1] - 1)
            blocks.carried["carried_embeds"] = self.head.embed(batch["input_ids"][sequences, places], exist.device)

    # First drafts kept on disk

    def _bank_paths(self, batch: dict) -> list[Path]:
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        examples = batch["example_index"].tolist()
        return [
            self.bank.path(ids[:length], example)
            for ids, length, example in zip(batch["input_ids"], lengths, examples, strict=True)
        ]

    @torch.no_grad()
    def _fill_bank(self, batch: dict) -> None:
        """
        Draft and verify the recordings of a batch, and keep those that the bank does not hold. All of them, for the
        same reason as in [`FrozenTarget.record`]: alone a recording would round differently.
        """
        paths = self._bank_paths(batch)
        missing = [row for row, path in enumerate(paths) if not path.exists()]
        if not missing:
            return
        names = ("input_ids", "attention_mask", "response_mask", "example_index")
        batch = {name: batch[name] for name in names}
        self.add_anchors(batch, step=0)
        recorded = self.target.record(batch["input_ids"], batch["attention_mask"], keep_cache=True, keep_logits=False)
        healthy = self._drop_non_finite(recorded, batch["attention_mask"])
        self.target.remember(batch["input_ids"], batch["attention_mask"], recorded.features)
        sequence_index, positions = batch["sequence_index"], batch["anchor_positions"]
        blocks = Blocks(sequence_index, positions, healthy[sequence_index], carried={})
        anchors = batch["input_ids"][sequence_index, positions]
        drafter = self.first_drafter
        hidden = self._draft(drafter, recorded.features, batch["input_ids"], blocks).hidden_states
        proposals = self.propose(hidden, anchors, self.args.draft_temperature, batch.get("draws"), drafter)
        _, _, tokens, exist = self._label_weights(batch, sequence_index, positions)
        accepted = accepted_prefix(proposals, tokens, exist)
        kept = blocks.counted & (response_runs(batch["response_mask"])[sequence_index, positions] >= accepted + 2)
        sequence_index, positions = sequence_index[kept], positions[kept]
        accepted, proposals = accepted[kept], proposals[kept]
        rejected = torch.arange(1, proposals.shape[1] + 1, device=proposals.device) > accepted.unsqueeze(1)
        branches = Branches(proposals, sequence_index, positions, accepted, rejected)
        features, predictions = self.target.verify(recorded, branches, predict=True)
        for row in missing:
            own = (sequence_index == row) & torch.isfinite(features).flatten(1).all(dim=1)
            drafts = FirstDrafts(positions[own], accepted[own], proposals[own], predictions[own])
            drafts.features = features[own][rejected[own]]
            self.bank.save(paths[row], drafts)

    def _banked(self, batch: dict, healthy: torch.BoolTensor) -> Blocks:
        """The shifted anchors and carried rows of the first drafts in the bank."""
        config, device = self.drafter.config, batch["input_ids"].device
        paths = self._bank_paths(batch)
        drafts = [self.bank.load(path, with_features=config.carries_states) for path in paths]
        if any(one is None for one in drafts):  # damaged, and removed
            self._fill_bank(batch)
            drafts = [self.bank.load(path, with_features=config.carries_states) for path in paths]
        rows = [len(one.positions) for one in drafts]
        sequence_index = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)).to(device)
        anchors, accepted, proposals, predictions = (
            torch.cat([getattr(one, name) for one in drafts]).to(device)
            for name in ("positions", "accepted", "proposals", "predictions")
        )
        if not len(anchors):  # one block that doesn't count, so that there is a graph
            one = batch["input_ids"].new_zeros(1)
            return Blocks(one, one, one > 0, carried={}, first_accepted=one)
        blocks = Blocks(sequence_index, anchors + accepted + 1, healthy[sequence_index], {}, first_accepted=accepted)
        if config.carry:
            offsets = torch.arange(1, proposals.shape[1] + 1, device=device)
            rejected = (offsets > accepted.unsqueeze(1)) & blocks.counted.unsqueeze(1)
            width = (*proposals.shape, config.feature_size)
            features = (
                torch.cat([one.dense_features() for one in drafts]).to(device)
                if config.carries_states
                else torch.zeros(width, device=device)
            )
            blocks.carried = {
                "carried_features": features,
                "carried_positions": anchors.unsqueeze(1) + offsets,
                "carried_mask": rejected,
            }
            if config.carried_token is not None:
                tokens = predictions if config.carried_token == "prediction" else proposals
                blocks.carried["carried_embeds"] = self.head.embed(tokens, device)
            blocks.carried |= self._pointed(predictions, blocks)
        return blocks

    def _draft(self, model, features, input_ids, blocks: Blocks, previous=None, row_loss=None):
        """
        Draft blocks of recorded `input_ids`; their losses too where `row_loss` is given, see
        [`CarryoverDrafter.forward`].
        """
        anchors = input_ids[blocks.sequence_index, blocks.positions]
        drafter = model if isinstance(model, CarryoverDrafter) else self.drafter  # else it is wrapped
        hints = block_hints(self.head, drafter, input_ids, blocks.sequence_index, blocks.positions)
        head = {} if row_loss is None else {"head_weight": self.head.weight, "head_bias": self.head.bias}
        embeds = self.head.embed(anchors, features.device).detach()
        return model(
            # What doesn't count must be finite all the same: 0 times NaN is NaN.
            anchor_embeds=torch.where(blocks.counted.unsqueeze(1), embeds, 0.0),
            anchor_positions=blocks.positions,
            features=features,
            sequence_index=blocks.sequence_index,
            mask_embeds=self.head.mask_embeds,
            previous_ids=previous,
            row_loss=row_loss,
            max_logits=self.args.max_logits,
            **hints,
            **head,
            **blocks.carried,
        )

    @torch.no_grad()
    def _shift(self, batch: dict, recorded: RecordedPass, blocks: Blocks, draws: torch.Tensor | None) -> Blocks:
        """Steps 1 to 3: first draft, verification, and the shifted anchors with their carried rows."""
        anchors = batch["input_ids"][blocks.sequence_index, blocks.positions]
        hidden = self._draft(self.drafter, recorded.features, batch["input_ids"], blocks).hidden_states
        proposals = self.propose(hidden, anchors, self.args.draft_temperature, draws)
        _, _, tokens, exist = self._label_weights(batch, blocks.sequence_index, blocks.positions)
        accepted = accepted_prefix(proposals, tokens, exist)
        # x_{a'} must be the target's own token and have a recorded successor.
        runs = response_runs(batch["response_mask"])[blocks.sequence_index, blocks.positions]
        kept = blocks.counted & (runs >= accepted + 2)
        counted = kept
        if not kept.any():  # keep one, uncounted, so that there is a graph
            kept = torch.arange(len(kept), device=kept.device) == 0
        last = batch["input_ids"].shape[1] - 1  # the uncounted one may be shifted past it
        shifted = Blocks(
            sequence_index=blocks.sequence_index[kept],
            positions=(blocks.positions + accepted + 1)[kept].clamp(max=last),
            counted=counted[kept],
            carried={},
            first_accepted=accepted[kept],
        )
        if self.drafter.config.carry:
            self._carry(recorded, shifted, proposals[kept], blocks.positions[kept])
        return shifted

    def _carry(self, recorded: RecordedPass, shifted: Blocks, proposals: torch.LongTensor, anchor_positions) -> None:
        """Step 2 for the rejected rows of the blocks that are kept: verify them, and let `shifted` carry them."""
        rows = torch.arange(1, proposals.shape[1] + 1, device=proposals.device)
        # A block that doesn't count carries nothing: its sequence may be one whose features are not finite.
        rejected = (rows > shifted.first_accepted.unsqueeze(1)) & shifted.counted.unsqueeze(1)
        branches = Branches(
            tokens=proposals,
            sequence_index=shifted.sequence_index,
            anchor_positions=anchor_positions,
            accepted=shifted.first_accepted,
            verify=rejected,
        )
        config = self.drafter.config
        token = config.carried_token
        predict = token == "prediction" or config.points_at_carried
        features, predictions = self.target.verify(recorded, branches, predict=predict)
        finite = torch.isfinite(features).flatten(1).all(dim=1)
        if not bool(finite.all()):
            bad = int((~finite).sum())
            self.skipped_blocks += bad
            features = torch.where(finite[:, None, None], features, 0.0)
            logger.warning(f"Skipped {bad} blocks with verified states not finite ({self.skipped_blocks} so far).")
        shifted.counted = shifted.counted & finite
        shifted.carried = {
            "carried_features": features,
            "carried_positions": anchor_positions.unsqueeze(1) + rows,
            "carried_mask": rejected & finite.unsqueeze(1),
        }
        if token is not None:
            tokens = predictions if token == "prediction" else proposals
            shifted.carried["carried_embeds"] = self.head.embed(tokens, features.device)
        if predictions is not None:
            shifted.carried |= self._pointed(predictions, shifted)

    def _pointed(self, predictions: torch.LongTensor, blocks: Blocks) -> dict:
        """What blocks behind a first draft point at of the target's `predictions` behind its rows."""
        last = torch.where(blocks.counted, predictions.shape[1], 0)
        return carried_hints(self.head, self.drafter, predictions, blocks.first_accepted, last)

    @torch.no_grad()
    def propose(self, hidden_states, anchors, temperature: float = 0.0, draws=None, drafter=None) -> torch.LongTensor:
        """
        Proposals of drafted states `(num_blocks, block_size, target_hidden_size)`, block by block within
        `args.max_logits`; the other arguments are those of [`~DraftVerifyDraft.roll_out`].
        """
        drafter = drafter or self.drafter
        most = max(1, self.args.max_logits // (hidden_states.shape[1] * self.head.weight.shape[0]))
        proposals = []
        for start in range(0, len(anchors), most):
            part = slice(start, start + most)
            logits = drafter.logits(hidden_states[part], self.head.weight, self.head.bias)
            drawn = None if draws is None else draws[part]
            proposals.append(self.roll_out(logits, anchors[part], temperature, drawn, drafter))
        return torch.cat(proposals)

    @torch.no_grad()
    def roll_out(
        self,
        logits: torch.Tensor,
        anchors: torch.LongTensor,
        temperature: float = 0.0,
        draws: torch.Tensor | None = None,
        drafter: CarryoverDrafter | None = None,
    ) -> torch.LongTensor:
        """
        Proposals `(num_blocks, block_size)`, target ids, from base logits (without Markov bias), left to right.

        Args:
            logits (`torch.Tensor` of shape `(num_blocks, block_size, output_vocab_size)`): Of the target's head.
            anchors (`torch.LongTensor` of shape `(num_blocks,)`): Anchor tokens.
            temperature (`float`, *optional*, defaults to 0.0): 0 takes the likeliest token.
            draws (`torch.Tensor` of shape `(num_blocks, block_size)`, *optional*):
                Uniform numbers that decide what is sampled; needed with a temperature.
            drafter ([`CarryoverDrafter`], *optional*): Whose Markov head, by default the trained drafter's.
        """
        markov, token_ids = (drafter or self.drafter).markov_head, self.head.token_ids
        previous, drawn = anchors, []
        for k in range(logits.shape[1]):
            scores = logits[:, k].float()
            if markov is not None:
                scores = scores + markov(previous).float()
            if temperature:
                levels = torch.softmax(scores / temperature, dim=-1).cumsum(dim=-1)
                # Scaled by the last level, which rounding may leave beside 1.
                level = draws[:, k : k + 1] * levels[:, -1:]
                token = torch.searchsorted(levels, level, right=True).squeeze(1).clamp(max=levels.shape[1] - 1)
            else:
                token = scores.argmax(dim=-1)
            previous = token if token_ids is None else token_ids[token]
            drawn.append(previous)
        return torch.stack(drawn, dim=1)
