"""
Execute a notebook, with a Hub on localhost to push to: `python tests/run_notebook.py NOTEBOOK [--write]`.

With `--write` the outputs are stored in the file. `HF_CARRYOVER_NOTEBOOK_SMALL=1` makes it short.
"""

import argparse
import os
import sys
from pathlib import Path

import nbformat
from hub_server import TOKEN, HubServer
from nbclient import NotebookClient


def execute(path: Path, runs: Path, timeout: int = 3600):
    """The executed notebook; what it makes goes to `runs`."""
    notebook = nbformat.read(path, as_version=4)
    root = Path(__file__).parents[1]
    with HubServer() as hub:
        os.environ.update(
            HF_ENDPOINT=hub.endpoint,
            HF_TOKEN=TOKEN,
            HF_HUB_OFFLINE="0",
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HOME=str(runs / "hf"),
            HF_CARRYOVER_REPO_ID="user/smollm2-135m-markov-carryover",
            HF_CARRYOVER_NOTEBOOK_RUNS=str(runs),
            PYTHONPATH=os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            PYTHONWARNINGS="ignore",
        )
        NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(path.parent)}}).execute()
        pushed = hub.files("user/smollm2-135m-markov-carryover")
    return notebook, pushed


def strip(notebook, runs: Path) -> None:
    """Leave out what differs from run to run or names this machine: standard error, progress bars, folders."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        kept = []
        for output in cell.outputs:
            data = output.get("data", {})
            if output.get("name") == "stderr" or "application/vnd.jupyter.widget-view+json" in data:
                continue
            output.get("metadata", {}).clear()
            if "text" in output:
                output["text"] = output["text"].replace(str(runs), "runs")
            for kind in [kind for kind in data if kind.startswith("text/")]:
                data[kind] = data[kind].replace(str(runs), "runs")
            kept.append(output)
        cell.outputs = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/notebooks"))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    notebook, _ = execute(args.notebook.resolve(), args.runs.resolve())
    if args.write:
        strip(notebook, args.runs.resolve())
        nbformat.write(notebook, args.notebook)
    print(f"{args.notebook.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells", file=sys.stderr)


if __name__ == "__main__":
    main()
