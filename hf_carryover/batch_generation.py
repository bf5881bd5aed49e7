# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Assisted decoding of several sequences at once, each with its own acceptance.

transformers' assisted loop takes one sequence. Here every sequence keeps its own length: a round verifies one block of
each in one pass of the target, commits of each what was accepted of it, and leaves the rest out by the attention mask.
The target's cache thus gets holes, which are closed by moving the kept columns together when they are many (with a
sliding window at once, since masks count columns there). Sequences that ended leave the batch.

Greedy output equals that of single runs, up to the rounding that any batch brings; sampling keeps the target's
distribution, sequence by sequence.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, _speculative_sampling

from .batch_cache import BatchCache
from .generation import CarryoverCandidateGenerator, GenerationReport, cached_tokens
from .lookup import carried_hints, lookup_hints
from .modeling_carryover import CarryoverDrafter
from .proposals import argmax_proposals, confident_proposals
from .target import gather_features, text_config


# Share of the target's cached columns that may be holes before they are closed.
MAX_HOLES = 0.25
# Processors that count from the start of the padded prompt, and where they keep the count.
_COUNTING = {
    ExponentialDecayLengthPenalty: "regulation_start",
    ForcedEOSTokenLogitsProcessor: "max_length",
    MinLengthLogitsProcessor: "min_length",
    MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    SuppressTokensAtBeginLogitsProcessor: "begin_index",
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def refuse_batch(target: PreTrainedModel, input_ids: torch.LongTensor, kwargs: dict) -> None:
    """
    Raise a `ValueError` for what works with one sequence but not with several, naming it and the way out.

    Args:
        target (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): The prompts.
        kwargs (`dict`): What the decoding loop was called with.
    """
    config: GenerationConfig = kwargs["generation_config"]
    processors = kwargs.get("logits_processor") or []
    text = text_config(target)
    known = set(inspect.signature(target.forward).parameters)
    reasons = {
        "a streamer": kwargs.get("streamer") is not None,
        "continued `past_key_values`": cached_tokens(kwargs) > 0,
        "`assistant_ensemble_weight`": config.assistant_ensemble_weight is not None,
        "`prefix_allowed_tokens_fn`": any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in processors),
        "synced GPUs": bool(kwargs.get("synced_gpus")),
        "a target that takes no `position_ids`": "position_ids" not in known,
        "chunked attention": getattr(text, "attention_chunk_size", None) is not None,
        **{f"`{name}`": config.return_dict_in_generate and getattr(config, name) for name in _OUTPUTS},
    }
    problems = [name for name, there in reasons.items() if there]
    if problems:
        raise ValueError(
            f"A Carryover drafter does not support {', '.join(problems)} for a batch of {input_ids.shape[0]} "
            "sequences. Call `generate` once per prompt."
        )


def unpadded(processors: LogitsProcessorList, padding: int) -> LogitsProcessorList:
    """
    The processors of one sequence that is shown without its padding: those that count tokens count `padding` less, and
    the repetition penalty, which is told each row's padding, has none to leave out. Limits in total length thus count
    the padding, as in plain decoding of a batch.
    """
    own = LogitsProcessorList()
    for processor in processors:
        name = _COUNTING.get(type(processor))
        if name is not None or isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
            processor = copy.copy(processor)
        if name is not None:
            setattr(processor, name, getattr(processor, name) - padding)
        elif isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
            processor.prompt_ignore_length = None
        own.append(processor)
    return own


class _Sequence:
    """One sequence of the batch: its own tokens, without padding, its processors and its report."""

    def __init__(self, row: int, prompt: list[int], budget: int, processors: LogitsProcessorList):
        self.row, self.ids, self.prompt_length, self.budget = row, prompt, len(prompt), budget
        self.processors = processors
        self.report = GenerationReport()
        self.finished = False

    @property
    def left(self) -> int:
        """New tokens it may still get."""
        return self.budget - (len(self.ids) - self.prompt_length)

    def tensor(self, device, proposals: Sequence[int] = ()) -> torch.LongTensor:
        return torch.tensor([[*self.ids, *proposals]], device=device)


