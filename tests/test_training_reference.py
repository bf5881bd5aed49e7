"""
[`CarryoverTrainer.block_losses`] against a slow reference that does one anchor at a time, and leak tests (R28).

Everything is float32. Tolerance: the two sum in different orders, over hidden sizes of 32 and texts of some 30 tokens;
the largest difference seen is 2e-5 of the largest value compared, and the least error that matters (one wrong row, one
wrong position) changes results by more than 1e-2.
"""

import pytest
import torch
from conftest import tiny_drafter
from slow_reference import SlowReference, scripted_recording
from tiny_targets import tiny_target
from training_helpers import make_batch, make_trainer


GAMMA = 3.0
TOLERANCE = 2e-4  # of the largest value
SLIDING_DRAFTER = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
NARROW_DRAFTER = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
ANCHOR_FIRST = {"anchor_first": True}
OWN_HEAD = {"own_head": True}
SPECULATORS_WINDOW = {**SLIDING_DRAFTER, "block_attention": "causal_sliding", "sliding_window_from": "anchor"}
LOOKUP = {"lookup_ngram_size": 3}
CAPPED = {"logit_scale": 0.5, "logit_softcapping": 2.0, "embedding_scale": 1.0}
HALF_VOCABULARY = {"draft_token_ids": torch.arange(1, 64, 2)}


def recordings(target, drafter, size):
    """Three recordings of unequal lengths whose first drafts are right 0 … B times; the second has two turns."""
    reference = SlowReference(target, drafter, GAMMA)
    parts = [
        ([5, 17, 33], [*range(size + 1), 1, 0, 0], None),
        ([9, 40, 21, 8], [0, size, min(2, size), size, 0], 2),
        ([50, 2], [1], None),
    ]
    made = [scripted_recording(reference, prompt, ms, turn, seed=i) for i, (prompt, ms, turn) in enumerate(parts)]
    rows = [{"id": str(i), "input_ids": ids, "response_mask": mask} for i, (ids, mask, _) in enumerate(made)]
    return rows, [anchors for _, _, anchors in made]


def assert_close(ours, theirs):
    ours, theirs = ours.detach(), theirs.detach()
    difference = float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-3)
    assert difference < TOLERANCE, f"differs by {difference:.1e} of the largest value"


CASES = [
    pytest.param("llama", {"carry": True, "markov_rank": 4}, {}, id="llama", marks=pytest.mark.compat),
    pytest.param("llama", {"carry": True, **HALF_VOCABULARY, "mask_token_id": 3}, {}, id="reduced-mask-token"),
    pytest.param("llama", {"carry": False, "markov_rank": 4}, {}, id="control"),
    pytest.param("llama", {"carry": False, **NARROW_DRAFTER}, {"stage": "baseline"}, id="baseline-narrow"),
    pytest.param("llama", {"carry": True, "markov_rank": 4, **SLIDING_DRAFTER}, {}, id="sliding-drafter"),
    pytest.param("llama", {"carry": True, "target_layer_ids": [0, 3]}, {}, id="last-layer-tapped"),
    pytest.param("qwen3", {"carry": True, "block_size": 1}, {}, id="one-proposal"),
    pytest.param("qwen3", {"carry": True, "markov_rank": 4, **ANCHOR_FIRST}, {}, id="anchor-first"),
    pytest.param("qwen3", {"carry": True, "block_size": 1, **ANCHOR_FIRST}, {}, id="anchor-first-one-row"),
    pytest.param(
        "llama",
        {"carry": False, "markov_rank": 4, **HALF_VOCABULARY, **ANCHOR_FIRST, **OWN_HEAD},
        {"stage": "baseline", "alpha_ce": 0.1, "alpha_tv": 0.9},
        id="anchor-first-baseline-own-head-tv",
    ),
    pytest.param("llama", {"carry": True, **SPECULATORS_WINDOW}, {}, id="causal-block-window-from-anchor"),
    pytest.param(
        "gemma3",
        {"carry": True, "markov_rank": 4, "block_attention": "causal", **CAPPED},
        {"alpha_ce": 0.1, "alpha_tv": 0.9},
        id="causal-capped-raw-embeddings",
    ),
    pytest.param(
        "mistral",
        {"carry": True, "markov_rank": 4, **HALF_VOCABULARY},
        {"alpha_ce": 0.1, "alpha_tv": 0.9},
        id="mistral-window-tv",
    ),
    pytest.param("gemma3", {"carry": True, "markov_rank": 4}, {}, id="gemma3-mixed", marks=pytest.mark.compat),
    pytest.param(
        "gemma3", {"carry": False, **HALF_VOCABULARY}, {"stage": "baseline", "alpha_tv": 1.0}, id="gemma3-tv"
    ),
    pytest.param("gemma4", {"carry": True}, {}, id="gemma4"),
    pytest.param("llama", {"carry": True, "markov_rank": 4, **LOOKUP}, {}, id="lookup"),
    pytest.param("llama", {"carry": True, "carry_pointer": True, "markov_rank": 4}, {}, id="pointer"),
    pytest.param(
        "qwen3", {"carry": True, "carry_pointer": True, **LOOKUP, **HALF_VOCABULARY}, {}, id="pointer-lookup-reduced"
    ),
    pytest.param("qwen3", {"carry": False, **LOOKUP, **NARROW_DRAFTER, **ANCHOR_FIRST}, {}, id="lookup-anchor-first"),
    pytest.param("gpt_neox", {"carry": True}, {}, id="gpt-neox"),
    pytest.param("lora", {"carry": True}, {}, id="lora"),
]


