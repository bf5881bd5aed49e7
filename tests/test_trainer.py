"""
[`CarryoverTrainer`]: what must not change the result (accumulation, processes, checkpointing, resumption), precision,
saving, evaluation, bad data, and contradictions.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from safetensors.torch import load_file
from tiny_targets import counting_target
from training_helpers import losses_of, make_arguments, make_batch, make_trainer, random_rows, weights_of
from transformers import TrainingArguments

from hf_carryover import CarryoverDrafter
from hf_carryover.training.trainer import CarryoverTrainer


LENGTHS = [14, 22, 9, 31, 17, 12, 26, 11]


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def make_drafter(target, **kwargs):
    return tiny_drafter(target, **{"carry": True, "markov_rank": 4, "block_size": 3, **kwargs})


def train(target, output_dir, drafter=None, rows=None, resume=None, **kwargs):
    """Train a drafter; returns the trainer."""
    drafter = make_drafter(target) if drafter is None else drafter
    values = {"per_device_train_batch_size": 2, "anchors_per_response": 6, "max_steps": 4}
    trainer = make_trainer(target, drafter, output_dir, rows or random_rows(LENGTHS), **{**values, **kwargs})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


# What must not change the result


@pytest.mark.compat
def test_accumulation_equals_the_full_batch(target, tmp_path):
    """Unequal lengths, so a mean of means would differ. Float32 sums in another order: 1e-5."""
    whole = train(target, tmp_path, per_device_train_batch_size=4, optim="sgd", learning_rate=0.05)
    parts = train(
        target,
        tmp_path,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        optim="sgd",
        learning_rate=0.05,
    )
    assert losses_of(parts) == pytest.approx(losses_of(whole), rel=1e-5)
    start, one, other = weights_of(make_drafter(target)), weights_of(whole.drafter), weights_of(parts.drafter)
    for name, weight in one.items():
        assert torch.allclose(weight, other[name], atol=1e-5), name
        assert not torch.equal(weight, start[name]), name


def test_loss_is_divided_by_the_weights_of_the_whole_step(target, tmp_path):
    """The logged loss is the sum of the weighted losses over the sampled anchors' label weights."""
    rows = random_rows(LENGTHS[:3])
    trainer = make_trainer(target, make_drafter(target), tmp_path, rows, max_steps=1)
    batch = make_batch(trainer)
    with torch.no_grad():
        losses, seen = trainer.block_losses(trainer.drafter, batch)
    weight = 0.0
    gamma = trainer.args.position_gamma(3)
    for row in rows:
        for a in range(3, len(row["input_ids"]) - 1):
            weight += sum(math.exp(-k / gamma) for k in range(min(3, len(row["input_ids"]) - 1 - a)))
    trainer.train()
    assert losses_of(trainer)[0] == pytest.approx(float(losses.sum()) / weight, rel=1e-5)
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logged["block_loss"] == pytest.approx(float(losses.sum() / seen["weights"].sum()), rel=1e-5)
    assert logged["carried"] == pytest.approx(3 - logged["accepted_first"], abs=2e-4)


CHECKPOINTING = "activation_checkpointing"
if not hasattr(TrainingArguments, CHECKPOINTING):
    CHECKPOINTING = "gradient_checkpointing"  # its name in older versions


@pytest.mark.compat
def test_gradient_checkpointing_gives_the_same_gradients(target, tmp_path):
    """The gradient of the context too, which reaches the layers through an object."""
    rows, gradients = random_rows(LENGTHS[:3]), []
    for checkpointing in (False, True):
        drafter = make_drafter(target)
        trainer = make_trainer(target, drafter, tmp_path, rows, **{CHECKPOINTING: checkpointing})
        if checkpointing:
            kwargs = getattr(trainer.args, f"{CHECKPOINTING}_kwargs")
            assert kwargs == {"use_reentrant": False}
            getattr(drafter, f"{CHECKPOINTING}_enable")(kwargs)
            assert drafter.layers[0].gradient_checkpointing
        drafter.train()
        trainer.compute_loss(drafter, make_batch(trainer)).backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-7), name
        assert gradient.any(), name
    trained = train(target, tmp_path, **{CHECKPOINTING: True})
    plain = train(target, tmp_path)
    assert losses_of(trained) == pytest.approx(losses_of(plain), rel=1e-6)