class TargetCache:
    """
    The target's keys and values of a batch of ragged sequences.

    Attributes:
        mask (`torch.LongTensor` of shape `(batch_size, columns)`): 1 for columns that belong to the sequence.
    """

    def __init__(self, target: PreTrainedModel, mask: torch.LongTensor):
        # Not the layers of the target's configuration: those of a sliding window drop columns by number.
        self.cache = DynamicCache()
        self.mask = mask
        self.tight = getattr(text_config(target), "sliding_window", None) is not None

    def keep(self, first: int, counts: torch.LongTensor) -> None:
        """Of the columns from `first` on, keep each sequence's leading `counts` `(batch_size,)`."""
        width = int(counts.max())
        new = torch.arange(width, device=self.mask.device) < counts.unsqueeze(1)
        self.mask = torch.cat([self.mask[:, :first], new.to(self.mask.dtype)], dim=1)
        self._replace(lambda states: states[:, :, : first + width])
        longest = int(self.mask.sum(dim=1).max())
        if self.tight or self.mask.shape[1] - longest > MAX_HOLES * self.mask.shape[1]:
            self._close(longest)

    def _close(self, columns: int) -> None:
        """Move the columns of every sequence together, in order, to the right end of `columns`."""
        order = self.mask.argsort(dim=1, stable=True)[:, -columns:]  # holes first
        self.mask = self.mask.gather(1, order)

        def gather(states: torch.Tensor) -> torch.Tensor:
            index = order.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            return states.gather(2, index)

        self._replace(gather)

    def select(self, rows: torch.LongTensor) -> None:
        """Keep the sequences `rows`."""
        self.mask = self.mask[rows]
        self._replace(lambda states: states[rows.to(states.device)])

    def _replace(self, change) -> None:
        for layer in self.cache.layers:
            layer.keys, layer.values = change(layer.keys), change(layer.values)


