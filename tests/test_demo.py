# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The side-by-side demo, on tiny models in memory: what it measures, prints, compares and returns."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from hf_carryover import demo, drafter_from_target
from hf_carryover import demo_report as report


WORDS = ["<unk>", "<eos>", "user:", "assistant:", "system:", *(f"w{i}" for i in range(59))]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
EOS = 1


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def target():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture
def drafter(target):
    set_seed(1)
    return drafter_from_target(target, num_hidden_layers=1, block_size=3, markov_rank=4).eval()


def run(ids, seconds=1.0, rounds=0, committed=0, carried=0, draft=0.0):
    return report.Run(len(ids), len(ids) - 1, seconds, 0.5, list(ids), rounds, committed, carried, draft)


def comparison(label, plain, differences=None, **drafters):
    return report.Comparison(label, {"plain": plain, **drafters}, differences or {})


class TestPrompts:
    def test_bundled(self):
        prompts = demo.load_prompts()
        assert [prompt.name for prompt in prompts] == [
            *("code", "function-call", "arithmetic", "advice", "question", "passage", "summary", "translation")
        ]
        assert [len(prompt.turns) for prompt in prompts] == [1, 1, 1, 2, 1, 1, 1, 1]
        assert [prompt.name for prompt in prompts if prompt.tools] == ["function-call"]

    def test_own_file(self, tmp_path):
        file = tmp_path / "own.jsonl"
        file.write_text('{"id": 7, "turns": ["a", "b"]}\n\n{"turns": ["é"], "tools": [{"name": "f"}]}\n', "utf-8")
        assert demo.load_prompts(file) == [
            demo.Prompt("7", ["a", "b"]),
            demo.Prompt("prompt-3", ["é"], [{"name": "f"}]),
        ]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            pytest.param('{"turns": ["a"]}\n{"turns": "b"}', "line 2 needs `turns`, .* got 'b'", id="text"),
            pytest.param('{"turns": []}', r"line 1 needs `turns`, .* got \[\]", id="empty"),
            pytest.param('{"prompt": "a"}', "line 1 needs `turns`, .* got None", id="missing"),
            pytest.param("[1]", "line 1 needs `turns`, .* got None", id="no object"),
            pytest.param("{", "line 1 is not JSON", id="no JSON"),
            pytest.param("\n", "holds no prompts", id="no prompts"),
        ],
    )
    def test_errors(self, tmp_path, content, message):
        file = tmp_path / "own.jsonl"
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            demo.load_prompts(file)

    def test_choose(self):
        prompts = [demo.Prompt(str(i), ["a"]) for i in range(6)]
        assert demo.choose(prompts, 2, None) == prompts[:2]
        shuffled = demo.choose(prompts, None, 3)
        assert shuffled != prompts
        assert sorted(shuffled, key=lambda prompt: prompt.name) == prompts
        assert demo.choose(prompts, 2, 3) == shuffled[:2]

    def test_encode_puts_tools_where_the_template_has_no_place(self, tokenizer):
        messages = [{"role": "user", "content": "w1"}]
        plain = demo.encode(tokenizer, messages, None, "cpu")["input_ids"]
        assert tokenizer.decode(plain[0]) == "user: w1 assistant:"
        with_tools = demo.encode(tokenizer, messages, [{"name": "w2"}], "cpu")["input_ids"]
        assert tokenizer.decode(with_tools[0]).startswith("system: ")
        assert tokenizer.decode(with_tools[0]).endswith("user: w1 assistant:")
        assert messages == [{"role": "user", "content": "w1"}]


class TestRun:
    def test_rates(self):
        plain, assisted = run(range(21), seconds=2.0), run(range(21), seconds=1.25, rounds=8, committed=20)
        assert plain.tokens_per_second == 10.0
        assert assisted.tau == 2.5
        assert assisted.speedup_over(plain) == 1.6

    def test_nothing_decoded(self):
        assert math.isnan(run([5], seconds=0.0).tokens_per_second)
        assert math.isnan(run([5]).tau)
        assert report.number(math.nan) == "-"

    def test_pool_is_micro_averaged(self):
        pooled = report.pool([run(range(11), 1.0, 2, 10, 4, 0.25), run(range(5), 3.0, 4, 4, 8, 0.5)])
        assert pooled == report.Run(16, 14, 4.0, 1.0, [], 6, 14, 12, 0.75)
        assert pooled.tau == 14 / 6
        assert pooled.tokens_per_second == 3.5


