# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Recordings as the trainer feeds them."""

from __future__ import annotations

import logging

import torch
from datasets import Dataset

from .loading import load_recordings


logger = logging.getLogger(__name__)


class RecordingCollator:
    """
    Right-pads recordings.

    Returns `input_ids`, `attention_mask` and `response_mask`, each `(num_sequences, length)`, and `example_index`
    `(num_sequences,)`. Two recordings of 3 and 2 tokens:

    ```python
    {
        "input_ids": tensor([[5, 6, 7], [8, 9, 0]]),
        "attention_mask": tensor([[1, 1, 1], [1, 1, 0]]),
        "response_mask": tensor([[0, 1, 1], [0, 1, 0]]),
        "example_index": tensor([0, 1]),
    }
    ```
    """

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        length = max(len(example["input_ids"]) for example in examples)
        batch = {
            name: torch.zeros((len(examples), length), dtype=torch.long)
            for name in ("input_ids", "attention_mask", "response_mask")
        }
        for row, example in enumerate(examples):
            tokens = torch.as_tensor(example["input_ids"])
            batch["input_ids"][row, : len(tokens)] = tokens
            batch["attention_mask"][row, : len(tokens)] = 1
            batch["response_mask"][row, : len(tokens)] = torch.as_tensor(example["response_mask"])
        batch["example_index"] = torch.tensor([example["example_index"] for example in examples])
        return batch


def prepare_recordings(recordings, vocab_size: int, name: str = "dataset") -> Dataset:
    """
    Recordings for [`CarryoverTrainer`]: checked, without those that have no anchor, and numbered.

    Args:
        recordings (`str`, `Path` or `datasets.Dataset`): Anything [`load_recordings`] reads.
        vocab_size (`int`): Of the target; a larger token id is an error.
        name (`str`, *optional*, defaults to `"dataset"`): How messages call it.

    Returns:
        `datasets.Dataset` with `input_ids`, `response_mask` and `example_index`.

    Raises:
        ValueError: If nothing is left, or a recording is malformed.
    """
    dataset = load_recordings(recordings, vocab_size=vocab_size, min_response_tokens=1)
    total = len(dataset)
    # An anchor is a position in front of a response token, so position 0 can't be a label.
    keep = [index for index, mask in enumerate(dataset["response_mask"]) if any(mask[1:])]
    if len(keep) < total:
        dataset = dataset.select(keep)
        logger.warning("%s: dropped %d of %d recordings without an anchor.", name, total - len(dataset), total)
    if len(dataset) == 0:
        raise ValueError(
            f"{name}: none of {total} recordings has an anchor (a position in front of a response token). Check that "
            "`response_mask` marks what the target produced."
        )
    dataset = dataset.select_columns(["input_ids", "response_mask"])
    return dataset.add_column("example_index", list(range(len(dataset))))


def frequent_tokens(recordings: Dataset, size: int, vocab_size: int) -> torch.LongTensor:
    """
    A draft vocabulary: the `size` tokens most frequent in the responses, increasing, shape `(size,)`. Where the
    responses have fewer distinct tokens, the smallest other ids fill up.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"A draft vocabulary has 1 ... {vocab_size} tokens (the target's), got {size}.")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in recordings:
        tokens = torch.as_tensor(row["input_ids"])[torch.as_tensor(row["response_mask"]).bool()]
        counts += torch.bincount(tokens, minlength=vocab_size)
    # A stable sort prefers the smaller id among equals, on every machine.
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values
