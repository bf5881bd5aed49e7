# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What the subcommands of `hf-carryover` share: YAML files of flags, switches, and errors without a traceback."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import yaml
from transformers.hf_argparser import HfArgumentParser, string_to_bool


T = TypeVar("T")


def config_flags(path: str | Path) -> list[str]:
    """
    The flags that a YAML file of `name: value` lines stands for. So both forms convert and refuse alike: YAML reads
    `6e-4` as a string.

    Raises:
        ValueError: If it is no YAML file of that form.
        OSError: If it can't be read.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold `name: value` lines, got {type(content).__name__}.")
    flags = []
    for name, value in content.items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *(json.dumps(v) if isinstance(v, (dict, bool)) else str(v) for v in values)]
    return flags


def expand_config(argv: list[str]) -> list[str]:
    """
    `--config FILE` replaced by the file's flags, in front of all others, which win. One YAML file alone is the same.

    Raises:
        ValueError: If `--config` names no file, or the file is not as expected.
    """
    if len(argv) == 1 and argv[0].endswith((".yaml", ".yml")):
        return config_flags(argv[0])
    flags, rest, i = [], [], 0
    while i < len(argv):
        name, _, value = argv[i].partition("=")
        if name != "--config":
            rest.append(argv[i])
        elif value:
            flags += config_flags(value)
        elif i + 1 < len(argv):
            i += 1
            flags += config_flags(argv[i])
        else:
            raise ValueError("`--config` needs a YAML file.")
        i += 1
    return flags + rest


def add_switch(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    """A flag that is false unless given, and takes `true` or `false` as well, as YAML files write it."""
    parser.add_argument(name, type=string_to_bool, nargs="?", const=True, default=False, help=help)


def run_command(work: Callable[[list[str]], int | None], argv: list[str] | None) -> int:
    """
    Run a subcommand: expand its YAML file, and print what the user did wrong in one line.

    Args:
        work (`Callable`): Takes the arguments, returns the exit code (`None` is 0).
        argv (`list[str]`, *optional*): The arguments; those of the process by default.

    Returns:
        `int`: The exit code, 2 for a mistake in what was asked for.
    """
    try:
        return work(expand_config(sys.argv[1:] if argv is None else argv)) or 0
    except (ValueError, OSError, ImportError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2


def parse_dataclass(kind: type[T], argv: list[str], description: str | None) -> T:
    """
    Flags as an instance of a dataclass, whose fields they are; a mistake is one line, --help lists them all.

    Raises:
        ValueError: From the dataclass, for values that do not go together.
    """
    parser = HfArgumentParser(kind, description=description, allow_abbrev=False)  # a typo is no abbreviation
    parser.error = lambda message: parser.exit(2, f"error: {message} (--help lists the flags)\n")
    (arguments,) = parser.parse_args_into_dataclasses(argv)
    return arguments


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and which takes no abbreviations: a typo is none."""

    def __init__(self, description: str, **kwargs):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **kwargs,
        )

    def error(self, message: str):
        """Exit with code 2 and the message."""
        self.exit(2, f"error: {message} (--help lists the flags)\n")


__all__ = ["Parser", "add_switch", "config_flags", "expand_config", "parse_dataclass", "run_command"]