class TestStreamPrinter:
    def test_indents_every_line_and_skips_the_prompt(self, tokenizer, capsys):
        streamer = demo.StreamPrinter(tokenizer)
        streamer.put(torch.tensor([[5, 6]]))
        assert streamer.first_token_at is None
        streamer.put(torch.tensor([7, 8]))
        first = streamer.first_token_at
        streamer.put(torch.tensor([9]))
        streamer.end()
        assert streamer.first_token_at == first is not None
        assert capsys.readouterr().out == "    w2 w3 w4\n"

    def test_line_breaks(self, tokenizer, capsys):
        streamer = demo.StreamPrinter(tokenizer)
        streamer.on_finalized_text("one\n\ntwo")
        streamer.on_finalized_text(" three\n", stream_end=True)
        assert capsys.readouterr().out == "    one\n    \n    two three\n"

    def test_silent(self, tokenizer, capsys):
        streamer = demo.StreamPrinter(tokenizer, echo=False)
        streamer.put(torch.tensor([[5, 6]]))
        streamer.put(torch.tensor([7]))
        streamer.end()
        assert streamer.first_token_at is not None
        assert capsys.readouterr().out == ""


class TestCompareOutputs:
    @pytest.fixture
    def scripted(self):
        """A target whose next-token logits are 3.0, 2.9 and 1.0 for tokens 4, 5 and 6, and 0 for all others."""
        logits = torch.zeros(1, 1, 10)
        logits[0, 0, 4:7] = torch.tensor([3.0, 2.9, 1.0])
        seen = []

        class Scripted:
            dtype = torch.bfloat16

            def __call__(self, input_ids, use_cache, past_key_values=None):
                seen.append(input_ids.tolist())
                found = self.alone if use_cache and hasattr(self, "alone") else logits
                return SimpleNamespace(logits=found, past_key_values=None)

        return Scripted(), seen

    def test_equal(self):
        assert demo.compare_outputs(None, torch.tensor([[1]]), [4, 5], [4, 5]) is None

    def test_near_tie_in_half_precision(self, scripted):
        model, seen = scripted
        found = demo.compare_outputs(model, torch.tensor([[1, 2]]), [8, 4, 7], [8, 5, 9])
        assert (found.position, found.near_tie) == (1, True)
        assert found.margin == pytest.approx(0.1, abs=1e-6)
        assert seen == [[[1, 2, 8]]]

    @pytest.mark.parametrize(
        ("best", "dtype", "margin"),
        [(31.0, "bfloat16", 0.25), (32.0, "bfloat16", 0.25), (63.0, "bfloat16", 0.25), (64.0, "bfloat16", 0.5)]
        + [(3.0, "bfloat16", 0.25), (0.0, "bfloat16", 0.25), (200.0, "float16", 0.25), (-70.0, "bfloat16", 0.5)],
    )
    def test_margin_is_at_least_one_step(self, best, dtype, margin):
        """The next logit below a best one of 32 is 31.75 in bfloat16: a tie up to rounding."""
        found = demo.near_tie_margin(best, getattr(torch, dtype))
        assert found == pytest.approx(margin, abs=1e-9)
        # Below 0.25 unless the steps themselves are that wide.
        assert (found < 0.25) == (abs(best) < 32 or dtype == "float16")

    def test_never_in_float32(self, scripted):
        model, _ = scripted
        model.dtype = torch.float32
        assert not demo.compare_outputs(model, torch.tensor([[1]]), [4], [5]).near_tie

    def test_a_token_outside_the_tie(self, scripted):
        # The two best tokens are nearly tied, but what the other system wrote is neither of them.
        assert not demo.compare_outputs(scripted[0], torch.tensor([[1]]), [4], [6]).near_tie

    def test_a_tie_in_single_steps(self, scripted):
        """Rounding may part in one long pass what plain decoding, token by token, found tied."""
        model, seen = scripted
        model.alone = torch.zeros(1, 1, 10)
        model.alone[0, 0, 4:7] = torch.tensor([3.0, 1.0, 3.0])
        found = demo.compare_outputs(model, torch.tensor([[1, 2]]), [8, 4], [8, 6])
        assert (found.position, found.margin, found.near_tie) == (1, 0.0, True)
        assert seen == [[[1, 2, 8]], [[1, 2]], [[8]]]
        model.alone[0, 0, 6] = 2.0
        assert not demo.compare_outputs(model, torch.tensor([[1, 2]]), [8, 4], [8, 6]).near_tie

    def test_one_output_is_longer(self):
        assert demo.compare_outputs(None, torch.tensor([[1]]), [4, 5], [4]) == report.Difference(1, None, False)


