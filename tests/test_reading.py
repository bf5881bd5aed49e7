"""What a drafter reads and misses: the anchors it is asked at, and the parts of a fused state."""

import json
import sys
from pathlib import Path

import torch
from conftest import tiny_drafter


sys.path.insert(0, str(Path(__file__).parents[1]))  # `bench` is not part of the installed package

from bench import reading
from hf_carryover.evaluation.replay import Replay, ReplayedResponse


def test_rounds_are_counted_where_they_begin():
    ids, mask = [1, 2, 3, 1, 2, 3, 1, 2, 9, 8], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    # Anchors 3, 4, 6, 7: the second knows (1 2 -> 3), the third (3 1 -> 2), the last is wrong (1 2 -> 3, not 9).
    response = ReplayedResponse("set-0", accepted=[0, 1, 0, 0], committed=[1, 2, 1, 2], carried=[0, 3, 3, 3])
    assert reading.count_copies(response, ids, mask) == {"right": [2, 1], "wrong": [1, 0], "none": [1, 0]}


def test_every_round_is_some_kind_and_the_parts_make_the_whole(target):
    drafter = tiny_drafter(target, block_size=3, target_layer_ids=[0, 2])
    rows = [{"id": f"set-{i}", "input_ids": [3, 4, 5, 6] * 6, "response_mask": [0] * 4 + [1] * 20} for i in range(2)]
    kinds = reading.copies(drafter, target, rows, batch_size=2)
    assert sum(kinds[kind]["share"]["value"] for kind in reading.KINDS) == 1
    assert kinds["right"]["share"]["value"] > 0.5
    replayed = Replay(drafter, target)(rows)
    counted = [reading.count_copies(r, row["input_ids"], row["response_mask"]) for r, row in zip(replayed, rows)]
    assert sum(c[kind][0] for c in counted for kind in reading.KINDS) == sum(r.rounds for r in replayed)
    with torch.no_grad():
        drafter.fc.weight[:, 32:] = 0
        drafter.fc.weight[:, :32] = 2 * torch.eye(32)
    first, second = reading.taps(drafter, target, {"input_ids": [rows[0]["input_ids"]]})
    assert (first["layer"], second["layer"]) == (0, 2)
    assert second["part"] == 0 and second["feature"] > 0
    assert abs(first["part"] - 2 * first["feature"]) < 1e-5


def test_tables():
    estimate = {"value": 0.5, "low": 0.4, "high": 0.6}
    copies = {kind: {"share": estimate, "accepted": estimate} for kind in reading.KINDS}
    report = {"drafters": {"one": {"taps": [{"layer": 3, "feature": 2.0, "part": 0.05}], "copies": copies}}}
    lines = reading.tables(json.loads(json.dumps(report))).splitlines()
    assert "| 3 | 2.0 | 0.05 |" in lines
    assert lines[-1] == "| nothing | 0.50 [0.40, 0.60] | 0.50 [0.40, 0.60] |"
