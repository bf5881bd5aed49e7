"""The measuring tools in `bench/`: their statistics, their bookkeeping, and that what is compared is comparable."""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_drafter, tiny_llama


sys.path.insert(0, str(Path(__file__).parents[1]))  # `bench` is not part of the installed package

from bench import draft_step
from hf_carryover import GenerationReport
from hf_carryover.evaluation import benchmark as evaluate
from hf_carryover.evaluation import summary
from hf_carryover.evaluation.bootstrap import Estimate, PairedBootstrap, median_estimate, percentiles, ratio
from hf_carryover.evaluation.machine import describe_machine, weights_digest


def record(set_name, prompt, plain, turn=0, seed=0, **systems):
    """A journal record; `plain` is (new tokens, decode ms), a drafter (committed per round, decode ms)."""
    new_tokens, decode_ms = plain
    common = {"new_tokens": new_tokens, "prefill_ms": 5.0, "order": 0, "token_ids": list(range(new_tokens))}
    numbers = {"plain": {**common, "decode_ms": decode_ms, "wall_ms": decode_ms + 5.0}}
    for name, (committed, milliseconds) in systems.items():
        numbers[name] = {
            **common,
            "decode_ms": milliseconds,
            "wall_ms": milliseconds + 5.0,
            "rounds": len(committed),
            "proposed": [3] * len(committed),
            "accepted": [tokens - 1 for tokens in committed],
            "committed": committed,
            "carried": [4 - tokens for tokens in committed],
            "acceptance": [],
            "draft_ms": 2.0 * len(committed),
            "target_ms": 8.0 * len(committed),
            "difference": None,
        }
    return {"set": set_name, "prompt": prompt, "turn": turn, "seed": seed, "prompt_tokens": 7, "systems": numbers}