@pytest.mark.compat
@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"draft_temperature": 0.8, "bf16": True, "gradient_accumulation_steps": 2}, id="sampled-bf16"),
        pytest.param({"stage": "baseline", "fc_learning_rate_scale": 0.1}, id="baseline"),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(target, tmp_path, kwargs):
    """Bit for bit: losses, and final weights, across an epoch's end. Evaluations in between change nothing."""
    made = {"carry": kwargs.get("stage") != "baseline"}
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **kwargs}
    straight = train(target, tmp_path / "a", make_drafter(target, **made), **options)
    checkpoint = tmp_path / "a" / "checkpoint-3"
    torch.manual_seed(123)  # whatever ran before
    drafter = make_drafter(target, seed=5, **made)
    values = {"per_device_train_batch_size": 2, "anchors_per_response": 6, **options}
    resumed = make_trainer(
        target, drafter, tmp_path / "b", random_rows(LENGTHS), eval_dataset=random_rows([15]), eval_strategy="steps",
        eval_steps=1, **values,
    )  # fmt: skip
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses_of(resumed)[-3:] == losses_of(straight)[-3:]
    for name, weight in weights_of(straight.drafter).items():
        assert torch.equal(weight, weights_of(drafter)[name]), name


@pytest.mark.compat
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_a_finished_run_is_resumed_without_a_step(target, tmp_path, steps):
    """Two steps an epoch: done within one or behind one, with a rate that would show a step too many."""
    options = {"per_device_train_batch_size": 2, "max_steps": steps, "lr_scheduler_type": "constant"}

    def make(**kwargs):
        rows, drafter = random_rows([14, 20, 9, 17]), tiny_drafter(target)
        return make_trainer(target, drafter, tmp_path, rows, **{**options, "save_strategy": "steps", **kwargs})

    whole = make(save_steps=1)
    whole.train()
    for more in ({}, {"max_steps": 1}):
        again = make(**more)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}"))
        assert again.state.global_step == steps
        assert losses_of(again) == losses_of(whole)
        before, after = weights_of(whole.drafter), weights_of(again.drafter)
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("kind", "tokens"), [("no", 0), ("non_padding", 14 + 20 + 9 + 17), ("all", 2 * 20 + 2 * 17)])
def test_tokens_seen_are_those_of_the_recordings(target, tmp_path, kind, tokens):
    """In order, two at a time, padded to the longer one."""
    trainer = make_trainer(
        target, tiny_drafter(target), tmp_path, random_rows([14, 20, 9, 17]), per_device_train_batch_size=2,
        max_steps=2, train_sampling_strategy="sequential", include_num_input_tokens_seen=kind,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.num_input_tokens_seen == tokens


def test_evaluation_changes_no_training(target, tmp_path):
    """Not the random state either: sampled first drafts have draws of their own."""
    plain = train(target, tmp_path, draft_temperature=1.0)
    rows = random_rows(LENGTHS)
    values = {"per_device_train_batch_size": 2, "anchors_per_response": 6, "max_steps": 4, "draft_temperature": 1.0}
    trainer = make_trainer(
        target, make_drafter(target), tmp_path, rows, eval_dataset=rows, eval_strategy="steps", eval_steps=1, **values
    )
    trainer.train()
    assert losses_of(trainer) == losses_of(plain)
    assert trainer.drafter.training
    first = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(set(first)) == len(first) == 4


def test_sampled_proposals_follow_the_distribution(target, tmp_path):
    """The share of each token over 20000 draws, within 5 standard deviations; draws decide, nothing else."""
    trainer = make_trainer(target, make_drafter(target, markov_rank=0), tmp_path, random_rows([9]))
    logits = torch.tensor([2.0, 0.0, 1.0, -50.0]).expand(20000, 1, 4)
    draws = torch.rand((20000, 1), generator=torch.Generator().manual_seed(0))
    anchors = torch.zeros(20000, dtype=torch.long)
    tokens = trainer.roll_out(logits, anchors, 0.5, draws)
    chances = torch.tensor([2.0, 0.0, 1.0, -50.0]).div(0.5).softmax(dim=0)
    counts = torch.bincount(tokens.flatten(), minlength=4) / 20000
    assert bool(((counts - chances).abs() <= 5 * (chances * (1 - chances) / 20000).sqrt() + 1e-9).all())
    assert torch.equal(tokens, trainer.roll_out(logits, anchors, 0.5, draws))
    edges = trainer.roll_out(logits[:2], anchors[:2], 0.5, torch.tensor([[0.0], [1.0 - 2**-24]]))
    assert edges.flatten().tolist() == [0, 2]


# Precision


def test_weights_and_optimizer_are_float32(target, tmp_path):
    """R32: from a bfloat16 drafter, norms move in 20 steps and again after a resumption, equal to 40 straight ones."""
    options = {"learning_rate": 6e-4, "bf16": True, "save_strategy": "steps", "save_steps": 20}

    def norms(drafter):
        return torch.cat([p.detach().flatten() for n, p in drafter.named_parameters() if "norm" in n])

    def fresh():
        drafter = make_drafter(target)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
        return drafter.to(torch.bfloat16)

    straight = train(target, tmp_path / "a", fresh(), max_steps=40, lr_scheduler_type="constant", **options)
    half = CarryoverDrafter.from_pretrained(tmp_path / "a" / "checkpoint-20", dtype="auto")
    assert half.dtype == torch.float32
    assert float((norms(half) != 1.0).float().mean()) > 0.9
    resumed = train(
        target, tmp_path / "b", fresh(), resume=str(tmp_path / "a" / "checkpoint-20"), max_steps=40,
        lr_scheduler_type="constant", **options,
    )  # fmt: skip
    for trainer in (straight, resumed):
        assert all(parameter.dtype == torch.float32 for parameter in trainer.drafter.parameters())
        states = trainer.optimizer.state.values()
        assert {v.dtype for state in states for v in state.values() if torch.is_tensor(v)} == {torch.float32}
    assert float((norms(resumed.drafter) != norms(half)).float().mean()) > 0.9
    for name, weight in weights_of(straight.drafter).items():
        assert torch.allclose(weight, weights_of(resumed.drafter)[name], atol=1e-5), name


def test_autocast_runs_in_low_precision_without_touching_the_head(target, tmp_path):
    """Close to float32, and not equal to it; without autocast a bfloat16 target's head is used in float32."""
    rows = random_rows(LENGTHS[:4])
    exact = train(target, tmp_path, rows=rows, max_steps=2)
    low = train(target, tmp_path, rows=rows, max_steps=2, bf16=True)
    assert losses_of(low) == pytest.approx(losses_of(exact), rel=3e-2)
    assert losses_of(low) != losses_of(exact)
    half = tiny_llama().to(torch.bfloat16)
    trainer = make_trainer(half, make_drafter(half), tmp_path, rows)
    assert trainer.head.weight.dtype == torch.float32
    assert half.lm_head.weight.dtype == torch.bfloat16
    _, seen = trainer.block_losses(trainer.drafter, make_batch(trainer))
    assert seen["hidden_states"].dtype == torch.float32
    assert trainer.drafter.logits(seen["hidden_states"], trainer.head.weight).dtype == torch.float32


# Labels


def test_overfitted_drafter_is_accepted_whole(tmp_path):
    """R29: labels are not shifted. τ = B + 1 in `generate`, after the baseline and after the carryover stage."""
    target = counting_target()
    prompt = torch.tensor([[7, 8, 9]])
    new_tokens = 1 + 4 * 8
    plain = target.generate(prompt, max_new_tokens=new_tokens, do_sample=False)
    assert plain[0].tolist() == [7 + i for i in range(3 + new_tokens)]
    rows = [
        {"id": str(i), "input_ids": [(i + j) % 64 for j in range(40)], "response_mask": [0] * 2 + [1] * 38}
        for i in range(0, 64, 2)
    ]
    drafter = tiny_drafter(target, carry=False, block_size=3, num_hidden_layers=1, std=0.1)
    options = {
        "per_device_train_batch_size": 8,
        "anchors_per_response": 8,
        "learning_rate": 1e-2,
        "logging_steps": 50,
    }
    make_trainer(target, drafter, tmp_path / "a", rows, stage="baseline", max_steps=240, **options).train()
    drafter.eval()
    assert torch.equal(target.generate(prompt, assistant_model=drafter, max_new_tokens=new_tokens), plain)
    assert drafter.last_report.tau == 4.0
    assert drafter.last_report.accepted == [3] * 8

    drafter.save_pretrained(tmp_path / "drafter")
    carrying = CarryoverDrafter.from_pretrained(tmp_path / "drafter", carry=True)
    with torch.no_grad():  # not accepted any more: there is something to carry and to learn
        carrying.norm.weight.mul_(torch.linspace(-1.0, 1.0, 32))
    options["learning_rate"] = 2e-2
    trainer = make_trainer(target, carrying, tmp_path / "b", rows, max_steps=200, **options)
    trainer.train()
    assert trainer.state.log_history[0]["carried"] > 0.5
    carrying.eval()
    assert torch.equal(target.generate(prompt, assistant_model=carrying, max_new_tokens=new_tokens), plain)
    assert carrying.last_report.tau == 4.0
    metrics = trainer.evaluate(rows)
    assert metrics["eval_acceptance_1"] == metrics["eval_acceptance_3"] == 1.0


# Bad data


def nan_target():
    """A target whose states are not finite from token 63 on."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = float("nan")
    return model


def with_token(row, place, token):
    return {**row, "input_ids": [*row["input_ids"][:place], token, *row["input_ids"][place + 1 :]]}


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({}, id="carryover"),
        pytest.param({"stage": "baseline", "fc_learning_rate_scale": 0.1}, id="baseline"),
        pytest.param({"alpha_tv": 0.9, "alpha_ce": 0.1}, id="carryover-tv"),
        pytest.param({"stage": "baseline", "alpha_tv": 0.9, "alpha_ce": 0.1}, id="baseline-tv"),
    ],
)
def test_non_finite_recordings_are_skipped_and_counted(tmp_path, kwargs):
    """The gradient is that of the healthy recordings, and it is finite; with none left it is zero."""
    rows = random_rows(LENGTHS[:3])
    broken = [rows[0], with_token(rows[1], 9, 63), rows[2]]
    gradients = []
    for made, bad in ((tiny_llama(), False), (nan_target(), True)):
        drafter = make_drafter(made, carry=kwargs.get("stage") != "baseline")
        trainer = make_trainer(made, drafter, tmp_path, broken if bad else rows, **kwargs)
        batch = make_batch(trainer)
        keep = batch["sequence_index"] != 1
        if not bad:
            batch["sequence_index"] = batch["sequence_index"][keep]
            batch["anchor_positions"] = batch["anchor_positions"][keep]
        losses, _ = trainer.block_losses(drafter, batch)
        losses.sum().backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
        assert trainer.skipped_sequences == int(bad)
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=2e-5), name

    drafter.zero_grad()
    trainer = make_trainer(made, drafter, tmp_path, [broken[1]], **kwargs)
    losses, _ = trainer.block_losses(drafter, make_batch(trainer))
    losses.sum().backward()
    assert not losses.detach().any()
    assert all(not parameter.grad.any() for parameter in drafter.parameters())  # any() of NaN is true


def test_non_finite_branches_are_skipped_and_counted(tmp_path):
    """A proposal may be a token the target can't take: its block does not count, the others do."""
    target = nan_target()
    drafter = make_drafter(target, markov_rank=0)
    trainer = make_trainer(target, drafter, tmp_path, random_rows(LENGTHS[:3]), max_steps=1)
    roll_out = trainer.roll_out

    def with_bad_token(*args, **kwargs):
        proposals = roll_out(*args, **kwargs)
        proposals[::4, 0] = 63
        return proposals

    trainer.roll_out = with_bad_token
    losses, seen = trainer.block_losses(drafter, make_batch(trainer))
    counted = seen["blocks"].counted
    assert trainer.skipped_blocks == int((~counted).sum()) > 0
    assert not losses[~counted].any() and bool((losses[counted].sum(dim=1) > 0).all())
    losses.sum().backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in drafter.parameters())
    trainer.train()
    assert trainer.state.log_history[0]["skipped"] == trainer.skipped_blocks


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_answers(attention, dtype, tmp_path):
    """R31: answers of 0, 1, 2 and 40 tokens, block 8: the loss is that of the single recordings together."""
    target = tiny_llama(attn_implementation=attention).to(dtype)
    rows = random_rows([4, 5, 6, 44])
    losses = []
    for part in (rows, rows[1:2], rows[2:3], rows[3:]):
        drafter = make_drafter(target, block_size=8)
        trainer = make_trainer(target, drafter, tmp_path, part)
        assert len(trainer.train_dataset) == len([row for row in part if len(row["input_ids"]) > 4])
        loss = trainer.block_losses(drafter, make_batch(trainer))[0]
        loss.sum().backward()
        assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in drafter.parameters())
        losses.append(float(loss.detach().sum()))
    assert losses[0] == pytest.approx(sum(losses[1:]), rel=1e-5 if dtype == torch.float32 else 2e-2)
    assert losses[1] == 0.0 and losses[3] > 0.0


