# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
What a benchmark compares: plain decoding, Carryover drafters, and the peers that transformers has of its own.

Tokens per verification round are counted for all of them alike, from what `generate` streams.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..demo_report import PLAIN
from ..modeling_carryover import CarryoverDrafter
from ..timing import split_times


PROMPT_LOOKUP_TOKENS = 10


class RoundStreamer(BaseStreamer):
    """
    Notes when tokens arrive, and how many at a time.

    Attributes:
        first_token_at (`float`, *optional*): Second of `time.perf_counter` at which the first new token came.
        committed (`list[int]`): Tokens of each round after the one that the prompt was read in.
    """

    def __init__(self):
        self.first_token_at: float | None = None
        self.committed: list[int] = []
        self._prompt_seen = False

    def put(self, value):
        if not self._prompt_seen:  # `generate` first puts the prompt
            self._prompt_seen = True
        elif self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        else:
            self.committed.append(value.numel())

    def end(self):
        pass


@dataclass
class System:
    """
    One way to decode.

    Args:
        name (`str`): In reports.
        drafter ([`CarryoverDrafter`], *optional*): If it is one of ours.
        arguments (`dict`, *optional*): What else goes to `generate`.
    """

    name: str
    drafter: CarryoverDrafter | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def generate(self, target, inputs: dict, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> dict:
        """
        One call of `target.generate`.

        Args:
            target (`PreTrainedModel`): The target.
            inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask` of one prompt.
            max_new_tokens (`int`): Length limit.
            temperature (`float`, *optional*, defaults to 0.0): 0 is greedy; else the softmax is sampled as it is.
            seed (`int`, *optional*, defaults to 0): Of sampling.

        Returns:
            `dict`: `token_ids`, `new_tokens`; milliseconds `prefill_ms` (until the first new token), `decode_ms`,
            `wall_ms`; but for plain decoding `rounds` and `committed` per round; and for our drafters
            [`report_numbers`].
        """
        arguments = {**self.arguments, "do_sample": temperature > 0, "max_new_tokens": max_new_tokens}
        if temperature > 0:
            arguments |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(seed)
        if self.drafter is not None:
            arguments["assistant_model"] = self.drafter
        clock = RoundStreamer()
        # On a CPU splitting costs nothing; on an accelerator it waits at every step, see `split`.
        splitting = self.drafter is not None and target.device.type == "cpu"
        with split_times(target) if splitting else contextlib.nullcontext():
            start = self._now(target)
            output = target.generate(**inputs, **arguments, streamer=clock)
            end = self._now(target)
        tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
        first = end if clock.first_token_at is None else clock.first_token_at
        numbers = {
            "new_tokens": len(tokens),
            "prefill_ms": 1000 * (first - start),
            "decode_ms": 1000 * (end - first),
            "wall_ms": 1000 * (end - start),
            "token_ids": tokens,
        }
        if self.drafter is not None:
            return numbers | report_numbers(self.drafter.last_report)
        if self.name == PLAIN:
            return numbers
        return numbers | {"rounds": len(clock.committed), "committed": clock.committed}

    def split(self, target, inputs: dict, max_new_tokens: int) -> dict[str, float]:
        """The times of [`split_times`] of one greedy call of its own, for an accelerator."""
        with split_times(target):
            target.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                assistant_model=self.drafter,
                **self.arguments,
            )
        return dict(self.drafter.last_report.phases)

    @staticmethod
    def _now(target) -> float:
        if target.device.type != "cpu":
            torch.accelerator.synchronize(target.device)
        return time.perf_counter()


def report_numbers(report) -> dict:
    """A [`GenerationReport`] as plain numbers; the lists have one entry a round."""
    return {
        "rounds": report.rounds,
        "proposed": report.proposed,
        "accepted": report.accepted,
        "committed": report.committed,
        # The last draft may have been made for a round that was never verified.
        "carried": report.carried[: report.rounds],
        "acceptance": [None if rate != rate else rate for rate in report.acceptance],
        "draft_ms": report.draft_ms,
        "target_ms": report.target_ms,
        "phases": None if report.phases is None else dict(report.phases),
    }