class TestBootstrap:
    def test_ratio_is_a_ratio_of_sums_and_nan_without_rounds(self):
        weights = np.array([[1.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
        assert ratio(weights, [6, 1], [2, 2]).tolist()[:2] == [1.75, 3.0]
        assert np.isnan(ratio(weights, [6, 1], [2, 2])[2])

    def test_hand_computed_interval(self):
        # Two prompts with 1 and 3 tokens a round: a resample is (1,1), (1,3), (3,1) or (3,3), so τ is 1, 2 or 3 with
        # probability 1/4, 1/2, 1/4. The 95 % interval is [1, 3], the 40 % interval [2, 2].
        bootstrap = PairedBootstrap(["a", "a"], num_resamples=4000)
        tau = ratio(bootstrap.weights, [1, 3], [1, 1])
        shares = [float((tau == value).mean()) for value in (1, 2, 3)]
        assert np.allclose(shares, [0.25, 0.5, 0.25], atol=0.03)  # 4 standard errors
        assert bootstrap(lambda w: ratio(w, [1, 3], [1, 1])) == Estimate(2.0, 1.0, 3.0)
        assert bootstrap(lambda w: ratio(w, [1, 3], [1, 1]), level=0.4) == Estimate(2.0, 2.0, 2.0)

    def test_pairs_cancel_what_prompts_share(self):
        committed, rounds = np.array([10, 20, 60, 80]), np.array([10, 10, 20, 20])
        bootstrap = PairedBootstrap(["a"] * 4, num_resamples=500)
        alone = bootstrap(lambda w: ratio(w, committed, rounds))
        paired = bootstrap(lambda w: ratio(w, committed + rounds, rounds) - ratio(w, committed, rounds))
        assert alone.high - alone.low > 1.0
        assert (paired.value, paired.low, paired.high) == pytest.approx((1.0, 1.0, 1.0))

    def test_strata_keep_their_sizes(self):
        weights = PairedBootstrap(["a", "b", "a", "b", "b"], num_resamples=200).weights
        assert (weights[:, [0, 2]].sum(axis=1) == 2).all()
        assert (weights[:, [1, 3, 4]].sum(axis=1) == 3).all()
        assert weights[:, 0].max() == 2  # with replacement

    def test_seed_decides(self):
        first, again, other = (PairedBootstrap(["a"] * 6, 50, seed).weights for seed in (0, 0, 1))
        assert (first == again).all()
        assert (first != other).any()

    def test_coverage(self):
        # 300 experiments on 30 prompts each; 95 % intervals of the true ratio 2.5 / 1.25 = 2. Percentile intervals are
        # a little short at n = 30; the bounds are 5 standard errors (0.0126) around 0.95, rounded outwards.
        generator = np.random.default_rng(0)
        hits = 0
        for experiment in range(300):
            scale = generator.uniform(0.5, 2.0, 30)
            numerators = scale * generator.uniform(1.5, 3.5, 30)
            denominators = scale * generator.uniform(0.75, 1.75, 30)
            bootstrap = PairedBootstrap(["a"] * 30, num_resamples=400, seed=experiment)
            estimate = bootstrap(lambda w, n=numerators, d=denominators: ratio(w, n, d))
            hits += estimate.low <= 2.0 <= estimate.high
        assert 0.88 <= hits / 300 <= 1.0 - 1 / 300

    def test_resamples_without_a_value_are_left_out(self):
        assert percentiles(np.array([1.0, np.nan, 1.0])) == (1.0, 1.0)
        assert Estimate(1.0, *percentiles(np.array([np.nan]))).to_dict() == {"value": 1.0, "low": None, "high": None}

    def test_median(self):
        assert median_estimate([1.0, 5.0, 2.0]) == Estimate(2.0, 1.0, 5.0)

    def test_nothing_to_resample(self):
        with pytest.raises(ValueError, match="no prompt to resample"):
            PairedBootstrap([])


class TestSummary:
    records = [
        record("math", "m0", (9, 80.0), control=([2, 2, 2, 2], 60.0), carryover=([4, 4], 40.0)),
        record("math", "m1", (5, 40.0), control=([1, 1, 1, 1], 60.0), carryover=([2, 2], 20.0)),
        record("qa", "q0", (3, 20.0), control=([1, 1], 20.0), carryover=([1, 1], 20.0)),
        record("held_out", "h0", (4, 30.0), control=([3], 10.0), carryover=([3], 15.0)),
    ]

    def group(self, name):
        return summary.summarize(self.records, [("carryover", "control")])["groups"][name]["systems"]

    def test_tau_is_micro_averaged(self):
        assert self.group("math")["control"]["tau"]["value"] == 12 / 8
        assert self.group("math")["carryover"]["tau"]["value"] == 12 / 4
        assert self.group("all sets")["carryover"]["tau"]["value"] == 14 / 6  # not the mean of 3 and 1, nor of prompts
        assert self.group("mean of sets")["carryover"]["tau"]["value"] == (3 + 1) / 2
        assert self.group("held_out")["carryover"]["tau"]["value"] == 3

    def test_speedup_is_the_ratio_of_decode_times(self):
        # All systems decode the same 12 tokens of math: plain in 120 ms.
        assert self.group("math")["control"]["speedup"]["value"] == pytest.approx(120 / 120)
        assert self.group("math")["carryover"]["speedup"]["value"] == pytest.approx(120 / 60)
        assert self.group("math")["plain"]["tokens_per_second"] == pytest.approx(100)

    def test_comparison(self):
        pair = summary.summarize(self.records, [("carryover", "control")])["comparisons"]["carryover - control"]
        assert pair["math"]["tau_difference"]["value"] == 1.5
        assert pair["math"]["tau_change"]["value"] == pytest.approx(1.0)
        assert pair["math"]["speedup_ratio"]["value"] == pytest.approx(2.0)
        # m0 gives 4 - 2, m1 gives 2 - 1: these and the pooled value are all a resample can give.
        assert (pair["math"]["tau_difference"]["low"], pair["math"]["tau_difference"]["high"]) == (1.0, 2.0)
        assert pair["qa"]["tau_difference"] == {"value": 0.0, "low": None, "high": None}  # one prompt: no interval

    def test_round_costs_and_acceptance(self):
        numbers = self.group("math")["control"]
        assert (numbers["rounds"], numbers["committed"], numbers["proposed"], numbers["accepted"]) == (8, 12, 24, 4)
        assert (numbers["draft_ms_per_round"], numbers["target_ms_per_round"]) == (2.0, 8.0)
        assert numbers["carried_per_round"] == 20 / 8
        assert numbers["acceptance"] == [0.5, 0.0, None]  # y_2 was judged after y_1 was accepted only

    def test_turns_and_seeds_of_a_prompt_are_one_pair(self):
        turns = [record("chat", "c0", (9, 80.0), turn=turn, a=([2, 2], 10.0)) for turn in (0, 1)]
        turns.append(record("chat", "c1", (3, 20.0), a=([1], 10.0)))
        table = summary.Table(turns)
        assert table.values["a"]["committed"].tolist() == [8.0, 1.0]
        assert summary.summarize(turns, [])["groups"]["chat"]["prompts"] == 2

    def test_equality(self):
        rows = [record("qa", str(i), (3, 20.0), a=([1, 1], 20.0)) for i in range(3)]
        rows[1]["systems"]["a"]["difference"] = {"position": 4, "margin": 0.1, "near_tie": True}
        rows[2]["systems"]["a"]["difference"] = {"position": 5, "margin": 0.9, "near_tie": False}
        counts = summary.equality(rows)["a"]
        assert (counts["compared"], counts["identical"]) == (3, 1)
        assert counts["near_ties"] == [{"set": "qa", "prompt": "1", "turn": 0, "position": 4, "margin": 0.1}]
        assert counts["failures"] == [{"set": "qa", "prompt": "2", "turn": 0, "position": 5, "margin": 0.9}]
        assert evaluate.failures(rows) == ["qa 2 turn 0, a: position 5, margin 0.9"]

    def test_one_token_answers_count_nothing(self):
        rows = [record("qa", "q0", (1, 0.0), a=([], 0.0)), record("qa", "q1", (3, 20.0), a=([2], 5.0))]
        numbers = summary.summarize(rows, [])["groups"]["qa"]["systems"]["a"]
        assert numbers["tau"]["value"] == 2.0
        assert numbers["speedup"]["value"] == 4.0


class TestItems:
    def test_choice_is_even(self):
        assert evaluate.choose_evenly(range(80), 10) == list(range(0, 80, 8))
        assert evaluate.choose_evenly(range(5), 3) == [0, 1, 3]
        assert evaluate.choose_evenly(range(3), 10) == [0, 1, 2]
        assert evaluate.choose_evenly(range(3), None) == [0, 1, 2]

    def options(self, **values):
        return evaluate.parse(["--target", "t", "--output", "o.json", *(f"--{k}={v}" for k, v in values.items())])

    def test_sets_are_files(self, tmp_path):
        for name in ("b", "a"):
            lines = [json.dumps({"id": f"{name}{i}", "turns": [f"Say {i}."]}) for i in range(4)]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        items = evaluate.load_items([str(tmp_path)], None, self.options(num_prompts=2))
        assert [(item.set, item.name) for item in items] == [("a", "a0"), ("a", "a2"), ("b", "b0"), ("b", "b2")]

    def test_recordings_give_their_prompts(self, tmp_path):
        rows = [{"prompt_ids": [5, 6 + i], "response_ids": [7, 8, 9]} for i in range(6)]
        path = tmp_path / "r.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        items = evaluate.load_items([], str(path), self.options(held_out=3, num_held_out=2))
        assert [item.set for item in items] == ["held_out", "held_out"]
        assert all(item.prompt_ids[0] == 5 and len(item.prompt_ids) == 2 for item in items)

    def test_missing_files_are_named(self, tmp_path, capsys):
        for option in ("prompts", "recordings"):
            with pytest.raises(SystemExit, match="2"):
                self.options(**{option: str(tmp_path / "none")})
            assert f"{tmp_path / 'none'} does not exist" in capsys.readouterr().err

    def test_nothing_and_repeated_ids_are_errors(self, tmp_path):
        with pytest.raises(ValueError, match="No prompts in"):
            evaluate.load_items([str(tmp_path)], None, self.options())
        (tmp_path / "a.jsonl").write_text('{"id": "x", "turns": ["a"]}\n{"id": "x", "turns": ["b"]}\n')
        with pytest.raises(ValueError, match=r"repeated: \[\('a', 'x'\)\]"):
            evaluate.load_items([str(tmp_path)], None, self.options())

    def test_comparisons(self):
        assert evaluate.comparisons(None, ["carryover", "control"]) == [("carryover", "control")]
        assert evaluate.comparisons(None, ["a"]) == []
        assert evaluate.comparisons([("a", "b")], ["a", "b"]) == [("a", "b")]
        with pytest.raises(ValueError, match=r"names of drafters \(a\), got \['c'\]"):
            evaluate.comparisons([("a", "c")], ["a"])


class Words:
    """A tokenizer as far as `evaluate` needs one: a message is the digits in it."""

    chat_template = "tools"

    def apply_chat_template(self, messages, **kwargs):
        from transformers import BatchEncoding

        ids = [int(word) for message in messages for word in message["content"].split()]
        tokens = torch.tensor([ids])
        return BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})

    def decode(self, ids, **kwargs):
        return " ".join(str(token) for token in ids)


@pytest.fixture
def evaluation(target):
    drafters = {"control": tiny_drafter(target, carry=False), "carryover": tiny_drafter(target, carry=True)}
    return evaluate.Evaluation(target, Words(), drafters, max_new_tokens=12, max_turns=2)


def items(count):
    return [evaluate.Item("qa", f"q{i}", [f"{5 + i} 6 7", "8"]) for i in range(count)]


def silent(line):
    pass


@pytest.mark.compat
class TestRuns:
    def test_records(self, evaluation, target, tmp_path):
        journal = evaluate.Journal(tmp_path / "j.jsonl", evaluation.settings())
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
        journal = evaluate.Journal(tmp_path / "j.jsonl", evaluation.settings())
        records = evaluation.run(items(2), [0], journal, log=silent)
        orders = [sorted(r["systems"], key=lambda name, r=r: r["systems"][name]["order"]) for r in records[:3]]
        assert orders == [
            ["plain", "control", "carryover"],
            ["control", "carryover", "plain"],
            ["carryover", "plain", "control"],
        ]

    def test_resume_runs_only_what_is_missing(self, evaluation, tmp_path):
        path, settings = tmp_path / "j.jsonl", evaluation.settings()
        done = evaluation.run(items(2), [0], evaluate.Journal(path, settings), log=silent)
        with path.open("a") as file:
            file.write('{"set": "qa", "prom')  # interrupted
        fresh = []
        again = evaluation.run(items(3), [0], evaluate.Journal(path, settings), log=fresh.append)
        assert again[:4] == done
        assert [line.split(":")[0] for line in fresh] == ["qa q2 turn 0", "qa q2 turn 1"]
        assert len(evaluate.Journal(path, settings).records) == 6

    def test_journal_of_other_settings_is_refused(self, evaluation, tmp_path):
        path, settings = tmp_path / "j.jsonl", evaluation.settings()
        evaluate.Journal(path, settings)
        with pytest.raises(ValueError, match=r"other settings \(max_new_tokens differ\)"):
            evaluate.Journal(path, {**settings, "max_new_tokens": 13})

    def test_a_difference_is_found(self, evaluation, tmp_path, monkeypatch):
        generate = evaluate.Evaluation._generate

        def wrong(self, system, *args):
            numbers = generate(self, system, *args)
            if system == "carryover":
                numbers["token_ids"][4] = (numbers["token_ids"][4] + 1) % 64
            return numbers

        monkeypatch.setattr(evaluate.Evaluation, "_generate", wrong)
        journal = evaluate.Journal(tmp_path / "j.jsonl", evaluation.settings())
        records = evaluation.run(items(1), [0], journal, log=silent)
        found = records[0]["systems"]["carryover"]["difference"]
        assert (found["position"], found["near_tie"]) == (4, False)
        assert len(evaluate.failures(records)) == 2  # both turns

    def test_sampling_is_seeded_and_not_compared(self, evaluation, tmp_path):
        evaluation.temperature = 1.0
        journal = evaluate.Journal(tmp_path / "j.jsonl", evaluation.settings())
        records = evaluation.run(items(1), [0, 1], journal, log=silent)
        other = evaluate.Journal(tmp_path / "k.jsonl", evaluation.settings())
        again = evaluation.run(items(1), [0, 1], other, log=silent)
        tokens = [[r["systems"][name]["token_ids"] for r in records] for name in ("plain", "carryover")]
        assert tokens == [[r["systems"][name]["token_ids"] for r in again] for name in ("plain", "carryover")]
        assert tokens[0][0] != tokens[0][2]  # another seed
        assert all("difference" not in r["systems"]["carryover"] for r in records)

    def test_a_drafter_cannot_be_called_plain(self, target):
        with pytest.raises(ValueError, match="'plain' is plain decoding"):
            evaluate.Evaluation(target, None, {"plain": None}, max_new_tokens=4)


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

    def test_schema(self, folders, monkeypatch, capsys):
        monkeypatch.setattr(evaluate.AutoTokenizer, "from_pretrained", lambda folder: Words())
        output = folders / "out" / "report.json"
        code = evaluate.main(
            ["--target", str(folders / "target"), "--prompts", str(folders / "qa.jsonl"), "--output", str(output)]
            + ["--drafter", f"control={folders / 'control'}", "--drafter", f"carryover={folders / 'carryover'}"]
            + ["--num_prompts", "2", "--max_new_tokens", "6", "--dtype", "float32"]
        )
        assert code == 0
        text = output.read_text()
        report = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert list(report) == ["settings", "arguments", "machine", "versions", "commit", "summary", "prompts"]
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
            "carried", "acceptance", "draft_ms", "target_ms", "order", "difference",
        }  # fmt: skip
        assert set(report["prompts"][0]["systems"]["carryover"]) == expected
        # Neither the report nor its table says where files lie.
        table = output.with_suffix(".md").read_text()
        assert str(folders) not in text + table
        assert "| qa | 2 |" in table
        assert "carryover: 2 of 2 outputs identical to plain decoding." in table
        assert table in capsys.readouterr().out

    def test_a_difference_fails_the_run(self, folders, monkeypatch):
        monkeypatch.setattr(evaluate.AutoTokenizer, "from_pretrained", lambda folder: Words())
        monkeypatch.setattr(
            evaluate, "compare_outputs", lambda *args: SimpleNamespace(position=1, margin=0.9, near_tie=False)
        )
        arguments = ["--target", str(folders / "target"), "--prompts", str(folders / "qa.jsonl")]
        arguments += ["--drafter", f"carryover={folders / 'carryover'}", "--output", str(folders / "r.json")]
        assert evaluate.main([*arguments, "--num_prompts", "1", "--max_new_tokens", "3"]) == 1

    def test_folder_option(self):
        assert evaluate.named_folder("a=b/c") == ("a", "b/c")
        with pytest.raises(evaluate.argparse.ArgumentTypeError, match="expected NAME=DIR, got 'a'"):
            evaluate.named_folder("a")

    def test_report_numbers_of_an_unfinished_round(self):
        report = GenerationReport(proposed=[3], accepted=[1], committed=[2], carried=[0, 2], draft_times=[1.0, 1.0])
        assert evaluate.report_numbers(report)["carried"] == [0]

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
        found = evaluate.compare_outputs(model, prompt, [1, 2, 9, 4], [1, 2, 11, 4])
        assert found.position == 2
        assert found.margin == pytest.approx(gap, abs=0.04)  # bfloat16 steps at 8
        assert found.near_tie is near_tie
        assert evaluate.compare_outputs(model, prompt, [1, 2], [1, 2]) is None


