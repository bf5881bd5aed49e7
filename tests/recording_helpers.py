# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""A tiny chat model with its tokenizer, and a scripted engine, for the tests of prompts and recordings."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_carryover.training.recording import RecordingSettings, record_with_engine


SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|stop|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz \n0123456789?.,:<>/_{}\"'[]-+!"
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: the reasoning of earlier answers is removed when the conversation goes on.
THINKING = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
PROMPTS = [{"id": f"p{i}", "turns": ["a" * (1 + 3 * i % 7), "and then?"][: 1 + i % 2]} for i in range(7)]


def make_tokenizer(template=CHATML):
    vocab = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    assert len(vocab) <= 64
    characters = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|stop|>"],
        chat_template=template,
    )


def make_model():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3, generator=generator)
    return model


def save_target(folder):
    """Writes model and tokenizer; returns the folder's name."""
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def encode(text):
    return make_tokenizer()(text, add_special_tokens=False)["input_ids"]


class Script:
    """An engine that gives the answers of a script, turn by turn, and keeps what it was asked."""

    def __init__(self, *turns):
        self.turns, self.calls = list(turns), []

    def __call__(self, prompts, seeds):
        self.calls.append((prompts, seeds))
        return [encode(answer) for answer in self.turns[len(self.calls) - 1]]


def record(engine, tokenizer, prompts, folder, *, stops=(2,), context_length=None, **settings):
    settings = RecordingSettings(**{"max_new_tokens": 20, **settings})
    return record_with_engine(
        engine,
        tokenizer,
        prompts,
        folder,
        settings=settings,
        stop_token_ids=list(stops),
        context_length=context_length,
    )


def answers_of(tokenizer, row):
    """The marked runs, decoded."""
    texts, previous = [], 0
    for token, marked in zip(row["input_ids"], row["response_mask"]):
        if marked:
            texts = [*texts, []] if not previous else texts
            texts[-1].append(token)
        previous = marked
    return [tokenizer.decode(ids) for ids in texts]