@pytest.mark.parametrize("name, options, arguments", CASES)
def test_equals_one_anchor_at_a_time(name, options, arguments, tmp_path, monkeypatch):
    """Proposals, m, shifted anchors, carried rows, losses and the gradient of every parameter."""
    target = tiny_target(name)
    drafter = tiny_drafter(target, **{"block_size": 3, "target_layer_ids": [0, 2], **options})
    rows, scripted = recordings(target, drafter, drafter.config.block_size)
    trainer = make_trainer(target, drafter, tmp_path, rows, gamma=GAMMA, **arguments)
    drafted = []
    roll_out = trainer.roll_out
    monkeypatch.setattr(trainer, "roll_out", lambda *a, **k: drafted.append(roll_out(*a, **k)) or drafted[-1])

    batch = make_batch(trainer)
    losses, seen = trainer.block_losses(drafter, batch)
    losses.sum().backward()
    ours = {key: parameter.grad.clone() for key, parameter in drafter.named_parameters()}
    drafter.zero_grad()

    first_draft = trainer.args.stage == "carryover"
    reference = SlowReference(
        target, drafter, GAMMA, trainer.args.alpha_ce, trainer.args.alpha_tv, first_draft=first_draft
    )
    blocks, expected = seen["blocks"], []
    for i, (sequence, a) in enumerate(
        zip(batch["sequence_index"].tolist(), batch["anchor_positions"].tolist(), strict=True)
    ):
        block = reference.block(rows[sequence]["input_ids"], rows[sequence]["response_mask"], a)
        if first_draft:
            assert drafted[0][i].tolist() == reference.first_proposals(rows[sequence]["input_ids"], a)
        if block is not None:
            expected.append((sequence, block))
    assert blocks.sequence_index.tolist() == [sequence for sequence, _ in expected]
    assert blocks.positions.tolist() == [block.anchor for _, block in expected]
    assert bool(blocks.counted.all())
    if first_draft:
        accepted = {(sequence, block.first_anchor): block.accepted for sequence, block in expected}
        assert blocks.first_accepted.tolist() == list(accepted.values())
        for sequence, anchors in enumerate(scripted):
            for a, m in anchors.items():
                assert accepted.get((sequence, a), m) == m
        assert set(accepted.values()) == set(range(drafter.config.block_size + 1))  # no, partial and full acceptance
    theirs = torch.stack([block.losses for _, block in expected])
    assert_close(losses, theirs)
    if first_draft and drafter.config.carry:
        compare_carried(blocks, [block for _, block in expected])
    theirs.sum().backward()
    for key, parameter in drafter.named_parameters():
        assert float(ours[key].abs().max()) > 0 or parameter.grad is None or not parameter.grad.any(), key
        assert_close(ours[key], parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))


