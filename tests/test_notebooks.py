# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The notebooks run, and what is stored in them came out of a run of these very cells."""

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file


nbformat = pytest.importorskip("nbformat", reason="needs the extra `test`: nbformat, nbclient, ipykernel")
pytest.importorskip("nbclient")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
IDS = [path.stem for path in NOTEBOOKS]


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_stored_as_executed(path):
    """Every cell has run, in order and without an error, and nothing names the machine it ran on."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    text = path.read_text(encoding="utf-8")
    places = ("/root/", "/home/", "/tmp/", str(Path(__file__).parents[1]))
    assert not [place for place in places if place in text]
    if path.stem != "03_publish":
        assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_executes(path, tmp_path, monkeypatch):
    """At small size, on the real SmolLM2; a push goes to a Hub on localhost."""
    from run_notebook import execute

    for name in os.environ:  # what the run sets, it sets for this test alone
        monkeypatch.setenv(name, os.environ[name])
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_CARRYOVER_NOTEBOOK_SMALL", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    saved = dict(os.environ)
    try:
        notebook, pushed = execute(path, tmp_path)
    finally:
        os.environ.clear()
        os.environ.update(saved)
    assert all(cell.execution_count for cell in code_cells(notebook))
    if path.stem == "03_publish":
        assert {"README.md", "config.json", "model.safetensors", "report.json", "training.json"} <= set(pushed)
        shipped = Path(__file__).parents[1] / "model_cards" / "smollm2-135m-markov-carryover" / "model.safetensors"
        (tmp_path / "pushed.safetensors").write_bytes(pushed["model.safetensors"])
        ours, theirs = load_file(shipped), load_file(tmp_path / "pushed.safetensors")
        assert set(ours) == set(theirs) and all(ours[name].equal(theirs[name]) for name in ours)
