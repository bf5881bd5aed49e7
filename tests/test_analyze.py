"""The analyses behind `hf-carryover analyze`, each against a plain computation of the same thing."""

import json

import pytest
import torch
from bench_helpers import Words
from conftest import tiny_drafter, tiny_llama
from training_helpers import random_rows

from hf_carryover.evaluation import analyze_command
from hf_carryover.evaluation.attention import AttentionShare
from hf_carryover.evaluation.correlation import correlate, pearson, ranks, spearman
from hf_carryover.evaluation.overhead import measure_overhead
from hf_carryover.evaluation.replay import Replay
from hf_carryover.evaluation.view import RoundTracer, TracedRound, to_html, to_text, trace
from hf_carryover.modeling_carryover import CarryoverDrafter


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def rows():
    return [{**row, "id": f"{'abc'[i % 3]}-{i}"} for i, row in enumerate(random_rows([22, 30, 26, 24, 28, 20]))]


class TestAttention:
    def test_shares_are_those_of_a_plain_softmax(self, target, monkeypatch):
        """Of every layer, head and block: softmax over what the block sees, summed over the carried rows."""
        drafter = tiny_drafter(target, block_size=4)
        share = AttentionShare(drafter)
        expected: dict[int, list[torch.Tensor]] = {}

        def check(seen):
            if not seen.carried:
                return
            inputs = []
            for layer in drafter.layers:
                forward = layer.self_attn.forward
                monkeypatch.setattr(
                    layer.self_attn,
                    "forward",
                    lambda *a, f=forward, m=layer.self_attn: (inputs.append((m, a)), f(*a))[1],
                )
            seen.draft(seen.carried)
            monkeypatch.undo()
            for block in range(len(seen.names)):
                carried = int(seen.carried["carried_mask"][block].sum())
                if carried:
                    layers = [self.plain(module, args, block, seen) for module, args in inputs]
                    expected.setdefault(carried, []).append(torch.stack(layers))

        Replay(drafter, target, observers=[check, share])(rows())
        assert sorted(expected) == [i for i in range(5) if share.blocks[i]]
        for count, values in expected.items():
            assert share.blocks[count] == len(values)
            torch.testing.assert_close(share.sums[count], torch.stack(values).sum(dim=0), rtol=1e-4, atol=1e-5)
        summary = share.summary()
        assert summary["blocks"] == sum(map(len, expected.values()))
        assert 0 < summary["share"] < 1 and 0 < summary["uniform"] < 1
        assert torch.tensor(summary["by_layer_and_head"]).shape == (2, drafter.config.num_attention_heads)

    @staticmethod
    def plain(module, args, block, seen):
        """`(num_heads,)`, with the heads of a key head one after the other and every row by itself."""
        states, rope, memory, mask = args
        key, _ = memory.keys_and_values(module, states, rope)
        from hf_carryover.modeling_carryover import apply_rotary

        query = apply_rotary(module.q_norm(module._heads(module.q_proj(states))).transpose(1, 2), rope)
        key = key.repeat_interleave(module.heads_per_kv, dim=1)
        scores = query[block] @ key[block].transpose(1, 2) * module.head_dim**-0.5 + mask[block]
        start = memory.context.shape[1]
        width = seen.carried["carried_mask"].shape[1]
        return scores.softmax(dim=-1)[:, 1:, start : start + width].sum(dim=-1).mean(dim=-1)

    def test_the_drafter_is_left_as_it_was(self, target):
        drafter = tiny_drafter(target)
        before = drafter.config._attn_implementation
        Replay(drafter, target, observers=[AttentionShare(drafter)])(rows()[:2])
        assert drafter.config._attn_implementation == before


