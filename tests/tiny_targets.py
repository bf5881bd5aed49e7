"""
Tiny targets of many architectures, and drafters whose proposals follow a script.

Every model is drawn wide (`spread`), so greedy choices are not ties, and has windows smaller than the texts generated.
"""

import functools
import itertools

import pytest
import torch
import transformers
from conftest import VOCAB, spread, tiny_drafter, tiny_llama
from transformers.generation.streamers import BaseStreamer


PROMPT_LENGTH = 12
WINDOW = 8  # of every sliding-window target: smaller than prompt, text and largest block


def prompt_ids(length: int = PROMPT_LENGTH, seed: int = 3) -> torch.LongTensor:
    """A prompt `(1, length)` of ids that are no special tokens."""
    return torch.randint(2, 60, (1, length), generator=torch.Generator().manual_seed(seed))


_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def build(name: str, std: float = 0.3, **values):
    """A target of the architecture whose classes start with `name`."""
    config_class = getattr(transformers, f"{name}Config")
    heads = {"GPT2": "GPT2LMHeadModel"}
    model_class = getattr(transformers, heads.get(name, f"{name.removesuffix('Text')}ForCausalLM"))
    torch.manual_seed(0)
    return spread(model_class(config_class(**{**_COMMON, **values})), std=std)


def _lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(tiny_llama(), config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.mul_(4)  # wide enough that the adapted model writes another text
    return model


_GEMMA4 = {
    "layer_types": _MIXED,
    "sliding_window": WINDOW,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 3.0,
    "per_layer_config": None,
}
_BUILDERS = {
    "llama": tiny_llama,
    "qwen3": functools.partial(build, "Qwen3", head_dim=8),
    "mistral": functools.partial(build, "Mistral", sliding_window=WINDOW),
    "gemma3": functools.partial(build, "Gemma3Text", sliding_window=WINDOW, layer_types=_MIXED, head_dim=8),
    "gemma4": functools.partial(build, "Gemma4Text", **_GEMMA4),
    "mixtral": functools.partial(build, "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": functools.partial(build, "GPTNeoX"),
    "gpt2": functools.partial(build, "GPT2", n_positions=256),
    "lora": _lora,
}
TARGETS = list(_BUILDERS)


def counting_target(scale: float = 5.0):
    """
    A Llama whose likeliest next token is `(t + 1) mod 64`, and a certain one from a `scale` of about 5 on: its layers
    add nothing, its head reads the embedding.
    """
    model = tiny_llama(hidden_size=32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.nn.functional.normalize(
            torch.randn((64, 32), generator=torch.Generator().manual_seed(0)), dim=-1
        )
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(embedding.roll(1, dims=0) * scale)
    return model


@functools.cache
def tiny_target(name: str):
    """The target called `name`, built once; tests must not change it."""
    return _BUILDERS[name]()


def plain(target, ids, **options):
    """Plain greedy decoding, the reference of every lossless test."""
    return target.generate(ids, **{"do_sample": False, **options})


def assisted(target, ids, drafter, **options):
    """Greedy decoding with the drafter, through plain `generate`."""
    return target.generate(ids, assistant_model=drafter, **{"do_sample": False, **options})


def record_proposals(drafter, monkeypatch) -> list[list[int]]:
    """A list that grows by the proposals of each round, from now on."""
    from hf_carryover.generation import CarryoverCandidateGenerator
    from hf_carryover.target import unwrap_target

    rounds: list[list[int]] = []
    original = CarryoverCandidateGenerator._propose

    def _propose(self, input_ids, limit):
        candidates, logits = original(self, input_ids, limit)
        if self.drafter is unwrap_target(drafter):  # PEFT may have wrapped it
            rounds.append(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, logits

    monkeypatch.setattr(CarryoverCandidateGenerator, "_propose", _propose)
    return rounds


def follow_script(drafter, text: torch.LongTensor, correct):
    """
    Make `drafter` propose `text` `(1, length)`, the target's own, for the first `correct` tokens of a round and a
    wrong one then. Storage, layers and carried rows run as always; only the logits are replaced.

    Args:
        correct (`int` or iterable of `int`): Right proposals per round; an iterable is repeated.
    """
    plan = itertools.cycle([correct] if isinstance(correct, int) else list(correct))
    original, anchor = drafter.draft, {}

    def draft(cache, anchor_embeds, mask_embeds):
        anchor["position"] = cache.first_position + cache.committed
        return original(cache, anchor_embeds, mask_embeds)

    def logits(hidden_states, head_weight, head_bias=None, previous_ids=None):
        rows, right = hidden_states.shape[0], next(plan)
        scores = torch.zeros(rows, drafter.config.output_vocab_size)
        for k in range(rows):
            place = anchor["position"] + 1 + k
            token = int(text[0, place]) if place < text.shape[1] else 1
            scores[k, token if k < right else (token + 1) % VOCAB] = 1e4
        return scores

    drafter.draft, drafter.logits = draft, logits
    return drafter


def count_forwards(target, monkeypatch) -> list[int]:
    """A list that grows by the number of rows of each forward pass of `target`, from now on."""
    rows: list[int] = []
    inner = target.get_base_model() if hasattr(target, "get_base_model") else target
    original = inner.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        rows.append(0 if ids is None else ids.shape[1])
        return original(*args, **kwargs)

    monkeypatch.setattr(inner, "forward", forward)
    return rows


class Recorder(BaseStreamer):
    """Keeps what a streamer is given."""

    def __init__(self):
        self.ids: list[int] = []
        self.ended = 0

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        self.ended += 1


def pairwise(*factors: list) -> list[tuple]:
    """A small selection of the full product in which every pair of values of two factors occurs."""
    everything = list(itertools.product(*factors))

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, everything))
    chosen = []
    while missing:
        best = max(everything, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


__all__ = [
    "PROMPT_LENGTH",
    "TARGETS",
    "VOCAB",
    "WINDOW",
    "Recorder",
    "assisted",
    "build",
    "count_forwards",
    "counting_target",
    "follow_script",
    "pairwise",
    "plain",
    "prompt_ids",
    "record_proposals",
    "tiny_drafter",
    "tiny_llama",
    "tiny_target",
]