class TestReport:
    @pytest.fixture
    def comparisons(self):
        return [
            comparison(
                "code",
                run(range(11), 1.0),
                control=run(range(11), 0.5, 5, 10),
                carryover=run(range(11), 0.4, 4, 10, 8, 0.1),
            ),
            comparison(
                "question 1/2",
                run(range(6), 1.0),
                control=run(range(6), 1.0, 5, 5),
                carryover=run(range(6), 0.8, 2, 5, 4, 0.1),
            ),
        ]

    def test_table(self, comparisons):
        rows = [line.split() for line in report.table(comparisons).splitlines()]
        numbers = [row[-8:] for row in rows if row[-1].endswith("x")]
        assert numbers == [
            ["11", "10.0", "20.0", "2.00", "2.00x", "25.0", "2.50", "2.50x"],
            ["6", "5.0", "5.0", "1.00", "1.00x", "6.2", "2.50", "1.25x"],
            ["17", "7.5", "10.0", "1.50", "1.33x", "12.5", "2.50", "1.67x"],
        ]
        assert [row[0] for row in rows if row[-1].endswith("x")] == ["code", "question", "all"]
        assert len({len(line) for line in report.table(comparisons).splitlines()}) == 1

    def test_gains(self, comparisons):
        assert report.gains(comparisons) == (
            "carryover against control: tau +66.7 %, decoding speed +25.0 %. Drafting took 17 % of its decode time."
        )
        assert report.gains([comparison("code", run([1, 2]), carryover=run([1, 2]))]) == ""

    def test_one_token_answers(self, capsys):
        only = [comparison("code", run([1], 0.0), control=run([1], 0.0), carryover=run([1], 0.0))]
        assert report.table(only).splitlines()[-1].split() == ["all", "1", "-", "-", "-", "-x", "-", "-", "-x"]
        report.print_result(only[0])
        assert "carryover    1 tokens  - tok/s  tau - (0 rounds" in capsys.readouterr().out

    def test_verdict_identical(self, comparisons):
        assert report.verdict(comparisons, "float32") == (
            "OK: all 4 assisted outputs are identical to plain decoding (17 tokens, float32).",
            True,
        )

    def test_verdict_near_tie(self, comparisons):
        comparisons[0].differences["control"] = report.Difference(3, 0.0625, True)
        assert report.verdict(comparisons, "bfloat16") == (
            "  code, control: first difference at new token 3; the target's top-1 minus top-2 logit is 0.0625 there: "
            "a near tie\n"
            "OK, up to near ties: 3 of 4 assisted outputs are identical (bfloat16).",
            True,
        )

    @pytest.mark.parametrize(
        ("difference", "reason"),
        [
            (report.Difference(3, 1.5, False), "logit is 1.5000 there: NOT a near tie"),
            (report.Difference(3, None, False), "one output ends there, the other goes on: NOT a near tie"),
        ],
    )
    def test_verdict_failed(self, comparisons, difference, reason):
        comparisons[0].differences["control"] = report.Difference(3, 0.0625, True)
        comparisons[1].differences["carryover"] = difference
        text, passed = report.verdict(comparisons, "bfloat16")
        assert not passed
        assert "question 1/2, carryover: first difference at new token 3; " in text
        assert reason in text
        assert text.endswith("FAILED: 2 of 4 assisted outputs are identical (bfloat16).")

    def test_shorten(self):
        assert demo.shorten("a\n  b") == "a b"
        assert demo.shorten("abcdefghij", 8) == "abcd ..."


