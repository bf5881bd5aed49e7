# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Convert drafters between formats: `hf-carryover convert SOURCE FOLDER`.

Reads z-lab DFlash, DeepSpec DFlash and DSpark, speculators dflash and dspark, and our own folders; the format is
recognised. Writes our own format (the default), z-lab's or speculators'. What has no place in the other format is
named, or refused where proposals would change.

examples:
  hf-carryover convert z-lab/Qwen3-4B-DFlash-b16 qwen3-4b
  hf-carryover convert qwen3-4b back --to z-lab
  hf-carryover convert qwen3-4b out --to speculators --target Qwen/Qwen3-4B
"""

from __future__ import annotations

import sys

from ..command import Parser, add_switch, run_command
from .convert import FORMATS, convert_drafter


def run(argv: list[str]) -> None:
    """Convert, and print what was done."""
    parser = Parser(__doc__)
    parser.add_argument("source", help="folder or Hub id of the drafter")
    parser.add_argument("folder", help="folder to write")
    parser.add_argument("--to", default="carryover", choices=FORMATS, help="format to write (default: carryover)")
    parser.add_argument("--target", help="folder or Hub id of the target, for what a format says about it")
    parser.add_argument("--revision", help="branch, tag or commit of the source")
    parser.add_argument("--subfolder", default="", help="folder inside the source")
    add_switch(parser, "--overwrite", "replace FOLDER if it is there")
    args = parser.parse_args(argv)
    hub = {name: getattr(args, name) for name in ("revision", "subfolder") if getattr(args, name)}
    done = convert_drafter(args.source, args.folder, args.to, args.target, bool(args.overwrite), **hub)
    print(f"{done.source_format} -> {done.format}: {done.folder}")
    for note in done.notes:
        print(f"note: {note}")


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