class TestCorrelation:
    def test_by_hand(self):
        assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
        assert pearson([1, 2, 3], [3, 1, 2]) == pytest.approx(-0.5)
        assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]
        assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1.0)
        assert spearman([1, 2, 3], [1, 1, 1]) != spearman([1, 2, 3], [1, 1, 1])  # NaN: nothing varies

    def test_one_set_can_make_all_of_it(self):
        result = correlate("abcd", [0, 1, 2, 10], [1, 0, 1, 9])
        assert result["pearson"] > 0.9
        assert result["without"]["d"] == {"pearson": 0.0, "spearman": 0.0}
        assert result["without"]["a"]["pearson"] == pytest.approx(pearson([1, 2, 10], [0, 1, 9]))

    def test_undefined(self):
        assert correlate("ab", [0, 1], [0, 1])["pearson"] is None
        assert correlate("abc", [0, 1, 2], [1, 1, 1])["spearman"] is None
        with pytest.raises(ValueError, match="for each of 3 sets, got 2 and 3"):
            correlate("abc", [0, 1], [0, 1, 2])


class TestOverhead:
    def test_what_is_timed_is_a_draft_step_with_that_many_rows(self, target, monkeypatch):
        drafter = tiny_drafter(target, block_size=3, carry_from="states_and_predictions")
        seen = []
        draft = CarryoverDrafter.draft

        def watched(self, cache, *args):
            seen.append((cache.committed, cache.carried))
            return draft(self, cache, *args)

        monkeypatch.setattr(CarryoverDrafter, "draft", watched)
        results = measure_overhead(drafter, target, contexts=(10, 20), repetitions=2, rounds=2)
        assert [(r["context"], r["carried"]) for r in results] == [(c, k) for c in (10, 20) for k in range(4)]
        assert set(seen) == {(c + 1, k) for c in (10, 20) for k in range(4)}
        for result in results:
            assert result["draft_ms"]["value"] > 0
            # Keys and values of 2 layers, 2 key heads of width 8, in float32.
            assert result["carried_bytes"] == result["carried"] * 2 * 2 * 2 * 8 * 4
            if not result["carried"]:
                assert result["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}

    def test_a_drafter_without_carry_is_refused(self, target):
        with pytest.raises(ValueError, match=r"does not carry \(`config.carry` is False\)"):
            measure_overhead(tiny_drafter(target, carry=False), target)


class TestView:
    def test_the_rounds_are_those_of_generate(self, target):
        drafter = tiny_drafter(target, markov_rank=4)
        prompt = torch.arange(5, 17)[None]
        text = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, do_sample=False, max_new_tokens=40
        )[0, 12:].tolist()
        report, traced = drafter.last_report, trace(target, drafter, prompt, max_new_tokens=40)
        # `generate` proposes less before its limit; up to there the rounds are the same.
        whole = [i for i, proposed in enumerate(report.proposed) if proposed == 4]
        assert [traced[i].accepted for i in whole] == [report.accepted[i] for i in whole]
        assert [len(traced[i].carried) for i in whole] == [report.carried[i] for i in whole]
        committed = [traced[0].anchor]
        for one in traced:
            assert one.anchor == committed[-1]
            committed += one.proposals[: one.accepted] + ([] if one.correction is None else [one.correction])
        assert committed == text[: len(committed)]
        assert len(committed) >= 40 - 5

    def test_carried_rows_and_what_they_change(self, target):
        """A row at position p speaks of p + 1: re-converged is where the text has that word."""
        drafter = tiny_drafter(target)
        tracer, checked = RoundTracer(), []

        def check(seen):
            for row, name in enumerate(seen.names):
                one = tracer.rounds[name][-1]
                if one.without is None:
                    continue
                anchor = int(seen.anchors[row])
                text = seen.input_ids[row].tolist()
                places = seen.carried["carried_positions"][row][seen.carried["carried_mask"][row]].tolist()
                right = [
                    p + 1 <= anchor + min(4, int(seen.left[row])) and text[p + 1] == word
                    for p, word in zip(places, one.predictions)
                ]
                assert one.reconverged == right
                without = seen.likeliest(seen.draft({}))[row].tolist()[: len(one.without)]
                assert one.without == without
                agree = [a == b for a, b in zip(without, text[anchor + 1 :])]
                assert one.without_accepted == (agree.index(False) if False in agree else len(agree))
                checked.append(name)

        Replay(drafter, target, observers=[tracer, check])(rows())
        assert len(checked) > 10

    def test_text_and_page(self):
        rounds = [
            TracedRound(5, [6, 7], 1, 8),
            TracedRound(8, [9, 60], 2, None, [7], [9], [True], [1, 2], 0),
        ]

        class Tokenizer:
            def decode(self, ids):
                return {7: "<b>", 60: "\n"}.get(ids[0], str(ids[0]))

        text = to_text(rounds, Tokenizer(), color=False)
        assert text.splitlines() == [
            "  1  5 → a:6 c:8 r:<b>",
            "  2  8 → a:9 a:⏎  |  r:9  g:+2 by carry",
        ]
        assert "\x1b[32m6\x1b[0m" in to_text(rounds, Tokenizer())
        page = to_html(rounds, Tokenizer(), "a < b")
        assert "<title>a &lt; b</title>" in page and "&lt;b&gt;" in page and "<b>" not in page
        assert "2 rounds, τ = 2.00; carry changed the number of accepted tokens by +2." in page
        assert '<code class="reconverged">9</code>' in page
        assert "<script" not in page and "http" not in page

    def test_nothing_to_show(self):
        assert to_text([], None) == ""
        assert "0 rounds, τ = –" in to_html([], None)


