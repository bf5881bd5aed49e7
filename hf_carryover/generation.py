# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
The candidate generator behind `model.generate(assistant_model=CarryoverDrafter)`.

transformers' assisted decoding loop owns verification (greedy comparison, or rejection sampling with the `q` returned
here), cutting at EOS, stopping criteria and `max_length`, and the target's cache. This class drafts: it takes the
target states of every verified row, accepted and rejected, commits the first and carries the second
(arXiv 2609.14717, Algorithm 1).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .compiled import CompiledDraft
from .lookup import carried_hints, lookup_hints
from .modeling_carryover import CarryoverCache, CarryoverDrafter
from .proposals import argmax_proposals, confidence_threshold, confident_proposals, proposals_per_round
from .stopping import ScoreTap
from .target import PositionLimit, TargetHead, gather_features, hidden_state_indices
from .timing import new_clock


@dataclass
class GenerationReport:
    """
    What happened in one `generate` call. One entry per verification round in every list; the prefill is no round.

    Args:
        proposed (`list[int]`): Proposals verified.
        accepted (`list[int]`): Proposals accepted and committed, `m`.
        committed (`list[int]`): Tokens committed, the target's own included; fewer when EOS or the limit cut a round.
        carried (`list[int]`): Carried rows the round's draft could read.
        draft_times, target_times (`list[float]`): Milliseconds for drafting with its bookkeeping, and for the target
            with verification. Wall time on the host; on an accelerator kernels may be charged to the later part.
        prefill_ms (`float`): Milliseconds of the target's first pass.
        phases (`dict[str, float]`, *optional*):
            Milliseconds of all rounds by [`~hf_carryover.timing.PHASES`]; inside [`~hf_carryover.split_times`] only.
        sequences (`list[GenerationReport]`):
            Of a batch, the report of each sequence; the lists above then have the rounds of all, one sequence after
            the other, and each sequence's times are those of the rounds it was part of.
    """

    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)
    draft_times: list[float] = field(default_factory=list)
    target_times: list[float] = field(default_factory=list)
    prefill_ms: float = 0.0
    phases: dict[str, float] | None = None
    sequences: list[GenerationReport] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Verification rounds."""
        return len(self.committed)

    @classmethod
    def pool(cls, reports: list[GenerationReport]) -> GenerationReport:
        """The report of a batch, from those of its sequences; times are those of the sequence that took longest."""
        names = ("proposed", "accepted", "committed", "carried")
        pooled = cls()
        for name in names:
            setattr(pooled, name, [value for report in reports for value in getattr(report, name)])
        longest = max(reports, key=lambda report: report.rounds)
        pooled.draft_times, pooled.target_times = list(longest.draft_times), list(longest.target_times)
        pooled.prefill_ms = max(report.prefill_ms for report in reports)
        pooled.sequences = reports
        return pooled

    @property
    def tau(self) -> float:
        """Acceptance length τ: committed tokens / verification rounds, the prefill's token excluded."""
        return sum(self.committed) / self.rounds if self.rounds else float("nan")

    @property
    def draft_ms(self) -> float:
        """Milliseconds spent drafting, all rounds."""
        return sum(self.draft_times)

    @property
    def target_ms(self) -> float:
        """Milliseconds spent in the target and verification, all rounds, without the prefill."""
        return sum(self.target_times)

    @property
    def acceptance(self) -> list[float]:
        """
        Per-position acceptance `α_k` = P(`y_k` accepted | `y_1 … y_{k-1}` accepted), for `k = 1 …`, over the rounds in
        which `y_k` was judged: a proposal behind the cut of EOS or the length limit was not.
        """
        rates = []
        for k in range(1, max(self.proposed, default=0) + 1):
            judged = passed = 0
            for proposed, accepted, committed in zip(self.proposed, self.accepted, self.committed, strict=True):
                if proposed < k or accepted < k - 1 or committed < k:
                    continue
                judged += 1
                passed += accepted >= k
            rates.append(passed / judged if judged else float("nan"))
        return rates

    def __repr__(self) -> str:
        if not self.rounds:
            return "GenerationReport(no verification round)"
        rates = ", ".join(f"{rate:.2f}" for rate in self.acceptance)
        return (
            f"GenerationReport(rounds={self.rounds}, tau={self.tau:.3f}, accepted={sum(self.accepted)}/"
            f"{sum(self.proposed)}, acceptance=[{rates}], carried_per_round={sum(self.carried) / self.rounds:.2f}, "
            f"draft={self.draft_ms:.1f} ms, target={self.target_ms:.1f} ms, prefill={self.prefill_ms:.1f} ms)"
        )


