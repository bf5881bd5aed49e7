"""Replaying recorded responses gives the rounds that `generate` takes."""

import itertools

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from tiny_targets import prompt_ids
from training_helpers import make_trainer, random_rows

from hf_carryover.evaluation.replay import Replay, _groups, acceptance_length, replay_together
from hf_carryover.training.verification import FrozenTarget


NEW_TOKENS = 40


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def greedy_rows(target, number=5):
    rows = []
    for seed in range(number):
        prompt = prompt_ids(6 + seed, seed=seed)
        text = target.generate(prompt, max_new_tokens=NEW_TOKENS - 3 * seed, do_sample=False)[0].tolist()
        mask = [0] * prompt.shape[1] + [1] * (len(text) - prompt.shape[1])
        rows.append({"id": f"set-{seed}", "input_ids": text, "response_mask": mask})
    return rows


def half_right_drafter(target, rows, tmp_path, **config):
    """A drafter that has learned these very responses a little, so that some proposals are accepted."""
    drafter = tiny_drafter(target, **config)
    stage = "carryover" if drafter.config.carry else "baseline"
    make_trainer(target, drafter, tmp_path, rows, stage=stage, max_steps=12, learning_rate=5e-3).train()
    return drafter.eval()


@pytest.mark.parametrize(
    "config",
    [
        {"carry": False},
        {"carry": True},
        {"carry": True, "markov_rank": 4},
        {"carry": True, "draft_token_ids": torch.arange(0, 64, 2)},
        {"carry": True, "lookup_ngram_size": 2},
        {"carry": True, "carry_pointer": True},
        {"carry": True, "carry_from": "predictions"},
        {"carry": True, "carry_from": "proposals"},
        {"carry": True, "carry_from": "states_and_predictions"},
    ],
    ids=str,
)
def test_greedy_rounds_are_those_of_generate(target, tmp_path, config):
    rows = greedy_rows(target)
    drafter = half_right_drafter(target, rows, tmp_path, **config)
    replayed = Replay(drafter, target)(rows, batch_size=2)
    assert [response.id for response in replayed] == [row["id"] for row in rows]
    for response, row in zip(replayed, rows):
        length = row["response_mask"].index(1)
        prompt = torch.tensor([row["input_ids"][:length]])
        text = target.generate(
            prompt, max_new_tokens=len(row["input_ids"]) - length, do_sample=False, assistant_model=drafter
        )
        assert text[0].tolist() == row["input_ids"], "lossless, whatever is carried"
        report = drafter.last_report
        # Near the length limit `generate` cuts its proposals, which a replay can't know of.
        cut = NEW_TOKENS - 3 * int(row["id"][-1]) - drafter.config.block_size - 2
        far = sum(1 for done in itertools.accumulate(report.committed) if done <= cut)
        assert far > 5
        assert response.accepted[:far] == report.accepted[:far]
        assert response.committed[:far] == report.committed[:far]
        assert response.carried[:far] == report.carried[:far]
    assert 1.1 < acceptance_length(replayed) < 5, "nothing to compare if all or none are accepted"


def test_batch_size_changes_nothing(target, tmp_path):
    rows = greedy_rows(target)
    drafter = half_right_drafter(target, rows, tmp_path, carry=True)
    alone, together = (Replay(drafter, target)(rows, batch_size=size) for size in (1, 5))
    assert [vars(one) for one in alone] == [vars(one) for one in together]


def test_later_turns_start_without_carry(target, tmp_path):
    (row,) = greedy_rows(target, 1)
    rows = [{**row, "response_mask": [0] * 6 + [1] * 15 + [0] * 5 + [1] * 20}]
    drafter = half_right_drafter(target, rows, tmp_path, carry=True)
    (response,) = Replay(drafter, target)(rows)
    # The first token of each turn is the prefill's.
    assert sum(response.committed) == 14 + 19
    committed, first_of_second = 0, 0
    while committed < 14:
        committed += response.committed[first_of_second]
        first_of_second += 1
    assert committed == 14
    assert response.carried[0] == response.carried[first_of_second] == 0


def test_response_of_one_token_has_no_round(target):
    row = {"id": "a", "input_ids": [5, 6, 7], "response_mask": [0, 0, 1]}
    rows = [row, {**row, "id": "b", "input_ids": [5, 6, 7, 8], "response_mask": [0, 0, 1, 1]}]
    (response,) = Replay(tiny_drafter(target), target)(rows)
    assert (response.id, response.committed, response.rounds) == ("b", [1], 1)


