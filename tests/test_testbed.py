"""The language with a dial, and the proof on it that training and generation agree and carry pays for its reason."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_carryover import CarryoverDrafter
from hf_carryover.demo import encode
from hf_carryover.evaluation.prompts import load_items
from hf_carryover.evaluation.replay import Replay, acceptance_length
from hf_carryover.testbed.command import TestbedArguments, gain, main, measure_systems, table, tau, train_systems
from hf_carryover.testbed.experiment import Sizes, new_drafter, probe, train_target, with_carry
from hf_carryover.testbed.export import PROMPT_SEED
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


def test_a_saved_test_bed_can_be_generated_with(tmp_path, capsys):
    """Target, tokenizer, drafters and prompts as folders, equal to what was measured."""
    output = tmp_path / "report.json"
    assert main([*TINY_RUN, "--output", str(output), "--seeds", "3", "--save_dir", str(tmp_path / "kept")]) == 0
    folder = tmp_path / "kept" / "seed-3"
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    language = Language(seed=3)
    assert len(tokenizer) == language.vocab_size == target.config.vocab_size
    items = load_items([str(folder / "prompts")])
    assert {item.set for item in items} == {"rho-100"}
    texts = language.texts(64, 1.0, seed=PROMPT_SEED)[:, : language.prompt_length]
    encoded = [encode(tokenizer, item.segments[0], item.tools, "cpu")["input_ids"][0].tolist() for item in items]
    assert encoded == texts.tolist()
    for name, carry in (("baseline", False), ("control", False), ("states", True)):
        drafter = CarryoverDrafter.from_pretrained(folder / name)
        assert drafter.config.carry is carry
        ids = torch.tensor(encoded[:1])
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), target.generate(ids, **options))
    # A run that is in the report is not repeated, and leaves nothing.
    assert main([*TINY_RUN, "--output", str(output), "--seeds", "3", "--save_dir", str(tmp_path / "again")]) == 0
    assert not (tmp_path / "again").exists()


def test_unknown_source_is_refused(capsys):
    assert main(["--carry_from", "thoughts"]) == 2
    assert "--carry_from must be among states, predictions" in capsys.readouterr().err
    assert TestbedArguments().sizes() == Sizes()


# One point of the dial's curve


@pytest.fixture(scope="module")
def trained():
    """A shorter language, its target, and baseline, control and carryover drafters."""
    language = Language(length=16)
    sizes = Sizes(target_steps=400, baseline_steps=100, carry_steps=300)
    target, accuracy = train_target(language, sizes)
    return language, target, accuracy, train_systems(language, target, sizes, ["states"])


@pytest.mark.slow
def test_carry_pays_where_rejected_rows_stay_valid(trained):
    """A large gain where all rejected rows stay valid, next to none where they do by chance alone."""
    language, target, accuracy, systems = trained
    assert accuracy > 0.98
    assert probe(systems["states"], target, language, 1.0) > 0.95
    assert probe(systems["states"], target, language, 0.0) < 0.35
    report = {"systems": measure_systems(language, target, systems, [0.0, 1.0], texts=128)}
    value, low, _ = gain([report], 1.0, "states")
    assert value > 0.2 and low > 0.1
    assert gain([report], 0.0, "states")[0] < value / 4


@pytest.mark.slow
def test_generation_takes_the_rounds_that_were_replayed(trained):
    """What was trained for is what `generate` does: the same acceptance length, with the target sampling."""
    language, target, _, systems = trained
    drafter = systems["states"]
    prompts = torch.from_numpy(language.texts(96, 1.0, seed=9)[:, : language.prompt_length])
    options = {"max_new_tokens": language.length, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    # The target's own samples: it does not know the language perfectly.
    texts = target.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    mask = [0] * language.prompt_length + [1] * language.length
    rows = [{"id": str(i), "input_ids": text.tolist(), "response_mask": mask} for i, text in enumerate(texts)]
    replayed, generated = Replay(drafter, target)(rows), {"committed": [], "rounds": []}
    for prompt in prompts:
        prompt = prompt.unsqueeze(0)
        target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, **options)
        generated["committed"].append(sum(drafter.last_report.committed))
        generated["rounds"].append(drafter.last_report.rounds)
    # The standard error of either is about 2 %.
    assert tau(generated) == pytest.approx(acceptance_length(replayed), rel=0.08)
    assert tau(generated) > 1.5
