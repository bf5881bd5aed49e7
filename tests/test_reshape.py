"""A trained drafter in another shape keeps what it has learned."""

import pytest
import torch
from conftest import VOCAB, tiny_drafter, tiny_llama
from drafter_helpers import block_inputs, run

from hf_carryover import reshape_drafter


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def test_nothing_changed_is_a_copy(target):
    drafter = tiny_drafter(target, markov_rank=4, draft_token_ids=torch.tensor([1, 5, 9]))
    copy = reshape_drafter(drafter)
    assert copy.config.to_dict() == drafter.config.to_dict()
    assert copy.state_dict().keys() == drafter.state_dict().keys()
    for name, value in drafter.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value), name
        assert copy.state_dict()[name].data_ptr() != value.data_ptr(), name


def test_more_layers_change_nothing_yet(target):
    drafter = tiny_drafter(target, target_layer_ids=[0, 2])
    wider = reshape_drafter(drafter, target_layer_ids=[0, 1, 2, 3])
    inputs = block_inputs(wider)
    width = drafter.config.target_hidden_size

    def old(features):
        return torch.cat([features[..., :width], features[..., 2 * width : 3 * width]], dim=-1)

    narrow = {name: old(value) if name.endswith("features") else value for name, value in inputs.items()}
    assert torch.allclose(run(wider, inputs).logits, run(drafter, narrow).logits, atol=1e-5)


def test_fewer_layers_keep_their_columns(target):
    drafter = tiny_drafter(target, target_layer_ids=[0, 2])
    fewer = reshape_drafter(drafter, target_layer_ids=[2])
    assert torch.equal(fewer.fc.weight, drafter.fc.weight[:, 32:])


@pytest.mark.parametrize("before", [None, [1, 5, 9, 20]])
def test_markov_rows_follow_their_tokens(target, before):
    options = {} if before is None else {"draft_token_ids": torch.tensor(before)}
    drafter = tiny_drafter(target, markov_rank=4, **options)
    new = reshape_drafter(drafter, draft_token_ids=torch.tensor([5, 6, 20]))
    assert new.draft_token_ids().tolist() == [5, 6, 20]
    assert new.t2d.nonzero().flatten().tolist() == [5, 6, 20]
    old, rows = drafter.markov_head.markov_w2.weight, new.markov_head.markov_w2.weight
    places = {5: 5, 6: 6, 20: 20} if before is None else {5: 1, 20: 3}
    for row, token in enumerate([5, 6, 20]):
        expected = old[places[token]] if token in places else torch.zeros(4)
        assert torch.equal(rows[row], expected)
    assert torch.equal(new.markov_head.markov_w1.weight, drafter.markov_head.markov_w1.weight)


def test_block_size_and_carry(target):
    drafter = tiny_drafter(target, carry=False)
    new = reshape_drafter(drafter, block_size=9, carry=True, carry_from="states_and_predictions")
    assert new.config.block_size == 9
    assert not new.carry_embedding.any() and not new.carry_proj.weight.any()
    assert torch.equal(new.layers[1].mlp.up_proj.weight, drafter.layers[1].mlp.up_proj.weight)


def test_without_markov_head(target):
    drafter = tiny_drafter(target, markov_rank=4)
    assert reshape_drafter(drafter, markov_rank=0).markov_head is None


def test_dtype_and_original_are_kept(target):
    drafter = tiny_drafter(target).bfloat16()
    before = drafter.fc.weight.clone()
    new = reshape_drafter(drafter, target_layer_ids=[1, 3])
    assert new.dtype == torch.bfloat16
    assert torch.equal(drafter.fc.weight, before)


def test_other_changes_are_refused(target):
    with pytest.raises(
        ValueError, match="can't change `hidden_size`, `num_hidden_layers`; expected some of block_size"
    ):
        reshape_drafter(tiny_drafter(target), num_hidden_layers=3, hidden_size=8)
    with pytest.raises(ValueError, match="increase within"):
        reshape_drafter(tiny_drafter(target), draft_token_ids=torch.tensor([3, VOCAB]))
