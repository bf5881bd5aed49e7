# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Failures that users of comparable software reported, tried here: those that have no place in another file. The README
beside this file lists all of them.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from fresh_process import python
from huggingface_hub import ModelCard, metadata_load
from safetensors.torch import load_file, save_file
from tiny_targets import (
    PROMPT_LENGTH,
    VOCAB,
    WINDOW,
    assisted,
    build,
    count_forwards,
    plain,
    prompt_ids,
    record_proposals,
    tiny_drafter,
    tiny_llama,
    tiny_target,
)
from training_helpers import make_arguments, make_trainer, random_rows

from hf_carryover import CarryoverConfig, CarryoverDrafter, CarryoverTrainer, check_fit, model_card
from hf_carryover.hub.publish import _name_of_target


NEW = 40


# Targets


@pytest.mark.parametrize("block_size", [4, 15])
def test_gemma2_past_its_window(block_size):
    """R5: capped logits and alternating windows, blocks longer than a window."""
    kinds = ["sliding_attention", "full_attention"] * 2
    target = build("Gemma2", sliding_window=WINDOW, layer_types=kinds, head_dim=8, attn_implementation="eager")
    want = plain(target, prompt_ids(), max_new_tokens=NEW)
    drafter = tiny_drafter(target, block_size=block_size)
    assert assisted(target, prompt_ids(), drafter, max_new_tokens=NEW).tolist() == want.tolist()


def test_recurrent_targets_are_refused(monkeypatch):
    """R5: a state that can't be rolled back; silently another text elsewhere."""
    target = build(
        "Qwen3Next",
        layer_types=["linear_attention", "full_attention"] * 2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    forwards = count_forwards(target, monkeypatch)
    with pytest.raises(ValueError, match=r"not supported with stateful models, such as Qwen3NextForCausalLM"):
        assisted(target, prompt_ids(), tiny_drafter(target), max_new_tokens=4)
    assert forwards == []


def test_acceptance_does_not_sink_under_a_penalty():
    """R9: a drafter that knows the target's raw scores is believed to the end: the penalty is the draft's too."""
    target, options = tiny_llama(), {"max_new_tokens": 128, "repetition_penalty": 1.3}
    want = plain(target, prompt_ids(), return_dict_in_generate=True, output_logits=True, **options)
    changed = [bool(raw.argmax() != want.sequences[0, PROMPT_LENGTH + i]) for i, raw in enumerate(want.logits)]
    assert sum(changed) > 20  # the penalty decides much of this text
    drafter, place = tiny_drafter(target, block_size=7), {}
    original = drafter.draft

    def draft(cache, anchor_embeds, mask_embeds):
        place["anchor"] = cache.committed
        return original(cache, anchor_embeds, mask_embeds)

    def logits(hidden_states, head_weight, head_bias=None, previous_ids=None):
        first = place["anchor"] + 1 - PROMPT_LENGTH
        return torch.cat(want.logits[first : first + len(hidden_states)])

    drafter.draft, drafter.logits = draft, logits
    assert assisted(target, prompt_ids(), drafter, **options).tolist() == want.sequences.tolist()
    assert drafter.last_report.accepted == drafter.last_report.proposed == [7] * 15 + [6]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU beside the CPU")
@pytest.mark.parametrize("where", ["target-on-gpu", "split"])
def test_target_and_drafter_on_different_devices(where):
    """R10: head, tapped layers and drafter lie apart; nothing is moved."""
    target = tiny_llama()
    if where == "split":
        from accelerate import dispatch_model

        layers = {f"model.layers.{i}": 0 if i % 2 else "cpu" for i in range(4)}
        places = {"model.embed_tokens": "cpu", "model.rotary_emb": 0, "model.norm": "cpu", "lm_head": 0, **layers}
        target = dispatch_model(target, places, main_device=0)
    else:
        target = target.cuda()
    drafter = tiny_drafter(tiny_llama(), block_size=4, markov_rank=3, target_layer_ids=[0, 1, 2, 3])
    ids = prompt_ids().cuda()
    want = plain(target, ids, max_new_tokens=NEW)
    assert assisted(target, ids, drafter, max_new_tokens=NEW).tolist() == want.tolist()
    assert {parameter.device.type for parameter in drafter.parameters()} == {"cpu"}


def test_drafter_position_limit():
    """R27: a text goes on behind the drafter's `max_position_embeddings`; there is no table that could end."""
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=7, max_position_embeddings=16)
    want = plain(target, prompt_ids(), max_new_tokens=NEW)
    assert assisted(target, prompt_ids(), drafter, max_new_tokens=NEW).tolist() == want.tolist()


