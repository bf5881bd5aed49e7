# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Acceptance length, speed and equality of several systems on the same prompts.

Systems take turns prompt by prompt, in rotating order, so that drift of the machine hits them alike. Prefill
(everything up to the first new token) is timed apart, by a streamer, the same way for every system. Greedy outputs are
compared with plain decoding as they come: in float32 any difference is a failure; in half precision a near tie of the
target is reported as such. Of a conversation, later turns go on from *plain* decoding's answers, so that all systems
see the same prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ..demo import compare_outputs, encode
from .journal import Journal
from .prompts import Item
from .systems import PLAIN, System


WARM_UP_TOKENS = 16


class Evaluation:
    """
    Runs systems on prompts.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase` or `None`): Its tokenizer; prompts of token ids need none.
        systems (`Sequence[System]`): What is compared with plain decoding, which comes with them.
        max_new_tokens (`int`): Length limit of an answer.
        max_turns (`int`, *optional*, defaults to 1): Turns of a conversation that are asked.
        temperature (`float`, *optional*, defaults to 0.0): 0 is greedy; otherwise the softmax is sampled as it is.

    Raises:
        ValueError: If two systems have one name, or one is called like plain decoding.
    """

    def __init__(
        self,
        target,
        tokenizer,
        systems: Sequence[System],
        max_new_tokens: int,
        max_turns: int = 1,
        temperature: float = 0.0,
    ):
        names = [PLAIN, *(system.name for system in systems)]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"Each system needs a name of its own, and {PLAIN!r} is plain decoding; got {repeated}.")
        self.target, self.tokenizer = target, tokenizer
        self.systems = {system.name: system for system in [System(PLAIN), *systems]}
        self.max_new_tokens, self.max_turns, self.temperature = max_new_tokens, max_turns, temperature
        self._warm = False

    def settings(self) -> dict:
        """What two records must share to be comparable, weights aside."""
        return {
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "device": self.target.device.type,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "systems": list(self.systems),
            "threads": torch.get_num_threads(),
        }

    def run(
        self,
        items: Sequence[Item],
        seeds: Sequence[int],
        journal: Journal,
        log: Callable[[str], None] = print,
        finished: Callable[[], None] = lambda: None,
        deadline: float | None = None,
    ) -> list[dict]:
        """
        Records of all items; those in the journal are taken from it, the others are added to it.

        Args:
            items (`Sequence[Item]`): The prompts.
            seeds (`Sequence[int]`): Of sampling; every prompt is asked once for each.
            journal ([`Journal`]): Finished records.
            log (`Callable`, *optional*): Called with a line about each new record.
            finished (`Callable`, *optional*): Called after every item.
            deadline (`float`, *optional*): Second of `time.perf_counter` after which no further item is begun.
        """
        records: list[dict] = []
        for item in items:
            if deadline is not None and records and time.perf_counter() > deadline:
                break
            for seed in seeds:
                records += self._run_item(item, seed, journal, log, shift=len(records))
            finished()
        return records

    def _run_item(self, item: Item, seed: int, journal: Journal, log, shift: int) -> list[dict]:
        """Records of all turns of one prompt."""
        records: list[dict] = []
        messages: list[dict] = []
        for turn in range(min(item.num_turns, self.max_turns)):
            inputs = self._inputs(item, turn, messages)
            head = {"set": item.set, "prompt": item.name, "turn": turn, "seed": seed}
            if journal.key(head) not in journal.records:
                systems = self._run_systems(inputs, seed, shift + turn)
                journal.add({**head, "prompt_tokens": inputs["input_ids"].shape[1], "systems": systems})
                log(progress(journal.records[journal.key(head)]))
            records.append(journal.records[journal.key(head)])
            if item.segments is not None:
                answer = records[-1]["systems"][PLAIN]["token_ids"]
                text = self.tokenizer.decode(answer, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
        return records

    def _inputs(self, item: Item, turn: int, messages: list[dict]) -> dict[str, torch.Tensor]:
        """Token ids and mask of the conversation so far; its next messages are appended to `messages`."""
        if item.segments is None:
            input_ids = torch.tensor([item.prompt_ids], device=self.target.device)
            return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        messages += item.segments[turn]
        return dict(encode(self.tokenizer, messages, item.tools, self.target.device))

    def _run_systems(self, inputs: dict, seed: int, shift: int) -> dict[str, dict]:
        """Numbers of all systems on one prompt, run in an order rotated by `shift`."""
        names = list(self.systems)
        if not self._warm:
            for name in names:
                self._generate(name, inputs, seed, min(WARM_UP_TOKENS, self.max_new_tokens))
            self._warm = True
        shift %= len(names)
        order = names[shift:] + names[:shift]
        numbers = {name: self._generate(name, inputs, seed, self.max_new_tokens) for name in order}
        plain = numbers[PLAIN]["token_ids"]
        for place, name in enumerate(order):
            numbers[name]["order"] = place
            if name != PLAIN and not self.temperature:
                tokens = numbers[name]["token_ids"]
                difference = compare_outputs(self.target, inputs["input_ids"], plain, tokens)
                numbers[name]["difference"] = None if difference is None else vars(difference)
        return {name: numbers[name] for name in names}

    def _generate(self, name: str, inputs: dict, seed: int, max_new_tokens: int) -> dict:
        """One system's numbers; on an accelerator the split of times comes from a call of its own."""
        system = self.systems[name]
        numbers = system.generate(self.target, inputs, max_new_tokens, self.temperature, seed)
        if system.drafter is not None and numbers["phases"] is None:
            numbers["phases"] = system.split(self.target, inputs, max_new_tokens)
        return numbers


def progress(record: dict) -> str:
    """One line about a finished prompt."""
    plain = record["systems"][PLAIN]
    parts = [f"{record['set']} {record['prompt']} turn {record['turn']}: {plain['new_tokens']} tokens"]
    for name, numbers in record["systems"].items():
        text = f"{name} {numbers['decode_ms'] / 1000:.1f} s"
        if numbers.get("rounds"):
            text += f" τ {sum(numbers['committed']) / numbers['rounds']:.2f}"
        difference = numbers.get("difference")
        if difference is not None:
            kind = "near tie" if difference["near_tie"] else "DIFFERENT"
            text += f" ({kind} at {difference['position']}, margin {difference['margin']})"
        parts.append(text)
    return ", ".join(parts)


def failures(records: list[dict]) -> list[str]:
    """Greedy outputs that differ from plain decoding and are no near tie."""
    return [
        f"{record['set']} {record['prompt']} turn {record['turn']}, {name}: "
        f"position {numbers['difference']['position']}, margin {numbers['difference']['margin']}"
        for record in records
        for name, numbers in record["systems"].items()
        if numbers.get("difference") is not None and not numbers["difference"]["near_tie"]
    ]


__all__ = ["Evaluation", "failures", "progress"]
