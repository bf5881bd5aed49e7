# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Train a drafter: `hf-carryover train --config config.yaml`, or with flags.

Without `--drafter` a new drafter is built from the target; with it, training goes on from that checkpoint, with or
without carry. A run whose output folder has a checkpoint is resumed from the last whole one. The output folder gets
the drafter and its tokenizer in `drafter`, and `training.json` (the exact arguments, versions, commit and metrics) and
`training_log.jsonl` (everything that was logged).
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path

import torch
from datasets import concatenate_datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from transformers.trainer_pt_utils import AcceleratorConfig

from . import __version__
from .command import expand_config
from .modeling_carryover import CarryoverDrafter
from .reshape import reshape_drafter
from .target import drafter_from_target
from .training.arguments import CarryoverTrainingArguments
from .training.data import frequent_tokens
from .training.loading import load_recordings, split_recordings
from .training.trainer import CarryoverTrainer


logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
# What shapes a new drafter, and which of it only a new one takes: see `reshape_drafter` for the others.
NEW_FLAGS = ("num_hidden_layers", "init_from_target", "anchor_first", "mask_token_id")
CARRY_FLAGS = ("carry", "carry_from", "carry_pointer")
SHAPE_FLAGS = ("block_size", "lookup_ngram_size", "markov_rank", "target_layer_ids", *NEW_FLAGS)


