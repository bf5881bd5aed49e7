"""Recordings and trainers for the training tests."""

import torch

from hf_carryover.training.arguments import CarryoverTrainingArguments
from hf_carryover.training.trainer import CarryoverTrainer


def make_arguments(output_dir, **kwargs):
    """Arguments of a quiet run on the CPU."""
    values = {
        "output_dir": str(output_dir),
        "stage": "carryover",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
    }
    return CarryoverTrainingArguments(**{**values, **kwargs})


def make_trainer(target, drafter, output_dir, rows, **kwargs):
    """A trainer over `rows`; `eval_dataset` and `peft_config` are the trainer's, every other keyword an argument."""
    own = {name: kwargs.pop(name, None) for name in ("eval_dataset", "peft_config")}
    args = make_arguments(output_dir, **{"per_device_train_batch_size": len(rows), **kwargs})
    return CarryoverTrainer(drafter, target, args, train_dataset=rows, **own)


def make_batch(trainer, anchors=None):
    """All recordings in order, right-padded, with the sampled anchors or those given as `(sequence, position)`."""
    dataset = trainer.train_dataset
    batch = trainer.data_collator([dataset[i] for i in range(len(dataset))])
    trainer.add_anchors(batch, step=1)
    if anchors is not None:
        batch["sequence_index"], batch["anchor_positions"] = torch.tensor(anchors).T.contiguous()
    return batch


def random_rows(lengths, prompt=4, seed=0):
    """Recordings of random tokens; all behind the prompt is response."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "id": str(i),
            "input_ids": torch.randint(2, 60, (length,), generator=generator).tolist(),
            "response_mask": [0] * prompt + [1] * (length - prompt),
        }
        for i, length in enumerate(lengths)
    ]


def fit_drafter(target, drafter, texts, prompt_lengths, output_dir, **kwargs):
    """Train `drafter` on texts of the target until it knows them: most of its proposals there are accepted."""
    rows = [
        {"id": str(i), "input_ids": text, "response_mask": [0] * n + [1] * (len(text) - n)}
        for i, (text, n) in enumerate(zip(texts, prompt_lengths))
    ]
    options = {"max_steps": 60, "learning_rate": 8e-3, "anchors_per_response": 20, "logging_steps": 1000}
    make_trainer(target, drafter, output_dir, rows, **{**options, **kwargs}).train()
    return drafter.eval()


def losses_of(trainer):
    """Every logged training loss."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights_of(drafter):
    """Copies of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}


__all__ = ["fit_drafter", "losses_of", "make_arguments", "make_batch", "make_trainer", "random_rows", "weights_of"]
