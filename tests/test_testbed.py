"""The language with a dial, and the proof on it that training and generation agree and carry pays for its reason."""

import json

import numpy as np
import pytest
import torch

from hf_carryover.testbed.command import TestbedArguments, gain, main, run_seed, table, tau
from hf_carryover.testbed.experiment import Sizes, new_drafter, train_drafter, train_target, with_carry
from hf_carryover.testbed.language import Language


SMALL = Language(num_states=5, num_symbols=3, num_choices=2, choice_every=3, length=7, seed=4)


def parts(language, texts):
    """Symbols, key and outputs of texts, numbered from 0."""
    symbols = texts[:, 1 : 1 + language.length] - 1 - 2 * language.num_states
    key = texts[:, 1 + language.length] - 1
    return symbols, key, texts[:, language.prompt_length :] - 1 - language.num_states


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0, None])
def test_outputs_follow_the_table(rho):
    texts = SMALL.texts(50, rho, seed=1)
    symbols, key, outputs = parts(SMALL, texts)
    for row in range(50):
        before = key[row]
        for i in range(SMALL.length):
            free = symbols[row, i] < SMALL.num_symbols
            if i % SMALL.choice_every == 0:
                assert 0 <= outputs[row, i] < SMALL.num_choices
            else:
                assert outputs[row, i] == SMALL.table[key[row] if free else before, symbols[row, i]]
            before = outputs[row, i]


@pytest.mark.parametrize("rho", [0.0, 0.25, 1.0])
def test_dial_is_the_share_of_free_symbols(rho):
    language = Language()
    symbols, _, _ = parts(language, language.texts(400, rho, seed=2))
    assert (symbols < language.num_symbols).mean() == pytest.approx(rho, abs=0.02)


def test_tokens_fill_the_vocabulary():
    texts = SMALL.texts(300, 0.5, seed=0)
    assert texts.shape == (300, 2 * SMALL.length + 2)
    assert set(np.unique(texts)) == set(range(SMALL.vocab_size))


def test_recordings_mark_the_output():
    recordings = SMALL.recordings(3, 0.5, seed=1)
    assert recordings["input_ids"] == SMALL.texts(3, 0.5, seed=1).tolist()
    assert recordings[0]["response_mask"] == [0] * 9 + [1] * 7


def test_seeds_give_other_texts_and_tables():
    one, two, other = (Language(seed=seed).texts(4, 0.5, seed=s) for seed, s in ((0, 1), (0, 2), (1, 1)))
    assert not np.array_equal(one, two) and not np.array_equal(one, other)
    assert np.array_equal(one, Language().texts(4, 0.5, seed=1))


def test_wrong_dial_is_refused():
    with pytest.raises(ValueError, match=r"`rho` must lie in 0 ... 1, got 1.5"):
        SMALL.texts(1, 1.5, seed=0)


def test_carry_is_all_that_differs():
    sizes = Sizes(target_hidden=32, target_layers=2, target_steps=1, drafter_hidden=16)
    target, _ = train_target(SMALL, sizes)
    baseline = new_drafter(target, sizes)
    control, carry = with_carry(baseline, None), with_carry(baseline, "states")
    assert (control.config.carry, carry.config.carry) == (False, True)
    extra = set(carry.state_dict()) - set(control.state_dict())
    assert extra == {"carry_embedding"}
    assert all(torch.equal(value, carry.state_dict()[name]) for name, value in baseline.state_dict().items())


def counts(committed, rounds):
    return {"committed": committed, "rounds": rounds}


def made_up(control, carry):
    return {"systems": {"control": {"1.0": control}, "states": {"1.0": carry}}, "probe": {"1.0": 0.5}}


def test_gain_is_that_of_micro_averages():
    run_ = made_up(counts([10, 20], [10, 10]), counts([20, 20], [10, 8]))
    value, low, high = gain([run_], 1.0, "states")
    assert value == pytest.approx((40 / 18) / (30 / 20) - 1)
    assert low < value < high
    same = made_up(counts([10, 20], [10, 10]), counts([10, 20], [10, 10]))
    assert gain([same, same], 1.0, "states") == (0.0, 0.0, 0.0)
    assert tau(counts([10, 20], [10, 10])) == 1.5


def test_table_has_a_row_for_each_position():
    runs = {"0": made_up(counts([10, 20], [10, 10]), counts([20, 20], [10, 8]))}
    text = table({"rhos": [1.0], "runs": runs})
    assert text.splitlines()[0] == "| ρ | τ control | states: gain | linear probe |"
    assert text.splitlines()[2].startswith("| 1 | 1.50 | +48.1% [")


TINY_RUN = [
    "--target_hidden", "32", "--target_layers", "2", "--target_steps", "2", "--baseline_steps", "2", "--carry_steps",
    "2", "--texts", "4", "--rhos", "1.0", "--texts_per_step", "4", "--texts_per_drafter_step", "4",
]  # fmt: skip


def test_command_resumes_and_refuses_other_settings(tmp_path, capsys):
    output = tmp_path / "report.json"
    assert main([*TINY_RUN, "--output", str(output), "--seeds", "0"]) == 0
    first = json.loads(output.read_text())["runs"]["0"]
    assert main([*TINY_RUN, "--output", str(output), "--seeds", "0", "1"]) == 0
    runs = json.loads(output.read_text())["runs"]
    assert runs["0"] == first and set(runs) == {"0", "1"}
    assert "| 1 |" in capsys.readouterr().out
    assert main([*TINY_RUN, "--output", str(output), "--texts", "5"]) == 2
    assert "holds a run with other settings" in capsys.readouterr().err


def test_unknown_source_is_refused(capsys):
    assert main(["--carry_from", "thoughts"]) == 2
    assert "--carry_from must be among states, predictions" in capsys.readouterr().err
    assert TestbedArguments().sizes() == Sizes()


@pytest.mark.slow
def test_carry_pays_where_rejected_rows_stay_valid():
    """One point of the dial's curve: a large gain where all of them do, next to none where none does."""
    run_ = run_seed(0, Sizes(), [0.0, 1.0], ["states"], texts=128)
    assert run_["target_accuracy"] > 0.99
    assert run_["probe"]["1.0"] > 0.95 and run_["probe"]["0.0"] < 0.3
    value, low, _ = gain([run_], 1.0, "states")
    assert low > 0 and value > 0.2
    assert gain([run_], 0.0, "states")[0] < value / 4


@pytest.mark.slow
def test_generation_takes_the_rounds_that_were_replayed():
    """Acceptance in `generate` is that of the replay: what was trained for is what is used."""
    from hf_carryover.testbed.experiment import arrays, measure

    language, sizes = Language(length=16), Sizes(target_steps=250, baseline_steps=60, carry_steps=150)
    target, _ = train_target(language, sizes)
    baseline = train_drafter(new_drafter(target, sizes), target, language, sizes, "baseline")
    drafter = train_drafter(with_carry(baseline, "states"), target, language, sizes, "carryover")
    committed, rounds = arrays(measure(drafter, target, language, 1.0, 128))
    torch.manual_seed(0)
    generated = np.zeros(2)
    for text in language.texts(48, 1.0, seed=9):
        prompt = torch.from_numpy(text[: language.prompt_length]).unsqueeze(0)
        target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=language.length, do_sample=True, top_k=0,
            assistant_model=drafter, pad_token_id=0,
        )  # fmt: skip
        generated += [sum(drafter.last_report.committed), drafter.last_report.rounds]
    assert generated[0] / generated[1] == pytest.approx(committed.sum() / rounds.sum(), rel=0.08)
    assert committed.sum() / rounds.sum() > 1.5
