"""
Real vLLM engines around tiny models, with every draft recorded and recomputed with transformers.

A recorded draft says what the proposer was given: the request, its window, how many rows were rejected, the anchor.
The reference computes the same block from nothing but the text and the window, with a plain forward pass of the
target: a row that comes from another request, another round or another slot shows up as other logits.
"""

import contextlib
import gc
import importlib.util
import os
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import VOCAB, tiny_drafter, tiny_llama

from hf_carryover.lookup import carried_hints, lookup_hints
from hf_carryover.modeling_carryover import CarryoverCache
from hf_carryover.target import TargetHead, gather_features


NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM, in an environment of its own: `make test-vllm`"
    ),
]
# The CPU backend of vLLM has kernels for head sizes of 32 and more.
TARGET = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
KEPT_IDS = [*range(1, 40), 45, 50, 63]
# Two kernels' rounding, on logits around 5; a wrong row moves them by about 1.
TOLERANCE = 1e-3
# Every combination of head, vocabulary, mask and width that a folder can hold, with and without carry.
DRAFTERS = {
    "dflash": {"mask_token_id": 0},
    "dflash-control": {"mask_token_id": 0, "carry": False},
    "markov": {"markov_rank": 8},
    "markov-control": {"markov_rank": 8, "carry": False},
    "markov-reduced": {"markov_rank": 8, "draft_token_ids": torch.tensor(KEPT_IDS)},
    "markov-whole-vocabulary": {"markov_rank": 4, "draft_token_ids": torch.arange(VOCAB)},
    "dflash-reduced-last-layer": {"draft_token_ids": torch.tensor(KEPT_IDS), "target_layer_ids": [1, 3]},
    "lookup": {"markov_rank": 8, "lookup_ngram_size": 3, "draft_token_ids": torch.tensor(KEPT_IDS)},
    "pointer": {
        "markov_rank": 8,
        "lookup_ngram_size": 3,
        "carry_pointer": True,
        "draft_token_ids": torch.tensor(KEPT_IDS),
        "target_layer_ids": [0, 1, 3],
    },
    "markov-narrow": {
        "markov_rank": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    },
}


def uneven_norms(model):
    """Redraw the norms' weights: all ones would hide one norm that takes the weights of another."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.5 * torch.rand(parameter.shape, generator=generator))
    return model


def build_target(**values):
    return uneven_norms(tiny_llama(**{**TARGET, **values}))


def build_drafter(target, name: str, **values):
    return uneven_norms(tiny_drafter(target, **{"head_dim": 32, **DRAFTERS[name], **values}))


@dataclass
class Draft:
    """One block as the proposer drafted it."""

    request: str
    window_start: int
    window: list[int]  # tokens of the verified window, accepted and rejected
    rejected: int
    anchor: int
    logits: torch.Tensor  # (proposals, draft vocabulary), without the Markov bias
    tokens: list[int]
    unfinished: bool  # the prompt is not through: vLLM throws this draft away

    @property
    def anchor_position(self) -> int:
        return self.window_start + len(self.window) - self.rejected


class Recorder:
    """
    Records every draft of an engine in this process, and optionally replaces what is proposed.

    Args:
        engine (`vllm.LLM`): With `VLLM_ENABLE_V1_MULTIPROCESSING=0`.
        script (`Callable`, *optional*): From a [`Draft`] to the tokens to propose instead of its own.
    """

    def __init__(self, engine, script=None):
        self.runner = model_runner(engine)
        self.proposer, self.script, self.drafts = self.runner.drafter, script, []
        self.batches: list[int] = []  # requests of each step

    def __enter__(self):
        proposer = self.proposer
        set_inputs, sample = proposer.set_inputs_first_pass, proposer._sample_draft_tokens

        def set_inputs_first_pass(**kwargs):
            self.given = kwargs
            return set_inputs(**kwargs)

        def _sample_draft_tokens(hidden_states, sampling_metadata):
            tokens, probs = sample(hidden_states, sampling_metadata)
            return self._record(hidden_states, tokens), probs

        proposer.set_inputs_first_pass, proposer._sample_draft_tokens = set_inputs_first_pass, _sample_draft_tokens
        return self

    def __exit__(self, *error):
        del self.proposer.set_inputs_first_pass, self.proposer._sample_draft_tokens

    def _record(self, hidden_states, tokens):
        given, proposals = self.given, self.proposer.num_speculative_tokens
        cad, rejected = given["cad"], given["num_rejected_tokens_gpu"]
        logits = self.proposer.model.draft_logits(hidden_states, **self.proposer.pointed_at)
        replaced = tokens.clone()
        self.batches.append(len(self.runner.input_batch.req_ids))
        for i, request in enumerate(self.runner.input_batch.req_ids):
            start, end = (int(cad.query_start_loc[j]) for j in (i, i + 1))
            rows = slice(i * proposals, (i + 1) * proposals)
            draft = Draft(
                request,
                int(given["target_positions"][start]),
                given["target_token_ids"][start:end].tolist(),
                0 if rejected is None else int(rejected[i]),
                int(given["next_token_ids"][i]),
                logits[rows].clone(),
                tokens[rows].tolist(),
                bool(self.runner.discard_request_mask.gpu[i]),
            )
            self.drafts.append(draft)
            if self.script is not None:
                replaced[rows] = torch.tensor(self.script(draft))
        return replaced

    def by_request(self) -> dict[str, list[Draft]]:
        """Drafts per request, in order. vLLM appends a random suffix to request ids; it is cut off."""
        found: dict[str, list[Draft]] = {}
        for draft in self.drafts:
            found.setdefault(draft.request.split("-")[0], []).append(draft)
        return found


def scripted(texts: dict[str, list[int]]):
    """
    A script for [`Recorder`]: right for the first few proposals and wrong then, every number of right ones in turn,
    as a function of the anchor's position alone. `texts` are prompt and output of each request.
    """

    def script(draft: Draft) -> list[int]:
        text, place = texts[draft.request.split("-")[0]], draft.anchor_position
        right = random.Random(place).randrange(len(draft.tokens) + 1)
        truth = [text[place + 1 + k] if place + 1 + k < len(text) else 1 for k in range(len(draft.tokens))]
        return [token if k < right else (token + 1) % VOCAB for k, token in enumerate(truth)]

    return script


class Reference:
    """Blocks recomputed with transformers, from the text and the window alone."""

    def __init__(self, target, drafter):
        self.target, self.drafter = target, drafter
        self.head = TargetHead(target, drafter)

    @torch.no_grad()
    def read(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and likeliest next tokens of all rows of a text."""
        output = self.target(torch.tensor([ids]), output_hidden_states=True)
        features = gather_features(output.hidden_states, self.drafter.config.target_layer_ids)
        return features, output.logits.argmax(dim=-1)

    @torch.no_grad()
    def logits(self, text: list[int], draft: Draft) -> torch.Tensor:
        """Logits `(block_size, draft vocabulary)` of `draft` within `text`, prompt and output of its request."""
        drafter, anchor = self.drafter, draft.anchor_position
        assert text[: draft.window_start] + draft.window[: len(draft.window) - draft.rejected] == text[:anchor]
        assert draft.unfinished or draft.anchor == text[anchor]
        cache = CarryoverCache(drafter.config, dtype=torch.float32, device="cpu")
        features, predictions = self.read(text[: draft.window_start] + draft.window)
        drafter.commit_window(cache, features, anchor)
        embeds = self.head.embed(torch.tensor([draft.anchor]), drafter.device)
        hints = lookup_hints(self.head, drafter, [np.array([*text[:anchor], draft.anchor])])
        first, last = torch.tensor([anchor]), torch.tensor([features.shape[1]])
        hints |= carried_hints(self.head, drafter, predictions, first, last)
        hidden = drafter.draft(cache, embeds, self.head.mask_embeds, **hints)[0]
        return drafter.logits(hidden, self.head.weight, self.head.bias).float()

    def check(self, recorder: "Recorder", texts: dict[str, list[int]], limit: int | None = None) -> list[Draft]:
        """
        Compare every recorded draft within `texts`, and return them. Drafts behind the end of a text (a request that
        was just finished) and those whose block reaches past `limit` slots (`max_model_len`) have no reference.
        """
        checked = []
        for request, drafts in recorder.by_request().items():
            text = texts[request]
            for draft in drafts:
                reach = draft.window_start + len(draft.window) + self.drafter.config.block_size + 1
                if draft.anchor_position >= len(text) or (limit is not None and reach > limit):
                    continue
                expected = self.logits(text, draft)[: len(draft.tokens)]
                torch.testing.assert_close(
                    draft.logits, expected, atol=TOLERANCE, rtol=0, msg=lambda m, d=draft: f"{d}: {m}"
                )
                checked.append(draft)
        return checked