@pytest.mark.parametrize("kwargs", [{}, {"stage": "baseline"}, {"draft_temperature": 1.0}])
def test_batch_without_an_anchor(target, tmp_path, kwargs):
    """R31: loss 0 with a graph, gradients 0, the step counted, no weight moved."""
    drafter = make_drafter(target, carry=kwargs.get("stage") != "baseline")
    trainer = make_trainer(target, drafter, tmp_path, random_rows([9, 12]), max_steps=1, weight_decay=0.0, **kwargs)
    batch = make_batch(trainer)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    trainer.add_anchors(batch, step=1)
    loss = trainer.compute_loss(drafter, batch, num_items_in_batch=torch.zeros(()))
    loss.backward()
    assert loss.item() == 0.0
    assert all(not parameter.grad.any() for parameter in drafter.parameters())

    before = weights_of(drafter)
    collator = trainer.data_collator
    trainer.data_collator = lambda rows: {**collator(rows), "response_mask": torch.zeros((len(rows), 12))}
    trainer.train()
    assert trainer.state.global_step == 1 and losses_of(trainer) == [0.0]
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(drafter).items())


def test_next_turn_is_no_label(target, tmp_path):
    """A shifted anchor that would lie in the template or the next turn is dropped; blocks end with their turn."""
    ids = random_rows([16])[0]["input_ids"]
    rows = [{"id": "0", "input_ids": ids, "response_mask": [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1]}]
    trainer = make_trainer(target, make_drafter(target), tmp_path, rows)
    trainer.roll_out = lambda logits, anchors, *rest: torch.stack(
        [torch.tensor([ids[min(a + k, 15)] for k in (1, 2, 3)]) for a in (1, 2, 3, 6, 7, 8, 9, 10, 14)]
    )
    _, seen = trainer.block_losses(trainer.drafter, make_batch(trainer))
    # All proposals are right, so m is 3 or ends with the turn: only the anchor 6 has tokens left behind its block.
    assert seen["blocks"].positions.tolist() == [10]
    assert seen["exist"].tolist() == [[True, False, False]]
    assert seen["tokens"].tolist() == [[ids[11], 0, 0]]


