# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What makes a benchmark resumable."""

from __future__ import annotations

import json
from pathlib import Path


class Journal:
    """
    Finished prompts, one JSON object a line after a line of settings.

    Args:
        path (`Path`): The file; it is created, or continued if its settings are the same.
        settings (`dict`): Everything that makes records comparable.

    Raises:
        ValueError: If the file was written with other settings.
    """

    def __init__(self, path: Path, settings: dict):
        self.path = path
        self.records: dict[tuple, dict] = {}
        settings = json.loads(json.dumps(settings))
        if path.exists():
            self._load(settings)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")

    def _load(self, settings: dict) -> None:
        text = self.path.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]  # an interrupted write leaves half a line
        lines = [json.loads(line) for line in complete.splitlines()]
        before = lines[0]["settings"] if lines else None
        if before != settings:
            changed = sorted(key for key in settings if before is None or before.get(key) != settings[key])
            raise ValueError(
                f"{self.path.name} was written with other settings ({', '.join(changed)} differ). Use another "
                "--output, or delete it to start anew."
            )
        if complete != text:
            self.path.write_text(complete, encoding="utf-8")
        self.records = {self.key(record): record for record in lines[1:]}

    @staticmethod
    def key(record: dict) -> tuple:
        return record["set"], record["prompt"], record["turn"], record["seed"]

    def add(self, record: dict) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.records[self.key(record)] = record


__all__ = ["Journal"]