class CarryoverCandidateGenerator(CandidateGenerator):
    """
    Drafts a block per round from the target's states, the carried ones of the last round included.

    Args:
        target (`PreTrainedModel`): The target that generates.
        drafter ([`CarryoverDrafter`]): The drafter; never moved, cast or otherwise changed.
        generation_config (`GenerationConfig`): The prepared configuration of this call.
        logits_processor (`LogitsProcessorList`): The target's processors; the draft goes through them too.
        attention_mask (`torch.Tensor` of shape `(1, sequence_length)`, *optional*): Of the prompt.
    """

    requires_model_outputs = True

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: CarryoverDrafter,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
        attention_mask: torch.Tensor | None = None,
    ):
        self.drafter = drafter
        self.head = TargetHead(target, drafter)
        self.logits_processor = LogitsProcessorList(
            processor for processor in logits_processor or [] if not isinstance(processor, ScoreTap)
        )
        self.do_sample = bool(generation_config.do_sample)
        # Without an ensemble weight the greedy verifier compares tokens and needs no logits.
        self.needs_logits = self.do_sample or generation_config.assistant_ensemble_weight is not None
        self.max_length = generation_config.max_length
        self.num_proposals = proposals_per_round(drafter, generation_config)
        self.confidence_threshold = confidence_threshold(generation_config)
        self.attention_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        self.position_limit = PositionLimit(target)
        # A user who asks for hidden states gets them all; otherwise only the tapped layers are kept.
        layers = hidden_state_indices(drafter.config.target_layer_ids)
        self.output_hidden_states = generation_config.output_hidden_states or layers
        self.needs_attentions = bool(generation_config.return_dict_in_generate and generation_config.output_attentions)
        # An all-ones mask is dropped before the loop, which keeps its length for plain decoding's prefill.
        dropped = getattr(generation_config, "_mask_length", -1)
        self.mask_length = dropped if self.attention_mask is None else self.attention_mask.shape[1]
        self.compiled: CompiledDraft | None = drafter.compiled_draft
        self.cache: CarryoverCache | None = None
        self.columns = 0  # columns of `input_ids` whose states are committed
        self.cached_columns = 0  # columns of a continued cache that `input_ids` do not repeat
        self.pointed: dict = {}  # what the drafter points at of the last round
        self.proposals: list[int] = []
        self.proposed_last: list[int] = []
        self.report = GenerationReport()
        drafter.set_report(self.report)
        self.phase_clock = new_clock()
        if self.phase_clock is not None:
            self.report.phases = self.phase_clock.totals
        self._clock = time.perf_counter()

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict | None = None,
        model_outputs=None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Propose up to `block_size` tokens.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): Committed tokens; the last is the anchor.
            model_kwargs (`dict`, *optional*): What the loop will pass to the target.
            model_outputs (`ModelOutput`, *optional*): The target's last pass, with the tapped hidden states.
            is_first_iteration (`bool`, *optional*): The target has not run yet: nothing to draft from.

        Returns:
            `tuple[torch.LongTensor, torch.Tensor | None]`: `input_ids` followed by the proposals, and when the
            target samples the logits of `q`, the distribution each proposal was drawn from, `(1, proposals, vocab)`.
        """
        self.proposed_last, self.proposals = self.proposals, []
        model_kwargs = model_kwargs or {}
        self.model_kwargs_overrides = {"output_hidden_states": self.output_hidden_states}
        if is_first_iteration or model_outputs is None:
            self._continue_cache(input_ids, model_kwargs)
            self._override_mask(model_kwargs)
            self._clock = time.perf_counter()
            return input_ids, None
        start = time.perf_counter()
        self._lap("bookkeeping")
        carried = self._absorb(input_ids, model_outputs)
        limit = min(self.num_proposals, self.max_length - input_ids.shape[1] - 1)
        limit = self.position_limit.clip(limit, anchor=self.cache.first_position + self.cache.committed)
        candidates, logits = input_ids, None
        if limit > 0:
            candidates, logits = self._propose(input_ids, limit)
            self.proposals = candidates[0, input_ids.shape[1] :].tolist()
        self._lap("sampling")
        self._override_mask(model_kwargs)
        self._clock = time.perf_counter()
        self.report.carried.append(carried)
        self.report.draft_times.append(1000 * (self._clock - start))
        return candidates, logits if self.proposals else None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Count the round. `num_matches` is what the loop committed less one, after EOS and the limit."""
        elapsed = 1000 * (time.perf_counter() - self._clock)
        if self.cache is None:
            self.report.prefill_ms = elapsed
            if self.phase_clock is not None:
                self.phase_clock.restart()
            return
        self._lap("verify")
        committed = input_ids[0, self.columns + 1 :].tolist()
        accepted = 0
        for proposal, token in zip(self.proposals, committed, strict=False):
            if proposal != token:
                break
            accepted += 1
        self.report.target_times.append(elapsed)
        self.report.proposed.append(len(self.proposals))
        self.report.accepted.append(accepted)
        self.report.committed.append(len(committed))

    def _lap(self, phase: str) -> None:
        if self.phase_clock is not None:
            self.phase_clock.lap(phase)

    def _continue_cache(self, input_ids: torch.LongTensor, model_kwargs: dict) -> None:
        """
        Make the first target pass right when `past_key_values` of an earlier call are continued.

        As in plain decoding, `input_ids` hold the whole text, or the new tokens alone when the mask is longer. In the
        first form plain decoding feeds the columns that the cache lacks, while the assisted loop of transformers 5.19
        to 5.23 feeds all of them a second time. The overrides, which the loop puts over what it prepared, mend that.
        """
        length, past = input_ids.shape[1], cached_tokens(model_kwargs)
        if past == 0:
            return
        if self.mask_length != length:
            if self.needs_attentions:
                raise ValueError(
                    "With `output_attentions` and a Carryover drafter, continued `past_key_values` need the whole "
                    f"text in `input_ids`, got the last {length} tokens."
                )
            self.cached_columns = past
            return
        if past >= length:
            raise ValueError(
                f"`past_key_values` hold {past} tokens, `input_ids` only {length}. Pass the whole text with at least "
                "one new token, or the new tokens with the attention mask of the whole text."
            )
        for name in ("position_ids", "token_type_ids", "mm_token_type_ids"):
            if model_kwargs.get(name) is not None:
                self.model_kwargs_overrides[name] = model_kwargs[name][..., past - length :].contiguous()
        self.model_kwargs_overrides["input_ids"] = input_ids[:, past:].contiguous()

    def _override_mask(self, model_kwargs: dict) -> None:
        """Keep a mask whole that covers more than `input_ids`: the loop would crop it to their length."""
        mask = model_kwargs.get("attention_mask")
        if self.cached_columns and mask is not None:
            ones = mask.new_ones((1, len(self.proposals)))
            self.model_kwargs_overrides["attention_mask"] = torch.cat([mask, ones], dim=1)

    def _absorb(self, input_ids: torch.LongTensor, model_outputs) -> int:
        """Commit and carry the rows of the target's last pass; returns the number of carried rows."""
        hidden_states = getattr(model_outputs, "hidden_states", None)
        if hidden_states is None:
            raise ValueError(
                "The target returned no hidden states. A Carryover drafter needs a target whose forward supports "
                "`output_hidden_states`."
            )
        drafter = self.drafter
        features = gather_features(hidden_states, drafter.config.target_layer_ids, drafter.device)
        committed = input_ids.shape[1] - 1 - self.columns
        if self.cache is None:
            features = self._start_cache(input_ids, features)
            committed = features.shape[1]
        self.columns = input_ids.shape[1] - 1
        self._lap("projection")
        self.pointed = self._carried_hints(features.shape[1], committed, model_outputs)
        embeds = self._carried_embeds(features.shape[1], committed, model_outputs)
        self._lap("carry")
        rows = features.shape[1] if drafter.config.carry else committed
        full = self.num_proposals + 1
        fuse = self.compiled is None or not self.compiled.takes(drafter, self.head, self.cache, rows, full)
        drafter.commit_window(self.cache, features, committed, embeds, fuse=fuse)
        return self.cache.carried

    def _carried_embeds(self, rows: int, committed: int, model_outputs) -> torch.Tensor | None:
        """Target embeddings `(1, rows, target_hidden_size)` of the tokens that rejected rows carry, if they do."""
        kind = self.drafter.config.carried_token
        if kind is None or rows == committed:
            return None
        if kind == "prediction":
            tokens = model_outputs.logits[:, -rows:].argmax(dim=-1)
        else:  # row 0 is the anchor, which is committed always
            tokens = torch.tensor([[0, *self.proposed_last]], device=self.head.weight.device)[:, :rows]
        return self.head.embed(tokens, self.drafter.device)

    def _carried_hints(self, rows: int, committed: int, model_outputs) -> dict:
        """What the drafter points at of the target's predictions behind rejected rows, if it does."""
        if not self.drafter.config.points_at_carried or rows == committed:
            return {}
        tokens = model_outputs.logits[:, -rows:].argmax(dim=-1)
        first, last = (torch.tensor([row], device=tokens.device) for row in (committed, rows))
        return carried_hints(self.head, self.drafter, tokens, first, last)

    def _start_cache(self, input_ids: torch.LongTensor, features: torch.Tensor) -> torch.Tensor:
        """
        Open the storage at the first target pass, over the last `rows` columns of the text (fewer than all when the
        target's cache was continued). Masked columns (left padding) have no place in the text: they are dropped, so
        that a padded prompt drafts exactly as the bare one.
        """
        rows = features.shape[1]
        unseen = self.cached_columns + input_ids.shape[1] - 1 - rows
        if self.attention_mask is not None:
            real = self.attention_mask[0].bool().to(features.device)
            features = features[:, real[unseen : unseen + rows]]
            unseen = int(real[:unseen].sum())
        drafter, capacity = self.drafter, features.shape[1] + 8 * (self.drafter.config.block_size + 1)
        if self.compiled is not None:
            self.cache = self.compiled.new_cache(drafter, unseen, capacity)
        else:
            self.cache = CarryoverCache(drafter.config, drafter.fc.weight.dtype, drafter.device, unseen, capacity)
        self.cache.clock = self.phase_clock
        return features

    def _propose(self, input_ids: torch.LongTensor, limit: int) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Draft a block and draw its first `limit` proposals."""
        draw = not (self.needs_logits or self.logits_processor)
        base, tokens = self._base_logits(input_ids, limit, draw)
        self._lap("draft")
        if not draw:
            return self.draw_processed(input_ids, base)
        with torch.no_grad():
            if tokens is None:
                tokens = argmax_proposals(self.drafter, base[None], input_ids[0, -1:], self.head.token_ids)[0]
            if self.confidence_threshold is not None:
                anchor, threshold = input_ids[0, -1:], self.confidence_threshold
                tokens = tokens[: int(confident_proposals(self.drafter, base[None], tokens[None], anchor, threshold))]
        return torch.cat([input_ids, tokens.unsqueeze(0).to(input_ids.device)], dim=1), None

    @torch.no_grad()
    def _base_logits(self, input_ids: torch.LongTensor, limit: int, draw: bool):
        """
        Draft logits without Markov bias `(limit, output_vocab_size)`, and if the compiled step could `draw` them the
        likeliest proposals `(limit,)`.
        """
        drafter, head, anchor_id = self.drafter, self.head, input_ids[0, -1:]
        hints = self._hints(input_ids)
        if self.compiled is not None and self.cache.unfused is not None:
            drafted = self.compiled(drafter, head, self.cache, anchor_id, self.num_proposals, draw, hints)
            if drafted is not None:
                base, tokens = drafted
                return base[:limit], None if tokens is None else tokens[:limit]
        anchor = head.embed(anchor_id, drafter.device)
        # The whole block runs, as in training; only the rows in use reach the head.
        hidden = drafter.draft(self.cache, anchor, head.mask_embeds, **hints)[0, :limit]
        base = drafter.logits(hidden.to(head.weight.device), head.weight, head.bias)
        return base.float(), None  # argmax over half precision is several times slower on a CPU

    def _hints(self, input_ids: torch.LongTensor) -> dict:
        """What the drafter looks up in the text, where padding is no part of it, and what it points at."""
        if not self.drafter.config.lookup_ngram_size:
            return self.pointed
        text = input_ids[0]
        if self.attention_mask is not None:
            prompt = self.attention_mask[0, self.cached_columns :].bool()
            text = torch.cat([text[: len(prompt)][prompt], text[len(prompt) :]])
        return {**lookup_hints(self.head, self.drafter, [text.cpu().numpy()]), **self.pointed}

    @torch.no_grad()
    def draw_processed(self, input_ids: torch.LongTensor, base: torch.Tensor, processors=None):
        """
        Proposals one by one through the target's processors, with the exact logits of `q`.

        A position at which no token can be drawn (everything the draft vocabulary holds is forbidden, or the drafter
        produced NaN) ends the block: fewer proposals are always lossless.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, sequence_length)`): Committed tokens.
            base (`torch.Tensor` of shape `(proposals, output_vocab_size)`): Logits without Markov bias.
            processors (`LogitsProcessorList`, *optional*): Others than those of the call.

        Returns:
            `tuple[torch.LongTensor, torch.Tensor | None]`: as [`~CarryoverCandidateGenerator.get_candidates`].
        """
        processors = self.logits_processor if processors is None else processors
        config, markov, token_ids = self.drafter.config, self.drafter.markov_head, self.head.token_ids
        candidates, kept = input_ids, []
        for row in base:
            if markov is not None:
                row = row + markov(candidates[0, -1].to(self.drafter.device)).to(row.device).float()
            if token_ids is not None:
                row = row.new_full((config.vocab_size,), float("-inf")).index_copy_(0, token_ids, row)
            scores = row.unsqueeze(0).to(input_ids.device)
            scores = processors(candidates, scores).float()
            q = torch.softmax(scores, dim=-1)
            if not torch.isfinite(q.sum()):
                break
            if self.do_sample and config.draft_sampling == "sample":
                token = torch.multinomial(q, num_samples=1)
            else:
                token = q.argmax(dim=-1, keepdim=True)
                if self.do_sample:  # drawn from the one-point distribution: that is the q to verify with
                    scores = torch.full_like(scores, float("-inf")).scatter_(1, token, 0.0)
            candidates = torch.cat([candidates, token], dim=1)
            kept.append(scores)
            if self.confidence_threshold is not None and float(q[0, token]) < self.confidence_threshold:
                break
        logits = torch.stack(kept, dim=1) if kept and self.needs_logits else None
        return candidates, logits


def cached_tokens(model_kwargs: dict) -> int:
    """Tokens in the target's cache that a call continues."""
    # Found by what it is: its name is `past_key_values` up to transformers 5.23, and `cache` from 5.24 on.
    cache = next((value for value in model_kwargs.values() if isinstance(value, Cache)), None)
    return 0 if cache is None else int(cache.get_seq_length())


__all__ = ["CarryoverCandidateGenerator", "GenerationReport"]