def test_recordings_without_anchors_are_dropped_or_refused(target, tmp_path, caplog):
    """A response mask on the first token alone leaves nothing to predict it from."""
    rows = random_rows([9, 12])
    no_anchor = {"id": "x", "input_ids": [5, 6, 7], "response_mask": [1, 0, 0]}
    with caplog.at_level("WARNING"):
        trainer = make_trainer(target, make_drafter(target), tmp_path, [no_anchor, *rows])
    assert "train_dataset: dropped 1 of 3 recordings without an anchor." in caplog.text
    assert trainer.train_dataset["example_index"][:] == [0, 1]
    with pytest.raises(ValueError, match="train_dataset: none of 1 recordings has an anchor"):
        make_trainer(target, make_drafter(target), tmp_path, [no_anchor])
    with pytest.raises(ValueError, match="All 2 recordings have an empty response mask"):
        make_trainer(
            target, make_drafter(target), tmp_path, [{**r, "response_mask": [0] * len(r["input_ids"])} for r in rows]
        )


def test_wrong_vocabulary_is_refused(target, tmp_path):
    rows = random_rows([9])
    rows[0]["input_ids"][5] = 64
    with pytest.raises(ValueError, match="64"):
        make_trainer(target, make_drafter(target), tmp_path, rows)