def full_rounds(report, proposals: int) -> list[int]:
    """
    Accepted proposals of the rounds with a whole block. Near its length limit `generate` proposes, and so carries,
    fewer; vLLM cuts the text behind the round.
    """
    whole = [i for i, proposed in enumerate(report.proposed) if proposed < proposals]
    return report.accepted[: whole[0]] if whole else report.accepted


def model_runner(engine):
    """The V1 model runner of an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def start(target_folder, drafter_folder=None, *, proposals: int = 4, speculative: dict | None = None, **options):
    """A real engine in this process, float32 and eager."""
    from vllm import LLM

    config = None
    if drafter_folder is not None:
        config = {"model": str(drafter_folder), "num_speculative_tokens": proposals, **(speculative or {})}
    return LLM(
        str(target_folder),
        speculative_config=config,
        **{
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "enable_prefix_caching": False,
            "block_size": 32,
            "disable_log_stats": False,
            **options,
        },
    )


def stop(engine) -> None:
    """Let an engine go, so that the next one of this process starts from nothing."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    engine.llm_engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory()
    gc.collect()


@contextlib.contextmanager
def engine(*args, **options):
    """[`start`] and [`stop`]."""
    started = start(*args, **options)
    try:
        yield started
    finally:
        stop(started)


def prompts(lengths, vocab: int = 60, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in lengths]


def greedy(tokens: int = 40, **options):
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "detokenize": False, **options})


def generate(engine, texts: list[list[int]], params) -> list[list[int]]:
    """Output token ids, in the order of the prompts."""
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in texts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def arrive(llm, texts: dict[str, list[int]], tokens: int, every: int = 3, abort: dict[str, int] | None = None):
    """Add one request each `every` steps, abort some after so many steps, and step until all are done."""
    waiting, done, step, abort = list(texts.items()), {}, 0, dict(abort or {})
    while waiting or llm.llm_engine.has_unfinished_requests():
        if waiting and step % every == 0:
            name, ids = waiting.pop(0)
            llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, greedy(tokens))
        for name in [name for name, at in abort.items() if at == step]:
            llm.llm_engine.abort_request([name])
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return done


def named(texts: list[list[int]], prefix: str) -> dict[str, list[int]]:
    return {f"{prefix}{i}": ids for i, ids in enumerate(texts)}


def accepted(drafts) -> list[int]:
    """Accepted proposals per round, of one request's drafts."""
    return [len(draft.window) - 1 - draft.rejected for draft in drafts[1:]]


# Before vLLM is imported: one process, no network, a small cache.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
