"""The measurement of a draft step against transformers' own generator."""

import copy
import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1]))  # `bench` is not part of the installed package

from bench import draft_step


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
        for peer in set(draft_step.PEERS) & set(systems):
            assert draft_step.same_proposals(target, systems, prompt, 5, peer) == 1.0
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
            least = -1 if name == "z-lab" else 0  # whose loop makes no generator
            assert all(least < a <= b for a, b in zip(recorder.inside, recorder.outside, strict=True))
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
        peers = [name for name in systems if name in draft_step.PEERS]
        assert set(case["ratios"]) == {f"{a} / {b}" for a in ("ours", "ours+carry") for b in peers} | {
            "ours+carry / ours"
        }
        theirs, ours = (case["per_repetition"][name]["outside"] for name in ("transformers", "ours"))
        ratios = sorted(x / y for x, y in zip(ours, theirs, strict=True))
        assert case["ratios"]["ours / transformers"]["outside"]["value"] == pytest.approx(sum(ratios) / 2)
        row = draft_step.table(
            [{"dtype": "float32", "block_size": 4, "context": 12, "same_proposals": {"transformers": 1.0}, **case}]
        )
        assert row.splitlines()[2].startswith("| float32 | 4 | 12 | ")

    def test_profile_names_operators(self, small):
        target, systems, prompt = small
        text = draft_step.profile_table(target, {"ours": systems["ours"]}, prompt, rounds=1)
        assert text.startswith("ours: ")
        assert "aten::mm" in text