# Saving


@pytest.mark.compat
def test_checkpoints_hold_the_drafter_alone(target, tmp_path):
    """R36: reloading restores every part, the draft vocabulary too, and no tensor of the target is in the file."""
    token_ids = torch.arange(1, 64, 2)
    drafter = make_drafter(target, draft_token_ids=token_ids)
    trainer = train(target, tmp_path, drafter, max_steps=1)
    trainer.save_model(str(tmp_path / "saved"))
    file = tmp_path / "saved" / "model.safetensors"
    names = set(load_file(file))
    assert names == {*dict(drafter.named_parameters()), "d2t", "t2d"}
    size = sum(p.numel() * p.element_size() for p in [*drafter.parameters(), drafter.d2t, drafter.t2d])
    assert size < file.stat().st_size < size + 10_000
    again = CarryoverDrafter.from_pretrained(tmp_path / "saved")
    assert again.draft_token_ids().tolist() == token_ids.tolist()
    for name, weight in weights_of(drafter).items():
        assert torch.equal(weight, weights_of(again)[name]), name
    batch = make_batch(trainer)
    with torch.no_grad():
        ours = trainer.block_losses(drafter, batch)[0]
        other = make_trainer(target, again, tmp_path, random_rows(LENGTHS), anchors_per_response=6)
        assert torch.equal(other.block_losses(again, make_batch(other))[0], ours)


