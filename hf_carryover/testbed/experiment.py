# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Training and measuring on the language with a dial: a target, a baseline drafter, and what carry adds to it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from ..configuration_carryover import CarryoverConfig
from ..evaluation.replay import Replay, ReplayedResponse
from ..modeling_carryover import CarryoverDrafter
from ..reshape import reshape_drafter
from ..training.arguments import CarryoverTrainingArguments
from ..training.trainer import CarryoverTrainer
from .language import Language


@dataclass(frozen=True)
class Sizes:
    """Sizes of target and drafter, and lengths of the stages in steps."""

    target_hidden: int = 128
    target_layers: int = 4
    target_steps: int = 400
    drafter_hidden: int = 64
    drafter_intermediate: int = 64
    drafter_layers: int = 2
    drafter_heads: int = 2
    block_size: int = 7
    baseline_steps: int = 200
    carry_steps: int = 300
    texts_per_step: int = 64
    texts_per_drafter_step: int = 32
    anchors_per_text: int = 8
    learning_rate: float = 3e-3


def train_target(language: Language, sizes: Sizes, seed: int = 0) -> tuple[LlamaForCausalLM, float]:
    """
    A target that has learned the language, at all positions of the dial.

    Returns:
        `tuple[LlamaForCausalLM, float]`: the target, and how many outputs that are fixed it gets right.
    """
    set_seed(seed)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=language.vocab_size,
            hidden_size=sizes.target_hidden,
            intermediate_size=3 * sizes.target_hidden,
            num_hidden_layers=sizes.target_layers,
            num_attention_heads=sizes.target_hidden // 32,
            num_key_value_heads=sizes.target_hidden // 32,
            max_position_embeddings=4 * language.length,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    texts = language.recordings(sizes.target_steps * sizes.texts_per_step, None, seed=1_000 + seed)
    prompt = [-100] * language.prompt_length
    texts = texts.map(lambda row: {"labels": prompt + row["input_ids"][language.prompt_length :]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=sizes.texts_per_step,
            max_steps=sizes.target_steps,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=50,
            weight_decay=0.01,
            **_quiet(seed),
        )
        trainer = Trainer(target, arguments, train_dataset=texts.select_columns(["input_ids", "labels"]))
        trainer.train()
    target.eval()
    return target, target_accuracy(target, language)


@torch.no_grad()
def target_accuracy(target: LlamaForCausalLM, language: Language, number: int = 256) -> float:
    """Share of the fixed outputs of new texts that the target predicts."""
    texts = torch.from_numpy(language.texts(number, None, seed=2))
    predicted = target(texts).logits[:, language.prompt_length - 1 : -1].argmax(dim=-1)
    right = predicted == texts[:, language.prompt_length :]
    return float(right[:, language.fixed(texts)].float().mean())


def new_drafter(target: LlamaForCausalLM, sizes: Sizes, seed: int = 0) -> CarryoverDrafter:
    """A drafter too small for the language's table, without carry."""
    set_seed(seed)
    config = target.config
    return CarryoverDrafter(
        CarryoverConfig(
            vocab_size=config.vocab_size,
            target_hidden_size=config.hidden_size,
            num_target_layers=config.num_hidden_layers,
            target_layer_ids=sorted({1, config.num_hidden_layers - 1}),
            hidden_size=sizes.drafter_hidden,
            intermediate_size=sizes.drafter_intermediate,
            num_hidden_layers=sizes.drafter_layers,
            num_attention_heads=sizes.drafter_heads,
            num_key_value_heads=sizes.drafter_heads,
            head_dim=32,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            block_size=sizes.block_size,
            carry=False,
            draft_sampling="argmax",
        )
    )


def train_drafter(
    drafter: CarryoverDrafter, target, language: Language, sizes: Sizes, stage: str, seed: int = 0
) -> CarryoverDrafter:
    """Trains a drafter on texts of all positions of the dial, in place."""
    steps = sizes.baseline_steps if stage == "baseline" else sizes.carry_steps
    recordings = language.recordings(steps * sizes.texts_per_drafter_step, None, seed=3_000 + seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = CarryoverTrainingArguments(
            output_dir=folder,
            stage=stage,
            anchors_per_response=sizes.anchors_per_text,
            per_device_train_batch_size=sizes.texts_per_drafter_step,
            max_steps=steps,
            learning_rate=sizes.learning_rate,
            **_quiet(seed),
        )
        CarryoverTrainer(drafter, target, arguments, train_dataset=recordings).train()
    return drafter.eval()


def with_carry(drafter: CarryoverDrafter, carry_from: str | None) -> CarryoverDrafter:
    """A copy of a drafter, with carry unless `carry_from` is `None`."""
    changes = {} if carry_from is None else {"carry_from": carry_from}
    return reshape_drafter(drafter, carry=carry_from is not None, **changes)


def measure(
    drafter, target, language: Language, rho: float, number: int = 256, seed: int = 4
) -> list[ReplayedResponse]:
    """Rounds on new texts, proposals being the likeliest tokens and the target sampling."""
    # With proposals from a one-point distribution a committed token was accepted iff it was proposed: as if greedy.
    return Replay(drafter, target)(language.recordings(number, rho, seed=seed), batch_size=64)


def probe(drafter, target, language: Language, rho: float, number: int = 512, steps: int = 300) -> float:
    """
    What the carried rows tell, at most: the share of tokens behind rejected rows that a linear map, fitted on half of
    the texts, reads off the rows' features on the other half. Free choices, which nothing tells, are left out.
    """
    recordings = language.recordings(number, rho, seed=5)
    with tempfile.TemporaryDirectory() as folder:
        arguments = CarryoverTrainingArguments(
            output_dir=folder, stage="carryover", anchors_per_response=8, per_device_eval_batch_size=64, **_quiet(0)
        )
        trainer = CarryoverTrainer(drafter, target, arguments, eval_dataset=recordings)
    features, tokens, owners = [], [], []
    for batch in trainer.get_eval_dataloader():
        trainer.add_anchors(batch, step=0)
        with torch.no_grad():
            _, seen = trainer.block_losses(drafter, batch)
        carried, blocks = seen["blocks"].carried, seen["blocks"]
        behind = carried["carried_positions"] + 1
        inside = behind < batch["input_ids"].shape[1]
        fixed = (behind - language.prompt_length) % language.choice_every != 0
        wanted = carried["carried_mask"] & inside & fixed & blocks.counted.unsqueeze(1)
        block = wanted.nonzero()[:, 0]
        features.append(carried["carried_features"][wanted])
        tokens.append(batch["input_ids"][blocks.sequence_index[block], behind[wanted]])
        owners.append(batch["example_index"][blocks.sequence_index[block]])
    rows, labels, fitted = torch.cat(features).float(), torch.cat(tokens), torch.cat(owners) % 2 == 0
    rows = (rows - rows[fitted].mean(dim=0)) / (rows[fitted].std(dim=0) + 1e-6)
    torch.manual_seed(0)
    linear = torch.nn.Linear(rows.shape[1], language.vocab_size)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(linear(rows[fitted]), labels[fitted])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = linear(rows[~fitted]).argmax(dim=-1) == labels[~fitted]
    return float(right.float().mean())


def _quiet(seed: int) -> dict:
    return {
        "seed": seed,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 50,
        "disable_tqdm": True,
    }


def arrays(responses: list[ReplayedResponse]) -> tuple[np.ndarray, np.ndarray]:
    """Committed tokens and rounds of each text."""
    return np.array([sum(r.committed) for r in responses]), np.array([r.rounds for r in responses])
