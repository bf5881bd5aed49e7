"""Records and a tokenizer for the tests of the benchmark."""

import torch


def bench_record(set_name, prompt, plain, turn=0, seed=0, **systems):
    """A journal record; `plain` is (new tokens, decode ms), a drafter (committed per round, decode ms)."""
    new_tokens, decode_ms = plain
    common = {"new_tokens": new_tokens, "prefill_ms": 5.0, "order": 0, "token_ids": list(range(new_tokens))}
    numbers = {"plain": {**common, "decode_ms": decode_ms, "wall_ms": decode_ms + 5.0}}
    for name, (committed, milliseconds) in systems.items():
        numbers[name] = {
            **common,
            "decode_ms": milliseconds,
            "wall_ms": milliseconds + 5.0,
            "rounds": len(committed),
            "proposed": [3] * len(committed),
            "accepted": [tokens - 1 for tokens in committed],
            "committed": committed,
            "carried": [4 - tokens for tokens in committed],
            "acceptance": [],
            "draft_ms": 2.0 * len(committed),
            "target_ms": 8.0 * len(committed),
            "difference": None,
        }
    return {"set": set_name, "prompt": prompt, "turn": turn, "seed": seed, "prompt_tokens": 7, "systems": numbers}


class Words:
    """A tokenizer as far as the benchmark needs one: a message is the digits in it."""

    chat_template = "tools"

    def apply_chat_template(self, messages, **kwargs):
        from transformers import BatchEncoding

        ids = [int(word) for message in messages for word in message["content"].split()]
        tokens = torch.tensor([ids])
        return BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})

    def decode(self, ids, **kwargs):
        return " ".join(str(token) for token in ids)