class TestCommand:
    def test_all_six(self, target, tmp_path, monkeypatch, capsys):
        target.save_pretrained(tmp_path / "target")
        for name, options in {
            "control": {"carry": False},
            "carryover": {},
            "tokens": {"carry_from": "proposals"},
        }.items():
            tiny_drafter(target, **options).save_pretrained(tmp_path / name)
        (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(row) for row in rows()) + "\n")
        monkeypatch.setattr(analyze_command, "load_target", lambda args: (target, Words()))
        arguments = ["--target", "x", "--recordings", str(tmp_path / "r.jsonl"), "--output", str(tmp_path / "out")]
        arguments += ["--carryover", str(tmp_path / "carryover"), "--control", str(tmp_path / "control")]
        arguments += ["--probe", f"nothing={tmp_path / 'control'}", f"proposals={tmp_path / 'tokens'}"]
        assert analyze_command.main([*arguments, "--contexts", "8", "--dtype", "float32"]) == 0
        out = capsys.readouterr().out
        report = json.loads((tmp_path / "out" / "analysis.json").read_text())
        assert report["responses"] == 6
        assert set(report["reconvergence"]) == {"all", "a", "b", "c"}
        assert set(report["correlation"]["without"]) == {"a", "b", "c"}
        assert report["probe"]["reference"] == "nothing"
        assert report["probe"]["change"]["nothing"]["a"]["value"] == 0.0
        assert [entry["carried"] for entry in report["overhead"]] == list(range(5))
        text = (tmp_path / "out" / "analysis.md").read_text()
        assert text in out and str(tmp_path) not in text
        assert [line for line in text.splitlines() if line.startswith("## ")] == [
            "## 1. The same anchors with carry and without",
            "## 2. Re-convergence and gain",
            "## 3. Attention on carried rows",
            "## 4. What is carried",
            "## 5. What carry costs",
            "## 6. One generation",
        ]
        assert (tmp_path / "out" / "view.html").read_text().startswith("<!doctype html>")
        for figure in ("reconvergence", "attention", "overhead"):
            assert (tmp_path / "out" / f"{figure}.png").stat().st_size > 1000

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--target", "t"], "its pair too: --carryover and --control"),
            (["--dtype", "int8"], "--dtype must be one of"),
            (["--num_prompts", "0"], "--num_prompts must be at least 1, got 0"),
            (["--probe", "x"], "--probe 'x': expected NAME=DIR"),
        ],
    )
    def test_mistakes_are_named(self, flags, message, capsys):
        assert analyze_command.main(flags) == 2
        assert message in capsys.readouterr().err

    def test_a_pair_without_carry(self, target, tmp_path, monkeypatch, capsys):
        tiny_drafter(target, carry=False).save_pretrained(tmp_path / "control")
        monkeypatch.setattr(analyze_command, "load_target", lambda args: (target, Words()))
        folder = str(tmp_path / "control")
        assert analyze_command.main(["--target", "x", "--carryover", folder, "--control", folder]) == 2
        assert "--carryover control has no carry" in capsys.readouterr().err