def compare_carried(blocks, expected):
    """Carried rows: which, where, and the target's states."""
    mask = blocks.carried["carried_mask"]
    for i, block in enumerate(expected):
        assert blocks.carried["carried_positions"][i][mask[i]].tolist() == block.carried_positions
        if block.carried_positions:
            assert_close(blocks.carried["carried_features"][i][mask[i]], block.carried)


def test_evaluation_equals_a_count_by_hand(tmp_path):
    """R34: loss, τ and per-position acceptance of `evaluate` are those counted over the reference's blocks."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size=3, markov_rank=4, carry=True)
    rows, _ = recordings(target, drafter, 3)
    trainer = make_trainer(target, drafter, tmp_path, rows, gamma=GAMMA, per_device_eval_batch_size=2)
    metrics = trainer.evaluate(rows)
    reference = SlowReference(target, drafter, GAMMA)
    blocks = []
    for row in rows:
        anchors = [p for p in range(len(row["input_ids"]) - 1) if row["response_mask"][p + 1]]
        with torch.no_grad():
            found = [reference.block(row["input_ids"], row["response_mask"], a) for a in anchors]
        runs = [(a, row) for a in anchors]
        blocks += [(block, run) for block, run in zip(found, runs, strict=True) if block is not None]
    assert metrics["eval_blocks"] == len(blocks)
    committed = weight = 0
    for block, (_, row) in blocks:
        rest = 0
        while block.anchor + rest + 1 < len(row["input_ids"]) and row["response_mask"][block.anchor + rest + 1]:
            rest += 1
        committed += min(block.second_accepted + 1, rest)
        weight += sum(torch.exp(torch.tensor(-k / GAMMA)).item() for k in range(block.judged))
    assert metrics["eval_tau"] == pytest.approx(committed / len(blocks))
    loss = sum(float(block.losses.sum()) for block, _ in blocks) / weight
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-4)
    for k in range(1, 4):
        judged = [block for block, _ in blocks if block.judged >= k and block.second_accepted >= k - 1]
        passed = sum(block.second_accepted >= k for block in judged)
        wanted = passed / len(judged) if judged else float("nan")
        assert metrics[f"eval_acceptance_{k}"] == pytest.approx(wanted, nan_ok=True)


def by_anchor(losses, blocks):
    """Losses by sampled anchor, `(sequence, a)`."""
    firsts = blocks.positions if blocks.first_accepted is None else blocks.positions - blocks.first_accepted - 1
    keys = zip(blocks.sequence_index.tolist(), firsts.tolist(), strict=True)
    return {key: (row, int(end)) for key, row, end in zip(keys, losses, blocks.positions, strict=True)}


@pytest.fixture
def leak_case(tmp_path):
    """A pair with everything on, and recordings in which drafts are partly right."""
    target = tiny_target("gemma3")
    drafter = tiny_drafter(target, block_size=3, markov_rank=4, carry=True)
    rows, _ = recordings(target, drafter, 3)
    return target, drafter, rows, tmp_path


@pytest.mark.parametrize("stage", ["baseline", "carryover"])
def test_tokens_behind_a_block_do_not_matter(leak_case, stage):
    """R28: changing every recorded token after `a' + B` leaves the loss of a block as it was."""
    target, drafter, rows, tmp_path = leak_case
    if stage == "baseline":
        drafter = tiny_drafter(target, block_size=3, markov_rank=4, carry=False)
    trainer = make_trainer(target, drafter, tmp_path, rows, gamma=GAMMA, stage=stage)
    batch = make_batch(trainer)
    with torch.no_grad():
        losses, seen = trainer.block_losses(drafter, batch)
        before = by_anchor(losses, seen["blocks"])
        compared = changed_ones = 0
        for cut in range(5, len(rows[0]["input_ids"]) - 1, 2):
            changed = {**batch, "input_ids": batch["input_ids"].clone()}
            changed["input_ids"][:, cut + 1 :] = (changed["input_ids"][:, cut + 1 :] + 7) % 64
            losses, seen = trainer.block_losses(drafter, changed)
            after = by_anchor(losses, seen["blocks"])
            for key, (row, anchor) in before.items():
                if anchor + 3 <= cut:
                    compared += 1
                    assert torch.allclose(after[key][0], row, atol=1e-5), (key, cut)
                elif key in after:
                    changed_ones += not torch.allclose(after[key][0], row, atol=1e-3)
    assert compared > 20 and changed_ones > 20


def test_density_does_not_matter(leak_case):
    """R28: the loss of an anchor is the same alone, with some others and with all of them, overlapping or not."""
    target, drafter, rows, tmp_path = leak_case
    trainer = make_trainer(target, drafter, tmp_path, rows, gamma=GAMMA)
    everything = make_batch(trainer)
    pairs = list(zip(everything["sequence_index"].tolist(), everything["anchor_positions"].tolist(), strict=True))
    with torch.no_grad():
        losses, seen = trainer.block_losses(drafter, everything)
        dense = by_anchor(losses, seen["blocks"])
        for chosen in [pairs[::3], pairs[1::4], *([pair] for pair in pairs[::5])]:
            losses, seen = trainer.block_losses(drafter, make_batch(trainer, chosen))
            if not seen["blocks"].counted.all():
                continue
            for key, (row, _) in by_anchor(losses, seen["blocks"]).items():
                assert torch.allclose(row, dense[key][0], atol=1e-5), key


def test_gradient_reaches_nothing_but_what_a_block_may_see(leak_case, monkeypatch):
    """R28: no gradient to features at or behind `a'`, of another sequence, or of another anchor's branch."""
    target, drafter, rows, tmp_path = leak_case
    trainer = make_trainer(target, drafter, tmp_path, rows, gamma=GAMMA)
    leaves = {}
    record, verify = trainer.target.record, trainer.target.verify

    def recorded(*args, **kwargs):
        result = record(*args, **kwargs)
        leaves["features"] = result.features = result.features.clone().requires_grad_(True)
        return result

    def verified(*args, **kwargs):
        features, predictions = verify(*args, **kwargs)
        leaves["carried"] = features.clone().requires_grad_(True)
        return leaves["carried"], predictions

    monkeypatch.setattr(trainer.target, "record", recorded)
    monkeypatch.setattr(trainer.target, "verify", verified)
    losses, seen = trainer.block_losses(drafter, make_batch(trainer))
    blocks = seen["blocks"]
    for i in range(len(losses)):
        features, carried = torch.autograd.grad(
            losses[i].sum(), (leaves["features"], leaves["carried"]), retain_graph=True
        )
        sequence, anchor = int(blocks.sequence_index[i]), int(blocks.positions[i])
        seen_rows = features.abs().sum(-1)
        assert not seen_rows[sequence, anchor:].any()
        assert bool((seen_rows[sequence, :anchor] > 0).all())
        seen_rows[sequence] = 0
        assert not seen_rows.any()
        own = carried.abs().sum(-1)
        assert torch.equal(own[i] > 0, blocks.carried["carried_mask"][i])
        own[i] = 0
        assert not own.any()


