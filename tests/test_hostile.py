# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Files from strangers: every damaged or malicious checkpoint is a clear error or a correct load. Nothing in it runs,
nothing outside is read or written, and no process crashes or hangs.
"""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_targets import tiny_drafter, tiny_target

from hf_carryover import CarryoverDrafter


COUNT = int(os.environ.get("HF_CARRYOVER_MUTATIONS", "100"))
SHAPES = {"num_hidden_layers": 1, "markov_rank": 3, "draft_token_ids": torch.arange(0, 64, 2), "target_layer_ids": [1]}
VALUES = [
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 10**30, 1e308, 0.5, "", "4", "../x", [], [0], [[0]], {}, {"a": {}}),
    *(float("nan"), float("inf"), "x" * 100_000, list(range(100_000)), "\u0000", "{{ 1 }}"),
]
MORE_KEYS = {
    "_attn_implementation": "owner/kernel",
    "attn_implementation": "owner/kernel@main",
    "transformers_weights": "../outside.safetensors",
    "quantization_config": {"quant_method": "unknown"},
    "auto_map": {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"},
    "base_model_name_or_path": "../outside",
    "torch_dtype": "os.system",
    "dtype": "evil",
    "architectures": ["../../Evil"],
    "per_layer_config": {"0": {"hidden_size": 1}},
    "model_type": "llama",
    "is_carryover_drafter": False,
    "_name_or_path": "/etc/passwd",
    "__class__": "evil",
    "problem_type": "x",
}


def header_of(content: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def damaged_weights(content: bytes, rng: random.Random) -> bytes:
    """Safetensors bytes, cut, flipped, or with a header that lies."""
    header, data = header_of(content)
    name = rng.choice(sorted(key for key in header if key != "__metadata__"))
    other = rng.choice(sorted(key for key in header if key not in ("__metadata__", name)))
    flipped = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        flipped[rng.randrange(len(content) if rng.random() < 0.5 else 8 + 2000)] ^= 1 << rng.randrange(8)
    entry = header[name]
    return rng.choice(
        [
            lambda: content[: rng.randrange(len(content))],
            lambda: content[: rng.randrange(16)],
            lambda: bytes(flipped),
            lambda: content + bytes(rng.randrange(1, 50)),
            lambda: rng.randbytes(rng.randrange(200)),
            lambda: (2 ** rng.randrange(20, 64)).to_bytes(8, "little") + content[8:],
            lambda: with_header(b" " * 200_000_000, b"") if rng.random() < 0.1 else with_header(b"[]", data),
            lambda: with_header(b"{" * rng.randrange(1, 100_000), data),
            lambda: with_header({**header, name: {**entry, "dtype": rng.choice(["F64", "I8", "BF16", "X", 4])}}, data),
            lambda: with_header({**header, name: {**entry, "shape": [2**40, 2**40]}}, data),
            lambda: with_header({**header, name: {**entry, "shape": [-1]}}, data),
            lambda: with_header({**header, name: {**entry, "data_offsets": header[other]["data_offsets"]}}, data),
            lambda: with_header({**header, name: {**entry, "data_offsets": [0, 2**60]}}, data),
            lambda: with_header({**header, name: header[other], other: entry}, data),
            lambda: with_header({**header, f"../{name}": entry}, data),
            lambda: with_header({key: value for key, value in header.items() if key != name}, data),
        ]
    )()


def damaged_config(text: str, rng: random.Random) -> str:
    """A configuration with one value changed, or no JSON at all."""
    values = json.loads(text)
    kind = rng.random()
    if kind < 0.55:
        values[rng.choice(sorted(values))] = rng.choice(VALUES)
    elif kind < 0.8:
        name = rng.choice(sorted(MORE_KEYS))
        values[name] = MORE_KEYS[name]
    elif kind < 0.9:
        del values[rng.choice(sorted(values))]
    else:
        return rng.choice(
            [text[: len(text) // 2], "", "null", "[1]", "[" * 100_000, '{"a":' * 50_000, "\ufeff{}", "NaN"]
        )
    return json.dumps(values)


def damaged_index(text: str, rng: random.Random) -> str:
    """The index of a sharded checkpoint, with other file names in it."""
    values = json.loads(text)
    name = rng.choice(sorted(values["weight_map"]))
    places = [
        "../outside.safetensors",
        "/etc/passwd",
        "..\\outside.safetensors",
        "",
        ".",
        "absent",
        3,
        None,
        "x" * 5000,
    ]
    kind = rng.random()
    if kind < 0.6:
        values["weight_map"][name] = rng.choice(places)
    elif kind < 0.7:
        values["weight_map"] = rng.choice([{}, [], None, "x"])
    elif kind < 0.8:
        values.pop(rng.choice(["metadata", "weight_map"]))
    elif kind < 0.9:
        del values["weight_map"][name]
    else:
        return rng.choice([text[: len(text) // 2], "[]", "[" * 100_000])
    return json.dumps(values)


def make_folder(base: Path, folder: Path, number: int) -> str:
    """The mutation of a number; returns what it is."""
    rng = random.Random(number)
    kind = ["weights", "config", "weights", "index", "config"][number % 5]
    shutil.copytree(base / ("sharded" if kind == "index" else "whole"), folder)
    file = {"weights": "model.safetensors", "config": "config.json", "index": "model.safetensors.index.json"}[kind]
    path = folder / file
    if kind == "weights":
        path.write_bytes(damaged_weights(path.read_bytes(), rng))
    else:
        damage = damaged_config if kind == "config" else damaged_index
        path.write_text(damage(path.read_text(), rng), encoding="utf-8")
    return kind


# One process loads all of them and says before each which it is: a crash shows, and where.
LOADER = """
import faulthandler, json, sys, time
from pathlib import Path
faulthandler.enable()
import torch
from safetensors.torch import load_file
from transformers.utils import logging
from hf_carryover import CarryoverDrafter
logging.set_verbosity(100)
logging.disable_progress_bar()
torch.set_num_threads(1)
for folder in sorted(Path(sys.argv[1]).iterdir()):
    print(folder.name, flush=True)
    begin = time.monotonic()
    try:
        drafter = CarryoverDrafter.from_pretrained(folder)
        stored = {}
        for path in folder.glob("*.safetensors"):
            stored.update(load_file(path))
        mine = drafter.state_dict()
        same = mine.keys() <= stored.keys() and all(
            torch.equal(mine[k].nan_to_num(), stored[k].to(mine[k].dtype).nan_to_num()) for k in mine
        )
        result = ["loaded", "as stored" if same else "DIFFERENT"]
    except Exception as error:
        result = [type(error).__name__, str(error)]
    print(json.dumps([*result, time.monotonic() - begin]), flush=True)
