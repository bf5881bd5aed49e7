"""First drafts kept on disk give the losses of first drafts computed on the spot."""

import pytest
import torch
from conftest import tiny_drafter, tiny_llama
from safetensors import safe_open
from training_helpers import losses_of, make_batch, make_trainer, random_rows, weights_of

from hf_carryover.training.bank import DraftBank, FirstDrafts, fingerprint


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


ROWS = random_rows([14, 20, 9, 17])


def losses(trainer):
    batch = make_batch(trainer)
    trainer.add_anchors(batch, step=0)  # the anchors that are kept
    trainer.drafter.train()
    return trainer.block_losses(trainer.drafter, batch)


@pytest.mark.parametrize(
    "config",
    [
        {"carry": True},
        {"carry": False},
        {"carry": True, "markov_rank": 4},
        {"carry": True, "carry_from": "predictions"},
        {"carry": True, "carry_from": "proposals"},
        {"carry": True, "carry_from": "states_and_predictions"},
    ],
    ids=str,
)
@pytest.mark.parametrize("features", [False, True])
def test_same_losses(target, tmp_path, config, features):
    plain = make_trainer(target, tiny_drafter(target, **config), tmp_path / "a", ROWS, anchors_per_response=6)
    cache = {"feature_cache_dir": str(tmp_path / "features")} if features else {}
    kept = make_trainer(
        target, tiny_drafter(target, **config), tmp_path / "b", ROWS, anchors_per_response=6,
        carry_cache_dir=str(tmp_path / "bank"), **cache,
    )  # fmt: skip
    expected, seen = losses(plain)
    # Computed and written, then read.
    for _ in range(2):
        found, banked = losses(kept)
        assert torch.equal(banked["blocks"].positions, seen["blocks"].positions)
        assert torch.allclose(found, expected, atol=1e-5)
    assert len(list((tmp_path / "bank").rglob("*.safetensors"))) == len(ROWS)
    assert expected.sum() > 0


def test_second_reading_needs_no_target(target, tmp_path, monkeypatch):
    trainer = make_trainer(
        target, tiny_drafter(target), tmp_path, ROWS, anchors_per_response=6,
        carry_cache_dir=str(tmp_path / "bank"), feature_cache_dir=str(tmp_path / "features"),
    )  # fmt: skip
    expected, _ = losses(trainer)
    monkeypatch.setattr(trainer.target, "_run", None)
    monkeypatch.setattr(trainer.target, "verify", None)
    assert torch.equal(losses(trainer)[0], expected)


def test_first_draft_is_that_of_the_start(target, tmp_path):
    """Training moves the drafter, not the first drafts, and other runs from the same start find them."""
    bank = {"carry_cache_dir": str(tmp_path / "bank")}
    start = tiny_drafter(target)
    trainer = make_trainer(target, start, tmp_path / "a", ROWS, max_steps=3, anchors_per_response=6, **bank)
    frozen = weights_of(trainer.first_drafter)
    trainer.train()
    assert all(torch.equal(value, frozen[name]) for name, value in weights_of(trainer.first_drafter).items())
    assert any(not torch.equal(value, frozen[name]) for name, value in weights_of(trainer.drafter).items())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "bank").rglob("*.safetensors")}
    again = tiny_drafter(target)
    again.carry_embedding.data.zero_()  # the first draft does not depend on it
    make_trainer(target, again, tmp_path / "b", ROWS, max_steps=2, anchors_per_response=6, **bank).train()
    control = tiny_drafter(target, carry=False)
    control.load_state_dict({k: v for k, v in tiny_drafter(target).state_dict().items() if "carry" not in k})
    make_trainer(target, control, tmp_path / "c", ROWS, max_steps=2, anchors_per_response=6, **bank).train()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "bank").rglob("*.safetensors")} == before


def test_a_new_adapter_shares_first_drafts(target, tmp_path):
    """It changes nothing at its start."""
    peft = pytest.importorskip("peft")
    bank = {"carry_cache_dir": str(tmp_path / "bank")}
    plain = make_trainer(target, tiny_drafter(target), tmp_path / "a", ROWS, anchors_per_response=6, **bank)
    adapter = make_trainer(
        target, tiny_drafter(target), tmp_path / "b", ROWS, anchors_per_response=6,
        peft_config=peft.LoraConfig(r=2), **bank,
    )  # fmt: skip
    assert adapter.bank.identity == plain.bank.identity
    assert not any("lora" in name for name in weights_of(adapter.first_drafter))


@pytest.mark.parametrize("change", [{"seed": 1}, {"anchors_per_response": 5}, {"draft_temperature": 0.5}])
def test_other_settings_have_other_drafts(target, tmp_path, change):
    values = {"anchors_per_response": 6, "carry_cache_dir": str(tmp_path / "bank")}
    one = make_trainer(target, tiny_drafter(target), tmp_path / "a", ROWS, **values)
    two = make_trainer(target, tiny_drafter(target), tmp_path / "b", ROWS, **{**values, **change})
    assert one.bank.identity != two.bank.identity


