# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Code in a fresh process, for what depends on the order of imports or on what is installed."""

import os
import subprocess
import sys
from pathlib import Path

import hf_carryover


def python(code, *arguments, folder):
    """Runs code in `folder` with this package in reach and no network; returns what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(hf_carryover.__file__).parents[1]),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
