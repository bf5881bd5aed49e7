# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Stopping criteria that are met inside a block.

transformers' assisted loop asks the criteria about the end of a committed block only, so a criterion met earlier in
the block is missed or noticed too late. Proposals can't be cut by what they are either: a block that is shortened
because of the token drawn there is no longer rejection sampling, and the output's distribution changes. The cut must
come after verification, where the loop cuts at EOS: [`StopWatch`] takes the place of the EOS tensor there.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria


# The loop itself cuts a block at the first two, and the third does not depend on the tokens.
_LEFT_TO_THE_LOOP = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)


class StopWatch:
    """
    Asks the criteria of a call about every committed prefix, each once and in order, as plain decoding does.

    The loop cuts the verified tokens with `torch.isin(tokens, eos_token_tensor)`. This object is handed to it as that
    tensor and answers through `__torch_function__`, with `True` at the first token that is EOS or meets a criterion:
    ids, streamer, scores and the target's cache are then cut by the loop, in one place.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): The prompt.
        criteria (`list[StoppingCriteria]`): Those to ask.
        eos_token_ids (`torch.LongTensor`, *optional*): The end tokens of this call.
        score_tap ([`ScoreTap`], *optional*): Where to find the scores of a token, when the criteria may read them.
    """

    def __init__(self, input_ids, criteria, eos_token_ids=None, score_tap=None):
        self.ids = input_ids
        self.criteria = criteria
        self.eos_token_ids = eos_token_ids
        self.score_tap = score_tap
        self.scores: tuple[torch.Tensor, ...] = ()
        self.stopped = False

    def to(self, device) -> StopWatch:
        """Itself: the loop moves the EOS tensor to the device of the tokens."""
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not torch.isin or len(args) != 2 or not isinstance(args[1], cls):
            return NotImplemented
        return args[1].first_stop(args[0])

    def first_stop(self, tokens: torch.LongTensor) -> torch.BoolTensor:
        """Where the verified `tokens` `(count,)` end: at most one `True`, at the last one that counts."""
        stops = torch.zeros_like(tokens, dtype=torch.bool)
        for i, token in enumerate(tokens):
            if self.score_tap is not None:
                self.scores += (self.score_tap.rows[self.ids.shape[1]],)
            self.ids = torch.cat([self.ids, token.to(self.ids.device).view(1, 1)], dim=1)
            # As in the library's list, a criterion that fires does not spare the others the question.
            scores = None if self.score_tap is None else self.scores
            answers = [bool(torch.as_tensor(criterion(self.ids, scores)).any()) for criterion in self.criteria]
            self.stopped = any(answers)
            ended = self.eos_token_ids is not None and bool((self.eos_token_ids.to(token.device) == token).any())
            if self.stopped or ended:
                stops[i] = True
                break
        if self.score_tap is not None:
            self.score_tap.rows.clear()
        return stops


class StopVerdict(StoppingCriteria):
    """Tells the loop at the end of a block what the watch found there."""

    def __init__(self, watch: StopWatch):
        self.watch = watch

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        if self.watch.ids.shape[1] != input_ids.shape[1]:
            raise RuntimeError(
                f"The assisted loop committed {input_ids.shape[1]} tokens, the stopping criteria were asked about "
                f"{self.watch.ids.shape[1]}. This version of transformers cuts a block in another way; call "
                "`generate` without custom stopping criteria, or without the drafter."
            )
        return torch.full((input_ids.shape[0],), self.watch.stopped, device=input_ids.device)


class ScoreTap(LogitsProcessor):
    """Last processor of the target: keeps each verified row's scores, by the length of the prefix they follow."""

    def __init__(self):
        self.rows: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows[input_ids.shape[1]] = scores.clone()
        return scores


def watch_stopping_criteria(
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    stopping_criteria: StoppingCriteriaList,
    logits_processor: LogitsProcessorList,
) -> dict[str, Any]:
    """
    Arguments of the assisted loop with which the stopping criteria are asked about every committed prefix.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): The prompt.
        generation_config (`GenerationConfig`), stopping_criteria (`StoppingCriteriaList`), logits_processor
            (`LogitsProcessorList`): Of this call; none of them is changed.

    Returns:
        `dict[str, Any]`: The three, replaced where needed; empty when there is no criterion but the loop's own.
    """
    asked = [criterion for criterion in stopping_criteria if type(criterion) not in _LEFT_TO_THE_LOOP]
    if not asked:
        return {}
    tap = ScoreTap() if generation_config.return_dict_in_generate and generation_config.output_scores else None
    watch = StopWatch(input_ids, asked, getattr(generation_config, "_eos_token_tensor", None), tap)
    # Shallow copies, once a call: the caller's objects stay as they are.
    config = GenerationConfig.__new__(type(generation_config))
    config.__dict__.update(generation_config.__dict__, _eos_token_tensor=watch)
    left = [criterion for criterion in stopping_criteria if type(criterion) in _LEFT_TO_THE_LOOP]
    return {
        "generation_config": config,
        "stopping_criteria": StoppingCriteriaList([*left, StopVerdict(watch)]),
        "logits_processor": LogitsProcessorList([*logits_processor, *([] if tap is None else [tap])]),
    }


__all__ = ["ScoreTap", "StopVerdict", "StopWatch", "watch_stopping_criteria"]