def test_fingerprint_sees_every_weight(target):
    one, two = tiny_drafter(target), tiny_drafter(target)
    assert fingerprint(one) == fingerprint(two)
    with torch.no_grad():
        two.norm.weight[3] += 1e-3
    assert fingerprint(one) != fingerprint(two)
    assert fingerprint(one, 1) != fingerprint(one, 2)


def test_file_holds_rejected_rows_alone(tmp_path):
    bank = DraftBank(tmp_path, b"x")
    drafts = FirstDrafts(
        positions=torch.tensor([3, 7]),
        accepted=torch.tensor([1, 3]),
        proposals=torch.tensor([[4, 5, 6], [7, 8, 9]]),
        predictions=torch.tensor([[0, 1, 2], [0, 0, 0]]),
        features=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    )
    path = bank.path(torch.tensor([1, 2, 3]), example=0)
    bank.save(path, drafts)
    with safe_open(path, framework="pt") as file:
        assert file.get_slice("features").get_shape() == [2, 2]
    dense = bank.load(path, with_features=True).dense_features()
    zero = [0.0, 0.0]
    assert dense.tolist() == [[zero, [1.0, 2.0], [3.0, 4.0]], [zero, zero, zero]]
    assert bank.load(path, with_features=False).features is None
    assert bank.path(torch.tensor([1, 2, 3]), example=1) != path


def test_recording_with_nothing_left_trains(target, tmp_path):
    """A response of one token has an anchor, whose shifted one has no successor."""
    rows = [{"id": "a", "input_ids": [5, 6, 7, 8], "response_mask": [0, 0, 0, 1]}]
    trainer = make_trainer(
        target, tiny_drafter(target), tmp_path, rows, max_steps=1, carry_cache_dir=str(tmp_path / "bank")
    )
    trainer.train()
    assert losses_of(trainer) == [0.0]


def test_baseline_stage_has_no_first_drafts(tmp_path):
    from training_helpers import make_arguments

    with pytest.raises(ValueError, match='which only `stage="carryover"` has'):
        make_arguments(tmp_path, stage="baseline", carry_cache_dir="bank")


class TestFirstDrafter:
    """A run that goes on from another's result shares its first drafts."""

    def trainer(self, target, folder, drafter, **kwargs):
        return make_trainer(
            target, drafter, folder, ROWS, anchors_per_response=6, carry_cache_dir=str(folder / "bank"), **kwargs
        )

    def test_the_bank_is_that_of_the_run_before(self, target, tmp_path):
        start = tiny_drafter(target, carry=False)
        start.save_pretrained(tmp_path / "start")
        losses(self.trainer(target, tmp_path, start))
        files = {path: path.stat().st_mtime_ns for path in (tmp_path / "bank").rglob("*.safetensors")}
        later = tiny_drafter(target, seed=5)
        found, seen = losses(self.trainer(target, tmp_path, later, first_drafter=str(tmp_path / "start")))
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "bank").rglob("*.safetensors")} == files
        # The drafts are the first drafter's, the losses the trained one's.
        assert torch.equal(
            seen["blocks"].positions, losses(self.trainer(target, tmp_path, start))[1]["blocks"].positions
        )
        own = losses(make_trainer(target, later, tmp_path / "x", ROWS, anchors_per_response=6))[1]["blocks"]
        assert not torch.equal(own.positions, seen["blocks"].positions)
        assert found.sum() > 0

    def test_another_layout_is_another_bank(self, target, tmp_path):
        """Same weights, other blocks: their first drafts must not be taken for each other's."""
        losses(self.trainer(target, tmp_path, tiny_drafter(target)))
        losses(self.trainer(target, tmp_path, tiny_drafter(target, block_attention="causal")))
        assert len(list((tmp_path / "bank").rglob("*.safetensors"))) == 2 * len(ROWS)

    def test_another_kind_of_drafter_is_refused(self, target, tmp_path):
        tiny_drafter(target, block_size=3).save_pretrained(tmp_path / "three")
        with pytest.raises(ValueError, match="`first_drafter` has `block_size` 3, the trained drafter 4"):
            self.trainer(target, tmp_path, tiny_drafter(target), first_drafter=str(tmp_path / "three"))

    def test_it_needs_a_bank(self, target, tmp_path):
        with pytest.raises(ValueError, match=r"`first_drafter` \('x'\) makes the drafts that `carry_cache_dir` keeps"):
            make_trainer(target, tiny_drafter(target), tmp_path, ROWS, first_drafter="x")