"""

# Ours and the file system's say what is wrong; the third is the configuration's own check of a value's type.
CLEAR = {"ValueError", "OSError", "FileNotFoundError", "StrictDataclassFieldValidationError", "ImportError"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    drafter = tiny_drafter(tiny_target("llama"), **SHAPES)
    drafter.save_pretrained(folder / "whole")
    drafter.save_pretrained(folder / "sharded", max_shard_size="10KB")
    return folder


def snapshot(folder: Path) -> dict:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_a_hundred_damaged_checkpoints(base, tmp_path):
    """A clear error or what is in the file, in under ten seconds each, and nothing is written anywhere."""
    kinds = {}
    (tmp_path / "all").mkdir()
    save_file({"fc.weight": torch.ones(32, 32)}, tmp_path / "all" / "outside.safetensors")
    os.rename(tmp_path / "all" / "outside.safetensors", tmp_path / "outside.safetensors")
    for number in range(COUNT):
        kinds[f"{number:03d}"] = make_folder(base, tmp_path / "all" / f"{number:03d}", number)
    before = snapshot(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOADER, str(tmp_path / "all")]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"crashed at {lines[-1]}: {done.stderr[-2000:]}"
    assert snapshot(tmp_path) == before
    results = {lines[i]: json.loads(lines[i + 1]) for i in range(0, len(lines), 2)}
    assert len(results) == COUNT
    print({outcome: sum(outcome == other for other, _, _ in results.values()) for outcome, _, _ in results.values()})
    for name, (outcome, text, seconds) in results.items():
        assert seconds < 10, (name, kinds[name], outcome)
        if outcome == "loaded":
            assert text == "as stored", (name, kinds[name])
        else:
            assert outcome in CLEAR and len(text) > 20, (name, kinds[name], outcome, text[:200])
    loaded = sum(outcome == "loaded" for outcome, _, _ in results.values())
    assert 0.05 * COUNT < loaded < 0.6 * COUNT  # a flipped bit of a weight is a weight; a header that lies never is


# Names and code


def test_shards_outside_the_folder(base, tmp_path):
    """Path traversal in an index, with a valid file at its end."""
    folder = shutil.copytree(base / "sharded", tmp_path / "folder")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["fc.weight"]
    shutil.move(folder / shard, tmp_path / "outside.safetensors")
    for place in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        changed = {name: place if file == shard else file for name, file in index["weight_map"].items()}
        (folder / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": changed}))
        with pytest.raises(ValueError, match=r"outside\.safetensors', expected safetensors files of its own folder"):
            CarryoverDrafter.from_pretrained(folder)


class Evil:
    """Runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.bin", "model.pt"])
