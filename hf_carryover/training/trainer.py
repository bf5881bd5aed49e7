# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Draft–verify–draft training (arXiv 2609.14717, Algorithm 2) as a `transformers.Trainer`.

All sampled anchors of all recordings of a batch are drafted at once. In the stage `"carryover"`: the first draft and
its verification run without gradient, each anchor is shifted to where the first draft failed, `a' = a + m + 1`, and
the loss is that of the second draft, which reads the rejected rows of its own branch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from ..modeling_carryover import CarryoverDrafter
from ..target import TargetHead, check_fit
from .anchors import (
    accepted_prefix,
    block_labels,
    position_weights,
    response_runs,
    sample_anchors,
    to_draft_labels,
)
from .arguments import CarryoverTrainingArguments
from .data import RecordingCollator, prepare_recordings
from .losses import block_loss
from .verification import Branches, FrozenTarget, RecordedPass

logger = logging.getLogger(__name__)


@dataclass
class Blocks:
    """
    The blocks a loss is taken of: where they start, and what they carry.

    Args:
        sequence_index, positions (`torch.LongTensor` of shape `(num_blocks,)`): Sequence and anchor position.
        counted (`torch.BoolTensor` of shape `(num_blocks,)`): Whether the block takes part in the loss.
        carried (`dict`): `carried_features`, `carried_positions`, `carried_mask` of the drafter's forward, or empty.
        first_accepted (`torch.LongTensor` of shape `(num_blocks,)`, *optional*): `m` of the first draft.
    """

    sequence_index: torch.LongTensor
    positions: torch.LongTensor
    counted: torch.BoolTensor
    carried: dict
    first_accepted: torch.LongTensor | None = None