# Adapters


def test_lora_on_the_drafter(monkeypatch, tmp_path):
    """R11: only the adapter is saved, and with it a drafter proposes what it proposed."""
    peft = pytest.importorskip("peft")
    target, base = tiny_llama(), tiny_drafter(tiny_llama(), block_size=4, markov_rank=3)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(copy.deepcopy(base), config)

    def proposals(drafter):
        with monkeypatch.context() as patch:
            rounds = record_proposals(drafter, patch)
            text = assisted(target, prompt_ids(), drafter, max_new_tokens=NEW)
        assert text.tolist() == plain(target, prompt_ids(), max_new_tokens=NEW).tolist()
        return list(rounds)

    want = proposals(adapted)
    assert want and want != proposals(base)
    adapted.save_pretrained(tmp_path / "adapter")
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert names and all("lora_" in name for name in names)
    again = CarryoverDrafter.from_pretrained(tmp_path / "base")
    assert proposals(peft.PeftModel.from_pretrained(again, tmp_path / "adapter")) == want
    with pytest.raises(TypeError, match="`model` must be a CarryoverDrafter, got PeftModel"):
        CarryoverTrainer(adapted, target, make_arguments(tmp_path, use_cpu=True))


# Checkpoints


@pytest.fixture
def folder(tmp_path):
    tiny_drafter(tiny_target("llama"), target_layer_ids=[0, 2]).save_pretrained(tmp_path)
    return tmp_path


def change_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in {**config, **values}.items() if value != "left out"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("left out", "has no `target_layer_ids`, so the target layers it reads are unknown"),
        (None, "has no `target_layer_ids`"),
        ([-2, 0], r"`target_layer_ids` must be distinct increasing ids in 0 \.\.\. 3 .*, got \[-2, 0\]"),
        ([0, 4], r"got \[0, 4\]"),
        ([0, 1, 2], r"another shape than its config says: fc\.weight is \(32, 64\), not \(32, 96\)"),
        ([2], r"fc\.weight is \(32, 64\), not \(32, 32\)"),
    ],
    ids=str,
)
def test_layer_ids_of_a_checkpoint(folder, ids, message):
    """R15: no formula stands in for a missing list, no negative id wraps, the list agrees with `fc`."""
    change_config(folder, target_layer_ids=ids)
    with pytest.raises(ValueError, match=message):
        CarryoverDrafter.from_pretrained(folder)


def test_layer_ids_given_when_loading(folder):
    """R15: the way out that the message names."""
    change_config(folder, target_layer_ids="left out")
    assert CarryoverDrafter.from_pretrained(folder, target_layer_ids=[0, 2]).config.target_layer_ids == [0, 2]
    with pytest.raises(ValueError, match="no `target_layer_ids`"):
        CarryoverConfig.from_pretrained(folder)


def test_a_drafter_with_a_head_of_its_own(folder):
    """R17: a checkpoint that brings a head is no checkpoint of ours; it is not read with the target's head instead."""
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.ones(VOCAB, 32)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"ones the drafter does not know: lm_head\.weight"):
        CarryoverDrafter.from_pretrained(folder)


@pytest.mark.parametrize("eos", [61, [3, 61]], ids=str)
def test_mask_token_that_ends_texts(eos):
    """R21: pad or EOS in place of a mask token trains and serves without an error, and badly."""
    target = tiny_llama(eos_token_id=eos)
    drafter = tiny_drafter(target, mask_token_id=61)
    with pytest.raises(ValueError, match=r"`mask_token_id` 61 is an end token of the target"):
        check_fit(drafter, target)
    with pytest.raises(ValueError, match=r"`mask_token_id` 61 is an end token of the target"):
        assisted(target, prompt_ids(), drafter, max_new_tokens=4)
    check_fit(tiny_drafter(target, mask_token_id=60), target)
    assert tiny_drafter(target).mask_embedding is not None  # without a mask token it is learned


# Training and saving


def test_template_text_is_no_label_and_long_rows_are_counted(tmp_path):
    """R30: rows cut to nothing are counted, and not taken for a template without marks."""
    from hf_carryover.training.loading import load_recordings

    rows = random_rows([12, 9, 4])  # the last has a prompt and nothing else
    dataset, counts = load_recordings(rows, return_counts=True)
    assert (len(dataset), counts["empty_response"]) == (2, 1)
    trainer = make_trainer(tiny_target("llama"), tiny_drafter(tiny_target("llama")), tmp_path, rows)
    assert len(trainer.train_dataset) == 2


