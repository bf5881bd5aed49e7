# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The command `hf-carryover`: one subcommand for each job, loaded only when it is asked for."""

import importlib
import sys

from . import __version__


# Subcommand, module with its `main(argv)`, and what it does.
COMMANDS = {
    "record": ("hf_carryover.training.recording", "record a target's responses, which drafters are trained on"),
    "train": ("hf_carryover.train", "train a drafter on recordings"),
    "bench": ("hf_carryover.evaluation.bench_command", "measure acceptance, speed and equality of outputs on prompts"),
    "report": ("hf_carryover.evaluation.compare_command", "show a report of `bench`, or compare two"),
    "replay": ("hf_carryover.evaluation.replay_command", "measure acceptance along recorded responses"),
    "analyze": ("hf_carryover.evaluation.analyze_command", "show why carry helps or does not"),
    "testbed": ("hf_carryover.testbed.command", "measure carry on a language with a dial"),
    "convert": ("hf_carryover.convert.command", "read and write drafters of other formats"),
    "push": ("hf_carryover.hub.command", "publish a drafter with its card and report"),
    "recipe": ("hf_carryover.recipes", "run a recipe: prompts, recordings, all stages, measurements"),
    "info": ("hf_carryover.info", "say what a folder is, and whether it fits a target"),
    "demo": ("hf_carryover.demo", "compare plain and assisted decoding on the demo target"),
}


def usage() -> str:
    """What is printed without a subcommand."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    config = "  --config FILE.yaml in any of them: `name: value` lines instead of flags; flags that are given win"
    return "\n".join(["usage: hf-carryover COMMAND [--help | flags]", "", *lines, "", config])


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns its exit code, 2 for an unknown one."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        print(f"error: unknown command {argv[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    sys.argv[0] = f"hf-carryover {argv[0]}"  # what the subcommand's --help calls itself
    rest = argv[1:]
    if any(flag.partition("=")[0] == "--config" for flag in rest):
        from .command import expand_config

        try:
            rest = expand_config(rest)
        except (ValueError, OSError) as error:
            print("error:", " ".join(str(error).split()), file=sys.stderr)
            return 2
    return importlib.import_module(COMMANDS[argv[0]][0]).main(rest)


if __name__ == "__main__":
    sys.exit(main())
