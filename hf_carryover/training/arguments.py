# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Arguments of [`CarryoverTrainer`]."""

import logging
from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..configuration_carryover import CarryoverConfig


logger = logging.getLogger(__name__)


@dataclass
class CarryoverTrainingArguments(TrainingArguments):
    r"""
    Training arguments of a Carryover drafter.

    Args:
        > Parameters that control the method

        stage (`str`, *optional*, defaults to `"baseline"`):
            `"baseline"` drafts once at the sampled anchors. `"carryover"` is draft–verify–draft: a first draft at the
            sampled anchor, verification by the target, the loss on the second draft at the shifted anchor. With a
            drafter whose `config.carry` is `False` the second draft gets no carried rows: the **control**, with equal
            data, steps and anchors.
        anchors_per_response (`int`, *optional*, defaults to 512):
            Anchors sampled per recording and step, without replacement; all of them where there are fewer.
        gamma (`float`, *optional*):
            Decay of the position weights `w_k = exp(-(k - 1) / gamma)`. Defaults to 7 for `block_size` 15 and 4 for
            7, linear between and beyond.
        alpha_ce (`float`, *optional*, defaults to 1.0): Weight of the cross entropy to the recorded tokens.
        alpha_tv (`float`, *optional*, defaults to 0.0):
            Weight of the total variation distance to the target's distribution (DSpark: 0.1 CE and 0.9 TV).
        alpha_kl (`float`, *optional*, defaults to 0.0):
            Weight of the cross entropy to the target's distribution (its gradient is that of the Kullback-Leibler
            divergence): soft labels, less noisy than the recorded tokens.
        muon (`bool`, *optional*, defaults to `False`):
            Use Muon for the matrices inside the layers, and AdamW for everything else, at the same learning rate.
        fc_learning_rate_scale (`float`, *optional*, defaults to 1.0):
            Factor on the learning rate of `fc.weight`. Its inputs are raw target states, whose size is the target's:
            where they are far above 1 (SmolLM2: 1 to 30 beside outliers of hundreds) an Adam step of the common rate
            moves the fused state by more than itself, and nothing that reads it can learn. Choose about
            1 / mean |state|.
        carry_learning_rate_scale (`float`, *optional*, defaults to 1.0):
            Factor on the learning rate of what only carried rows use: the carry embedding `e`, and the map of carried
            tokens. They are added to the fused state, so they must be able to become as large: where that one is far
            above 1 (SmolLM2: 9) an Adam step of the common rate moves `e` by nothing, and the drafter can't tell
            carried rows from committed ones. Choose so that a step is about 1 % of it, 0.01 · |fc(h)| / learning rate
            (SmolLM2: 300). The map of carried tokens gets that much less as its inputs add up to, so that a step of
            either moves the fused state alike.
        pointer_learning_rate_scale (`float`, *optional*, defaults to 1.0):
            Factor on the learning rate of what looking up and pointing add: their scales, embeddings and gates. They
            are new in a drafter that is otherwise trained, and few: on SmolLM2 a rate of about 2e-3 for them, 5 to 7
            times that of the rest, learned to point much sooner.
        draft_temperature (`float`, *optional*, defaults to 0.0):
            Temperature of the first draft's proposals; 0 takes the likeliest tokens. Draws depend on the seed, the
            step and the example alone, as anchors do.

        carry_warmup_steps (`int`, *optional*, defaults to 0):
            Steps of the stage `"carryover"` that draft once, at the sampled anchors, and carry *recorded* rows: rows
            whose states predict what is to be drafted. They cost no verification and teach a drafter where to look;
            the steps behind them, with rejected rows, how far to trust what it sees. A control drafts once as well.

        non_finite_steps (`str`, *optional*, defaults to `"skip"`):
            What happens to a step whose gradient is not finite: `"skip"` drops it, counts it (`skipped_steps` in the
            log) and goes on, `"stop"` ends the run with the weights before it.

        max_logits (`int`, *optional*, defaults to 2**28):
            Draft logits that may exist at a time (2**28 of them are 1 GiB in float32). Where blocks have more, head
            and loss run over parts of the rows, and once more in the backward pass: a third more work in the head, and
            memory that does not grow with anchors, block size and vocabulary.

        > Parameters that control the data

        feature_cache_dir (`str`, *optional*):
            Folder for the target's features, computed once and read back. `None` computes them on line. Verification
            needs the target's keys, `alpha_tv` and `alpha_kl` its logits: with any of them it has no effect.

        carry_cache_dir (`str`, *optional*):
            Folder for verified first drafts. With it the first draft is always that of the drafter the run starts
            from (without carry), at anchors that depend on the seed and the recording alone: computed once, and shared
            by all runs from that drafter with the same `seed` and `anchors_per_response`; `data_seed` orders the
            recordings. Together with `feature_cache_dir` a carryover step then costs hardly more than a baseline step.
            Size: about `block_size * feature_size * 2` bytes per anchor.

        first_drafter (`str`, *optional*):
            Folder of the drafter whose first drafts are kept in `carry_cache_dir`, instead of the one the run starts
            from: so that a run that goes on from another's result shares them.

    Mixed precision (`bf16`, `fp16`) runs the drafter under autocast; its own weights are float32 in any case.

    Raises:
        ValueError: If a value is out of range, contradicts another, or asks for what the trainer does not support.

    > [!NOTE]
    > Defaults that differ from [`~transformers.TrainingArguments`]: `learning_rate` 6e-4, `lr_scheduler_type`
    > `"cosine"`, `warmup_steps` 0.04 (a share of all steps), `remove_unused_columns` `False`, gradient checkpointing
    > without re-entrance.
    """

    stage: str = field(default="baseline", metadata={"help": '"baseline" or "carryover" (draft–verify–draft).'})
    anchors_per_response: int = field(default=512, metadata={"help": "Anchors sampled per recording and step."})
    gamma: float | None = field(default=None, metadata={"help": "Decay of the position weights exp(-(k-1)/gamma)."})
    alpha_ce: float = field(default=1.0, metadata={"help": "Weight of the cross entropy to recorded tokens."})
    alpha_tv: float = field(default=0.0, metadata={"help": "Weight of the total variation to the target."})
    alpha_kl: float = field(
        default=0.0, metadata={"help": "Weight of the cross entropy to the target's distribution."}
    )
    muon: bool = field(default=False, metadata={"help": "Muon for the layers' matrices instead of AdamW."})
    fc_learning_rate_scale: float = field(default=1.0, metadata={"help": "Factor on the learning rate of fc.weight."})
    carry_learning_rate_scale: float = field(
        default=1.0, metadata={"help": "Factor on the learning rate of what only carried rows use."}
    )
    pointer_learning_rate_scale: float = field(
        default=1.0, metadata={"help": "Factor on the learning rate of what looking up and pointing add."}
    )
    draft_temperature: float = field(default=0.0, metadata={"help": "Temperature of the first draft; 0 is greedy."})
    carry_warmup_steps: int = field(default=0, metadata={"help": "First steps, which carry recorded rows."})
    non_finite_steps: str = field(
        default="skip", metadata={"help": '"skip" or "stop" at a step whose gradient is not finite.'}
    )
    first_drafter: str | None = field(
        default=None, metadata={"help": "Folder of the drafter whose first drafts are kept."}
    )
    max_logits: int = field(default=2**28, metadata={"help": "Draft logits that may exist at a time."})
    carry_cache_dir: str | None = field(default=None, metadata={"help": "Folder for verified first drafts."})
    feature_cache_dir: str | None = field(default=None, metadata={"help": "Folder for cached target features."})

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate of AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up steps, or below 1 their share of all steps."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "The collator needs all columns."})

    def __post_init__(self):
        if self.stage not in ("baseline", "carryover"):
            raise ValueError(f'`stage` must be "baseline" or "carryover", got {self.stage!r}.')
        if self.non_finite_steps not in ("skip", "stop"):
            raise ValueError(f'`non_finite_steps` must be "skip" or "stop", got {self.non_finite_steps!r}.')
        if self.anchors_per_response < 1:
            raise ValueError(f"`anchors_per_response` must be at least 1, got {self.anchors_per_response}.")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"`gamma` must be positive, got {self.gamma}.")
        for name in ("fc_learning_rate_scale", "carry_learning_rate_scale", "pointer_learning_rate_scale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)}.")
        alphas = (self.alpha_ce, self.alpha_tv, self.alpha_kl)
        if min(alphas) < 0 or sum(alphas) == 0:
            raise ValueError(
                "`alpha_ce`, `alpha_tv` and `alpha_kl` must not be negative nor all 0, got "
                f"{self.alpha_ce}, {self.alpha_tv} and {self.alpha_kl}."
            )
        if self.max_logits < 1:
            raise ValueError(f"`max_logits` must be at least 1, got {self.max_logits}.")
        if self.draft_temperature < 0:
            raise ValueError(f"`draft_temperature` must not be negative, got {self.draft_temperature}.")
        if self.draft_temperature > 0 and self.stage == "baseline":
            raise ValueError(
                f'`draft_temperature` {self.draft_temperature} is of the first draft, which `stage="baseline"` does '
                'not have. Leave it at 0, or use `stage="carryover"`.'
            )
        if self.carry_warmup_steps < 0 or (self.carry_warmup_steps and self.stage == "baseline"):
            raise ValueError(
                f"`carry_warmup_steps` must not be negative, nor set in the baseline stage, got "
                f"{self.carry_warmup_steps}."
            )
        if self.first_drafter is not None and self.carry_cache_dir is None:
            raise ValueError(
                f"`first_drafter` ({self.first_drafter!r}) makes the drafts that `carry_cache_dir` keeps, which is "
                "not set. Set both, or none."
            )
        if self.carry_cache_dir is not None and self.stage == "baseline":
            raise ValueError('`carry_cache_dir` keeps first drafts, which only `stage="carryover"` has. Leave it out.')
        if self.label_smoothing_factor:
            raise ValueError(
                f"`label_smoothing_factor` is not supported, got {self.label_smoothing_factor}. `alpha_tv` learns "
                "from the target's whole distribution."
            )
        if self.neftune_noise_alpha is not None:
            raise ValueError(
                f"`neftune_noise_alpha` is not supported, got {self.neftune_noise_alpha}: it adds noise to a model's "
                "token embeddings, and a drafter has none, it reads the frozen target's. Leave it out."
            )
        if self.bf16_full_eval or self.fp16_full_eval:
            raise ValueError(
                "`bf16_full_eval` and `fp16_full_eval` would round the float32 master weights. Use `bf16=True` or "
                "`fp16=True`, which hold for evaluation too."
            )
        super().__post_init__()
        if self.gradient_checkpointing:
            self._check_checkpointing()

    def _check_checkpointing(self) -> None:
        """Checkpointing without re-entrance: the fused context reaches the layers through an object, unseen by it."""
        kwargs = {"use_reentrant": False, **(self.gradient_checkpointing_kwargs or {})}
        if kwargs["use_reentrant"]:
            raise ValueError(
                f"`use_reentrant=True` would lose the gradient of the context. Leave it out of {kwargs}, the "
                "arguments of checkpointing."
            )
        self.gradient_checkpointing_kwargs = kwargs
        if hasattr(self, "activation_checkpointing_kwargs"):  # its name in newer versions; the parent mirrors the rest
            self.activation_checkpointing_kwargs = kwargs

    def check_drafter(self, config: CarryoverConfig) -> None:
        """Raise a `ValueError` when the stage contradicts the drafter, and warn about options without effect."""
        if self.stage == "baseline" and config.carry:
            raise ValueError(
                '`stage="baseline"` trains a drafter without carry, but `config.carry` is True. Load it with '
                '`carry=False`, or use `stage="carryover"`.'
            )
        needs_target = [
            ("carried rows", self.stage == "carryover" and config.carry and self.carry_cache_dir is None),
            ("`alpha_tv`", self.alpha_tv > 0),
            ("`alpha_kl`", self.alpha_kl > 0),
        ]
        reasons = [name for name, needed in needs_target if needed]
        if self.feature_cache_dir is not None and reasons:
            logger.warning(
                "`feature_cache_dir` has no effect: %s need(s) a pass of the target over every batch anyway.",
                " and ".join(reasons),
            )

    @property
    def soft_labels(self) -> bool:
        """Whether the loss needs the target's distribution."""
        return self.alpha_tv > 0 or self.alpha_kl > 0

    def position_gamma(self, block_size: int) -> float:
        """`gamma`, or its default for a block of `block_size` proposals."""
        return self.gamma if self.gamma is not None else max(1.0, 4.0 + (block_size - 7) * 3.0 / 8.0)