def test_another_branch_does_not_matter(leak_case, monkeypatch):
    """Changing the proposals of other anchors leaves the verified states and the loss of this one as they were."""
    target, drafter, rows, tmp_path = leak_case
    trainer = make_trainer(target, drafter, tmp_path, rows, gamma=GAMMA)
    verify = trainer.target.verify
    batch = make_batch(trainer)
    with torch.no_grad():
        plain, seen = trainer.block_losses(drafter, batch)
        states = seen["blocks"].carried["carried_features"]
        for keep in (0, 4, len(plain) - 1):

            def other_tokens(recorded, branches, predict, keep=keep):
                own = branches.tokens[keep].clone()
                branches.tokens = (branches.tokens + 11) % 64
                branches.tokens[keep] = own
                return verify(recorded, branches, predict)

            monkeypatch.setattr(trainer.target, "verify", other_tokens)
            losses, seen = trainer.block_losses(drafter, batch)
            new = seen["blocks"].carried["carried_features"]
            assert torch.allclose(new[keep], states[keep], atol=1e-5)
            assert torch.allclose(losses[keep], plain[keep], atol=1e-5)
            others = [i for i in range(len(plain)) if i != keep and seen["blocks"].carried["carried_mask"][i].any()]
            assert not torch.allclose(new[others], states[others], atol=1e-2)