class CarryoverTrainer(Trainer):
    """
    Trains a [`CarryoverDrafter`] on recorded responses of its frozen target.

    Args:
        model ([`CarryoverDrafter`]): The drafter.
        target (`PreTrainedModel`): Its target. No gradient reaches it and no setting of it is changed.
        args ([`CarryoverTrainingArguments`]): Arguments; `args.stage` chooses the stage.
        train_dataset, eval_dataset (`str` or `datasets.Dataset`, *optional*):
            Recordings, in any form [`load_recordings`] reads.
        kwargs: Of [`~transformers.Trainer`].

    Raises:
        ValueError: Before any step, if drafter and target do not fit or the recordings can't be used.

    Logged beside the loss: `accepted_first`, `m` of the first draft, and `carried`, rows per block. Evaluation gives
    `loss`, `tau` (1 + accepted proposals of the drafted block, simulated at sampled anchors against the recording)
    and `acceptance_k`.
    """

    _tag_names = ("hf_carryover", "speculative-decoding")

    def __init__(self, model, target: nn.Module, args: CarryoverTrainingArguments, train_dataset=None, eval_dataset=None, **kwargs):
        if not isinstance(model, CarryoverDrafter):
            raise TypeError(f"`model` must be a CarryoverDrafter, got {type(model).__name__}.")
        if not isinstance(args, CarryoverTrainingArguments):
            raise TypeError(f"`args` must be CarryoverTrainingArguments, got {type(args).__name__}.")
        if args.stage == "baseline" and model.config.carry:
            raise ValueError(
                "`stage='baseline'` trains a drafter without carry, but `config.carry` is True. Load it with "
                "`carry=False`, or use `stage='carryover'`."
            )
        check_fit(model, target, kwargs.get("processing_class"))
        if train_dataset is not None:
            train_dataset = prepare_recordings(train_dataset, model.config.vocab_size, "train_dataset")
        if eval_dataset is not None:
            eval_dataset = prepare_recordings(eval_dataset, model.config.vocab_size, "eval_dataset")
        kwargs.setdefault("data_collator", RecordingCollator())
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        # The loss is divided by the weights of the whole accumulated, global batch: see `get_batch_samples`.
        self.model_accepts_loss_kwargs = True
        self.drafter = model
        if getattr(target, "hf_device_map", None) is None:
            target = target.to(args.device)
        self.target = FrozenTarget(target, model.config.target_layer_ids, args.feature_cache_dir)
        self.head = TargetHead(self.target.model, model)
        # Under autocast the product runs in the low precision anyway; otherwise it is exact in the master's dtype.
        if not (args.bf16 or args.fp16):
            self.head.weight = self.head.weight.to(model.dtype)
            self.head.bias = None if self.head.bias is None else self.head.bias.to(model.dtype)
        self.head.weight = self.head.weight.detach()
        self.weights = position_weights(model.config.block_size, args.position_gamma(model.config.block_size))
        self._stats: dict[str, torch.Tensor] = {}
        self.skipped_sequences = 0

    def create_optimizer(self, *args, **kwargs):
        """The optimizer of `Trainer`, with `fc.weight` in a group of its own where its learning rate is scaled."""
        optimizer = super().create_optimizer(*args, **kwargs)
        scale, weight = self.args.fc_learning_rate_scale, self.drafter.fc.weight
        if scale != 1.0 and not any(group.get("is_fc") for group in optimizer.param_groups):
            group = next(group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
            group["params"] = [p for p in group["params"] if p is not weight]
            own = {**group, "params": [weight], "lr": group["lr"] * scale, "is_fc": True}
            optimizer.add_param_group(own)
        return optimizer

    # Anchors and normalisation

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """
        The micro batches of one step with their anchors, and the sum of label weights over all of them and all
        processes: dividing by it makes accumulation and data parallelism equal to one full batch.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.zeros((), device=device)
        for batch in batches:
            self.add_anchors(batch, step=self.state.global_step + 1)
            total += self._label_weights(batch, batch["sequence_index"], batch["anchor_positions"])[1].sum().to(device)
        if self.args.world_size > 1:
            total = self.accelerator.reduce(total, reduction="sum")
        return batches, total

    def add_anchors(self, batch: dict, step: int) -> None:
        """Sample anchors into `batch` as `sequence_index` and `anchor_positions`."""
        batch["sequence_index"], batch["anchor_positions"] = sample_anchors(
            batch["response_mask"], batch["example_index"], self.args.anchors_per_response, self.args.seed, step
        )

    def _label_weights(self, batch: dict, sequence_index, positions):
        """Draft labels and weights of blocks, and the target ids, each `(num_blocks, block_size)`."""
        block_size = self.drafter.config.block_size
        tokens, exist = block_labels(
            batch["input_ids"], batch["response_mask"], sequence_index, positions, block_size
        )
        token_ids = self.head.token_ids
        labels, valid = to_draft_labels(tokens, exist, None if token_ids is None else token_ids.to(tokens.device))
        return labels, valid * self.weights.to(valid.device), tokens, exist

    # Draft, verify, draft

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Weighted block loss of a micro batch, over the weights of the whole step."""
        losses, _ = self.block_losses(model, inputs)
        if num_items_in_batch is None:
            num_items_in_batch = self._label_weights(inputs, inputs["sequence_index"], inputs["anchor_positions"])[1].sum()
        # The processes' gradients are averaged, so each scales its share up.
        loss = losses.sum() * self.args.world_size / torch.as_tensor(num_items_in_batch).clamp(min=1e-6).to(losses.device)
        return (loss, None) if return_outputs else loss

    def block_losses(self, model: nn.Module, batch: dict) -> tuple[torch.Tensor, dict]:
        """
        The losses of a batch with anchors.

        Returns:
            `tuple[torch.Tensor, dict]`: losses `(num_blocks, block_size)`, already weighted, with gradient; and what
            was computed on the way: `blocks`, `labels`, `weights`, `tokens`, `exist`, `hidden_states`.
        """
        carry = self.args.stage == "carryover"
        recorded = self.target.record(
            batch["input_ids"],
            batch["attention_mask"],
            keep_cache=carry and self.drafter.config.carry,
            keep_logits=self.args.alpha_tv > 0,
        )
        healthy = self._drop_non_finite(recorded)
        blocks = Blocks(
            batch["sequence_index"], batch["anchor_positions"], healthy[batch["sequence_index"]], carried={}
        )
        if blocks.positions.numel() == 0:
            # A process without an anchor still takes part in the step: one block that doesn't count.
            blocks.sequence_index = blocks.positions = batch["input_ids"].new_zeros(1)
            blocks.counted = torch.zeros(1, dtype=torch.bool, device=blocks.positions.device)
        if carry:
            blocks = self._shift(batch, recorded, blocks)
        labels, weights, tokens, exist = self._label_weights(batch, blocks.sequence_index, blocks.positions)
        weights = weights * blocks.counted.unsqueeze(1)
        anchors = batch["input_ids"][blocks.sequence_index, blocks.positions]
        previous = torch.cat([anchors.unsqueeze(1), tokens[:, :-1]], dim=1)
        outputs = self._draft(model, recorded.features, anchors, blocks, previous)
        target_probs = None
        if self.args.alpha_tv:
            target_probs = self._target_probs(recorded.logits, blocks)
        losses = block_loss(outputs.logits, labels, weights, target_probs, self.args.alpha_ce, self.args.alpha_tv)
        if self.drafter.training:
            self._count(losses, weights, blocks)
        return losses, {
            "blocks": blocks,
            "labels": labels,
            "weights": weights,
            "tokens": tokens,
            "exist": exist,
            "anchors": anchors,
            "hidden_states": outputs.hidden_states,
        }

    def _draft(self, model, features, anchors, blocks: Blocks, previous):
        return model(
            anchor_embeds=self.head.embed(anchors, features.device).detach(),
            anchor_positions=blocks.positions,
            features=features,
            sequence_index=blocks.sequence_index,
            mask_embeds=self.head.mask_embeds,
            previous_ids=previous,
            head_weight=self.head.weight,
            head_bias=self.head.bias,
            **blocks.carried,
        )

    @torch.no_grad()
    def _shift(self, batch: dict, recorded: RecordedPass, blocks: Blocks) -> Blocks:
        """Steps 1 to 3: first draft, verification, and the shifted anchors with their carried rows."""
        drafter, block_size = self.drafter, self.drafter.config.block_size
        anchors = batch["input_ids"][blocks.sequence_index, blocks.positions]
        outputs = self._draft(drafter, recorded.features, anchors, blocks, previous=None)
        proposals = self.roll_out(outputs.logits, anchors, self.args.draft_temperature)
        _, _, tokens, exist = self._label_weights(batch, blocks.sequence_index, blocks.positions)
        accepted = accepted_prefix(proposals, tokens, exist)
        # x_{a'} must be the target's own token and have a recorded successor.
        runs = response_runs(batch["response_mask"])[blocks.sequence_index, blocks.positions]
        kept = blocks.counted & (runs >= accepted + 2)
        counted = kept
        if not kept.any():  # keep one, uncounted, so that there is a graph
            kept = torch.zeros_like(kept)
            kept[0] = True
        # The uncounted one may be shifted past the end.
        last = batch["input_ids"].shape[1] - 1
        shifted = Blocks(
            sequence_index=blocks.sequence_index[kept],
            positions=(blocks.positions + accepted + 1)[kept].clamp(max=last),
            counted=counted[kept],
            carried={},
            first_accepted=accepted[kept],
        )
        if drafter.config.carry:
            rows = torch.arange(1, block_size + 1, device=accepted.device)
            rejected = (rows > accepted.unsqueeze(1))[kept]
            branches = Branches(
                tokens=proposals[kept],
                sequence_index=shifted.sequence_index,
                anchor_positions=blocks.positions[kept],
                accepted=shifted.first_accepted,
                verify=rejected,
            )
            shifted.carried = {
                "carried_features": self.target.verify(recorded, branches),
                "carried_positions": blocks.positions[kept].unsqueeze(1) + rows,
                "carried_mask": rejected,
            }
        return shifted

    @torch.no_grad()
    def roll_out(self, logits: torch.Tensor, anchors: torch.LongTensor, temperature: float = 0.0) -> torch.LongTensor:
        """
        Proposals `(num_blocks, block_size)`, target ids, from base logits (without Markov bias), left to right.

        Args:
            logits (`torch.Tensor` of shape `(num_blocks, block_size, output_vocab_size)`): Of the target's head.
            anchors (`torch.LongTensor` of shape `(num_blocks,)`): Anchor tokens.
            temperature (`float`, *optional*, defaults to 0.0): 0 takes the likeliest token.
        """
        markov, token_ids = self.drafter.markov_head, self.head.token_ids
        previous, drawn = anchors, []
        for k in range(logits.shape[1]):
            scores = logits[:, k].float()
            if markov is not None:
                scores = scores + markov(previous).float()
            if temperature:
                token = torch.multinomial(torch.softmax(scores / temperature, dim=-1), 1).squeeze(1)
            else:
                token = scores.argmax(dim=-1)
            previous = token if token_ids is None else token_ids[token]
            drawn.append(previous)
        return torch.stack(drawn, dim=1)

    def _target_probs(self, logits: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """The target's probabilities of the draft tokens for labels `x_{a+1} …`: recorded logits at `a … a+B-1`."""
        offsets = torch.arange(self.drafter.config.block_size, device=logits.device)
        rows = (blocks.positions.unsqueeze(1) + offsets).clamp(max=logits.shape[1] - 1)
        probs = logits.float().softmax(dim=-1)
        if self.head.token_ids is not None:
            probs = probs[..., self.head.token_ids]
        return probs[blocks.sequence_index.unsqueeze(1), rows]

    def _drop_non_finite(self, recorded: RecordedPass) -> torch.BoolTensor:
        """Zero and count sequences whose features are not finite; returns which sequences are healthy."""
        healthy = torch.isfinite(recorded.features).flatten(1).all(dim=1)
        bad = int((~healthy).sum())
        if bad:
            self.skipped_sequences += bad
            recorded.features = torch.where(healthy[:, None, None], recorded.features, 0.0)
            logger.warning(
                "Skipped %d recordings whose target features are not finite (%d so far). Run the target in a wider "
                "dtype, or remove them.",
                bad,
                self.skipped_sequences,
            )
        return healthy

    # Logging and evaluation

    def _count(self, losses: torch.Tensor, weights: torch.Tensor, blocks: Blocks) -> None:
        counted = blocks.counted.float()
        stats = {"weighted": losses.detach().sum(), "weights": weights.sum(), "blocks": counted.sum()}
        if blocks.first_accepted is not None:
            stats["accepted_first"] = (blocks.first_accepted * counted).sum()
        if blocks.carried:
            stats["carried"] = (blocks.carried["carried_mask"].sum(dim=1) * counted).sum()
        for name, value in stats.items():
            self._stats[name] = self._stats.get(name, 0.0) + value

    def log(self, logs: dict, *args, **kwargs) -> None:
        """Add what the steps since the last log counted, on this process."""
        if "loss" in logs and self._stats:
            blocks = max(float(self._stats["blocks"]), 1.0)
            for name in ("accepted_first", "carried"):
                if name in self._stats:
                    logs[name] = round(float(self._stats[name]) / blocks, 4)
            logs["block_loss"] = float(self._stats["weighted"]) / max(float(self._stats["weights"]), 1e-6)
            self._stats = {}
        super().log(logs, *args, **kwargs)

    @torch.no_grad()
    def evaluation_loop(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"):
        """Loss, simulated τ and per-position acceptance over `dataloader`, micro-averaged over all blocks."""
        model = self._wrap_model(self.model, training=False, dataloader=dataloader)
        if self.accelerator.unwrap_model(model) is self.drafter and not self.is_in_train:
            model = self.accelerator.prepare_model(self.drafter, evaluation_mode=True)
        was_training = self.drafter.training
        self.drafter.eval()
        totals, examples = None, 0
        for batch in dataloader:
            batch = self._prepare_inputs(batch)
            self.add_anchors(batch, step=0)
            stats = self.accelerator.gather_for_metrics(self._evaluate_batch(model, batch))
            totals = stats.sum(dim=0) if totals is None else totals + stats.sum(dim=0)
            examples += len(stats)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.drafter.train(was_training)
        loss, weight, blocks, accepted, *positions = totals.tolist()
        block_size = self.drafter.config.block_size
        metrics = {
            f"{metric_key_prefix}_loss": loss / max(weight, 1e-6),
            f"{metric_key_prefix}_tau": 1.0 + accepted / max(blocks, 1.0),
            f"{metric_key_prefix}_blocks": int(blocks),
        }
        for k in range(block_size):
            passed, judged = positions[k], positions[block_size + k]
            metrics[f"{metric_key_prefix}_acceptance_{k + 1}"] = passed / judged if judged else float("nan")
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=examples)

    def _evaluate_batch(self, model, batch: dict) -> torch.Tensor:
        """
        Per sequence, `(num_sequences, 4 + 2 B)`: summed loss, weights, blocks, accepted proposals, and for each `k`
        how often `y_k` was accepted and how often it was judged.
        """
        losses, seen = self.block_losses(model, batch)
        blocks: Blocks = seen["blocks"]
        base = self.drafter.logits(seen["hidden_states"], self.head.weight, self.head.bias)
        proposals = self.roll_out(base, seen["anchors"])
        accepted = accepted_prefix(proposals, seen["tokens"], seen["exist"]).unsqueeze(1)
        rows = torch.arange(1, self.drafter.config.block_size + 1, device=accepted.device)
        counted = blocks.counted.float().unsqueeze(1)
        passed = (accepted >= rows) * counted
        judged = ((accepted >= rows - 1) & seen["exist"]) * counted
        columns = [losses.sum(1, keepdim=True), seen["weights"].sum(1, keepdim=True), counted, accepted * counted]
        table = torch.cat([*columns, passed, judged], dim=1).float()
        result = table.new_zeros((batch["input_ids"].shape[0], table.shape[1]))
        return result.index_add_(0, blocks.sequence_index, table)
