# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Tables of replayed acceptance, and the figure of the test bed."""

import json

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from recording_helpers import make_tokenizer

from bench import testbed_figure
from hf_carryover.evaluation import acceptance, replay_command


def response(name, committed):
    return {
        "id": name,
        "committed": committed,
        "accepted": [c - 1 for c in committed],
        "carried": [0] * len(committed),
    }


CONTROL = [response("a-0", [1, 1]), response("a-1", [2, 2, 2]), response("b-0", [4])]
CARRY = [response("a-0", [2]), response("a-1", [3, 3]), response("b-0", [2, 2])]


def test_micro_average_in_a_set_and_mean_over_sets():
    table = acceptance.Acceptance({"control": CONTROL, "carry": CARRY})
    assert table.estimate("control", "a").value == pytest.approx(8 / 5)
    assert table.estimate("control", acceptance.MEAN).value == pytest.approx((8 / 5 + 4) / 2)
    assert table.change("carry", "control", "a").value == pytest.approx((8 / 3) / (8 / 5) - 1)
    apart = acceptance.Acceptance({"control": CONTROL}, apart=("b",))
    assert apart.estimate("control", acceptance.MEAN).value == pytest.approx(8 / 5)
    # y_1 was judged in all six rounds and accepted in four; y_2 in those four and accepted in one.
    assert table.by_position("control", CONTROL, most=2) == [pytest.approx(4 / 6), pytest.approx(1 / 4)]


def test_mean_over_trainings():
    """Its value is the mean; its interval covers the spread of trainings, which those of the prompts do not."""
    better = [response("a-0", [2]), response("a-1", [3, 3]), response("b-0", [4])]
    table = acceptance.Acceptance({"control": CONTROL, "carry": CARRY, "again": better})
    pairs = [("carry", "control"), ("again", "control")]
    one, other = (table.change(*pair, acceptance.MEAN) for pair in pairs)
    mean = table.mean_change(pairs, acceptance.MEAN)
    assert mean.value == pytest.approx((one.value + other.value) / 2)
    assert mean.low <= min(one.value, other.value) and mean.high >= max(one.value, other.value)
    alone = table.mean_change(pairs[:1], acceptance.MEAN)
    assert (alone.value, alone.low, alone.high) == pytest.approx((one.value, one.low, one.high))


def test_other_responses_are_refused():
    with pytest.raises(ValueError, match="were not measured on the same responses"):
        acceptance.Acceptance({"control": CONTROL, "carry": CARRY[:2]})


def test_command_merges_reports(tmp_path, capsys):
    for name, systems in (("one", {"control": CONTROL}), ("two", {"carry": CARRY})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": {"greedy": systems}}))
    output = tmp_path / "table.md"
    paths = [str(tmp_path / "one.json"), str(tmp_path / "two.json")]
    assert acceptance.main([*paths, "--pair", "carry", "control", "--output", str(output)]) == 0
    lines = output.read_text().splitlines()
    assert lines[0] == "**greedy**"
    assert lines[2] == "| set | prompts | τ control | τ carry | carry against control |"
    assert lines[4].startswith("| a | 2 | 1.60 [") and "| +66.7% [" in lines[4]
    assert lines[6].startswith("| mean of sets | 3 | 2.80 [")
    assert capsys.readouterr().out.strip() == output.read_text().strip()


@pytest.mark.parametrize(("name", "expected"), [("qa-3", "qa"), ("mt_bench-84", "mt_bench"), ("x", "x"), ("7", "7")])
def test_prompt_set(name, expected):
    assert replay_command.prompt_set(name) == expected


def test_replay_command(tmp_path, capsys):
    target = tiny_llama()
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    for name, carry in (("control", False), ("carry", True)):
        tiny_drafter(target, carry=carry).save_pretrained(tmp_path / name)
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"id": f"s{i % 2}-{i}", "input_ids": torch.randint(2, 60, (18,), generator=generator).tolist(),
         "response_mask": [0] * 6 + [1] * 12} for i in range(4)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--target", str(tmp_path / "target"), "--dtype", "float32", "--output", str(tmp_path / "report.json")]
    arguments += ["--recordings", f"greedy={tmp_path / 'rows.jsonl'}", f"sampled:1.0={tmp_path / 'rows.jsonl'}"]
    arguments += ["--drafter", f"control={tmp_path / 'control'}", f"carry={tmp_path / 'carry'}", "--per_set", "1"]
    assert replay_command.main(arguments) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["results"]) == {"greedy", "sampled:1.0"}
    for systems in report["results"].values():
        assert set(systems) == {"control", "carry"}
        assert [r["id"] for r in systems["carry"]] == ["s0-0", "s1-1"]
        assert all(sum(r["committed"]) == 11 for r in systems["control"])
    assert "mean of sets" in capsys.readouterr().out
    assert "greedy" in acceptance.table(report, [("carry", "control")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recordings", "x", "--drafter", "a=b"], "--recordings 'x': expected NAME=DIR"),
        (["--recordings", "x=y", "--drafter", "a=b", "a=c"], "--drafter 'a=c': expected NAME=DIR with a name"),
        (["--recordings", "x=y", "--drafter", "a=b", "--dtype", "bf16"], "--dtype must be one of float32, bfloat16"),
    ],
)  # fmt: skip
def test_replay_command_mistakes(capsys, arguments, message):
    assert replay_command.main(["--target", "t", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_figure(tmp_path):
    pytest.importorskip("matplotlib")
    counts = {"0.0": {"committed": [4, 5], "rounds": [3, 3]}, "1.0": {"committed": [4, 5], "rounds": [2, 2]}}
    plain = {rho: {"committed": [4, 5], "rounds": [3, 3]} for rho in counts}
    run = {"systems": {"baseline": plain, "control": plain, "states": counts}, "probe": {"0.0": 0.1, "1.0": 1.0}}
    report = {"settings": {"block_size": 7}, "rhos": [0.0, 1.0], "runs": {"0": run}}
    (points,) = testbed_figure.curves([report]).values()
    assert [point[:2] for point in points] == [(0.0, 0.0), (1.0, pytest.approx(0.5))]
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert testbed_figure.main([str(tmp_path / "report.json"), "--output", str(tmp_path / "figure.png")]) == 0
    assert (tmp_path / "figure.png").stat().st_size > 1000
