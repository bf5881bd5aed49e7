# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Run a recipe from prompts to report: `hf-carryover recipe recipes/qwen3-4b-dflash.yaml --output runs/qwen3-4b-dflash`.

A recipe is one YAML file: the target, the prompt sets, and the flags of `record`, `train` (what all stages share),
each of its `stages`, and `bench`. The stages run in order; `from` names the stage whose drafter one goes on from.
Every step is a command of its own that is printed first, and what is finished is not repeated: an interrupted recipe
goes on where it stopped. An overlay is a second YAML file whose values replace those of the first (`null` removes
one); the tests run every recipe with an overlay that makes it tiny.

examples:
  hf-carryover recipe recipes/qwen3-4b-dflash.yaml --output runs/a --dry_run
  hf-carryover recipe recipes/qwen3-4b-dflash.yaml --output runs/a --steps prompts record
  hf-carryover recipe recipes/qwen3-4b-dflash.yaml --output runs/a --overlay mine.yaml
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from datasets import load_dataset

from .command import Parser, add_switch, run_command


STEPS = ("prompts", "record", "train", "bench")
# Of a prompt set: what goes to `load_dataset`, and how many of its rows are taken.
PROMPT_KEYS = {"path", "name", "split", "data_files", "limit"}
KEYS = {"description", "target", "processes", "prompts", "record", "train", "stages", "bench"}


@dataclass
class Recipe:
    """
    A recipe that was read.

    Args:
        target (`str`): Folder or Hub id of the target.
        stages (`dict[str, dict]`): Flags of `train` by stage, in order.
        prompts (`dict[str, dict]`): Prompt sets by name.
        record, train, bench (`dict`): Flags; `bench` may be empty, then nothing is measured.
        processes (`int`): Processes that train.
        description (`str`): What it is for.
    """

    target: str
    stages: dict[str, dict]
    prompts: dict[str, dict] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    description: str = ""

    def __post_init__(self):
        for name, flags in self.stages.items():
            before = flags.get("from")
            earlier = list(self.stages)[: list(self.stages).index(name)]
            if before is not None and before not in earlier:
                raise ValueError(
                    f"Stage {name!r} goes on from {before!r}, which is none of the stages before: {earlier}."
                )
        for name, prompts in self.prompts.items():
            unknown = sorted(set(prompts) - PROMPT_KEYS)
            if unknown or "path" not in prompts:
                raise ValueError(f"Prompt set {name!r} needs `path` and knows {sorted(PROMPT_KEYS)}, got {prompts}.")


def merge(below: dict, above: dict) -> dict:
    """`below` with the values of `above`, dictionaries within dictionaries merged; `None` removes a value."""
    merged = dict(below)
    for key, value in above.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def read_recipe(path: str | Path, *overlays: str | Path) -> Recipe:
    """
    Read a recipe and what is laid over it.

    Raises:
        ValueError: If it lacks a target or a stage, or has keys that mean nothing.
    """
    content: dict = {}
    for file in (path, *overlays):
        part = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        if not isinstance(part, dict):
            raise ValueError(f"{Path(file).name} must hold `name: value` lines, got {type(part).__name__}.")
        content = merge(content, part)
    unknown, missing = sorted(set(content) - KEYS), sorted({"target", "stages"} - set(content))
    if unknown or missing:
        raise ValueError(f"{Path(path).name}: unknown {unknown}, missing {missing}; a recipe has {sorted(KEYS)}.")
    return Recipe(**content)


def flags_of(values: dict[str, Any]) -> list[str]:
    """Command line flags of a dictionary."""
    flags = []
    for name, value in values.items():
        parts = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *(json.dumps(p) if isinstance(p, (dict, bool)) else str(p) for p in parts)]
    return flags


def save_prompts(recipe: Recipe, output: Path) -> list[Path]:
    """Fetch the prompt sets with `datasets` and save them, in the columns that `record` reads; their folders."""
    folders = []
    for name, source in recipe.prompts.items():
        folder, source = output / "prompts" / name, dict(source)
        folders.append(folder)
        if (folder / "state.json").is_file():
            continue
        limit, path = source.pop("limit", None), source.pop("path")
        data = load_dataset(path, **{"split": "train", **source})
        data = data if limit is None else data.select(range(min(limit, len(data))))
        data.save_to_disk(str(folder))
        print(f"{name}: {len(data)} prompts", flush=True)
    return folders


