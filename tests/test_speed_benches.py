"""The benches of speed: what they count, and that they run."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_drafter, tiny_llama


sys.path.insert(0, str(Path(__file__).parents[1]))  # `bench` is not part of the installed package

from bench import batch, floor, gpu_check, training_step


def test_work_by_hand():
    """Operations and bytes of a step, counted once more for a shape that can be counted by hand."""
    target = tiny_llama()  # hidden 32, vocabulary 64
    drafter = tiny_drafter(target, block_size=3, num_hidden_layers=2, target_layer_ids=[0, 2], markov_rank=4)
    d, q, kv, mlp, keys = 32, 4 * 8, 2 * 2 * 8, 64, 10 + 5 + 4
    weights = d * q + d * kv + q * d + 3 * d * mlp
    parts = floor.work(drafter, context=10, window_rows=5)
    assert parts["projection"] == (2 * 5 * 64 * 32, 4 * 64 * 32)
    layer = 2 * 4 * weights + 2 * 5 * d * kv + 4 * 4 * keys * q
    assert parts["layers"] == (2 * layer, 2 * 4 * (weights + kv * keys))
    assert parts["head"] == (2 * 3 * 32 * 64, 4 * 32 * 64)
    assert parts["sampling"] == (3 * 64 + 2 * 3 * 4 * 64, 4 * 3 * 64 + 4 * 4 * 64)


def test_the_floor_is_the_larger_of_both_bounds():
    ceiling = {"operations": 1e9, "bytes": 1e6}
    assert floor.floor_ms({"a": (2e6, 1e3), "b": (1e6, 3e3)}, ceiling) == {"a": 2.0, "b": 3.0}


def test_a_step_is_timed_part_by_part():
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=3, markov_rank=4)
    case = floor.measure(drafter, target, 10, 3, {"operations": 1e9, "bytes": 1e9}, repetitions=2)
    assert case["total_ms"]["value"] >= max(case["ms"].values()) > 0
    text = floor.table([{"dtype": "float32", "block_size": 3, **case}])
    assert text.splitlines()[2].startswith("| float32 | 3 | 10 | 3 | ")


def test_batches_are_padded_on_the_left():
    groups = batch.batches([[5, 6, 7], [8], [9, 9]], 2, 0, "cpu")
    assert [group["input_ids"].tolist() for group in groups] == [[[5, 6, 7], [0, 0, 8]], [[9, 9]]]
    assert groups[0]["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_batches_give_the_tokens_of_single_prompts():
    target = tiny_llama()
    drafter = tiny_drafter(target)
    prompts = [[5, 6, 7], [8], [9, 9]]
    _, single = batch.run(target, None, batch.batches(prompts, 1, 0, "cpu"), 6, 0, {})
    _, together = batch.run(target, drafter, batch.batches(prompts, 3, 0, "cpu"), 6, 0, {"num_assistant_tokens": 2})
    assert together == single


def test_expected_memory_by_hand():
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=3, target_layer_ids=[0, 2])
    expected = gpu_check.training_bytes(drafter, anchors=5, length=20, max_logits=100, verified_rows=7)
    assert expected["weights"] == 16 * sum(p.numel() for p in drafter.parameters())
    assert expected["logits"] == 10 * 100  # 5 * 3 * 64 would be more
    assert expected["carried"] == 2 * 5 * 3 * 64
    assert expected["masks"] == 2 * 5 * 4 * (20 + 3 + 4) + 2 * 7 * 27


@pytest.mark.slow
def test_the_accelerator_check_runs(tmp_path, capsys):
    assert (
        gpu_check.main(
            ["--tiny", "--block_size", "4", "--output", str(tmp_path / "g.json"), "--workdir", str(tmp_path)]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "draft step, context 64, 4 carried" in out and "anchors/s" in out
    assert "round, context 64, graphs: ms round" in out and "not compiled" not in out
    assert torch.get_default_dtype() == torch.float32


class TestTrainingStep:
    RUNS = {"seconds": [2.0, 2.0], "losses": [3.0, 2.5], "peak_bytes": 2**20}

    def test_losses_that_differ_are_an_error(self):
        other = {**self.RUNS, "losses": [3.0, 2.4]}
        with pytest.raises(
            RuntimeError, match=r"baseline, parts: losses \[3.0, 2.4\], those of `whole` are \[3.0, 2.5\]"
        ):
            training_step.compare({"whole": [self.RUNS], "parts": [other]}, "baseline")

    def test_quotients_are_paired_by_repetition(self):
        slow = {**self.RUNS, "seconds": [4.0]}
        half = [{**self.RUNS, "seconds": [1.0], "peak_bytes": 2**19}, {**self.RUNS, "seconds": [2.0]}]
        kept = [{**self.RUNS, "losses": [9.0]}, self.RUNS]  # at other anchors
        entries = training_step.compare({"whole": [self.RUNS, slow], "parts": half, "drafts kept": kept}, "carryover")
        assert [entry["over_whole"]["value"] for entry in entries] == [1.0, 0.5, 0.75]
        assert [entry["loss_difference"] for entry in entries] == [0.0, 0.0, None]
        lines = training_step.table(entries, 256).splitlines()
        assert lines[3].startswith("| carryover | parts | 1.50")

    def test_cases_differ_in_nothing_else(self, tmp_path):
        cases = {case: training_step.settings(case, "carryover", tmp_path) for case in training_step.CASES}
        assert cases["parts"]["max_logits"] < cases["whole"]["max_logits"]
        assert set(cases["features kept"]) - set(cases["parts"]) == {"feature_cache_dir"}
        assert set(cases["drafts kept"]) - set(cases["features kept"]) == {"carry_cache_dir"}
