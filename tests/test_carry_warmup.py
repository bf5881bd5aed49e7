"""The first carryover steps may carry recorded rows."""

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from training_helpers import make_arguments, make_batch, make_trainer, random_rows


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


ROWS = random_rows([14, 20])
ANCHORS = [(0, 5), (0, 12), (1, 8)]


def warm(target, tmp_path, **config):
    trainer = make_trainer(target, tiny_drafter(target, **config), tmp_path, ROWS, carry_warmup_steps=2, max_steps=3)
    trainer.drafter.train()
    batch = make_batch(trainer, ANCHORS)
    return trainer, batch, trainer.block_losses(trainer.drafter, batch)[1]["blocks"]


def test_rows_are_the_recorded_ones(target, tmp_path, monkeypatch):
    trainer, batch, blocks = warm(target, tmp_path)
    assert blocks.positions.tolist() == [5, 12, 8], "nothing is shifted"
    features = trainer.target.record(batch["input_ids"], batch["attention_mask"], False, False).features
    seen = 0
    for block, (sequence, anchor) in enumerate(ANCHORS):
        mask = blocks.carried["carried_mask"][block]
        left = int(batch["response_mask"][sequence].sum()) + 4 - anchor - 1
        assert mask.sum() <= left and mask.tolist() == sorted(mask.tolist(), reverse=True)
        for row in mask.nonzero().flatten().tolist():
            assert torch.equal(blocks.carried["carried_features"][block, row], features[sequence, anchor + row])
            assert blocks.carried["carried_positions"][block, row] == anchor + row
            seen += 1
    assert seen > 3


@pytest.mark.parametrize(("source", "shift"), [("predictions", 1), ("proposals", 0)])
def test_tokens_in_them(target, tmp_path, source, shift):
    _, batch, blocks = warm(target, tmp_path, carry_from=source)
    mask = blocks.carried["carried_mask"]
    for block, row in mask.nonzero().tolist():
        sequence, anchor = ANCHORS[block]
        token = batch["input_ids"][sequence, anchor + row + shift]
        expected = target.get_input_embeddings()(token)
        assert torch.equal(blocks.carried["carried_embeds"][block, row], expected)


def test_it_ends_and_a_control_has_nothing(target, tmp_path):
    trainer, batch, blocks = warm(target, tmp_path / "a")
    trainer.state.global_step = 2
    after = trainer.block_losses(trainer.drafter, batch)[1]["blocks"]
    assert blocks.first_accepted is None and after.first_accepted is not None
    _, _, control = warm(target, tmp_path / "b", carry=False)
    assert control.carried == {} and control.positions.tolist() == [5, 12, 8]
    trainer.state.global_step = 0
    trainer.drafter.eval()
    assert trainer.block_losses(trainer.drafter, batch)[1]["blocks"].first_accepted is not None


@pytest.mark.parametrize("values", [{"carry_warmup_steps": -1}, {"carry_warmup_steps": 3, "stage": "baseline"}])
def test_refusals(tmp_path, values):
    with pytest.raises(ValueError, match="`carry_warmup_steps` must not be negative, nor set in the baseline stage"):
        make_arguments(tmp_path, **values)
