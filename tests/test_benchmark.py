"""The benchmark as it runs: records, resuming, reports, and the command around them."""

import json
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from bench_helpers import Words
from conftest import tiny_drafter, tiny_llama

from hf_carryover import GenerationReport
from hf_carryover.demo import compare_outputs
from hf_carryover.evaluation import bench_command, benchmark
from hf_carryover.evaluation.benchmark import Evaluation, failures
from hf_carryover.evaluation.journal import Journal
from hf_carryover.evaluation.machine import describe_machine, weights_digest
from hf_carryover.evaluation.prompts import Item
from hf_carryover.evaluation.report_file import read_report, schema
from hf_carryover.evaluation.systems import System, report_numbers


@pytest.fixture
def evaluation(target):
    drafters = {"control": tiny_drafter(target, carry=False), "carryover": tiny_drafter(target, carry=True)}
    return Evaluation(target, Words(), [System(*pair) for pair in drafters.items()], max_new_tokens=12, max_turns=2)


def items(count):
    turns = [[f"{5 + i} 6 7", "8"] for i in range(count)]
    return [Item("qa", f"q{i}", [[{"role": "user", "content": text}] for text in turns[i]]) for i in range(count)]


def silent(line):
    pass


@pytest.mark.compat
class TestRuns:
    def test_records(self, evaluation, target, tmp_path):
        journal = Journal(tmp_path / "j.jsonl", evaluation.settings())
        records = evaluation.run(items(2), [0], journal, log=silent)
        assert [(r["prompt"], r["turn"]) for r in records] == [("q0", 0), ("q0", 1), ("q1", 0), ("q1", 1)]
        first, second = records[0]["systems"], records[1]
        plain = target.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=12)[0, 3:].tolist()
        for name in ("plain", "control", "carryover"):
            assert first[name]["token_ids"] == plain
            assert first[name]["new_tokens"] == 12
            assert first[name]["wall_ms"] == pytest.approx(first[name]["prefill_ms"] + first[name]["decode_ms"])
        # The second turn sees the first message, plain decoding's answer and the second message.
        assert second["prompt_tokens"] == 3 + 12 + 1
        for name in ("control", "carryover"):
            numbers = first[name]
            # The prefill's token is no round's.
            assert sum(numbers["committed"]) == 11
            assert numbers["rounds"] == len(numbers["proposed"]) == len(numbers["accepted"])
            assert numbers["rounds"] == len(numbers["committed"]) == len(numbers["carried"])
            assert numbers["difference"] is None
        assert sum(first["control"]["carried"]) == 0
        assert first["carryover"]["carried"] == evaluation_carried(first["carryover"])

    def test_order_rotates(self, evaluation, tmp_path):
        journal = Journal(tmp_path / "j.jsonl", evaluation.settings())
        records = evaluation.run(items(2), [0], journal, log=silent)
        orders = [sorted(r["systems"], key=lambda name, r=r: r["systems"][name]["order"]) for r in records[:3]]
        assert orders == [
            ["plain", "control", "carryover"],
            ["control", "carryover", "plain"],
            ["carryover", "plain", "control"],
        ]

    def test_resume_runs_only_what_is_missing(self, evaluation, tmp_path):
        path, settings = tmp_path / "j.jsonl", evaluation.settings()
        done = evaluation.run(items(2), [0], Journal(path, settings), log=silent)
        with path.open("a") as file:
            file.write('{"set": "qa", "prom')  # interrupted
        fresh = []
        again = evaluation.run(items(3), [0], Journal(path, settings), log=fresh.append)
        assert again[:4] == done
        assert [line.split(":")[0] for line in fresh] == ["qa q2 turn 0", "qa q2 turn 1"]
        assert len(Journal(path, settings).records) == 6

    def test_journal_of_other_settings_is_refused(self, evaluation, tmp_path):
        path, settings = tmp_path / "j.jsonl", evaluation.settings()
        Journal(path, settings)
        with pytest.raises(ValueError, match=r"other settings \(max_new_tokens differ\)"):
            Journal(path, {**settings, "max_new_tokens": 13})

    def test_a_difference_is_found(self, evaluation, tmp_path, monkeypatch):
        generate = Evaluation._generate

        def wrong(self, system, *args):
            numbers = generate(self, system, *args)
            if system == "carryover":
                numbers["token_ids"][4] = (numbers["token_ids"][4] + 1) % 64
            return numbers

        monkeypatch.setattr(Evaluation, "_generate", wrong)
        journal = Journal(tmp_path / "j.jsonl", evaluation.settings())
        records = evaluation.run(items(1), [0], journal, log=silent)
        found = records[0]["systems"]["carryover"]["difference"]
        assert (found["position"], found["near_tie"]) == (4, False)
        assert len(failures(records)) == 2  # both turns

    def test_sampling_is_seeded_and_not_compared(self, evaluation, tmp_path):
        evaluation.temperature = 1.0
        journal = Journal(tmp_path / "j.jsonl", evaluation.settings())
        records = evaluation.run(items(1), [0, 1], journal, log=silent)
        other = Journal(tmp_path / "k.jsonl", evaluation.settings())
        again = evaluation.run(items(1), [0, 1], other, log=silent)
        tokens = [[r["systems"][name]["token_ids"] for r in records] for name in ("plain", "carryover")]
        assert tokens == [[r["systems"][name]["token_ids"] for r in again] for name in ("plain", "carryover")]
        assert tokens[0][0] != tokens[0][2]  # another seed
        assert all("difference" not in r["systems"]["carryover"] for r in records)

    def test_names_are_distinct(self, target):
        with pytest.raises(ValueError, match=r"'plain' is plain decoding; got \['plain'\]"):
            Evaluation(target, None, [System("plain")], max_new_tokens=4)


