# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Draft–verify–draft training (arXiv 2609.14717, Algorithm 2) as a `transformers.Trainer`.

All sampled anchors of all recordings of a batch are drafted at once. In the stage `"carryover"`: the first draft and
its verification run without gradient, each anchor is shifted to where the first draft failed, `a' = a + m + 1`, and
the loss is that of the second draft, which reads the rejected rows of its own branch.
"""

from __future__ import annotations

import copy
import inspect
import logging
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput

from ..adapters import CONFIG_FILE, add_adapter, has_adapter, load_adapter_state, train_adapter
from ..configuration_carryover import CarryoverConfig
from ..modeling_carryover import CarryoverDrafter
from ..target import TargetHead, check_fit
from .anchors import (
    Blocks,
    accepted_prefix,
    position_weights,
    response_runs,
)
from .arguments import CarryoverTrainingArguments
from .bank import DraftBank, drafting_settings, fingerprint
from .checkpoints import STATE_FILE, checkpoint_problem, discard_incomplete, last_complete_checkpoint
from .data import RecordingCollator, prepare_recordings
from .drafting import DraftVerifyDraft
from .guard import StepGuard
from .losses import acceptance_counts, acceptance_metrics, block_loss
from .optimizers import MuonAdamW, split_for_muon
from .order import EpochLengthGroupedSampler
from .verification import FrozenTarget


logger = logging.getLogger(__name__)

# Fields that may differ between a checkpoint's configuration and the drafter's: the weights mean the same.
HARMLESS_FIELDS = {
    "attention_dropout",
    "converted_from",
    "draft_sampling",
    "initializer_range",
    "max_position_embeddings",
}


class CarryoverTrainer(DraftVerifyDraft):
    """
    Trains a [`CarryoverDrafter`] on recorded responses of its frozen target.

    Args:
        model ([`CarryoverDrafter`]):
            The drafter. It is trained in float32, and cast to it when it comes in another dtype: at the usual learning
            rates a bfloat16 weight near 1 never moves.
        target (`PreTrainedModel`):
            Its target, moved to the training device unless it is spread over several. Nothing else of it is changed,
            and no gradient reaches it.
        args ([`CarryoverTrainingArguments`]): Arguments; `args.stage` chooses the stage.
        train_dataset, eval_dataset (`str` or `datasets.Dataset`, *optional*):
            Recordings, in any form [`load_recordings`] reads. For evaluation also a dictionary of several.
        peft_config (`peft.PeftConfig`, *optional*):
            Train an adapter on the frozen drafter instead of the drafter, and the carry embedding with it: see
            [`add_adapter`]. Checkpoints and `save_model` are then adapters.
        kwargs: Of [`~transformers.Trainer`].

    Raises:
        ValueError: Before any step, if drafter, target and arguments do not fit or the recordings can't be used.

    Logged beside the loss, for this process: `block_loss`, the weighted mean over the labels of the drafted blocks
    (the loss itself is divided by the weights of the *sampled* anchors' labels, which no drafter can change);
    `accepted_first`, `m` of the first draft; `carried`, rows per block; and so far `skipped`, recordings and blocks
    left out for features that are not finite, and `skipped_steps`, steps left out for a gradient that is not.

    Evaluation gives `loss`; `tau`, tokens committed per drafted block, simulated at sampled anchors against the
    recording (accepted proposals and the target's own token, none behind the end of a response); `acceptance_k`,
    P(`y_k` accepted | `y_1 … y_{k-1}` accepted); and `blocks`, how many were counted.
    """

    _tag_names = ("hf_carryover", "speculative-decoding")

    def __init__(
        self,
        model: CarryoverDrafter,
        target: nn.Module,
        args: CarryoverTrainingArguments,
        train_dataset=None,
        eval_dataset=None,
        peft_config=None,
        **kwargs,
    ):
        _check_usage(model, args, kwargs)
        check_fit(model, target, kwargs.get("processing_class"))
        self.target = FrozenTarget(target, model.config.target_layer_ids, args.feature_cache_dir)
        if args.stage == "carryover" and model.config.carry:
            self.target.check_branches()
        self._vocab_size = model.config.vocab_size
        kwargs.setdefault("data_collator", RecordingCollator())
        model = model.float()
        self.bank: DraftBank | None = None
        keeps_drafts = args.carry_cache_dir is not None and args.stage == "carryover"
        if keeps_drafts:
            # Before an adapter is added, which changes nothing yet: runs with and without one share first drafts. And
            # before any checkpoint is loaded: a resumed run goes on with the first drafts it began with.
            self.first_drafter = self._copy_first_drafter(model, args.first_drafter)
        if peft_config is not None:
            add_adapter(model, peft_config)
        elif has_adapter(model):  # a loaded one is frozen
            train_adapter(model)
        super().__init__(
            model=model,
            args=args,
            train_dataset=self._prepared(train_dataset, "train_dataset"),
            eval_dataset=self._prepared(eval_dataset, "eval_dataset"),
            **kwargs,
        )
        self.step_guard = StepGuard(args.non_finite_steps, self._sum_over_processes)
        # The loss is divided by the weights of the whole accumulated, global batch: see `get_batch_samples`.
        self.model_accepts_loss_kwargs = True
        self.drafter = model
        if getattr(target, "hf_device_map", None) is None:
            target.to(args.device)
        self.head = TargetHead(self.target.model, model)
        # Under autocast the product runs in the low precision anyway; otherwise it is exact in the master's dtype.
        if not (args.bf16 or args.fp16):
            self.head.weight = self.head.weight.to(model.dtype)
            self.head.bias = None if self.head.bias is None else self.head.bias.to(model.dtype)
        self.head.weight = self.head.weight.detach()
        self.head.bias = None if self.head.bias is None else self.head.bias.detach()
        self.weights = position_weights(model.config.block_size, args.position_gamma(model.config.block_size))
        if keeps_drafts:
            self.target.check_branches()
            self.first_drafter.to(model.device)
            shape = drafting_settings(self.first_drafter.config)
            settings = (args.anchors_per_response, args.seed, args.draft_temperature, shape)
            identity = fingerprint(self.first_drafter, self.target.fingerprint(), settings)
            self.bank = DraftBank(args.carry_cache_dir, identity)
        self._stats: dict[str, torch.Tensor] = {}
        self.skipped_sequences = 0
        self.skipped_blocks = 0

    @staticmethod
    def _copy_first_drafter(model: CarryoverDrafter, folder: str | None) -> CarryoverDrafter:
        """The drafter, frozen, whose first drafts are kept: that of `folder`, or a copy of the one to train."""
        if folder is None:
            first = copy.deepcopy(model)
        else:
            first = CarryoverDrafter.from_pretrained(folder, carry=False, dtype=torch.float32)
            check_same_block(first, model)
        return first.eval().requires_grad_(False)

    # Data

    def _prepared(self, recordings, name: str):
        """Recordings checked and numbered; a dictionary of them one by one; what is prepared already as it is."""
        if isinstance(recordings, dict):
            return {key: self._prepared(part, f"{name}[{key!r}]") for key, part in recordings.items()}
        if recordings is None or "example_index" in (getattr(recordings, "column_names", None) or ()):
            return recordings
        return prepare_recordings(recordings, self._vocab_size, name)

    def _get_train_sampler(self, train_dataset=None):
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochLengthGroupedSampler(sampler, seed)

    def get_eval_dataloader(self, eval_dataset=None):
        """Of `eval_dataset`, recordings in any form or the name of one of several, or of the trainer's own."""
        if isinstance(eval_dataset, str) and isinstance(self.eval_dataset, dict) and eval_dataset in self.eval_dataset:
            return super().get_eval_dataloader(eval_dataset)
        return super().get_eval_dataloader(self._prepared(eval_dataset, "eval_dataset"))

    def get_test_dataloader(self, test_dataset):
        """Of recordings in any form."""
        return super().get_test_dataloader(self._prepared(test_dataset, "test_dataset"))

    # Checkpoints

    def check_checkpoint(self, checkpoint: str | Path) -> None:
        """
        Raise a `ValueError` when `checkpoint` is no checkpoint or half of one, or one of a drafter of another shape or
        kind.
        """
        if has_adapter(self.drafter):
            if not (Path(checkpoint) / CONFIG_FILE).is_file():
                raise ValueError(f"{str(checkpoint)!r} is no checkpoint of an adapter: it has no `{CONFIG_FILE}`.")
            return
        path = Path(checkpoint) / "config.json"
        if not path.is_file():
            raise ValueError(f"{str(checkpoint)!r} is no checkpoint to resume from: it has no `config.json`.")
        problem = checkpoint_problem(checkpoint, self.args.world_size)
        if problem is not None:
            raise ValueError(
                f"The checkpoint {str(checkpoint)!r} is not whole: {problem}. `resume_from_checkpoint=True` takes the "
                "last one that is."
            )
        saved, ours = CarryoverConfig.from_json_file(path).to_dict(), self.drafter.config.to_dict()
        fields = sorted(set(CarryoverConfig.__annotations__) - HARMLESS_FIELDS)
        different = [k for k in fields if saved.get(k) != ours.get(k)]
        if different:
            values = ", ".join(f"`{k}` is {saved.get(k)} there and {ours.get(k)} here" for k in different)
            raise ValueError(
                f"The checkpoint {str(checkpoint)!r} is of another drafter: {values}. Resume with the settings of "
                "that run, or choose another `output_dir`."
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """As in `Trainer`; `resume_from_checkpoint=True` passes over checkpoints that are not whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.last_checkpoint()
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no whole checkpoint to resume from in {self.args.output_dir!r}.")
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def last_checkpoint(self) -> str | None:
        """The last whole checkpoint of this run; those that are not whole are removed."""
        found = last_complete_checkpoint(self.args.output_dir, self.args.world_size)
        if self.args.should_save:
            discard_incomplete(self.args.output_dir, self.args.world_size)
        return None if found is None else str(found)

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save:  # until the end an older one of this name must not pass for whole
            (folder / STATE_FILE).unlink(missing_ok=True)
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            problem = checkpoint_problem(folder, self.args.world_size)
            if problem is None or not self.args.should_save:
                raise
            shutil.rmtree(folder, ignore_errors=True)
            last = last_complete_checkpoint(folder.parent, self.args.world_size)
            raise OSError(
                f"{folder.name} could not be saved ({problem}): {error}. What was written of it is removed. Resume "
                f"from {'the start' if last is None else last.name}."
            ) from error

    def _save(self, *args, **kwargs) -> None:
        # `training_args.bin` goes wherever the checkpoint goes: without the token.
        token, self.args.hub_token = self.args.hub_token, None
        try:
            super()._save(*args, **kwargs)
        finally:
            self.args.hub_token = token

    def _save_rng_state(self, output_dir) -> None:
        super()._save_rng_state(output_dir)
        if self.args.world_size > 1:  # the trainer's state, which makes a checkpoint whole, comes after all of them
            self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        self.check_checkpoint(resume_from_checkpoint)
        if has_adapter(self.drafter):
            load_adapter_state(self.drafter, resume_from_checkpoint)
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        loaded = self.drafter.draft_token_ids()
        if loaded is not None and not torch.equal(loaded.cpu(), self.head.token_ids.cpu()):
            raise ValueError(
                f"The checkpoint {str(resume_from_checkpoint)!r} has another draft vocabulary of equal size. Resume "
                "with the recordings of that run, or choose another `output_dir`."
            )

    def _load_best_model(self) -> None:
        if has_adapter(self.drafter):
            load_adapter_state(self.drafter, self.state.best_model_checkpoint)
            return
        super()._load_best_model()

    # The Hub

    def create_model_card(self, **kwargs) -> None:
        """Write the drafter's card to the output folder; see [`model_card`] for what can be given."""
        from ..hub import Run, model_card
        from ..hub.card import hub_id_of

        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        name = kwargs.pop("model_name", None) or Path(self.args.output_dir).name
        kwargs.setdefault("runs", {self.args.stage: Run.of_trainer(self)})
        # What a model was loaded from; a local folder is nobody else's name for it.
        kwargs["finetuned_from"] = hub_id_of(kwargs.get("finetuned_from"))
        for ours, theirs in (("base_model", "finetuned_from"), ("datasets", "dataset")):
            if theirs in kwargs:
                kwargs.setdefault(ours, kwargs.pop(theirs))
        known = inspect.signature(model_card).parameters
        kwargs = {key: value for key, value in kwargs.items() if key in known}
        model_card(self.drafter, name, **kwargs).save(Path(self.args.output_dir) / "README.md")

    def push_to_hub(
        self,
        commit_message: str | None = None,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        repo_id: str | None = None,
        **kwargs,
    ):
        """
        Publish the drafter as it is now, see [`push_to_hub`]: one commit of weights, config, card, records and report.

        Args:
            commit_message (`str`, *optional*), token (`str`, *optional*), revision (`str`, *optional*):
                As in [`push_to_hub`]. The token defaults to `args.hub_token`.
            blocking (`bool`, *optional*, defaults to `True`): Without effect: the call returns when all is done.
            repo_id (`str`, *optional*): `args.hub_model_id` by default, or the name of the output folder.
            kwargs: Of [`push_to_hub`] and [`model_card`].

        Returns:
            `huggingface_hub.CommitInfo`, on the main process; `None` on others.
        """
        from ..hub import push_to_hub

        if not self.is_world_process_zero():
            return None
        kwargs.setdefault("private", self.args.hub_private_repo)
        repo_id = repo_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        return push_to_hub(
            self,
            repo_id,
            commit_message=commit_message,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            **kwargs,
        )

    def create_optimizer(self, *args, **kwargs):
        """
        The optimizer of `Trainer`, with `fc.weight`, or what an adapter adds to it, what only carried rows use, and
        what looking up and pointing add in groups of their own where their learning rates are scaled.
        """
        optimizer = super().create_optimizer(*args, **kwargs)
        scaled = {
            "fc": (self.args.fc_learning_rate_scale, self.drafter.fc.parameters()),
            "carry": (self.args.carry_learning_rate_scale, [self.drafter.carry_embedding]),
            "pointer": (
                self.args.pointer_learning_rate_scale,
                [
                    self.drafter.carry_gate,
                    self.drafter.lookup_scale,
                    self.drafter.lookup_embedding,
                    self.drafter.lookup_gate,
                ],
            ),
        }
        if self.drafter.carry_proj is not None and self.args.carry_learning_rate_scale != 1.0:
            scale = self.args.carry_learning_rate_scale / self._embedding_reach()
            scaled["map"] = (scale, self.drafter.carry_proj.parameters())
        for name, (scale, parameters) in scaled.items():
            if scale == 1.0 or any(group.get("scaled") == name for group in optimizer.param_groups):
                continue
            chosen = {id(p) for p in parameters if p is not None}
            for group in list(optimizer.param_groups):
                own = [p for p in group["params"] if id(p) in chosen]
                if own:
                    group["params"] = [p for p in group["params"] if id(p) not in chosen]
                    optimizer.add_param_group({**group, "params": own, "lr": group["lr"] * scale, "scaled": name})
        if self.args.muon and not isinstance(optimizer, MuonAdamW):
            args = self.args
            optimizer = self.optimizer = MuonAdamW(
                *split_for_muon(self.drafter, optimizer.param_groups),
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                weight_decay=args.weight_decay,
            )
        optimizer.register_step_pre_hook(self.step_guard)
        return optimizer

    def _embedding_reach(self) -> float:
        """
        Mean sum of the magnitudes of a target embedding: how much more an Adam step of a map moves what it makes of
        one than the same step of a bias.
        """
        config = self.drafter.config
        sample = torch.arange(0, config.vocab_size, max(1, config.vocab_size // 512))
        rows = self.head.embed(sample, self.drafter.device).float()
        return max(float(rows.abs().sum(dim=-1).mean()), 1e-6)

    def _sum_over_processes(self, value: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(value, reduction="sum") if self.args.world_size > 1 else value

    def _track_num_input_tokens(self, inputs: dict) -> None:
        """Tokens of the recordings: transformers looks for the drafter's own input, embeddings of anchors."""
        if self.args.include_num_input_tokens_seen != "no":
            mask = inputs["attention_mask"]
            real = self.args.include_num_input_tokens_seen == "non_padding"
            tokens = mask.sum() if real else mask.new_tensor(mask.numel())
            self.state.num_input_tokens_seen += int(self._sum_over_processes(tokens))

    # Anchors and normalisation

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """
        The micro batches of one step with their anchors, and the sum of label weights over all of them and all
        processes: dividing by it makes accumulation and data parallelism equal to one full batch.
        """
        if self.state.global_step >= self.state.max_steps:
            # A finished run that is resumed within an epoch: the loop asks whether it is done behind a step only.
            self.control.should_training_stop = True
            return [], None
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.zeros((), device=device)
        # What is kept on disk is kept for one choice of anchors.
        step = 0 if self.bank is not None else self.state.global_step + 1
        for batch in batches:
            self.add_anchors(batch, step)
            total += self._anchor_weight(batch).to(device)
        return batches, self._sum_over_processes(total)

    def _anchor_weight(self, batch: dict) -> torch.Tensor:
        """Sum of the label weights of the sampled anchors, a scalar."""
        return self._label_weights(batch, batch["sequence_index"], batch["anchor_positions"])[1].sum()

    # Draft, verify, draft

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Weighted block loss of a micro batch, over the weights of the whole step."""
        losses, _ = self.block_losses(model, inputs)
        total = self._anchor_weight(inputs) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        # The processes' gradients are averaged, so each scales its share up.
        loss = losses.sum() * self.args.world_size / total.to(losses.device).clamp(min=1e-6)
        return (loss, None) if return_outputs else loss

    def block_losses(self, model: nn.Module, batch: dict) -> tuple[torch.Tensor, dict]:
        """
        The losses of a batch with anchors.

        Returns:
            `tuple[torch.Tensor, dict]`: losses `(num_blocks, block_size)`, already weighted, with gradient; and what
            was computed on the way: `blocks`, and for each of them `anchors` (tokens), `labels`, `weights`, `tokens`,
            `exist`, `hidden_states`.
        """
        carry = self.args.stage == "carryover"
        warming = carry and self.drafter.training and self.state.global_step < self.args.carry_warmup_steps
        banked = carry and self.bank is not None and self.drafter.training and not warming
        if banked:
            self._fill_bank(batch)
        recorded = self.target.record(
            batch["input_ids"],
            batch["attention_mask"],
            keep_cache=carry and self.drafter.config.carry and not (banked or warming),
            keep_logits=self.args.soft_labels,
        )
        healthy = self._drop_non_finite(recorded, batch["attention_mask"])
        sequence_index, positions, draws = batch["sequence_index"], batch["anchor_positions"], batch.get("draws")
        counted = healthy[sequence_index]
        if positions.numel() == 0:
            # A process without an anchor still takes part in the step: one block that doesn't count.
            sequence_index = positions = batch["input_ids"].new_zeros(1)
            counted = healthy.new_zeros(1)
            draws = None if draws is None else draws.new_zeros((1, draws.shape[1]))
        blocks = Blocks(sequence_index, positions, counted, carried={})
        if warming:
            self._carry_recorded(batch, recorded, blocks)
        elif banked:
            blocks = self._banked(batch, healthy)
        elif carry:
            blocks = self._shift(batch, recorded, blocks, draws)
        labels, weights, tokens, exist = self._label_weights(batch, blocks.sequence_index, blocks.positions)
        weights = weights * blocks.counted.unsqueeze(1)
        anchors = batch["input_ids"][blocks.sequence_index, blocks.positions]
        previous = torch.cat([anchors.unsqueeze(1), tokens[:, :-1]], dim=1)
        alphas = (self.args.alpha_ce, self.args.alpha_tv, self.args.alpha_kl)

        def row_loss(logits: torch.Tensor, rows: slice) -> torch.Tensor:
            probs = self._target_probs(recorded.logits, blocks, rows) if self.args.soft_labels else None
            wanted, weight = labels.flatten()[rows].unsqueeze(1), weights.flatten()[rows].unsqueeze(1)
            return block_loss(logits.unsqueeze(1), wanted, weight, probs, *alphas).squeeze(1)

        outputs = self._draft(model, recorded.features, batch["input_ids"], blocks, previous, row_loss)
        losses = outputs.losses
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

    def _target_probs(self, logits: torch.Tensor, blocks: Blocks, rows: slice) -> torch.Tensor:
        """
        The target's probabilities of the draft tokens for labels `x_{a+1} …`, `(rows, 1, draft_vocab)`, of the given
        rows of all `num_blocks * block_size`: recorded logits at `a … a+B-1`.
        """
        size = self.drafter.config.block_size
        places = (blocks.positions.unsqueeze(1) + torch.arange(size, device=logits.device)).flatten()[rows]
        sequences = blocks.sequence_index.repeat_interleave(size)[rows]
        probs = logits[sequences, places.clamp(max=logits.shape[1] - 1)].float().softmax(dim=-1)
        if self.head.token_ids is not None:
            probs = probs[:, self.head.token_ids]
        return probs.unsqueeze(1)

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
            if self.skipped_sequences or self.skipped_blocks:
                logs["skipped"] = self.skipped_sequences + self.skipped_blocks
            if self.step_guard.skipped:
                logs["skipped_steps"] = self.step_guard.skipped
            self._stats = {}
        super().log(logs, *args, **kwargs)

    @torch.no_grad()
    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """Loss, simulated τ and per-position acceptance over `dataloader`, micro-averaged over all blocks."""
        model = self._wrap_model(self.model, training=False)
        if not self.accelerator._models and model is self.model:
            # Evaluation without training: once, since each call would wrap `forward` again.
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        was_training = self.drafter.training
        self.drafter.eval()
        totals = torch.zeros(4 + 2 * self.drafter.config.block_size, dtype=torch.float64)
        examples = 0
        for batch in dataloader:
            batch = self._prepare_inputs(batch)
            self.add_anchors(batch, step=0)
            # Per sequence: so what a sampler repeated to fill the last batch can be left out.
            stats = self.accelerator.gather_for_metrics(self._evaluate_batch(model, batch))
            totals += stats.cpu().double().sum(dim=0)
            examples += len(stats)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.drafter.train(was_training)
        loss, weight, *counts = totals.tolist()
        metrics = {"loss": loss / max(weight, 1e-6), **acceptance_metrics(counts)}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=examples)

    def _evaluate_batch(self, model, batch: dict) -> torch.Tensor:
        """
        Per sequence, `(num_sequences, 4 + 2 B)`: summed loss, summed weights, and the sums of [`acceptance_counts`].
        """
        losses, seen = self.block_losses(model, batch)
        blocks: Blocks = seen["blocks"]
        # Once more, without the recorded tokens' Markov bias: the proposals have their own.
        proposals = self.propose(seen["hidden_states"], seen["anchors"])
        runs = response_runs(batch["response_mask"])[blocks.sequence_index, blocks.positions]
        counts = acceptance_counts(accepted_prefix(proposals, seen["tokens"], seen["exist"]), runs, proposals.shape[1])
        columns = [losses.sum(1, keepdim=True), seen["weights"].sum(1, keepdim=True)]
        table = torch.cat([*columns, counts * blocks.counted.unsqueeze(1)], dim=1).float()
        result = table.new_zeros((batch["input_ids"].shape[0], table.shape[1]))
        return result.index_add_(0, blocks.sequence_index, table)


def check_same_block(first: CarryoverDrafter, model: CarryoverDrafter) -> None:
    """Raise a `ValueError` when `first` can't make the first drafts of `model`'s training."""
    for name in ("block_size", "anchor_first", "target_layer_ids", "draft_vocab_size", "vocab_size"):
        ours, theirs = getattr(model.config, name), getattr(first.config, name)
        if ours != theirs:
            raise ValueError(
                f"`first_drafter` has `{name}` {theirs}, the trained drafter {ours}. Its drafts would be of another "
                "kind; name one that differs in its weights alone."
            )


def _check_usage(model, args, kwargs: dict) -> None:
    """Refuse what the trainer can't work with, or would silently ignore."""
    if not isinstance(model, CarryoverDrafter):
        raise TypeError(f"`model` must be a CarryoverDrafter, got {type(model).__name__}.")
    if not isinstance(args, CarryoverTrainingArguments):
        raise TypeError(f"`args` must be CarryoverTrainingArguments, got {type(args).__name__}.")
    for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"`{name}` is not supported: loss and metrics are those of the method. Override `compute_loss` or "
                "`evaluation_loop` in a subclass."
            )
    args.check_drafter(model.config)
    if args.n_gpu > 1:
        raise ValueError(
            f"One process sees {args.n_gpu} GPUs and would split batches over them, which is not supported. Start one "
            "process per GPU with `accelerate launch`, or show it one GPU with `CUDA_VISIBLE_DEVICES=0`."
        )