def test_documents_are_not_packed(tmp_path):
    """R31: one row is one document, whatever the batch: its loss is what it is alone, and its neighbour's too."""
    target = tiny_target("llama")
    losses = []
    rows = random_rows([14, 30])
    for part in (rows, rows[:1], rows[1:]):
        trainer = make_trainer(target, tiny_drafter(target), tmp_path, part)
        from training_helpers import make_batch

        losses.append(float(trainer.block_losses(trainer.drafter, make_batch(trainer))[0].detach().sum()))
    assert losses[0] == pytest.approx(losses[1] + losses[2], rel=1e-5)


LOAD = """
import sys
if sys.argv[2] == "hidden":
    sys.modules["hf_carryover"] = None
import torch
from transformers import AutoModel
drafter = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=sys.argv[2] == "hidden")
config = drafter.config
generator = torch.Generator().manual_seed(0)
features = torch.randn(1, 9, config.feature_size, generator=generator)
anchors = torch.randn(1, config.target_hidden_size, generator=generator)
with torch.no_grad():
    states = drafter(anchor_embeds=anchors, anchor_positions=torch.tensor([6]), features=features,
                     sequence_index=torch.tensor([0])).hidden_states
print(type(drafter).__module__.split(".")[0], states.flatten().tolist())
"""


@pytest.mark.slow
def test_a_checkpoint_of_training_loads_anywhere(tmp_path):
    """R37: `checkpoint-N` holds its own code: fresh processes with and without the package draft alike."""
    target = tiny_target("llama")
    rows = random_rows([14, 9])
    make_trainer(
        target, tiny_drafter(target), tmp_path / "run", rows, max_steps=1, save_strategy="steps", save_steps=1
    ).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert {"configuration_carryover.py", "modeling_carryover.py"} <= {path.name for path in checkpoint.iterdir()}
    seen = python("import hf_carryover" + LOAD, checkpoint, "seen", folder=tmp_path).splitlines()[-1].split(" ", 1)
    hidden = python(LOAD, checkpoint, "hidden", folder=tmp_path).splitlines()[-1].split(" ", 1)
    assert (seen[0], hidden[0]) == ("hf_carryover", "transformers_modules")
    assert seen[1] == hidden[1]


def test_a_card_names_no_path(tmp_path, monkeypatch):
    """R37: trained against a local target, a card names no base model; its metadata are valid, and it is short."""
    monkeypatch.chdir(tmp_path)
    tiny_target("llama").save_pretrained("out/target")
    target = type(tiny_target("llama")).from_pretrained("./out/target")
    trainer = make_trainer(target, tiny_drafter(target), tmp_path / "run", random_rows([9]), max_steps=1)
    trainer.train()
    trainer.state.log_history += [{"step": i, "block_loss": 1.0, "loss": 1.0} for i in range(2, 5001)]
    for place in ("./out/target", "out/target", str(tmp_path / "out" / "target"), "/target", "../target", "~/target"):
        target.config._name_or_path = place
        assert _name_of_target(trainer) is None
        trainer.create_model_card(finetuned_from=place)
        readme = Path(tmp_path, "run", "README.md")
        data = metadata_load(readme)
        assert "base_model" not in data and data["library_name"] == "hf_carryover"
        assert {"speculative-decoding", "carryover"} <= set(data["tags"])
        assert ModelCard.load(readme).data.to_dict() == data
        text = readme.read_text()
        assert "| carryover | 5000 |" in text and len(text) < 6000
        assert place not in text and str(tmp_path) not in text
    target.config._name_or_path = "owner/name"
    assert _name_of_target(trainer) == "owner/name"
    trainer.create_model_card(finetuned_from="owner/name")
    assert metadata_load(readme)["base_model"] == "owner/name"


@pytest.mark.parametrize("names", [{"base_model": "./out/target"}, {"datasets": ["owner/name", "/data/prompts"]}])
def test_a_path_in_place_of_a_name_is_refused(names):
    """R37: before anything is pushed."""
    key = next(iter(names))
    with pytest.raises(ValueError, match=rf"`{key}` must be a Hub id, such as 'owner/name', got '(\./out|/data)"):
        model_card(tiny_drafter(tiny_target("llama")), "owner/drafter", **names)


def test_an_edited_readme_survives(tmp_path):
    """R37: saving again leaves what a user wrote."""
    target = tiny_target("llama")
    trainer = make_trainer(target, tiny_drafter(target), tmp_path, random_rows([9]), max_steps=1)
    readme = Path(tmp_path, "README.md")
    readme.write_text("mine")
    trainer.save_model()
    trainer.drafter.save_pretrained(tmp_path)
    assert readme.read_text() == "mine"
