# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Engines: what answers prompts given as token ids, with transformers or with vLLM.

An engine is a function `generate_ids(prompts, seeds) -> answers` on lists of token ids. One seed per prompt makes a
sampled answer depend on the prompt's number and turn, not on what ran before it, so a resumed run repeats it.
"""

from collections.abc import Callable

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig

from .chat import derive_seed


GenerateIds = Callable[[list[list[int]], list[int]], list[list[int]]]


class TransformersGenerator:
    """
    `generate_ids` with a transformers model: left-padded batches of similar length.

    The model's own generation defaults (penalties, top-k, minimum length) are not used: a recording is what the bare
    target says, since training compares the drafter with the target's own distribution.

    Args:
        model (`PreTrainedModel`):
            The frozen target.
        stop_token_ids (`list[int]`):
            Tokens that end an answer.
        max_new_tokens, batch_size, do_sample, temperature, top_p, top_k:
            As in `RecordingSettings`.
    """

    def __init__(
        self, model, *, stop_token_ids, max_new_tokens: int, batch_size: int, do_sample, temperature, top_p, top_k
    ):
        self.model, self.batch_size = model, batch_size
        # Padding is masked, so any token of the vocabulary does.
        self.pad_token_id = stop_token_ids[0]
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if do_sample else {}
        self.generation_config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            eos_token_id=list(stop_token_ids),
            pad_token_id=self.pad_token_id,
            **sampling,
        )

    def __call__(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        # Longest first: if the memory does not suffice, the first batch says so.
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        answers: list[list[int]] = [[] for _ in prompts]
        own_config, was_training = self.model.generation_config, self.model.training
        # `generate` fills every value that is not given from the model's own generation config.
        self.model.generation_config = self.generation_config
        self.model.eval()
        try:
            for start in tqdm(range(0, len(order), self.batch_size), desc="batches", leave=False):
                batch = order[start : start + self.batch_size]
                generated = self._generate([prompts[i] for i in batch], [seeds[i] for i in batch])
                for index, ids in zip(batch, generated):
                    answers[index] = ids
        finally:
            self.model.generation_config = own_config
            self.model.train(was_training)
        return answers

    def _generate(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        width, device = max(map(len, prompts)), self.model.device
        padded = [[self.pad_token_id] * (width - len(ids)) + ids for ids in prompts]
        seen = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        # The caller's random state is left as it was.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(derive_seed("batch", *seeds))
            sequences = self.model.generate(
                input_ids=torch.tensor(padded, device=device),  # shape: [batch, width]
                attention_mask=torch.tensor(seen, device=device),
            )
        # Rows that ended early are padded; whoever asked cuts at the first stop token.
        return sequences[:, width:].tolist()


class VLLMGenerator:
    """
    `generate_ids` with vLLM's offline engine.

    Args:
        llm (`vllm.LLM`):
            The engine.
        stop_token_ids, max_new_tokens, do_sample, temperature, top_p, top_k:
            As in `TransformersGenerator`. vLLM batches by itself.
    """

    def __init__(self, llm, *, stop_token_ids, max_new_tokens: int, do_sample, temperature, top_p, top_k):
        self.llm, self.sampling_params = llm, import_vllm().SamplingParams
        self.common = {
            "max_tokens": max_new_tokens,
            "temperature": temperature if do_sample else 0.0,
            "top_p": top_p if do_sample else 1.0,
            # -1 switches top-k off in every version; 0 is refused by older ones.
            "top_k": top_k if do_sample and top_k else -1,
            "stop_token_ids": list(stop_token_ids),
            "detokenize": False,
        }

    def __call__(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        if not prompts:
            return []
        outputs = self.llm.generate(
            prompts=[{"prompt_token_ids": ids} for ids in prompts],
            sampling_params=[self.sampling_params(**self.common, seed=seed) for seed in seeds],
            use_tqdm=True,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


def import_vllm():
    """vLLM itself, imported only where it is used."""
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            f"Recording with vLLM needs vLLM, which could not be imported ({error}). Install it with `pip install "
            "'hf_carryover[vllm]'`, or record with transformers."
        ) from error
    return vllm


def llm_defaults() -> dict:
    """
    Arguments of `vllm.LLM` that a recording needs where it runs.

    A request with a seed has a generator of its own, which vLLM rewinds when a prompt was prefilled in part. On a CPU
    (seen with vLLM 0.32) that ends the run: "CPU Generator does not use offset". So prompts are prefilled whole there.
    """
    return {} if torch.cuda.is_available() else {"enable_chunked_prefill": False}