@pytest.mark.compat
class TestDraftStep:
    @pytest.fixture
    def small(self):
        widths = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
        target = draft_step.random_target(3, num_attention_heads=4, num_key_value_heads=2, **widths)
        target.generation_config.eos_token_id = None
        target.generation_config.pad_token_id = 0
        with torch.no_grad():
            for parameter in target.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.3)
        systems = draft_step.build_systems(target, block_size=4, num_hidden_layers=2)
        return target, systems, torch.arange(5, 17)[None]

    def test_the_twin_proposes_the_same(self, small):
        target, systems, prompt = small
        assert draft_step.same_proposals(target, systems, prompt, 5) == 1.0
        # The check can fail: another context projection, other proposals.
        other = copy.deepcopy(systems["ours"])
        with torch.no_grad():
            other.fc.weight.mul_(-1)
        assert draft_step.same_proposals(target, {**systems, "ours": other}, prompt, 5) < 1.0

    def test_proposals_that_do_not_vary_prove_nothing(self, small):
        target, systems, prompt = small
        same = copy.deepcopy(systems["ours"])
        with torch.no_grad():
            same.norm.weight.zero_()
        with pytest.raises(RuntimeError, match="Only 1 different proposals in 5 rounds"):
            draft_step.same_proposals(target, {**systems, "ours": same}, prompt, 5)

    def test_carry_has_the_same_weights_and_carries(self, small):
        target, systems, prompt = small
        own, carry = systems["ours"].state_dict(), systems["ours+carry"].state_dict()
        assert set(carry) - set(own) == {"carry_embedding"}
        assert all(torch.equal(value, carry[name]) for name, value in own.items())
        draft_step.run(target, "ours+carry", systems["ours+carry"], prompt, 4)
        carried = systems["ours+carry"].last_report.carried
        assert carried[0] == 0
        assert sum(carried) > 0

    def test_recorder_counts_rounds_and_leaves_the_target_as_it_was(self, small):
        target, systems, prompt = small
        for name, assistant in systems.items():
            recorder = draft_step.run(target, name, assistant, prompt, 5)
            assert len(recorder.outside) == len(recorder.inside) == len(recorder.proposals) == 5
            assert all(len(tokens) == 4 for tokens in recorder.proposals)
            assert all(
                0 < inside <= outside for inside, outside in zip(recorder.inside, recorder.outside, strict=True)
            )
        assert "forward" not in vars(target)
        assert "_get_candidate_generator" not in vars(target)

    def test_an_error_of_the_target_is_not_hidden(self, small):
        target, systems, _ = small
        with pytest.raises(IndexError):
            draft_step.run(target, "ours", systems["ours"], torch.tensor([[64]]), 2)
        assert "forward" not in vars(target)

    def test_measure(self, small):
        target, systems, prompt = small
        case = draft_step.measure(target, systems, prompt, rounds=2, repetitions=2)
        assert set(case) == {"per_repetition", "median_ms", "first_ms", "ratios"}
        assert set(case["ratios"]) == {"ours / transformers", "ours+carry / transformers", "ours+carry / ours"}
        theirs, ours = (case["per_repetition"][name]["outside"] for name in ("transformers", "ours"))
        ratios = sorted(x / y for x, y in zip(ours, theirs, strict=True))
        assert case["ratios"]["ours / transformers"]["outside"]["value"] == pytest.approx(sum(ratios) / 2)
        row = draft_step.table([{"dtype": "float32", "block_size": 4, "context": 12, "same_proposals": 1.0, **case}])
        assert row.splitlines()[2].startswith("| float32 | 4 | 12 | ")

    def test_profile_names_operators(self, small):
        target, systems, prompt = small
        text = draft_step.profile_table(target, {"ours": systems["ours"]}, prompt, rounds=1)
        assert text.startswith("ours: ")
        assert "aten::mm" in text