@pytest.mark.parametrize("reduced", [False, True])
def test_draws_follow_speculative_sampling(target, reduced):
    """The proposal's law is `q` and its acceptance that of the algorithm, given committed tokens drawn from `p`."""
    options = {"draft_token_ids": torch.tensor([0, 1, 3])} if reduced else {}
    replay = Replay(tiny_drafter(target, **options), target, temperature=1.0)
    p = torch.tensor([0.5, 0.2, 0.2, 0.1])
    q = torch.tensor([0.2, 0.3, 0.5]) if reduced else torch.tensor([0.1, 0.4, 0.2, 0.3])
    full_q = torch.tensor([0.2, 0.3, 0.0, 0.5]) if reduced else q
    number = 40_000
    committed = torch.multinomial(p, number, replacement=True, generator=torch.Generator().manual_seed(1))
    drawn, passed = replay._draw(
        q.expand(number, -1), p.expand(number, -1), committed, torch.ones(number, dtype=torch.bool)
    )
    # Standard deviations are below 0.0025: four of them.
    assert passed.float().mean().item() == pytest.approx(torch.minimum(p, full_q).sum().item(), abs=0.01)
    shares = torch.bincount(drawn, minlength=4) / number
    assert torch.allclose(shares, full_q, atol=0.01)
    assert torch.equal(drawn[passed], committed[passed])
    assert not (drawn[~passed] == committed[~passed]).any() or not reduced


def test_sampled_acceptance_is_certain_where_the_drafter_is_the_target(target):
    """`q = p` accepts everything, whatever was sampled."""
    replay = Replay(tiny_drafter(target), target, temperature=1.0)
    p = torch.rand(200, 8).softmax(dim=-1)
    committed = torch.multinomial(p, 1).squeeze(1)
    drawn, passed = replay._draw(p, p, committed, torch.ones(200, dtype=torch.bool))
    assert passed.all() and torch.equal(drawn, committed)


def test_same_seed_same_rounds(target, tmp_path):
    rows = random_rows([20, 24])
    drafter = half_right_drafter(target, rows, tmp_path, carry=True)
    runs = [Replay(drafter, target, temperature=1.0, seed=seed)(rows) for seed in (0, 0, 1)]
    assert [vars(one) for one in runs[0]] == [vars(one) for one in runs[1]]
    assert [vars(one) for one in runs[0]] != [vars(one) for one in runs[2]]


def test_negative_temperature_is_refused(target):
    with pytest.raises(ValueError, match=r"`temperature` must be 0 \(greedy\) or positive, got -1"):
        Replay(tiny_drafter(target), target, temperature=-1)


class TestTogether:
    """Several drafters along the same recordings: each as if it were alone."""

    def rows(self):
        return [{**row, "id": f"a-{i}"} for i, row in enumerate(random_rows([22, 30, 26, 18, 35]))]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_equal_to_one_by_one(self, temperature):
        target = tiny_llama()
        drafters = {
            "control": tiny_drafter(target, carry=False),
            "carry": tiny_drafter(target, markov_rank=4),
            "others": tiny_drafter(target, target_layer_ids=[0, 2]),
        }
        together = replay_together({k: Replay(d, target, temperature) for k, d in drafters.items()}, self.rows(), 2)
        for name, drafter in drafters.items():
            assert together[name] == Replay(drafter, target, temperature)(self.rows(), 2)

    def test_the_target_reads_once(self, monkeypatch):
        target = tiny_llama()
        passes = []
        record = FrozenTarget.record
        monkeypatch.setattr(FrozenTarget, "record", lambda *a, **k: passes.append(1) or record(*a, **k))
        replays = {str(i): Replay(tiny_drafter(target, seed=i), target) for i in range(3)}
        replay_together(replays, self.rows(), batch_size=5)
        assert len(passes) == 1

    def test_groups(self):
        assert _groups([5, 9, 9, 2, 7], 2, 1000) == [[1, 2], [4, 0], [3]]
        assert _groups([5, 9, 9, 2, 7], 5, 18) == [[1, 2], [4, 0], [3]]
        assert _groups([50, 3, 3], 5, 10) == [[0], [1, 2]]  # one alone may be longer
        assert _groups([], 5, 10) == []

    def test_other_targets_are_refused(self):
        one, two = tiny_llama(), tiny_llama()
        replays = {"a": Replay(tiny_drafter(one), one), "b": Replay(tiny_drafter(two), two)}
        with pytest.raises(ValueError, match="of different targets can't read recordings together"):
            replay_together(replays, self.rows())