class TestGeneration:
    @pytest.mark.compat
    def test_answer(self, target, tokenizer, drafter):
        inputs = demo.encode(tokenizer, [{"role": "user", "content": "w1 w2 w3"}], None, "cpu")
        expected = target.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
        plain = demo.answer(target, tokenizer, inputs, None, 12, echo=False)
        assisted = demo.answer(target, tokenizer, inputs, drafter, 12, echo=False)
        for result in (plain, assisted):
            assert result.token_ids == expected.tolist()
            assert (result.tokens, result.decoded) == (12, 11)
            assert result.seconds > 0
            assert result.prefill > 0
        assert (plain.rounds, plain.committed) == (0, 0)
        generated = drafter.last_report
        assert (assisted.rounds, assisted.committed) == (generated.rounds, sum(generated.committed))
        assert assisted.carried == sum(generated.carried)
        # 12 tokens: one from prefill, one at most left over when no proposal fits before the limit.
        assert assisted.committed in (10, 11)
        assert assisted.draft == generated.draft_ms / 1000

    @pytest.mark.compat
    def test_order_rotates_and_conversations_continue(self, target, tokenizer, drafter, monkeypatch):
        asked = []
        real = demo.answer

        def spy(model, tokenizer, inputs, chosen, max_new_tokens, echo):
            asked.append((chosen, tokenizer.decode(inputs["input_ids"][0])))
            return real(model, tokenizer, inputs, chosen, max_new_tokens, echo)

        monkeypatch.setattr(demo, "answer", spy)
        prompts = [demo.Prompt("chat", ["w1", "w2"]), demo.Prompt("one", ["w3"])]
        results = demo.compare_systems(target, tokenizer, {"carryover": drafter}, prompts, 5, echo=False)

        assert [result.label for result in results] == ["chat 1/2", "chat 2/2", "one"]
        assert [list(result.runs) for result in results] == [["plain", "carryover"]] * 3
        assert [result.differences for result in results] == [{}] * 3
        assert [chosen for chosen, _ in asked] == [None, drafter, drafter, None, None, drafter]
        first_answer = tokenizer.decode(results[0].runs["plain"].token_ids, skip_special_tokens=True)
        texts = [text for _, text in asked]
        assert texts == [
            *["user: w1 assistant:"] * 2,
            *[f"user: w1 assistant: {first_answer} user: w2 assistant:"] * 2,
            *["user: w3 assistant:"] * 2,
        ]

    def test_main(self, target, tokenizer, drafter, tmp_path, monkeypatch, capsys):
        target.save_pretrained(tmp_path / "target")
        tokenizer.save_pretrained(tmp_path / "target")
        drafter.save_pretrained(tmp_path / "drafter")
        prompts = tmp_path / "own.jsonl"
        prompts.write_text("".join(json.dumps({"id": f"p{i}", "turns": [f"w{i} w2"]}) + "\n" for i in range(3)))
        options = ["--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--control"]
        options += [tmp_path / "drafter", "--prompts", prompts, "--max-new-tokens", 6, "--limit", 2]
        # By default in bfloat16, and then once more in float32.
        assert demo.main(list(map(str, options))) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "OK: all 2 assisted outputs are identical to plain decoding (12 tokens, float32)."
        assert lines[-3:-1] == ["  p0: identical", "  p1: identical"]
        assert sum("(bfloat16)" in line or "bfloat16)." in line for line in lines) == 1

        options += ["--dtype", "float32"]
        assert demo.main(list(map(str, options))) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "OK: all 4 assisted outputs are identical to plain decoding (12 tokens, float32)."
        assert [line for line in lines if line.startswith("===")] == ["=== p0: w0 w2", "=== p1: w1 w2"]
        assert [line for line in lines if line.startswith("  [")] == [
            *("  [plain]", "  [control]", "  [carryover]", "  [control]", "  [carryover]", "  [plain]")
        ]

        monkeypatch.setattr(demo, "compare_outputs", lambda *_: report.Difference(0, 2.0, False))
        assert demo.main(list(map(str, options))) == 1
        assert "FAILED: 0 of " in capsys.readouterr().out

    def test_main_without_drafter(self, target, tokenizer, tmp_path, capsys):
        target.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        assert demo.main(["--target", str(tmp_path), "--control", str(tmp_path / "none")]) == 2
        error = capsys.readouterr().err
        assert f"error: No control drafter at {tmp_path / 'none'}" in error
        assert "name a checkpoint folder with --control" in error

    def test_limit_must_be_positive(self, capsys):
        with pytest.raises(SystemExit, match="2"):
            demo.main(["--limit", "0"])
        assert "must be at least 1, got 0" in capsys.readouterr().err