def peer(text: str, target: PreTrainedModel, drafters: dict[str, CarryoverDrafter]) -> System:
    """
    A peer of transformers' own, by the word that asks for it.

    Args:
        text (`str`):
            `"prompt_lookup"` or `"prompt_lookup:TOKENS"`; `"assistant:DIR"`, a small model of the same vocabulary;
            `"dflash:NAME"`, transformers' DFlash generator with the weights of drafter `NAME`.
        target (`PreTrainedModel`): The target.
        drafters (`dict[str, CarryoverDrafter]`): Ours by name.

    Raises:
        ValueError: If the word is none of these, or the drafter is one that transformers' generator can't run.
    """
    kind, _, value = text.partition(":")
    if kind == "prompt_lookup":
        if value and not (value.isdigit() and int(value)):
            raise ValueError(f"prompt_lookup takes a number of tokens, got {value!r}.")
        return System(text, arguments={"prompt_lookup_num_tokens": int(value or PROMPT_LOOKUP_TOKENS)})
    if kind == "assistant" and value:
        model = AutoModelForCausalLM.from_pretrained(value, dtype=target.dtype).to(target.device).eval()
        return System("assistant", arguments={"assistant_model": model})
    if kind == "dflash" and value:
        if value not in drafters:
            raise ValueError(f"dflash:{value} names no drafter, expected one of {sorted(drafters)}.")
        twin = transformers_dflash(drafters[value])
        return System(text, arguments={"assistant_model": twin, "speculation_type": "dflash"})
    raise ValueError(f"Unknown peer {text!r}, expected prompt_lookup[:TOKENS], assistant:DIR or dflash:NAME.")


def transformers_dflash(drafter: CarryoverDrafter) -> PreTrainedModel:
    """
    A drafter's weights as transformers' own DFlash assistant, for `generate(..., speculation_type="dflash")`. A carry
    embedding is left out: that generator carries nothing.

    Raises:
        ValueError: If the drafter has what that generator lacks: a Markov head, a reduced vocabulary, a learned mask
            or a width of its own.
    """
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig
    from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

    config = drafter.config
    lacking = {
        "a Markov head": drafter.markov_head is not None,
        "a reduced draft vocabulary": config.draft_vocab_size is not None,
        "a learned mask embedding": config.mask_token_id is None,
        "a width of its own": config.hidden_size != config.target_hidden_size,
        "blocks that predict from the anchor row": config.anchor_first,
        "a causal block": config.block_attention != "bidirectional",
        "a head of its own": config.own_head,
        "scaled or capped logits": config.logit_scale != 1.0 or config.logit_softcapping is not None,
        "scaled embeddings": config.embedding_scale is not None,
    }
    problems = [name for name, there in lacking.items() if there]
    if problems:
        raise ValueError(
            f"transformers' DFlash generator can't run this drafter: it has {', '.join(problems)}. Compare it with a "
            "drafter of plain DFlash form (`markov_rank=0`, `draft_vocab_size=None`, a `mask_token_id`)."
        )
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types", "hidden_act",
        "mask_token_id",
    )  # fmt: skip
    twin = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: getattr(config, name) for name in names},
            block_size=config.block_size + 1,  # the anchor row counts there
            # Up to 5.22 its generator reads `hidden_states[k]`, then `hidden_states[k + 1]`. What a target returns for
            # a list of layers moved along with it: id k is the output of decoder layer k in all versions.
            target_layer_ids=config.target_layer_ids,
        )
    )
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    state = {renamed.get(k, k): v for k, v in drafter.state_dict().items() if not k.startswith("carry_")}
    twin.load_state_dict(state)
    return twin.to(drafter.device, drafter.dtype).eval()


__all__ = ["PLAIN", "RoundStreamer", "System", "peer", "report_numbers", "transformers_dflash"]
