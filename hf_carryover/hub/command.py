# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Publish a drafter: `hf-carryover push FOLDER USER/NAME`.

FOLDER is a drafter or an adapter, or the output folder of `hf-carryover train`, whose drafter is in it. Weights,
config, a card written from the records, the report and its figures arrive with one commit, or nothing does. A
repository of another model is left alone unless `--force` is given. Log in first: `hf auth login`.

examples:
  hf-carryover push runs/carryover user/my-drafter --base_model Qwen/Qwen3-4B --report report.json
  hf-carryover push runs/carryover user/my-drafter --run baseline=runs/baseline --private
  hf-carryover push runs/carryover user/my-drafter --dry_run
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..command import Parser, add_switch, run_command
from ..modeling_carryover import CarryoverDrafter
from .card import model_card
from .publish import push_to_hub
from .run import Run


def run(argv: list[str]) -> None:
    """Publish, and print where it is."""
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="drafter, adapter, or output folder of a training run")
    parser.add_argument("repo_id", help="USER/NAME on the Hub")
    parser.add_argument("--base_model", help="Hub id of the target")
    parser.add_argument("--report", type=Path, help="report of `hf-carryover bench`, or a folder with one and figures")
    parser.add_argument("--system", help="what the report calls this drafter")
    parser.add_argument("--run", nargs="+", default=[], metavar="STAGE=FOLDER", help="earlier training runs")
    parser.add_argument("--license", help="such as apache-2.0")
    parser.add_argument("--language", nargs="+", help="such as en")
    parser.add_argument("--datasets", nargs="+", help="Hub ids of what it was trained on")
    parser.add_argument("--data", help="what it was trained on, in words")
    parser.add_argument("--revision", help="branch to commit to (default: main)")
    parser.add_argument("--commit_message", help="title of the commit")
    add_switch(parser, "--private", "make a new repository private")
    add_switch(parser, "--create_pr", "open a pull request instead of committing")
    add_switch(parser, "--force", "push into a repository of another model, and over an edited card")
    add_switch(parser, "--dry_run", "print the card and push nothing")
    args = parser.parse_args(argv)
    folder, runs = _drafter_and_runs(args.folder, args.run)
    drafter = CarryoverDrafter.from_pretrained(folder)
    names = ("base_model", "report", "system", "license", "language", "datasets", "data")
    about = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.dry_run:
        print(model_card(drafter, args.repo_id, runs=runs, **about))
        return
    done = push_to_hub(
        drafter,
        args.repo_id,
        runs=runs,
        private=args.private or None,
        revision=args.revision,
        create_pr=args.create_pr,
        force=args.force,
        commit_message=args.commit_message,
        **about,
    )
    print(done.pr_url or done.commit_url)


def _drafter_and_runs(folder: Path, earlier: list[str]) -> tuple[Path, dict[str, Run]]:
    """Where the drafter is, and the runs by stage, its own last."""
    runs: dict[str, Run] = {}
    for item in earlier:
        name, equals, place = item.partition("=")
        if not equals:
            raise ValueError(f"`--run` takes STAGE=FOLDER, got {item!r}.")
        runs[name] = Run.read(place)
    place = folder if (folder / "training.json").is_file() else folder.parent
    if (place / "training.json").is_file() and (folder / "drafter" if place == folder else folder).is_dir():
        own = Run.read(place)
        stage = own.record["training_arguments"].get("stage", "baseline")
        carry = (own.record.get("config") or {}).get("carry", True)
        runs["control" if stage == "carryover" and carry is False else stage] = own
    inner = folder / "drafter"
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder.")
    return (inner if inner.is_dir() else folder), runs


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