def test_best_checkpoint_is_loaded_at_the_end(target, tmp_path):
    """R36: `load_best_model_at_end`, with a learning rate that makes every further step worse; the target stays."""
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    rows = random_rows(LENGTHS)
    trainer = make_trainer(
        target, make_drafter(target), tmp_path, rows, eval_dataset=rows, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, max_steps=3, learning_rate=0.5,
        lr_scheduler_type="constant", warmup_steps=0, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = min(losses, key=losses.get)
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    saved = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    for name, weight in weights_of(trainer.drafter).items():
        assert torch.equal(weight, saved[name]), name
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-6)
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_checkpoint_of_another_drafter_is_refused(target, tmp_path):
    """R18 among them: instead of a run that goes on with half of the weights, or with the wrong tokens."""
    train(target, tmp_path, save_strategy="steps", save_steps=4)
    checkpoint = str(tmp_path / "checkpoint-4")
    control = make_trainer(target, make_drafter(target, carry=False), tmp_path, random_rows(LENGTHS))
    with pytest.raises(ValueError, match="of another drafter: `carry` is True there and False here"):
        control.train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match="nowhere' is no checkpoint to resume from"):
        control.check_checkpoint("nowhere")

    train(
        target, tmp_path / "v", make_drafter(target, draft_token_ids=torch.arange(32)), save_strategy="steps",
        save_steps=4,
    )  # fmt: skip
    drafter = make_drafter(target, draft_token_ids=torch.arange(1, 64, 2))
    other = make_trainer(target, drafter, tmp_path, random_rows(LENGTHS))
    with pytest.raises(ValueError, match="another draft vocabulary of equal size"):
        other.train(resume_from_checkpoint=str(tmp_path / "v" / "checkpoint-4"))


# Evaluation


