"""What can't work with a drafter is refused before the target's first pass, with the values and the way out."""

import pytest
import torch
from tiny_targets import assisted, count_forwards, plain, prompt_ids, tiny_drafter, tiny_llama, tiny_target
from transformers import (
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_carryover import check_fit
from hf_carryover.target import unwrap_target


def wrong_drafter(**kwargs):
    """A drafter of another target."""
    return tiny_drafter(tiny_llama(**kwargs), num_hidden_layers=1)


MISFITS = {
    "vocabulary": ({"vocab_size": 80}, r"`vocab_size` is 80, the target has 64"),
    "hidden_size": ({"hidden_size": 48, "head_dim": 8}, r"`target_hidden_size` is 48, the target has 32"),
    "layers": ({"num_hidden_layers": 6}, r"`num_target_layers` is 6, the target has 4"),
}


@pytest.mark.compat
@pytest.mark.parametrize(("kwargs", "message"), MISFITS.values(), ids=MISFITS)
def test_drafter_of_another_target(kwargs, message, monkeypatch):
    target = tiny_llama()
    forwards = count_forwards(target, monkeypatch)
    drafter = wrong_drafter(**kwargs)
    with pytest.raises(ValueError, match=message):
        assisted(target, prompt_ids(), drafter, max_new_tokens=4)
    assert forwards == []


def test_mask_token_behind_the_embedding(monkeypatch):
    target = tiny_llama()
    drafter = tiny_drafter(target, mask_token_id=63)
    target.model.embed_tokens = torch.nn.Embedding(60, 32)
    forwards = count_forwards(target, monkeypatch)
    with pytest.raises(ValueError, match=r"`mask_token_id` 63 is outside the target's embedding of 60 rows"):
        assisted(target, prompt_ids(), drafter, max_new_tokens=4)
    assert forwards == []


def test_head_with_another_number_of_rows(monkeypatch):
    target = tiny_llama()
    drafter = tiny_drafter(target)
    target.lm_head = torch.nn.Linear(32, 72, bias=False)
    forwards = count_forwards(target, monkeypatch)
    with pytest.raises(ValueError, match=r"head has 72 rows, .* `vocab_size` is 64"):
        assisted(target, prompt_ids(), drafter, max_new_tokens=4)
    target.lm_head = torch.nn.Linear(24, 64, bias=False)
    with pytest.raises(ValueError, match=r"head reads states of width 24, the drafter produces 32"):
        assisted(target, prompt_ids(), drafter, max_new_tokens=4)
    assert forwards == []


def test_target_without_a_head():
    with pytest.raises(ValueError, match=r"LlamaModel has no output head with a weight"):
        check_fit(tiny_drafter(tiny_target("llama")), tiny_target("llama").model)


def test_encoder_decoder_target():
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4, decoder_start_token_id=0)
    target = T5ForConditionalGeneration(config).eval()
    passes = []
    target.encoder.register_forward_pre_hook(lambda *_: passes.append("encoder"))
    with pytest.raises(ValueError, match=r"decoder-only target, got T5ForConditionalGeneration"):
        assisted(target, prompt_ids(), tiny_drafter(tiny_target("llama")), max_new_tokens=4)
    assert passes == []


class Tokenizer:
    """Stands for a tokenizer in calls that are refused before it is used."""


def embeds():
    return tiny_target("llama").get_input_embeddings()(prompt_ids())


