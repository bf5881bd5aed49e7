"""The order of recordings: a function of the seed and the epoch, whichever strategy makes it."""

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from training_helpers import losses_of, make_trainer, random_rows, weights_of


ROWS = random_rows([14, 22, 9, 31, 17, 12])
STRATEGIES = ["random", "sequential", "group_by_length"]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(num_hidden_layers=2)


def make(target, folder, strategy, **kwargs):
    drafter = tiny_drafter(target, block_size=3, num_hidden_layers=1, target_layer_ids=[1])
    values = {"per_device_train_batch_size": 2, "anchors_per_response": 4, "max_steps": 8, **kwargs}
    return make_trainer(target, drafter, folder, ROWS, train_sampling_strategy=strategy, **values)


def orders(trainer, epochs: int) -> list[list[int]]:
    """Which recordings the steps of each epoch see."""
    loader, seen = trainer.get_train_dataloader(), []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        seen.append([int(example) for batch in loader for example in batch["example_index"]])
    return seen


@pytest.mark.compat
@pytest.mark.parametrize("stop", [1, 3, 5, 6, 7])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumed_in_any_epoch_the_order_is_the_same(target, tmp_path, strategy, stop):
    """Three steps an epoch: resumed within the first, the second or the third, or between two."""
    whole = make(target, tmp_path / "whole", strategy, save_strategy="steps", save_steps=1)
    whole.train()
    resumed = make(target, tmp_path / "resumed", strategy)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
    assert losses_of(resumed) == losses_of(whole)
    before, after = weights_of(whole.drafter), weights_of(resumed.drafter)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.compat
@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_data_seed_orders_the_recordings(target, tmp_path, strategy):
    """Another one is another order, in every epoch; numbers drawn meanwhile move nothing."""
    first = orders(make(target, tmp_path, strategy, data_seed=1), 3)
    assert all(sorted(epoch) == list(range(len(ROWS))) for epoch in first)
    assert len(set(map(tuple, first))) > 1
    trainer = make(target, tmp_path, strategy, data_seed=1)
    torch.rand(5)
    assert orders(trainer, 3) == first
    assert orders(make(target, tmp_path, strategy, data_seed=2), 3) != first


@pytest.mark.compat
def test_recordings_of_a_length_come_together(target, tmp_path):
    """Within each batch of the grouped order, not in its sequence."""
    trainer = make(target, tmp_path, "group_by_length")
    lengths = [len(row["input_ids"]) for row in ROWS]
    batches = [orders(trainer, 1)[0][i : i + 2] for i in range(0, 6, 2)]
    assert lengths[batches[0][0]] == max(lengths)  # what does not fit in memory does not at once
    assert all(lengths[one] >= lengths[other] for one, other in batches)
