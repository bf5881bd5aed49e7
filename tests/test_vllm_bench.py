"""What `bench/vllm.py` makes of its records; no vLLM needed."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[1]))  # `bench` is not part of the installed package

from bench import vllm as bench
from hf_carryover.evaluation.prompts import Item


def answer(tokens, decode, rounds, same=True):
    return {"tokens": tokens, "first": 0.1, "decode": decode, "rounds": rounds, "carried": 0, "same": same}


def record(name, prompt, **systems):
    return {"set": name, "prompt": prompt, **systems}


RECORDS = [
    record("math", "0", plain=answer(11, 1.0, 10), control=answer(11, 0.5, 5), carryover=answer(11, 0.4, 4)),
    record("math", "1", plain=answer(11, 1.0, 10), control=answer(11, 0.5, 5), carryover=answer(11, 0.4, 4, False)),
    record("qa", "0", plain=answer(21, 2.0, 20), control=answer(21, 2.0, 20), carryover=answer(21, 1.0, 10)),
]
SYSTEMS = ["plain", "control", "carryover"]


def test_one_at_a_time():
    rows = {row[0]: row[1:] for row in bench.alone_rows(RECORDS, SYSTEMS)}
    # τ is tokens behind the first / rounds; all prompts of a set are alike, so that the intervals are points.
    assert rows["math"] == [
        "2",
        "2.00 [2.00, 2.00]",
        "2.00 [2.00, 2.00]",
        "2.50 [2.50, 2.50]",
        "2.50 [2.50, 2.50]",
        "1.250 [1.250, 1.250]",
        "2/1",
    ]
    assert rows["qa"][1:3] == ["1.00 [1.00, 1.00]", "1.00 [1.00, 1.00]"]
    # Ratios of sums: 40 tokens in 3.0 s and 1.8 s, 40 tokens in 30 and 18 rounds.
    assert rows["all"][1].startswith("1.33") and rows["all"][3].startswith("2.22")
    assert rows["all"][-2].startswith("1.667")


def test_a_single_token_has_no_decoding():
    one = record("qa", "1", plain=answer(1, 0.0, 0), control=answer(1, 0.0, 0), carryover=answer(1, 0.0, 0))
    assert bench.alone_rows([*RECORDS, one], SYSTEMS) == bench.alone_rows(RECORDS, SYSTEMS)


def test_several_at_once():
    times = {"plain": [10.0, 20.0], "control": [5.0, 10.0], "carryover": [4.0, 8.0]}
    load = [
        {"system": system, "concurrency": 4, "repetition": i, "seconds": seconds, "tokens": 100}
        for system, row in times.items()
        for i, seconds in enumerate(row)
    ]
    # Paired by repetition: the slower second one hits all systems alike, and the ratio does not move.
    assert bench.load_rows(load, SYSTEMS) == [
        ["4", "7.5", "15.0", "18.8", "2.500 [2.500, 2.500]", "1.250 [1.250, 1.250]"]
    ]


def test_report_has_both_tables():
    load = [{"system": s, "concurrency": 1, "repetition": 0, "seconds": 1.0, "tokens": 10} for s in SYSTEMS]
    result = {
        "systems": SYSTEMS,
        "settings": {"vllm": "0.0", "max_new_tokens": 8, "temperature": 0.0},
        "machine": {"accelerator": None, "cpu": "a processor", "cores": 2},
        "alone": RECORDS,
        "load": load,
    }
    text = bench.report(result)
    heads = [line for line in text.splitlines() if line.startswith(("| set", "| concurrency"))]
    widths = [len(line.split("|")) for line in text.splitlines() if line.startswith("|")]
    assert len(heads) == 2 and len(set(widths[:5])) == 1 and len(set(widths[5:])) == 1


def test_prompts_are_mixed_set_by_set_and_systems_take_turns():
    items = [
        Item(name, str(i), segments=[[{"role": "user", "content": "?"}]]) for name in ("a", "b") for i in range(2)
    ]
    assert [item.set + item.name for item in bench.mix(items, 5)] == ["a0", "b0", "a1", "b1", "a0"]
    assert bench.rotated(SYSTEMS, 4) == ["control", "carryover", "plain"]


@pytest.mark.parametrize("share", [None, 0.8])
def test_servers_differ_in_nothing_but_the_drafter(share, tmp_path):
    arguments = ["--target", "T", "--prompts", "P", "--output", str(tmp_path / "x.json"), "--temperature", "1"]
    arguments += ["--drafter", "control=A", "--drafter", "carryover=B"]
    options = bench.parse_arguments(arguments + ([] if share is None else ["--memory_share", str(share)]))
    servers = bench.start_servers(options, tmp_path)
    assert list(servers) == SYSTEMS and all(server.process is None for server in servers.values())
    tail = {name: server.command[7:] for name, server in servers.items()}  # behind the port
    assert tail["control"][: len(tail["plain"])] == tail["plain"]
    assert tail["control"][-1] == '{"model": "A", "draft_sample_method": "probabilistic"}'
    assert tail["carryover"][:-1] == tail["control"][:-1]
    assert share is None or "0.267" in tail["plain"]
