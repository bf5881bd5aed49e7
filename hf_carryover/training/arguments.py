# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Arguments of [`CarryoverTrainer`]."""

from dataclasses import dataclass, field

from transformers import TrainingArguments


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
        fc_learning_rate_scale (`float`, *optional*, defaults to 1.0):
            Factor on the learning rate of `fc.weight`. Its inputs are raw target states, whose size is the target's:
            where they are far above 1 (SmolLM2: 1 to 30 beside outliers of hundreds) an Adam step of the common rate
            moves the fused state by more than itself, and nothing that reads it can learn. Choose about
            1 / mean |state|.
        draft_temperature (`float`, *optional*, defaults to 0.0):
            Temperature of the first draft's proposals; 0 takes the likeliest tokens.

        > Parameters that control the data

        feature_cache_dir (`str`, *optional*):
            Folder for the target's features, computed once and read back. `None` computes them on line. The second
            draft needs the target's keys too, so `stage="carryover"` with `carry` computes them in any case.

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
    fc_learning_rate_scale: float = field(default=1.0, metadata={"help": "Factor on the learning rate of fc.weight."})
    draft_temperature: float = field(default=0.0, metadata={"help": "Temperature of the first draft; 0 is greedy."})
    feature_cache_dir: str | None = field(default=None, metadata={"help": "Folder for cached target features."})

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate of AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up steps, or below 1 their share of all steps."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "The collator needs all columns."})

    def __post_init__(self):
        if self.stage not in ("baseline", "carryover"):
            raise ValueError(f'`stage` must be "baseline" or "carryover", got {self.stage!r}.')
        if self.anchors_per_response < 1:
            raise ValueError(f"`anchors_per_response` must be at least 1, got {self.anchors_per_response}.")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"`gamma` must be positive, got {self.gamma}.")
        if self.alpha_ce < 0 or self.alpha_tv < 0 or self.alpha_ce + self.alpha_tv == 0:
            raise ValueError(
                f"`alpha_ce` and `alpha_tv` must not be negative nor both 0, got {self.alpha_ce} and {self.alpha_tv}."
            )
        if self.draft_temperature < 0:
            raise ValueError(f"`draft_temperature` must not be negative, got {self.draft_temperature}.")
        if self.gradient_checkpointing and self.gradient_checkpointing_kwargs is None:
            # The fused context reaches the layers through an object; re-entrant checkpointing would cut its gradient.
            self.gradient_checkpointing_kwargs = {"use_reentrant": False}
        super().__post_init__()

    def position_gamma(self, block_size: int) -> float:
        """`gamma`, or its default for a block of `block_size` proposals."""
        return self.gamma if self.gamma is not None else max(1.0, 4.0 + (block_size - 7) * 3.0 / 8.0)