@dataclass
class DrafterArguments:
    """
    What to train on what.

    Args:
        target (`str`): Folder or Hub id of the target.
        recordings (`list[str]`): Recordings of the target's responses, each in any form [`load_recordings`] reads.
        held_out (`int`, *optional*, defaults to 100):
            Recordings kept for evaluation, chosen by their id alone, so that every run on a file keeps the same ones;
            0 trains on all and evaluates nothing.
        drafter (`str`, *optional*): Checkpoint to go on from.
        carry (`bool`, *optional*):
            Whether the trained drafter carries. Defaults to what `drafter` does, and to `False` for a new one.
        carry_from (`str`, *optional*): What a carried row is made of, see [`CarryoverConfig`].
        carry_pointer (`bool`, *optional*): Whether the target's predictions at rejected rows are pointed at.
        num_hidden_layers, init_from_target, anchor_first, mask_token_id (*optional*):
            Of a new drafter, so refused together with `drafter`; see [`drafter_from_target`] and [`CarryoverConfig`],
            whose defaults hold.
        block_size, lookup_ngram_size, markov_rank, draft_vocab_size, target_layer_ids (*optional*):
            Of a new drafter, or changes to the shape of `drafter`, see [`reshape_drafter`]. The draft vocabulary is
            the recordings' most frequent tokens.
        lora_rank (`int`, *optional*):
            Train a LoRA of this rank, and the carry embedding, on the frozen `drafter`: see [`add_adapter`].
        lora_alpha (`int`, *optional*): Its scale, twice the rank by default.
        lora_target_modules (`list[str]`, *optional*): What it adapts, all linear maps by default.
        target_dtype (`str`, *optional*, defaults to `"bfloat16"`): The dtype the target runs in.
        save_dtype (`str`, *optional*, defaults to `"float32"`):
            The dtype of the finished drafter's file. Training and its checkpoints are float32.
    """

    target: str = field(metadata={"help": "Folder or Hub id of the target."})
    recordings: list[str] = field(metadata={"help": "Recorded responses of the target, one or more."})
    held_out: int = field(default=100, metadata={"help": "Recordings kept for evaluation; 0 for none."})
    drafter: str | None = field(default=None, metadata={"help": "Drafter checkpoint to go on from."})
    carry: bool | None = field(default=None, metadata={"help": "Whether the trained drafter carries rejected rows."})
    carry_from: str | None = field(default=None, metadata={"help": "What a carried row is made of."})
    carry_pointer: bool | None = field(
        default=None, metadata={"help": "Whether the target's predictions at rejected rows are pointed at."}
    )
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Layers of a new drafter."})
    block_size: int | None = field(default=None, metadata={"help": "Proposals per round of a new drafter."})
    lookup_ngram_size: int | None = field(
        default=None, metadata={"help": "Longest ending of the text that is looked up in it; 0 for none."}
    )
    markov_rank: int | None = field(
        default=None, metadata={"help": "Rank of a new drafter's Markov head; 0 is plain DFlash."}
    )
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Reduced draft vocabulary of a new drafter."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped layers of a new drafter."})
    init_from_target: bool | None = field(default=None, metadata={"help": "Start a new drafter from target layers."})
    anchor_first: bool | None = field(
        default=None, metadata={"help": "Whether a new drafter has anchor-first blocks."}
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "Mask token of a new drafter; a learned embedding by default."}
    )
    lora_rank: int | None = field(default=None, metadata={"help": "Train a LoRA of this rank on a frozen drafter."})
    lora_alpha: int | None = field(default=None, metadata={"help": "Scale of the LoRA; twice the rank by default."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "What the LoRA adapts; all linear maps by default."}
    )
    target_dtype: str = field(default="bfloat16", metadata={"help": "Dtype the target runs in."})
    save_dtype: str = field(default="float32", metadata={"help": "Dtype of the finished drafter's file."})

    def __post_init__(self):
        if self.held_out < 0:
            raise ValueError(f"`held_out` must be 0 or a number of recordings, got {self.held_out}.")
        given = [name for name in NEW_FLAGS if getattr(self, name) is not None]
        if self.drafter is not None and given:
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in given)} shape a new drafter, but `drafter` names one to go on "
                "from, which has its own. Leave them out, or leave out `drafter`."
            )
        if self.lora_rank is not None and (self.drafter is None or self.lora_rank < 1):
            raise ValueError(
                f"`lora_rank` {self.lora_rank} needs a `drafter` to adapt, and must be at least 1; got `drafter` "
                f"{self.drafter!r}."
            )
        if self.lora_rank is None and (self.lora_alpha is not None or self.lora_target_modules is not None):
            raise ValueError("`lora_alpha` and `lora_target_modules` have no effect without `lora_rank`.")
        for name in ("target_dtype", "save_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"`{name}` must be one of {', '.join(DTYPES)}, got {getattr(self, name)!r}.")


def parse(argv: list[str]) -> tuple[DrafterArguments, CarryoverTrainingArguments]:
    """Both groups of arguments, from flags and YAML files."""
    groups = (DrafterArguments, CarryoverTrainingArguments)
    parser = HfArgumentParser(groups, description=__doc__, allow_abbrev=False)  # a typo is no abbreviation
    # One line instead of the usage text, which lists every flag of `TrainingArguments`; --help prints it.
    parser.error = lambda message: parser.exit(2, f"error: {message} (--help lists the flags)\n")
    return parser.parse_args_into_dataclasses(expand_config(argv))


def build_drafter(arguments: DrafterArguments, target, recordings) -> CarryoverDrafter:
    """The checkpoint `arguments.drafter` in float32, reshaped where asked for, or a new drafter for `target`."""
    names = [*SHAPE_FLAGS, *CARRY_FLAGS]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    token_ids = None
    if arguments.draft_vocab_size is not None:
        token_ids = frequent_tokens(recordings, arguments.draft_vocab_size, target.config.get_text_config().vocab_size)
    if arguments.drafter is None:
        return drafter_from_target(target, draft_token_ids=token_ids, **{"carry": False, **given})
    carry = {name: given.pop(name) for name in CARRY_FLAGS if name in given}
    drafter = _load("drafter", arguments.drafter, CarryoverDrafter, dtype=torch.float32, **carry)
    if given.get("lookup_ngram_size") and not drafter.config.lookup_ngram_size:
        # Added to the checkpoint rather than another shape of it: an adapter's base keeps its name.
        carry["lookup_ngram_size"] = given.pop("lookup_ngram_size")
        drafter = _load("drafter", arguments.drafter, CarryoverDrafter, dtype=torch.float32, **carry)
    if given or token_ids is not None:
        drafter = reshape_drafter(drafter, draft_token_ids=token_ids, **given)
    return drafter


def build_adapter(arguments: DrafterArguments):
    """The PEFT config that was asked for, or `None`."""
    if arguments.lora_rank is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("`lora_rank` needs PEFT: `pip install 'hf_carryover[peft]'`.") from error
    alpha = 2 * arguments.lora_rank if arguments.lora_alpha is None else arguments.lora_alpha
    return LoraConfig(r=arguments.lora_rank, lora_alpha=alpha, target_modules=arguments.lora_target_modules)


def _load(argument: str, name: str, loader, **kwargs):
    """`loader.from_pretrained(name)`; what it can't find is named by the argument that asked for it."""
    try:
        return loader.from_pretrained(name, **kwargs)
    except OSError as error:
        raise ValueError(f"`{argument}` {name!r} is no folder or Hub id that can be loaded: {error}") from error


def build_trainer(arguments: DrafterArguments, args: CarryoverTrainingArguments):
    """The trainer, the target's tokenizer, and the checkpoint to resume from. What is wrong is found here."""
    set_seed(args.seed)
    tokenizer = _load("target", arguments.target, AutoTokenizer)
    target = _load("target", arguments.target, AutoModelForCausalLM, dtype=arguments.target_dtype).eval()
    vocab_size = target.config.get_text_config().vocab_size
    train = concatenate_datasets([load_recordings(part, vocab_size=vocab_size) for part in arguments.recordings])
    held_out = None
    if arguments.held_out:
        train, held_out = split_recordings(train, arguments.held_out, seed=0)
    drafter = build_drafter(arguments, target, train)
    parameters = sum(p.numel() for p in drafter.parameters()) / 1e6
    sizes = (len(train), 0 if held_out is None else len(held_out), parameters)
    logger.info("%d recordings, %d held out; drafter of %.1f M parameters.", *sizes)
    adapter = build_adapter(arguments)
    trainer = CarryoverTrainer(drafter, target, args, train_dataset=train, eval_dataset=held_out, peft_config=adapter)
    checkpoint = args.resume_from_checkpoint
    if checkpoint is None:
        checkpoint = trainer.last_checkpoint()
    if checkpoint is not None:
        trainer.check_checkpoint(checkpoint)
        logger.info("Resuming from %s.", Path(checkpoint).name)
    return trainer, tokenizer, checkpoint


def provenance() -> dict:
    """Versions, and the commit when run from a checkout."""
    packages = ("torch", "transformers", "accelerate", "datasets")
    versions: dict[str, str | None] = {"hf_carryover": __version__}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    # An installed copy may lie inside a repository that is not ours.
    ours = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    return {"versions": versions, "commit": _git("rev-parse", "HEAD") if ours else None}


def _git(*command: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:  # no git
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _unset(value) -> bool:
    """Whether an argument says nothing, before or after `TrainingArguments` has put it into its own form."""
    return value is None or value is False or value == [] or value in ("", "none")


def training_choices(args: CarryoverTrainingArguments) -> dict:
    """What differs from the defaults, and the seed; without folders and tokens."""
    # Not from a second instance: making one resets accelerate's state, and a process of several then counts as single.
    choices = {}
    values = args.to_dict()
    for item in fields(args):
        key, value = item.name, values.get(item.name)
        # Progress bars: on or off by the log level, unless said otherwise.
        if key.endswith(("_dir", "_from_checkpoint", "_token")) or key == "disable_tqdm":
            continue
        default = item.default if item.default_factory is MISSING else item.default_factory()
        same = value == default or (_unset(value) and _unset(default)) or getattr(args, key) == AcceleratorConfig()
        if key == "seed" or not same:
            choices[key] = value
    return choices


def write_record(
    output: Path,
    arguments: DrafterArguments,
    args: CarryoverTrainingArguments,
    trainer: CarryoverTrainer,
    metrics: dict,
) -> None:
    """Write `training.json`, with the drafter's own config, and `training_log.jsonl`."""
    chosen = training_choices(args)
    if chosen.get("first_drafter"):
        chosen["first_drafter"] = _place(chosen["first_drafter"], 2)
    data = asdict(arguments)
    # Names of folders, not their places: those differ on every machine. A Hub id stays as it is.
    data["recordings"] = [_place(name, 1) for name in data["recordings"]]
    for key, parts in (("target", 1), ("drafter", 2)):
        if data[key] is not None:
            data[key] = _place(data[key], parts)
    data = {key: value for key, value in data.items() if value is not None}
    config = trainer.drafter.config.to_diff_dict()
    record = {"arguments": data, "config": config, "training_arguments": chosen, "metrics": metrics, **provenance()}
    (output / "training.json").write_text(json.dumps(_finite(record), indent=2, default=str) + "\n")
    lines = [json.dumps(_finite(entry), default=str) for entry in trainer.state.log_history]
    (output / "training_log.jsonl").write_text("\n".join(lines) + "\n")


def _place(name: str, parts: int) -> str:
    """The last `parts` parts of a path that exists; another name as it is."""
    return "/".join(Path(name).resolve().parts[-parts:]) if Path(name).exists() else name


def _finite(value):
    """`value` with `null` for every number that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: list[str] | None = None) -> int:
    """Train and save; returns the exit code, 2 for a mistake in what was asked for."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        arguments, args = parse(sys.argv[1:] if argv is None else argv)
        trainer, tokenizer, checkpoint = build_trainer(arguments, args)
    except (ValueError, OSError, ImportError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics = trainer.evaluate() if arguments.held_out else {}
    if trainer.is_world_process_zero():
        output = Path(args.output_dir)
        trainer.drafter.to(getattr(torch, arguments.save_dtype)).save_pretrained(output / "drafter")
        tokenizer.save_pretrained(output / "drafter")
        write_record(output, arguments, args, trainer, metrics)
    # Threads of a process group that is left open abort a process that ends before the others.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