def test_pickles_are_not_read(base, tmp_path, name):
    """Not even where torch would refuse most of them: weights are safetensors."""
    folder, ran = shutil.copytree(base / "whole", tmp_path / "folder"), tmp_path / "ran"
    weights = CarryoverDrafter.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    for content in (Evil(ran), {**weights, "x": Evil(ran)}, weights):
        with open(folder / name, "wb") as file:
            pickle.dump(content, file) if content is not weights else torch.save(weights, file)
        with pytest.raises((OSError, ValueError), match=r"safetensors|can't be read"):
            CarryoverDrafter.from_pretrained(folder)
        with pytest.raises(ValueError, match="`use_safetensors` must be True, got False"):
            CarryoverDrafter.from_pretrained(folder, use_safetensors=False)
    assert not ran.exists()


@pytest.mark.parametrize("trust", [None, True, False])
def test_code_in_the_folder_does_not_run(base, tmp_path, trust):
    """Our class is here already: whatever `auto_map` names, and even if remote code is trusted."""
    folder, ran = shutil.copytree(base / "whole", tmp_path / "folder"), tmp_path / "ran"
    evil = f"from pathlib import Path\nPath({str(ran)!r}).touch()\n"
    for name in ("evil.py", "modeling_carryover.py", "configuration_carryover.py", "__init__.py", "setup.py"):
        (folder / name).write_text(evil)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil", "AutoTokenizer": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    kwargs = {} if trust is None else {"trust_remote_code": trust}
    drafter = CarryoverDrafter.from_pretrained(folder, **kwargs)
    drafter.save_pretrained(tmp_path / "again")
    assert not ran.exists()
    assert "touch" not in (tmp_path / "again" / "modeling_carryover.py").read_text()


def test_remote_code_is_asked_for_nowhere():
    """No call in the package trusts a repository's code."""
    package = Path(__file__).parents[1] / "hf_carryover"
    for path in package.rglob("*.py"):
        text = path.read_text()
        assert "trust_remote_code=True" not in text.replace(" ", ""), path
        assert "pickle.load" not in text and "torch.load(" not in text, path


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "transformers_weights"])
def test_a_file_chooses_no_code(base, tmp_path, name):
    """An attention implementation may be a kernel that is downloaded and run: whoever loads chooses it."""
    folder = shutil.copytree(base / "whole", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: "owner/kernel"}))
    with pytest.raises(ValueError, match=rf"holds what a file may not decide: `{name}` is 'owner/kernel'"):
        CarryoverDrafter.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    assert CarryoverDrafter.from_pretrained(folder, attn_implementation="eager").config._attn_implementation == "eager"