def evaluation_carried(numbers):
    """Carried rows of each round: what the round before proposed less what it accepted, none in the first."""
    rejected = [p - a for p, a in zip(numbers["proposed"], numbers["accepted"], strict=True)]
    return [0, *rejected[:-1]]


class TestReport:
    @pytest.fixture
    def folders(self, target, tmp_path):
        target.save_pretrained(tmp_path / "target")
        for name, carry in (("control", False), ("carryover", True)):
            tiny_drafter(target, carry=carry).save_pretrained(tmp_path / name)
        (tmp_path / "qa.jsonl").write_text(
            "\n".join(json.dumps({"id": f"q{i}", "turns": [f"{5 + i} 6 7"]}) for i in range(3)) + "\n"
        )
        return tmp_path

    def test_report(self, folders, monkeypatch, capsys):
        monkeypatch.setattr(bench_command.AutoTokenizer, "from_pretrained", lambda folder: Words())
        output = folders / "out" / "report.json"
        code = bench_command.main(
            ["--target", str(folders / "target"), "--prompts", str(folders / "qa.jsonl"), "--output", str(output)]
            + ["--drafter", f"control={folders / 'control'}", f"carryover={folders / 'carryover'}"]
            + ["--num_prompts", "2", "--max_new_tokens", "6", "--dtype", "float32"]
        )
        assert code == 0
        text = output.read_text()
        report = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert list(report) == [
            "schema_version",
            "settings",
            "arguments",
            "machine",
            "versions",
            "commit",
            "summary",
            "prompts",
        ]
        jsonschema.validate(report, schema())
        assert read_report(output) == report
        assert report["settings"]["systems"] == ["plain", "control", "carryover"]
        assert report["settings"]["weights"]["control"] == weights_digest(folders / "control")
        assert set(report["machine"]) == {"cpu", "cores", "threads", "system", "python", "accelerator"}
        assert {"hf_carryover", "torch", "transformers"} <= set(report["versions"])
        assert set(report["summary"]) == {"groups", "comparisons", "equality"}
        assert list(report["summary"]["groups"]) == ["qa", "all sets", "mean of sets"]
        assert list(report["summary"]["comparisons"]) == ["carryover - control"]
        assert report["summary"]["equality"]["carryover"]["identical"] == 2
        assert [entry["prompt"] for entry in report["prompts"]] == ["q0", "q1"]
        expected = {
            "new_tokens", "prefill_ms", "decode_ms", "wall_ms", "rounds", "proposed", "accepted", "committed",
            "carried", "acceptance", "draft_ms", "target_ms", "phases", "order", "difference",
        }  # fmt: skip
        assert set(report["prompts"][0]["systems"]["carryover"]) == expected
        # Neither the report nor its table says where files lie.
        table = output.with_suffix(".md").read_text()
        assert str(folders) not in text + table
        assert "| qa | 2 |" in table
        assert "carryover: 2 of 2 outputs identical to plain decoding." in table
        assert table in capsys.readouterr().out

    def test_a_difference_fails_the_run(self, folders, monkeypatch):
        monkeypatch.setattr(bench_command.AutoTokenizer, "from_pretrained", lambda folder: Words())
        monkeypatch.setattr(
            benchmark, "compare_outputs", lambda *args: SimpleNamespace(position=1, margin=0.9, near_tie=False)
        )
        arguments = ["--target", str(folders / "target"), "--prompts", str(folders / "qa.jsonl")]
        arguments += ["--drafter", f"carryover={folders / 'carryover'}", "--output", str(folders / "r.json")]
        assert bench_command.main([*arguments, "--num_prompts", "1", "--max_new_tokens", "3"]) == 1

    def test_report_numbers_of_an_unfinished_round(self):
        report = GenerationReport(proposed=[3], accepted=[1], committed=[2], carried=[0, 2], draft_times=[1.0, 1.0])
        assert report_numbers(report)["carried"] == [0]

    def test_digest_needs_weights(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="No safetensors file"):
            weights_digest(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"abc")
        assert weights_digest(tmp_path) == "ba7816bf8f01cfea"  # SHA-256 of "abc"

    def test_machine_names_no_host(self):
        import platform

        assert platform.node() not in json.dumps(describe_machine())


@pytest.mark.compat
class TestNearTie:
    """`evaluate` judges with the demo's `compare_outputs`: bfloat16 near ties pass, all else fails."""

    @pytest.mark.parametrize(
        ("dtype", "gap", "near_tie"),
        [(torch.float32, 0.1, False), (torch.bfloat16, 0.1, True), (torch.bfloat16, 0.5, False)],
    )
    def test_margin(self, dtype, gap, near_tie):
        model = tiny_llama().to(dtype)
        prompt = torch.tensor([[5, 6, 7]])
        forward = model.forward

        def tied(*args, **kwargs):
            outputs = forward(*args, **kwargs)
            outputs.logits = torch.zeros_like(outputs.logits)
            outputs.logits[..., 9], outputs.logits[..., 11] = 8.0, 8.0 - gap
            return outputs

        model.forward = tied
        found = compare_outputs(model, prompt, [1, 2, 9, 4], [1, 2, 11, 4])
        assert found.position == 2
        assert found.margin == pytest.approx(gap, abs=0.04)  # bfloat16 steps at 8
        assert found.near_tie is near_tie
        assert compare_outputs(model, prompt, [1, 2], [1, 2]) is None