def test_evaluation_alone_and_repeated(target, tmp_path):
    """`forward` is prepared once however often one evaluates, before and after training."""
    rows = random_rows(LENGTHS)
    trainer = make_trainer(
        target, make_drafter(target), tmp_path, rows, eval_dataset=rows, bf16=True, max_steps=1,
        per_device_eval_batch_size=3, warmup_steps=0,
    )  # fmt: skip
    first = trainer.evaluate()
    forward = trainer.drafter.forward
    assert trainer.evaluate()["eval_loss"] == first["eval_loss"]
    assert trainer.drafter.forward == forward and len(trainer.accelerator._models) == 1
    trainer.train()
    forward = trainer.drafter.forward
    assert trainer.evaluate()["eval_loss"] != first["eval_loss"]
    trainer.evaluate()
    assert trainer.drafter.forward == forward and len(trainer.accelerator._models) == 1


def test_evaluation_does_not_depend_on_batches(target, tmp_path):
    rows = random_rows(LENGTHS)
    trainer = make_trainer(target, make_drafter(target), tmp_path, rows, per_device_eval_batch_size=1)
    one = trainer.evaluate(rows)
    trainer.args.per_device_eval_batch_size = 5
    five = trainer.evaluate(rows)
    keys = ["eval_loss", "eval_tau", "eval_blocks", *(f"eval_acceptance_{k}" for k in (1, 2, 3))]
    assert [one[k] for k in keys] == pytest.approx([five[k] for k in keys], rel=1e-5, nan_ok=True)
    assert trainer.evaluate(rows, metric_key_prefix="test")["test_tau"] == one["eval_tau"]


def test_several_evaluation_sets(target, tmp_path):
    rows = random_rows(LENGTHS)
    trainer = make_trainer(
        target, make_drafter(target), tmp_path, rows, eval_dataset={"short": rows[:2], "long": rows[2:]}
    )
    metrics = trainer.evaluate()
    assert metrics["eval_short_blocks"] + metrics["eval_long_blocks"] == trainer.evaluate(rows)["eval_blocks"]
    assert trainer.predict(rows).metrics["test_blocks"] == metrics["eval_short_blocks"] + metrics["eval_long_blocks"]


# Contradictions