# Links and special files


def test_saving_does_not_write_through_links(base, tmp_path):
    """As in the Hub's cache, whose snapshots are links to files that other snapshots share."""
    blob = shutil.copy(base / "whole" / "model.safetensors", tmp_path / "blob")
    config = shutil.copy(base / "whole" / "config.json", tmp_path / "config")
    before = Path(blob).read_bytes(), Path(config).read_bytes()
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(blob)
    (folder / "config.json").symlink_to(config)
    drafter = CarryoverDrafter.from_pretrained(folder)
    with torch.no_grad():
        drafter.fc.weight.add_(1)
    drafter.config.draft_sampling = "argmax"
    drafter.save_pretrained(folder)
    assert (Path(blob).read_bytes(), Path(config).read_bytes()) == before
    again = CarryoverDrafter.from_pretrained(folder)
    assert torch.equal(again.fc.weight, drafter.fc.weight) and again.config.draft_sampling == "argmax"


def test_saving_where_it_was_loaded_from(base, tmp_path):
    """Weights may be views of the file that is written."""
    folder = shutil.copytree(base / "whole", tmp_path / "folder")
    drafter = CarryoverDrafter.from_pretrained(folder)
    want = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    for _ in range(3):
        drafter.save_pretrained(folder)
        drafter = CarryoverDrafter.from_pretrained(folder)
        assert all(torch.equal(tensor, want[name]) for name, tensor in drafter.state_dict().items())


def make_pipe(path):
    os.mkfifo(path)


SPECIAL = {
    "folder": lambda path: path.mkdir(),
    "pipe": make_pipe,
    "broken-link": lambda path: path.symlink_to("nowhere"),
    "link-to-itself": lambda path: path.symlink_to(path.name),
    "link-to-another-kind": lambda path: path.symlink_to("/etc/hostname"),
    "device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_special_files(base, tmp_path, make, name):
    """No hang at a pipe, no content of another file in a message."""
    folder = shutil.copytree(base / "whole", tmp_path / "folder")
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises((OSError, ValueError)) as raised:
        CarryoverDrafter.from_pretrained(folder)
    host = Path("/etc/hostname")
    assert not host.exists() or host.read_text().strip() not in str(raised.value).replace("/etc/hostname", "")


@pytest.mark.parametrize("field", ["d2t", "t2d"])
def test_tables_that_contradict_each_other(base, tmp_path, field):
    """An id outside the vocabulary would be an index error in the middle of a text, or a fault of the GPU."""
    folder = shutil.copytree(base / "whole", tmp_path / "folder")
    tensors = CarryoverDrafter.from_pretrained(folder).state_dict()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors[field][5] = 70 if field == "d2t" else ~tensors[field][5]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"must increase within 0 \.\.\. 63|name different draft vocabularies"):
        CarryoverDrafter.from_pretrained(folder)


def test_tokens_are_written_nowhere(tmp_path, monkeypatch):
    """Neither that of the arguments nor that of the environment is in any file of a run."""
    from training_helpers import make_trainer, random_rows

    from hf_carryover.train import DrafterArguments, write_record

    secrets = ("hf_secretargument", "hf_secretenvironment")
    monkeypatch.setenv("HF_TOKEN", secrets[1])
    target = tiny_target("llama")
    trainer = make_trainer(
        target, tiny_drafter(target), tmp_path / "run", random_rows([9, 12]), max_steps=1, hub_token=secrets[0],
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    assert trainer.args.hub_token == secrets[0]
    arguments = DrafterArguments(target="owner/target", recordings=["owner/recordings"])
    write_record(tmp_path / "run", arguments, trainer.args, trainer, {})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin", "training.json", "trainer_state.json"} <= {path.name for path in files}
    for path in files:
        assert not any(secret.encode() in path.read_bytes() for secret in secrets), path
