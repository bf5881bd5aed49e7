# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The JSON report of a benchmark: written, read back, checked.

Its format is written down in `report.schema.json` beside this file (JSON Schema). `schema_version` is `MAJOR.MINOR`:
a new minor version only adds fields, a reader accepts every minor version of its major one.
"""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path


SCHEMA_VERSION = "1.0"


def schema() -> dict:
    """The JSON Schema of a report."""
    return json.loads(resources.files(__package__).joinpath("report.schema.json").read_text(encoding="utf-8"))


def write_report(path: Path, report: dict) -> None:
    """The report, with one line per prompt so that it can be read and compared; the file is there whole or not."""
    head = json.dumps({**report, "prompts": []}, indent=1)
    lines = ",\n".join(json.dumps(record) for record in report["prompts"])
    if not head.endswith('"prompts": []\n}'):
        raise ValueError("`prompts` must be the last entry of the report.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(head.removesuffix("]\n}") + "\n" + lines + "\n]\n}\n", encoding="utf-8")
    os.replace(temporary, path)


def read_report(path: str | Path) -> dict:
    """
    Raises:
        ValueError: If the file is no report, or one of another major version.
    """
    path = Path(path)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} is not a report of `hf-carryover bench`: {error}") from error
    version = report.get("schema_version") if isinstance(report, dict) else None
    if not isinstance(version, str) or not {"settings", "summary", "prompts"} <= set(report):
        raise ValueError(
            f"{path.name} is not a report of `hf-carryover bench`: it has no schema_version or no prompts."
        )
    if version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise ValueError(f"{path.name} has schema version {version}, this package reads {SCHEMA_VERSION}.")
    return report


__all__ = ["SCHEMA_VERSION", "read_report", "schema", "write_report"]