REFUSED = [
    pytest.param({"stage": "baseline"}, {}, r"`stage=\"baseline\"` trains a drafter without carry", id="carry"),
    pytest.param({"stage": "both"}, {}, "`stage` must be \"baseline\" or \"carryover\", got 'both'", id="stage"),
    pytest.param({"anchors_per_response": 0}, {}, "must be at least 1, got 0", id="anchors"),
    pytest.param({"gamma": 0.0}, {}, "`gamma` must be positive, got 0.0", id="gamma"),
    pytest.param({"alpha_ce": 0.0}, {}, "nor all 0, got 0.0, 0.0 and 0.0", id="no-loss"),
    pytest.param({"alpha_tv": -1.0}, {}, "must not be negative", id="negative-loss"),
    pytest.param({"draft_temperature": -1.0}, {}, "must not be negative, got -1.0", id="temperature"),
    pytest.param({"stage": "baseline", "draft_temperature": 1.0}, {}, "is of the first draft", id="no-first-draft"),
    pytest.param({"label_smoothing_factor": 0.1}, {}, "is not supported, got 0.1", id="label-smoothing"),
    pytest.param({"neftune_noise_alpha": 5.0}, {}, "`neftune_noise_alpha` is not supported, got 5.0", id="neftune"),
    pytest.param({"bf16_full_eval": True}, {}, "would round the float32 master weights", id="full-eval"),
    pytest.param(
        {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}, {},
        "would lose the gradient of the context", id="reentrant",
    ),
    pytest.param({}, {"compute_metrics": len}, "`compute_metrics` is not supported", id="metrics"),
    pytest.param({}, {"compute_loss_func": len}, "`compute_loss_func` is not supported", id="loss"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, kwargs, message", REFUSED)
def test_contradictions_are_refused(target, tmp_path, arguments, kwargs, message):
    with pytest.raises(ValueError, match=message):
        CarryoverTrainer(make_drafter(target), target, make_arguments(tmp_path, **arguments), **kwargs)


def test_wrong_types_are_refused(target, tmp_path):
    with pytest.raises(TypeError, match="`model` must be a CarryoverDrafter, got LlamaForCausalLM"):
        CarryoverTrainer(target, target, make_arguments(tmp_path))
    with pytest.raises(TypeError, match="`args` must be CarryoverTrainingArguments, got TrainingArguments"):
        CarryoverTrainer(make_drafter(target), target, TrainingArguments(output_dir=str(tmp_path), use_cpu=True))


def test_wrong_target_is_refused(target, tmp_path):
    with pytest.raises(ValueError, match="drafter `num_target_layers` is 4, the target has 2"):
        CarryoverTrainer(make_drafter(target), tiny_llama(num_hidden_layers=2), make_arguments(tmp_path))


def test_one_process_with_several_gpus_is_refused(target, tmp_path):
    args = make_arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match="One process sees 2 GPUs"):
        CarryoverTrainer(make_drafter(target), target, args)


# Two processes


WORKER = """
import json, sys
from pathlib import Path
import torch
from conftest import tiny_drafter, tiny_llama
from safetensors.torch import save_file
from training_helpers import losses_of, make_trainer, random_rows, weights_of

size, output = int(sys.argv[1]), Path(sys.argv[2])
target, report = tiny_llama(), {}
rows = random_rows([14, 22, 9, 31, 17, 12, 26, 11])
# Examples 1, 3, 5, ... hold only tokens that the reduced vocabulary lacks: one of two processes has nothing to learn.
lacking = [
    {**row, "input_ids": [t // 2 * 2 + i % 2 for t in row["input_ids"]]} for i, row in enumerate(random_rows([12] * 8))
]
for name, data, kwargs in (
    ("mixed", rows, {"draft_temperature": 0.7}),
    ("lacking", lacking, {"train_sampling_strategy": "sequential"}),
):
    drafter = tiny_drafter(
        target, carry=True, markov_rank=4, block_size=3,
        draft_token_ids=None if name == "mixed" else torch.arange(0, 64, 2),
    )
    batch = (2 if name == "mixed" else 1) * 2 // size
    trainer = make_trainer(
        target, drafter, output / name, data, eval_dataset=rows[:5], max_steps=3, learning_rate=0.05, optim="sgd",
        per_device_train_batch_size=batch, per_device_eval_batch_size=2, anchors_per_response=6, **kwargs,
    )
    trainer.train()
    metrics = {k: v for k, v in trainer.evaluate().items() if "acceptance" in k or k[5:] in ("loss", "tau", "blocks")}
    report[name] = {"losses": losses_of(trainer), "metrics": metrics}
    own = weights_of(drafter)
    gathered = trainer.accelerator.gather(torch.cat([w.flatten() for w in own.values()]).unsqueeze(0))
    assert bool((gathered == gathered[0]).all()), "the processes' weights differ"
    if trainer.is_world_process_zero():
        save_file(own, output / f"{name}.safetensors")
if trainer.is_world_process_zero():
    (output / "report.json").write_text(json.dumps(report))
"""


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    """
    Weights, losses and metrics of `torchrun` with two gloo processes, one of them without a label (R31), and of an
    evaluation set that does not divide evenly. Sums in another order: 1e-5.
    """
    tests = Path(__file__).parent
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
        "OMP_NUM_THREADS": "1",
    }
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if size == 2 else []
        command = [sys.executable, *launch, str(script), str(size), str(tmp_path / str(size))]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
        assert result.returncode == 0, result.stderr[-3000:]
    one, two = (json.loads((tmp_path / str(size) / "report.json").read_text()) for size in (1, 2))
    for name in ("mixed", "lacking"):
        assert two[name]["losses"] == pytest.approx(one[name]["losses"], rel=1e-5)
        assert two[name]["metrics"] == pytest.approx(one[name]["metrics"], rel=1e-5, nan_ok=True)
        weights = [load_file(tmp_path / str(size) / f"{name}.safetensors") for size in (1, 2)]
        start = weights_of(
            tiny_drafter(
                tiny_llama(), carry=True, markov_rank=4, block_size=3,
                draft_token_ids=None if name == "mixed" else torch.arange(0, 64, 2),
            )
        )  # fmt: skip
        for key, weight in weights[0].items():
            assert torch.allclose(weight, weights[1][key], atol=1e-5), (name, key)
            assert not torch.equal(weight, start[key]), (name, key)