def record_command(recipe: Recipe, output: Path, folders: list[Path], python: str) -> list[str]:
    """The command that lets the target answer the prompts."""
    values = {"target": recipe.target, "prompts": [str(folder) for folder in folders], **recipe.record}
    return [python, "-m", "hf_carryover.cli", "record", *flags_of(values), "--output", str(output / "recordings")]


def train_command(recipe: Recipe, output: Path, stage: str) -> list[str]:
    """The command of one stage."""
    values = {"target": recipe.target, "recordings": [str(output / "recordings")], **recipe.train}
    values = merge(values, recipe.stages[stage])
    before = values.pop("from", None)
    if before is not None:
        values["drafter"] = str(output / before / "drafter")
    launch = [sys.executable]
    if recipe.processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(recipe.processes)]
    return [*launch, "-m", "hf_carryover.train", *flags_of(values), "--output_dir", str(output / stage)]


def bench_command(recipe: Recipe, output: Path) -> list[str]:
    """The command that measures all stages against plain decoding."""
    drafters = [f"{name}={output / name / 'drafter'}" for name in recipe.stages]
    values = {"target": recipe.target, "drafter": drafters, **recipe.bench}
    return [
        sys.executable,
        "-m",
        "hf_carryover.cli",
        "bench",
        *flags_of(values),
        "--output",
        str(output / "bench.json"),
    ]


def run_recipe(
    recipe: Recipe,
    output: Path,
    steps: tuple[str, ...] = STEPS,
    record_python: str = sys.executable,
    dry_run: bool = False,
) -> None:
    """
    Run the steps of a recipe that are not done yet.

    Args:
        recipe ([`Recipe`]): What to do.
        output (`Path`): Folder of everything: `prompts`, `recordings`, one folder per stage, `bench.json`.
        steps (`tuple[str, ...]`, *optional*): Some of `prompts`, `record`, `train` and `bench`.
        record_python (`str`, *optional*): Interpreter that has vLLM, where recording needs another environment.
        dry_run (`bool`, *optional*, defaults to `False`): Print the commands and run none.

    Raises:
        ValueError: If a step fails; its own message is above.
    """
    folders = [output / "prompts" / name for name in recipe.prompts]
    if "prompts" in steps and not dry_run:
        folders = save_prompts(recipe, output)
    if "record" in steps:
        _call(record_command(recipe, output, folders, record_python), dry_run)
    if "train" in steps:
        for stage in recipe.stages:
            if (output / stage / "training.json").is_file():
                print(f"{stage}: done", flush=True)
                continue
            _call(train_command(recipe, output, stage), dry_run)
    if "bench" in steps and recipe.bench and not (output / "bench.json").is_file():
        _call(bench_command(recipe, output), dry_run)


def _call(command: list[str], dry_run: bool) -> None:
    print("+", shlex.join(command), flush=True)
    if dry_run:
        return
    package = str(Path(__file__).parents[1])
    paths = [package, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise ValueError(f"The step failed with exit code {code}: {shlex.join(command[:6])} ...")


def run(argv: list[str]) -> None:
    """Read the arguments and run."""
    parser = Parser(__doc__)
    parser.add_argument("recipe", type=Path, help="YAML file")
    parser.add_argument("--output", type=Path, required=True, help="folder of everything the recipe makes")
    parser.add_argument("--overlay", type=Path, nargs="+", default=[], help="YAML files whose values replace its own")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="run only these")
    parser.add_argument("--record_python", default=sys.executable, help="interpreter with vLLM, for recording")
    add_switch(parser, "--dry_run", "print the commands and run none")
    args = parser.parse_args(argv)
    recipe = read_recipe(args.recipe, *args.overlay)
    run_recipe(recipe, args.output, tuple(args.steps), args.record_python, args.dry_run)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