REFUSED = {
    "return_sequences": ({"num_return_sequences": 3, "do_sample": True}, r"num_return_sequences has to be 1 .* 3"),
    "inputs_embeds": ({"input_ids": None, "inputs_embeds": embeds}, r"`inputs_embeds` is not supported"),
    "ids_and_embeds": ({"inputs_embeds": embeds}, r"`inputs_embeds` is not supported"),
    "beams": ({"num_beams": 2}, r"works with greedy search and sampling, not with 'beam_search'"),
    "prompt_lookup": ({"prompt_lookup_num_tokens": 3}, r"`prompt_lookup_num_tokens` \(3\) chooses another way"),
    "speculation_type": ({"speculation_type": "dflash"}, r"`speculation_type` \('dflash'\) chooses another way"),
    "early_exit": ({"assistant_early_exit": 2}, r"`assistant_early_exit` \(2\) chooses another way"),
    "assistant_tokenizer": (
        {"tokenizer": Tokenizer(), "assistant_tokenizer": Tokenizer()},
        r"`assistant_tokenizer` has no use here",
    ),
    "guidance": ({"guidance_scale": 1.5}, r"`guidance_scale` is not supported with a Carryover drafter: Unbatched"),
    "synthid": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3), "do_sample": True},
        r"`watermarking_config \(SynthID\)` is not supported",
    ),
    "attentions": (
        {"output_attentions": True, "return_dict_in_generate": True},
        r"`output_attentions` needs a target with `attn_implementation='eager'` here, got 'sdpa'",
    ),
    "no_cache": ({"use_cache": False}, r"requires `use_cache=True`"),
    "static_cache": ({"cache_implementation": "static"}, r"not supported with Static cache"),
    "proposals": ({"num_assistant_tokens": -1}, r"`num_assistant_tokens` must be at least 1, got -1"),
}


@pytest.mark.compat
@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_option_is_refused_by_name(options, message, monkeypatch):
    """R12 among them: several sequences and embeddings."""
    target = tiny_llama()
    options = {key: value() if value is embeds else value for key, value in options.items()}
    options = {"input_ids": prompt_ids(), "do_sample": False, "max_new_tokens": 4, **options}
    drafter = tiny_drafter(target)
    forwards = count_forwards(target, monkeypatch)
    with pytest.raises(ValueError, match=message):
        target.generate(assistant_model=drafter, **options)
    assert forwards == []


def test_stateful_target(monkeypatch):
    """R5: the library's own guard is not bypassed."""
    target = tiny_llama()
    monkeypatch.setattr(type(target), "_is_stateful", True)
    forwards = count_forwards(target, monkeypatch)
    with pytest.raises(ValueError, match=r"not supported with stateful models, such as LlamaForCausalLM"):
        assisted(target, prompt_ids(), tiny_drafter(target), max_new_tokens=4)
    assert forwards == []


def test_prompt_learning_adapter(monkeypatch):
    """PEFT's prompt tuning cuts every pass to one token, whatever the loop feeds: silently wrong, so refused."""
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    target = peft.get_peft_model(tiny_llama(), config).eval()
    drafter = tiny_drafter(target)
    assert unwrap_target(target).config.num_hidden_layers == 4
    forwards = count_forwards(target, monkeypatch)
    with pytest.raises(ValueError, match=r"prompt learning \(PromptTuningConfig\) is not supported"):
        target.generate(input_ids=prompt_ids(), do_sample=False, max_new_tokens=4, assistant_model=drafter)
    assert forwards == []
    got = target.generate(input_ids=prompt_ids(), do_sample=False, max_new_tokens=4)
    assert got.shape[1] == prompt_ids().shape[1] + 4


def test_target_that_returns_no_hidden_states(monkeypatch):
    target = tiny_llama()
    original = target.forward

    def forward(*args, output_hidden_states=None, **kwargs):
        return original(*args, **kwargs)

    drafter = tiny_drafter(target)
    monkeypatch.setattr(target, "forward", forward)
    with pytest.raises(ValueError, match=r"needs a target whose forward supports `output_hidden_states`"):
        assisted(target, prompt_ids(), drafter, max_new_tokens=4)


def test_refusal_leaves_nothing_behind():
    target = tiny_llama()
    drafter = tiny_drafter(target)
    with pytest.raises(ValueError, match="works with greedy search and sampling"):
        assisted(target, prompt_ids(), drafter, max_new_tokens=4, num_beams=2)
    assert drafter.last_report is None
    want = plain(target, prompt_ids(), max_new_tokens=8)
    assert assisted(target, prompt_ids(), drafter, max_new_tokens=8).tolist() == want.tolist()
