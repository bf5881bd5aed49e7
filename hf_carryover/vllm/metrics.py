# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Carried rows in vLLM's metrics.

The scheduler counts proposals and accepted ones where the engine core runs; every rejected row of a step with drafts
is carried into the draft made at the end of it. The difference of the two counts is therefore the number of carried
rows, and the frontend needs nothing else to export it. (A request that ends in a step has no next draft: its last rows
are counted, but read by nobody. Blocks that would reach past `max_model_len` are drafted without carry.)
"""

from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.spec_decode.metrics import SpecDecodingProm, SpecDecodingStats


NAME = "vllm:spec_decode_num_carried_rows"
DOCUMENTATION = "Rejected rows whose target states were carried into the next draft (hf_carryover)."


def rejected_rows(stats: SpecDecodingStats) -> int:
    """Rejected rows of the steps that `stats` covers."""
    return stats.num_draft_tokens - stats.num_accepted_tokens


def add_counter(
    prom: SpecDecodingProm, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
) -> None:
    """Give vLLM's Prometheus exporter one counter more, per engine."""
    counter = prom._counter_cls(name=NAME, documentation=DOCUMENTATION, labelnames=labelnames)
    prom.counter_spec_decode_num_carried_rows = create_metric_per_engine(counter, per_engine_labelvalues)


def observe(prom: SpecDecodingProm, stats: SpecDecodingStats, engine_idx: int) -> None:
    """Count the carried rows of one step."""
    counters = getattr(prom, "counter_spec_decode_num_carried_rows", None)
    if counters is not None:
        counters[engine_idx].inc(rejected_rows(stats))


__all__ = ["add_counter", "observe", "rejected_rows"]
