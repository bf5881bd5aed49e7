# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Train a drafter from the command line: `python -m hf_carryover.train config.yaml` or with flags.

Without `--drafter` a new drafter is built from the target; with it, training goes on from that checkpoint, with or
without carry. The output folder gets the drafter and, beside it, `training.json` (the exact arguments, versions,
commit and metrics) and `training_log.jsonl` (everything that was logged).
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from transformers.trainer_utils import get_last_checkpoint

from . import __version__
from .modeling_carryover import CarryoverDrafter
from .target import drafter_from_target
from .training.arguments import CarryoverTrainingArguments
from .training.data import frequent_tokens
from .training.recording import load_recordings, split_recordings
from .training.trainer import CarryoverTrainer

logger = logging.getLogger(__name__)


@dataclass
class DrafterArguments:
    """
    What to train on what.

    Args:
        target (`str`): Folder or Hub id of the target.
        recordings (`str`): Recordings of the target's responses, any form [`load_recordings`] reads.
        held_out (`int`, *optional*, defaults to 100): Recordings kept for evaluation, chosen by their id and the seed.
        drafter (`str`, *optional*): Checkpoint to go on from.
        carry (`bool`, *optional*, defaults to `False`): Whether the trained drafter carries.
        num_hidden_layers, block_size, markov_rank, draft_vocab_size, target_layer_ids:
            Of a new drafter; see [`CarryoverConfig`]. The draft vocabulary is the recordings' most frequent tokens.
        init_from_target (`bool`, *optional*, defaults to `True`): Whether a new drafter starts from target layers.
        target_dtype (`str`, *optional*, defaults to `"bfloat16"`): The dtype the target runs in.
    """

    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    recordings: str = field(metadata={"help": "Recorded responses of the target."})
    held_out: int = field(default=100, metadata={"help": "Recordings kept for evaluation."})
    drafter: str | None = field(default=None, metadata={"help": "Drafter checkpoint to go on from."})
    carry: bool = field(default=False, metadata={"help": "Whether the trained drafter carries rejected rows."})
    num_hidden_layers: int = field(default=5, metadata={"help": "Layers of a new drafter."})
    block_size: int = field(default=15, metadata={"help": "Proposals per round of a new drafter."})
    markov_rank: int = field(default=0, metadata={"help": "Rank of a new drafter's Markov head; 0 is plain DFlash."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Reduced draft vocabulary of a new drafter."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped layers of a new drafter."})
    init_from_target: bool = field(default=True, metadata={"help": "Start a new drafter from target layers."})
    target_dtype: str = field(default="bfloat16", metadata={"help": "Dtype the target runs in."})


def build_drafter(arguments: DrafterArguments, target, recordings) -> CarryoverDrafter:
    """The checkpoint `arguments.drafter` in float32, or a new drafter for `target`."""
    if arguments.drafter is not None:
        return CarryoverDrafter.from_pretrained(arguments.drafter, dtype=torch.float32, carry=arguments.carry)
    config = {
        "block_size": arguments.block_size,
        "markov_rank": arguments.markov_rank,
        "carry": arguments.carry,
    }
    if arguments.target_layer_ids:
        config["target_layer_ids"] = arguments.target_layer_ids
    token_ids = None
    if arguments.draft_vocab_size is not None:
        token_ids = frequent_tokens(recordings, arguments.draft_vocab_size, target.config.get_text_config().vocab_size)
    return drafter_from_target(
        target,
        num_hidden_layers=arguments.num_hidden_layers,
        init_from_target=arguments.init_from_target,
        draft_token_ids=token_ids,
        **config,
    )


def provenance() -> dict:
    """Versions, and the commit when run from a checkout."""
    packages = ("torch", "transformers", "accelerate", "datasets")
    versions: dict[str, str | None] = {"hf_carryover": __version__}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    folder = Path(__file__).parent
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return {"versions": versions, "commit": result.stdout.strip() or None}


def write_record(output: Path, arguments: DrafterArguments, args: CarryoverTrainingArguments, trainer, metrics) -> None:
    """Write `training.json` and `training_log.jsonl`."""
    defaults = CarryoverTrainingArguments(output_dir=args.output_dir).to_dict()
    chosen = {key: value for key, value in args.to_dict().items() if defaults.get(key) != value or key == "seed"}
    # Names of folders, not their places: those differ on every machine.
    data = {key: Path(value).name if key in ("target", "recordings") else value for key, value in asdict(arguments).items()}
    chosen = {key: value for key, value in chosen.items() if not key.endswith("_dir")}
    record = {"arguments": data, "training_arguments": chosen, "metrics": metrics, **provenance()}
    (output / "training.json").write_text(json.dumps(record, indent=2, default=str) + "\n")
    lines = [json.dumps(entry) for entry in trainer.state.log_history]
    (output / "training_log.jsonl").write_text("\n".join(lines) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Train and save; returns the exit code."""
    parser = HfArgumentParser((DrafterArguments, CarryoverTrainingArguments), description=__doc__)
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) == 1 and argv[0].endswith((".yaml", ".yml")):
        arguments, args = parser.parse_yaml_file(argv[0])
    else:
        arguments, args = parser.parse_args_into_dataclasses(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    set_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=arguments.target_dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    recordings = load_recordings(arguments.recordings, vocab_size=target.config.get_text_config().vocab_size)
    train, held_out = split_recordings(recordings, arguments.held_out, seed=0)
    drafter = build_drafter(arguments, target, train)
    parameters = sum(p.numel() for p in drafter.parameters())
    logger.info("%d recordings, %d held out; drafter of %.1f M parameters.", len(train), len(held_out), parameters / 1e6)
    trainer = CarryoverTrainer(
        drafter, target, args, train_dataset=train, eval_dataset=held_out if arguments.held_out else None
    )
    checkpoint = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or checkpoint)
    metrics = trainer.evaluate() if arguments.held_out else {}
    if trainer.is_world_process_zero():
        output = Path(args.output_dir)
        drafter.save_pretrained(output / "drafter")
        tokenizer.save_pretrained(output / "drafter")
        write_record(output, arguments, args, trainer, metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