class BatchDecoding:
    """
    One call of `generate` over a batch.

    Args:
        target (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): Prompts, padded on the left.
        drafter ([`CarryoverDrafter`]): The drafter.
        generation_config (`GenerationConfig`), logits_processor (`LogitsProcessorList`), stopping_criteria
            (`StoppingCriteriaList`): As `generate` prepared them.
        attention_mask (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*): 0 for padding.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        input_ids: torch.LongTensor,
        drafter: CarryoverDrafter,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        attention_mask: torch.Tensor | None = None,
        keep_logits: bool = True,
    ):
        self.target, self.drafter, self.config = target, drafter, generation_config
        self.prompts = input_ids
        self.device = input_ids.device
        # Drafting rules, head and processors are those of a single sequence.
        self.generator = CarryoverCandidateGenerator(target, drafter, generation_config, logits_processor)
        self.keep_logits = {"logits_to_keep": 1} if keep_logits else {}
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(torch.long)
        if bool((mask[:, -1] == 0).any()):
            raise ValueError(
                "The prompts are padded on the right, generation goes on behind the last token: pad on the left "
                '(`tokenizer.padding_side = "left"`).'
            )
        self.cache = TargetCache(target, mask)
        budget = generation_config.max_length - input_ids.shape[1]
        rows = [ids[real].tolist() for ids, real in zip(input_ids, mask.bool())]
        self.sequences = [
            _Sequence(i, ids, budget, unpadded(logits_processor, input_ids.shape[1] - len(ids)))
            for i, ids in enumerate(rows)
        ]
        self.pointed: dict = {}  # what the drafter points at of the last round
        self.drafts = BatchCache(drafter, len(rows), capacity=input_ids.shape[1] + 4 * drafter.config.block_rows)
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.eos = set() if eos is None else set(eos.flatten().tolist())
        own = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
        self.criteria = [criterion for criterion in stopping_criteria if type(criterion) not in own]
        self.deadlines = [criterion for criterion in stopping_criteria if type(criterion) is MaxTimeCriteria]

    @torch.no_grad()
    def run(self) -> torch.LongTensor:
        """All rounds; returns `(batch_size, longest)` ids, padded on the right behind sequences that ended early."""
        active = list(self.sequences)
        started = time.perf_counter()
        outputs = self._prefill()
        features = self._features(outputs)
        counts = torch.tensor([len(sequence.ids) for sequence in active], device=self.drafter.device)
        self.drafts.commit_window(features, features.shape[1] - counts, counts, counts)
        for row, sequence in enumerate(active):
            self._commit(sequence, [], outputs.logits[row, -1:].float().to(self.device))
            sequence.report.prefill_ms = 1000 * (time.perf_counter() - started)
        # The last token committed is the anchor, whose states nobody has yet.
        active = self._drop_finished(active)
        while active and not self._out_of_time():
            active = self._round(active)
        return self._collect()

    def _prefill(self):
        mask = self.cache.mask
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return self._forward(self.prompts, positions, self.keep_logits)

    def _forward(self, input_ids, position_ids, extra=None):
        return self.target(
            input_ids=input_ids.to(self.target.device),
            attention_mask=self.cache.mask.to(self.target.device),
            position_ids=position_ids.to(self.target.device),
            past_key_values=self.cache.cache,
            use_cache=True,
            output_hidden_states=self.generator.output_hidden_states,
            return_dict=True,
            **(extra or {}),
        )

    def _features(self, outputs) -> torch.Tensor:
        return gather_features(outputs.hidden_states, self.drafter.config.target_layer_ids, self.drafter.device)

    def _round(self, active: list[_Sequence]) -> list[_Sequence]:
        """Draft, verify, commit; returns the sequences that go on."""
        start = time.perf_counter()
        proposals, logits = self._propose(active)
        drafted = time.perf_counter()
        rows = [1 + len(block) for block in proposals]
        width, first = max(rows), self.cache.mask.shape[1]
        block = torch.tensor([[s.ids[-1], *y, *[0] * (width - 1 - len(y))] for s, y in zip(active, proposals)])
        count = torch.tensor(rows, device=self.device)
        place = torch.arange(width, device=self.device)
        last = torch.tensor([len(s.ids) - 1 for s in active], device=self.device)
        real = (place < count.unsqueeze(1)).to(self.cache.mask.dtype)
        self.cache.mask = torch.cat([self.cache.mask, real], dim=1)
        outputs = self._forward(block.to(self.device), last.unsqueeze(1) + place * real)
        carried = self.drafts.carried.tolist()
        committed = []
        for row, sequence in enumerate(active):
            new_logits = outputs.logits[row, : rows[row]].float().to(self.device)
            committed.append(self._commit(sequence, proposals[row], new_logits, logits[row]))
            sequence.report.carried.append(carried[row])
        kept = torch.tensor(committed, device=self.device)
        self.cache.keep(first, kept)
        embeds = self._carried_embeds(proposals, outputs, width)
        if self.drafter.config.points_at_carried:
            predictions = outputs.logits.argmax(dim=-1).to(self.device)
            self.pointed = carried_hints(self.generator.head, self.drafter, predictions, kept, count)
        move = self.drafter.device
        self.drafts.commit_window(
            self._features(outputs), torch.zeros_like(kept, device=move), count.to(move), kept.to(move), embeds
        )
        end = time.perf_counter()
        for sequence in active:
            sequence.report.draft_times.append(1000 * (drafted - start))
            sequence.report.target_times.append(1000 * (end - drafted))
        return self._drop_finished(active)

    def _propose(self, active: list[_Sequence]) -> tuple[list[list[int]], list[torch.Tensor | None]]:
        """Proposals of every sequence, no more than it can use, and the logits they were drawn from when sampling."""
        generator, head, drafter = self.generator, self.generator.head, self.drafter
        limits = []
        for sequence in active:
            limit = min(generator.num_proposals, sequence.left - 1)
            limits.append(max(0, generator.position_limit.clip(limit, anchor=len(sequence.ids) - 1)))
        anchor_ids = torch.tensor([s.ids[-1] for s in active], device=self.device)
        anchors = head.embed(anchor_ids, drafter.device)
        hidden = self.drafts.draft(anchors, head.mask_embeds, **self._hints(active))[:, : max(limits)]
        if not max(limits):
            return [[] for _ in active], [None] * len(active)
        base = drafter.logits(hidden.to(head.weight.device), head.weight, head.bias).float()
        if generator.needs_logits or generator.logits_processor:
            return self._draw_processed(active, base, limits)
        drawn = argmax_proposals(drafter, base, anchor_ids, head.token_ids)
        if generator.confidence_threshold is not None:
            sure = confident_proposals(drafter, base, drawn, anchor_ids, generator.confidence_threshold)
            limits = [min(pair) for pair in zip(limits, sure.tolist())]
        drawn = drawn.tolist()
        return [tokens[:limit] for tokens, limit in zip(drawn, limits)], [None] * len(active)

    def _hints(self, active: list[_Sequence]) -> dict:
        texts = (np.array(sequence.ids) for sequence in active)
        return {**lookup_hints(self.generator.head, self.drafter, texts), **self.pointed}

    def _draw_processed(self, active, base, limits):
        proposals, kept = [], []
        for sequence, rows, limit in zip(active, base, limits):
            ids = sequence.tensor(self.device)
            candidates, logits = self.generator.draw_processed(ids, rows[:limit], sequence.processors)
            proposals.append(candidates[0, ids.shape[1] :].tolist())
            kept.append(logits if proposals[-1] else None)
        return proposals, kept

    def _commit(self, sequence: _Sequence, proposals: list[int], new_logits: torch.Tensor, draft_logits=None) -> int:
        """
        Judge `proposals` by the target's `new_logits` `(proposals + 1, vocab)`, commit what is valid, and count the
        round (a call without a report entry for it is the prefill's). Returns the number of committed tokens.
        """
        prefill = len(sequence.ids) == sequence.prompt_length
        for i in range(len(proposals) + 1) if len(sequence.processors) else ():
            ids = sequence.tensor(self.device, proposals[:i])
            new_logits[i] = sequence.processors(ids, new_logits[i : i + 1])[0]
        tokens = self._judge(sequence, proposals, new_logits, draft_logits)
        tokens = self._cut(sequence, tokens[: sequence.left])
        sequence.ids.extend(tokens)
        if not prefill:
            same = [a == b for a, b in zip(tokens, proposals)]
            sequence.report.proposed.append(len(proposals))
            sequence.report.accepted.append(same.index(False) if False in same else len(same))
            sequence.report.committed.append(len(tokens))
        return len(tokens)

    def _judge(self, sequence, proposals, new_logits, draft_logits) -> list[int]:
        """Accepted proposals and the target's own token behind them."""
        if self.config.do_sample and draft_logits is not None:
            tokens, _ = _speculative_sampling(
                sequence.tensor(self.device, proposals),
                draft_logits.to(self.device),
                len(proposals),
                new_logits.unsqueeze(0),
            )
            return tokens[0].tolist()
        if self.config.do_sample:
            chosen = torch.multinomial(new_logits.softmax(dim=-1), num_samples=1).squeeze(1).tolist()
        else:
            chosen = new_logits.argmax(dim=-1).tolist()
        matches = 0
        while matches < len(proposals) and proposals[matches] == chosen[matches]:
            matches += 1
        return chosen[: matches + 1]

    def _cut(self, sequence: _Sequence, tokens: list[int]) -> list[int]:
        """Tokens up to the first that ends the sequence."""
        for i, token in enumerate(tokens):
            stop = token in self.eos
            if self.criteria:
                ids = sequence.tensor(self.device, tokens[: i + 1])
                # As in the library's list, a criterion that fires does not spare the others the question.
                stop |= any([bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in self.criteria])
            if stop:
                sequence.finished = True
                return tokens[: i + 1]
        sequence.finished = sequence.left <= len(tokens)
        return tokens

    def _carried_embeds(self, proposals: list[list[int]], outputs, width: int) -> torch.Tensor | None:
        """Target embeddings of the tokens that rejected rows carry, if they do; see the generator for one sequence."""
        kind = self.drafter.config.carried_token
        if kind is None:
            return None
        if kind == "prediction":
            tokens = outputs.logits.argmax(dim=-1)
        else:
            tokens = torch.tensor([[0, *y, *[0] * (width - 1 - len(y))] for y in proposals])
        return self.generator.head.embed(tokens, self.drafter.device)

    def _drop_finished(self, active: list[_Sequence]) -> list[_Sequence]:
        rows = [i for i, sequence in enumerate(active) if not sequence.finished]
        if len(rows) < len(active) and rows:
            kept = torch.tensor(rows, device=self.device)
            self.cache.select(kept)
            self.drafts.select(kept.to(self.drafter.device))
            self.pointed = {name: value[kept.to(value.device)] for name, value in self.pointed.items()}
        return [active[i] for i in rows]

    def _out_of_time(self) -> bool:
        return any(bool(torch.as_tensor(criterion(self.prompts, None)).any()) for criterion in self.deadlines)

    def _collect(self) -> torch.LongTensor:
        pad = getattr(self.config, "_pad_token_tensor", None)
        pad = 0 if pad is None else int(pad.flatten()[0])
        new = [sequence.ids[sequence.prompt_length :] for sequence in self.sequences]
        longest = max(map(len, new))
        tail = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in new], device=self.device)
        reports = [sequence.report for sequence in self.sequences]
        self.drafter.set_report(GenerationReport.pool(reports))
        return torch.cat([self.prompts, tail.to(self.prompts.dtype)], dim=1)


def batch_decoding(target: PreTrainedModel, input_ids: torch.LongTensor, drafter: CarryoverDrafter, **kwargs):
    """
    What [`~transformers.GenerationMixin.generate`] runs for more than one sequence; arguments as its own loops take.

    Returns:
        `torch.LongTensor` of shape `(batch_size, longest)`, or with `return_dict_in_generate` a
        `GenerateDecoderOnlyOutput` with `sequences`. `drafter.last_report` has all sequences' rounds, and
        `last_report.sequences` each one's.

    Raises:
        ValueError: For what a batch does not support, before any forward pass.
    """
    refuse_batch(target, input_ids, kwargs)
    decoding = BatchDecoding(
        target,
        input_ids,
        drafter,
        kwargs["generation_config"],
        kwargs["logits_processor"],
        kwargs["stopping_criteria"],
        kwargs.get("attention_mask"),
        keep_logits="logits_to_keep" in kwargs,
    )
    sequences = decoding.run()
    if kwargs["generation_config"].return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


__all__ = ["BatchDecoding", "batch_decoding", "refuse_batch"]
