"""Statistics of the benchmark: intervals and summaries, on numbers worked out by hand."""

import numpy as np
import pytest
from bench_helpers import bench_record as record

from hf_carryover import GenerationReport
from hf_carryover.evaluation import benchmark, compare_command, summary
from hf_carryover.evaluation.bootstrap import Estimate, PairedBootstrap, median_estimate, percentiles, ratio


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

    def test_coverage_on_rounds(self):
        """
        τ and its paired change on synthetic rounds: 24 prompts a set, two sets, each prompt with its own acceptance
        rate; 95 % intervals hold the truth in 95 % of 400 experiments, within 4 standard errors (0.011 each).
        """
        generator = np.random.default_rng(1)
        sets = ["a"] * 24 + ["b"] * 24
        level = np.array([0.3] * 24 + [0.6] * 24)
        hits = {"tau": 0, "change": 0}

        def run(rate, tokens):
            """Committed tokens and rounds of texts: each round commits 1 + m of at most 7 proposals."""
            committed = rounds = np.zeros(len(rate))
            while (open_ := committed < tokens).any():
                accepted = np.minimum(generator.geometric(1 - rate) - 1, 7)
                committed, rounds = committed + open_ * (accepted + 1), rounds + open_
            return committed, rounds

        # The truth, from many prompts of each set.
        many = np.repeat([0.3, 0.6], 20_000)
        easy = generator.uniform(-0.15, 0.15, len(many))
        far = {name: run(many + easy + gain, 60) for name, gain in (("control", 0.0), ("carry", 0.05))}
        truth = {
            k: [c[p].sum() / r[p].sum() for p in (slice(20_000), slice(20_000, None))] for k, (c, r) in far.items()
        }
        for experiment in range(400):
            easy = generator.uniform(-0.15, 0.15, 48)
            (c0, r0), (c1, r1) = run(level + easy, 60), run(level + easy + 0.05, 60)
            bootstrap = PairedBootstrap(sets, num_resamples=300, seed=experiment)
            first = np.array(sets) == "a"
            tau = bootstrap(lambda w, c=c1, r=r1, f=first: ratio(w * f, c, r))
            change = bootstrap(
                lambda w, c=(c0, c1), r=(r0, r1), first=first: np.mean(
                    [ratio(w * f, c[1], r[1]) - ratio(w * f, c[0], r[0]) for f in (first, ~first)], axis=0
                )
            )
            hits["tau"] += tau.low <= truth["carry"][0] <= tau.high
            mean = np.mean([x - y for x, y in zip(truth["carry"], truth["control"])])
            hits["change"] += change.low <= mean <= change.high
        for name, count in hits.items():
            assert 0.95 - 0.044 <= count / 400 <= 0.95 + 0.044, name

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
        assert benchmark.failures(rows) == ["qa 2 turn 0, a: position 5, margin 0.9"]

    def test_one_token_answers_count_nothing(self):
        rows = [record("qa", "q0", (1, 0.0), a=([], 0.0)), record("qa", "q1", (3, 20.0), a=([2], 5.0))]
        numbers = summary.summarize(rows, [])["groups"]["qa"]["systems"]["a"]
        assert numbers["tau"]["value"] == 2.0
        assert numbers["speedup"]["value"] == 4.0

    def test_a_peer_has_tau_and_no_more(self):
        """Peers of transformers' own tell only what they streamed."""
        row = record("qa", "q0", (9, 80.0), ours=([4, 4], 40.0))
        lookup = {key: row["systems"]["plain"][key] for key in ("new_tokens", "prefill_ms", "order", "token_ids")}
        row["systems"]["prompt_lookup"] = {
            **lookup,
            "decode_ms": 60.0,
            "wall_ms": 65.0,
            "rounds": 4,
            "committed": [2] * 4,
        }
        numbers = summary.summarize([row], [])["groups"]["qa"]["systems"]
        assert numbers["prompt_lookup"]["tau"]["value"] == 2.0
        assert numbers["prompt_lookup"]["speedup"]["value"] == pytest.approx(80 / 60)
        assert "acceptance" not in numbers["prompt_lookup"]
        assert numbers["ours"]["acceptance"] == [1.0, 1.0, 1.0]

    def test_accepted_shares(self):
        """Whole blocks alone count: not the one the limit shortened, nor the one that EOS cut."""
        report = GenerationReport(proposed=[3, 3, 3, 3, 2], accepted=[0, 3, 3, 1, 2], committed=[1, 4, 4, 1, 3])
        assert summary.accepted_shares(report) == [1 / 3, 0.0, 0.0, 2 / 3]
        assert summary.accepted_shares(GenerationReport()) == []


class TestCompare:
    """`hf-carryover report a.json b.json`, on numbers worked out by hand."""

    def report(self, *rows, **settings):
        base = {"target": "t", "dtype": "float32", "systems": list(rows[0]["systems"])}
        return {
            "settings": {**base, **settings},
            "machine": {"cpu": "a"},
            "versions": {"torch": "1"},
            "commit": "c",
            "prompts": list(rows),
        }

    def test_shared_prompts_are_paired(self):
        before = self.report(
            record("qa", "q0", (9, 80.0), ours=([2] * 4, 60.0)), record("qa", "gone", (9, 80.0), ours=([8], 10.0))
        )
        after = self.report(
            record("qa", "new", (9, 80.0), ours=([8], 10.0)), record("qa", "q0", (9, 40.0), ours=([4] * 2, 20.0))
        )
        result = compare_command.compare(before, after)
        assert result["prompts"] == 1
        ours = result["systems"]["ours"]["qa"]
        assert {key: ours[key]["value"] for key in ours} == pytest.approx(
            {
                "speed": 3.0,
                "tau_before": 2.0,
                "tau_after": 4.0,
                "tau_difference": 2.0,
                "speedup_before": 80 / 60,
                "speedup_after": 2.0,
            }
        )
        assert result["systems"]["plain"]["qa"]["speed"]["value"] == pytest.approx(2.0)

    def test_what_differs_is_said_first(self):
        before = self.report(record("qa", "q0", (9, 80.0), ours=([2] * 4, 60.0)))
        after = self.report(record("qa", "q0", (9, 80.0), ours=([2] * 4, 60.0)), dtype="bfloat16")
        after["commit"] = "d"
        text = compare_command.comparison_text(before, after)
        assert "Differences: settings: dtype float32 → bfloat16; commit c → d." in text
        assert "| qa | 2.00 [2.00, 2.00] | 2.00 [2.00, 2.00] | +0.000 [+0.000, +0.000] |" in text
        assert "Differences: none." in compare_command.comparison_text(before, before)

    def test_other_prompts_are_refused(self):
        before = self.report(record("qa", "q0", (9, 80.0), ours=([2] * 4, 60.0)))
        other = self.report(record("qa", "q1", (9, 80.0), ours=([2] * 4, 60.0)))
        with pytest.raises(ValueError, match="no prompt in common"):
            compare_command.compare(before, other)
        longer = self.report({**record("qa", "q0", (9, 80.0), ours=([2] * 4, 60.0)), "prompt_tokens": 9})
        with pytest.raises(ValueError, match="'q0' of set 'qa' has 7 tokens in one report and 9 in the other"):
            compare_command.compare(before, longer)
