# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Plain decoding, a control drafter and a carryover drafter, side by side on one target.

Every prompt is answered by each system in turn (the order rotates from prompt to prompt, after one warm-up), greedily
and streamed. Then come one table over all prompts and the check that all systems wrote the same tokens.

What the columns mean:
- **tok/s**: decoded tokens per second. Time runs from the first new token to the last, so prefill is left out, and the
  first token with it.
- **tau**: acceptance length, committed tokens / verification rounds, pooled over all rounds (the target's own token
  counts, the prefill token does not).
- **speedup**: plain decode time / assisted decode time for the same tokens. Should the outputs differ in length, it is
  the ratio of the times per token.

It runs twice. First in bfloat16, which is how such a model is served and where a verification pass over a block costs
little more than a pass over one token: these are the times. But such a pass rounds differently from passes over single
tokens, and in bfloat16 that is enough to flip two nearly tied tokens, which [`compare_outputs`] can only explain
afterwards. So the carryover drafter's answers are made once more in float32, unstreamed, where rounding is around 1e-5
and the outputs have to be identical, token for token. `--dtype float32` does all of it in float32.

Command line: `python -m hf_carryover.demo --help`. The exit code is 0 when every output equals plain decoding up to
near ties, 1 when one does not, 2 when the demo could not run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from . import __version__
from .demo_report import PLAIN, Comparison, Difference, Run, gains, print_result, table, verdict
from .smollm2 import load_smollm2
from .training.chat import normalize_tools, place_tools


MODEL_CARDS = Path(__file__).resolve().parent.parent / "model_cards"
DEFAULT_DRAFTERS = {
    "control": MODEL_CARDS / "smollm2-135m-lookup-control",
    "carryover": MODEL_CARDS / "smollm2-135m-lookup-carryover",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_UP_TOKENS = 8

# Rounding alone moves a logit gap by up to this much in half precision (observed: 0 to 0.25; real defects: 0.6 and
# more). In float32 no difference is excused.
NEAR_TIE = 0.25


def near_tie_margin(best: float, dtype: torch.dtype) -> float:
    """
    The largest gap below the best logit that counts as a near tie in half precision: below `NEAR_TIE`, or one step of
    `dtype` at that logit where the steps are wider (bfloat16 has none smaller than 0.25 between 32 and 64).
    """
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(best), 1.0)))
    return max(step, math.nextafter(NEAR_TIE, 0.0))


@dataclass(frozen=True)
class Prompt:
    """
    Args:
        name (`str`):
            Shown in the output.
        turns (`list[str]`):
            User messages in order. Each is answered before the next one is sent.
        tools (`list[dict]`, *optional*):
            JSON schemas of the functions the model may call.
    """

    name: str
    turns: list[str]
    tools: list[dict[str, Any]] | None = None


class StreamPrinter(TextStreamer):
    """
    Prints new text indented as it comes, and notes when the first new token arrived.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Turns tokens into text.
        echo (`bool`, *optional*, defaults to `True`):
            Whether to print at all; the clock runs either way.
    """

    indent = "    "

    def __init__(self, tokenizer: Any, echo: bool = True):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.echo = echo
        self.first_token_at: float | None = None
        self._line_start = True

    def put(self, value: torch.Tensor) -> None:
        # The first call brings the prompt.
        if not self.next_tokens_are_prompt and self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if not self.echo:
            return
        for piece in text.splitlines(keepends=True):
            print((self.indent if self._line_start else "") + piece, end="", flush=True)
            self._line_start = piece.endswith("\n")
        if stream_end and not self._line_start:
            print(flush=True)
            self._line_start = True


def load_prompts(path: str | os.PathLike[str] | None = None) -> list[Prompt]:
    """
    Args:
        path (`str` or `os.PathLike`, *optional*):
            A file with one JSON object a line: `turns` (list of user messages), optionally `id` and `tools` (list of
            function schemas). Defaults to the prompts that come with the package.

    Returns:
        `list[Prompt]`: The prompts in file order.
    """
    source = resources.files(__package__) / "demo_prompts.jsonl" if path is None else Path(path)
    prompts = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        turns = record.get("turns") if isinstance(record, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"{where} needs `turns`, a non-empty list of user messages, got {turns!r}.")
        prompts.append(Prompt(str(record.get("id", f"prompt-{number}")), turns, record.get("tools")))
    if not prompts:
        raise ValueError(f"{source} holds no prompts.")
    return prompts


def encode(tokenizer: Any, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None, device: Any) -> Any:
    """
    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The target's tokenizer, with its chat template.
        messages (`list[dict[str, str]]`):
            The conversation, ending with a user message.
        tools (`list[dict]` or `None`):
            Function schemas. A chat template without a place for them gets them in the system message.
        device (`torch.device`):
            Where the tensors go.

    Returns:
        [`~transformers.BatchEncoding`]: `input_ids` and `attention_mask`, of shape `(1, sequence_length)`.
    """
    messages, tools = place_tools(tokenizer.chat_template, messages, normalize_tools(tools, "tools"))
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(device)


def answer(
    model: Any, tokenizer: Any, inputs: Any, drafter: Any = None, max_new_tokens: int = 64, echo: bool = True
) -> Run:
    """
    Generates greedily, with or without a drafter, and measures it.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The target.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        inputs (`dict[str, torch.Tensor]`):
            `input_ids` and `attention_mask` of one prompt.
        drafter ([`CarryoverDrafter`], *optional*):
            The assistant; `None` is plain decoding.
        max_new_tokens (`int`, *optional*, defaults to 64):
            Length limit in tokens.
        echo (`bool`, *optional*, defaults to `True`):
            Whether to print the text as it comes.

    Returns:
        [`Run`]: Tokens, times and the drafter's counts.
    """
    streamer = StreamPrinter(tokenizer, echo)
    assisted = {} if drafter is None else {"assistant_model": drafter}
    start = time.perf_counter()
    output = model.generate(**inputs, **assisted, do_sample=False, max_new_tokens=max_new_tokens, streamer=streamer)
    end = time.perf_counter()

    token_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    first = streamer.first_token_at or end
    run = Run(len(token_ids), max(len(token_ids) - 1, 0), end - first, first - start, token_ids)
    if drafter is not None:
        report = drafter.last_report
        run.rounds, run.committed, run.carried = report.rounds, sum(report.committed), sum(report.carried)
        run.draft = report.draft_ms / 1000
    return run


@torch.no_grad()
def compare_outputs(model: Any, input_ids: torch.Tensor, plain: list[int], other: list[int]) -> Difference | None:
    """
    Args:
        model ([`~transformers.PreTrainedModel`]):
            The target.
        input_ids (`torch.LongTensor` of shape `(1, prompt_length)`):
            The prompt.
        plain (`list[int]`):
            New tokens of plain decoding.
        other (`list[int]`):
            New tokens of another system.

    Returns:
        [`Difference`], *optional*: `None` if both are equal, else the first difference. It counts as a near tie in
        half precision only, when the runner-up and both chosen tokens are within [`near_tie_margin`] of the target's
        best logit, in one pass over all tokens or in single steps.
    """
    if plain == other:
        return None
    shared = min(len(plain), len(other))
    position = next((i for i in range(shared) if plain[i] != other[i]), shared)
    if position == shared:
        return Difference(position, None, False)
    prefix = torch.tensor([plain[:position]], dtype=input_ids.dtype, device=input_ids.device)
    logits = model(input_ids=torch.cat([input_ids, prefix], dim=1), use_cache=False).logits[0, -1]
    tokens = (plain[position], other[position])
    margin, near_tie = _margin(logits, tokens, model.dtype)
    if not near_tie and model.dtype != torch.float32:
        # One pass over all tokens rounds differently from plain decoding's single steps: ask those too.
        alone = _margin(_single_steps(model, input_ids, prefix), tokens, model.dtype)
        margin, near_tie = alone if alone[1] else (margin, near_tie)
    return Difference(position, margin, near_tie)


def _margin(logits: torch.Tensor, tokens: tuple[int, int], dtype: torch.dtype) -> tuple[float, bool]:
    """Gap of the best two `logits` `(vocab_size,)`, and whether it and those of both `tokens` are a near tie."""
    best, second = logits.float().topk(2).values.tolist()
    furthest = max(best - float(logits[token]) for token in tokens)
    half = dtype != torch.float32
    return best - second, half and max(best - second, furthest) <= near_tie_margin(best, dtype)


def _single_steps(model: Any, input_ids: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
    """Logits `(vocab_size,)` behind the prompt and `prefix` `(1, n)`, computed as plain decoding does."""
    outputs = model(input_ids=input_ids, use_cache=True)
    for token in prefix.T:
        outputs = model(input_ids=token.view(1, 1), past_key_values=outputs.past_key_values, use_cache=True)
    return outputs.logits[0, -1]


def compare_systems(
    model: Any, tokenizer: Any, drafters: dict[str, Any], prompts: list[Prompt], max_new_tokens: int, echo: bool = True
) -> list[Comparison]:
    """
    Answers every message with every system, in an order that rotates from message to message.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The target.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        drafters (`dict[str, CarryoverDrafter]`):
            The drafters by name. Plain decoding is added.
        prompts (`list[Prompt]`):
            What to answer. In a conversation the earlier answers are those of plain decoding, so all systems see the
            same prompt.
        max_new_tokens (`int`):
            Length limit of each answer, in tokens.
        echo (`bool`, *optional*, defaults to `True`):
            Whether to print answers and results as they come.

    Returns:
        `list[Comparison]`: One for each user message.
    """
    systems: dict[str, Any] = {PLAIN: None, **drafters}
    order = list(systems)
    comparisons: list[Comparison] = []
    for prompt in prompts:
        messages: list[dict[str, str]] = []
        for turn, message in enumerate(prompt.turns, start=1):
            messages.append({"role": "user", "content": message})
            label = prompt.name if len(prompt.turns) == 1 else f"{prompt.name} {turn}/{len(prompt.turns)}"
            inputs = encode(tokenizer, messages, prompt.tools, model.device)
            if echo:
                print(f"\n=== {label}: {shorten(message)}", flush=True)
            shift = len(comparisons) % len(order)
            runs = {}
            for name in order[shift:] + order[:shift]:
                if echo:
                    print(f"  [{name}]", flush=True)
                runs[name] = answer(model, tokenizer, inputs, systems[name], max_new_tokens, echo)
            comparisons.append(judge(model, inputs["input_ids"], label, {name: runs[name] for name in order}))
            if echo:
                print_result(comparisons[-1])
            text = tokenizer.decode(runs[PLAIN].token_ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
    return comparisons


def judge(model: Any, input_ids: torch.Tensor, label: str, runs: dict[str, Run]) -> Comparison:
    """Compares each run with plain decoding of the same prompt. Returns the [`Comparison`]."""
    plain = runs[PLAIN].token_ids
    found = {name: compare_outputs(model, input_ids, plain, run.token_ids) for name, run in runs.items()}
    return Comparison(label, runs, {name: difference for name, difference in found.items() if difference is not None})


def environment(model: Any) -> str:
    """
    Args:
        model ([`~transformers.PreTrainedModel`]):
            The target.

    Returns:
        `str`: Versions, device, dtype, cores and threads, in one line.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    return (
        f"hf_carryover {__version__}, transformers {transformers.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {device} {dtype_name(model.dtype)}, "
        f"{cores} cores, {torch.get_num_threads()} threads"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` to `"float32"`."""
    return str(dtype).removeprefix("torch.")


def shorten(text: str, width: int = 88) -> str:
    """The text on one line, cut to `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 4].rstrip() + " ..."


def load_target(folder: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """
    Args:
        folder (`str`, *optional*):
            A causal language model with its tokenizer, by default SmolLM2-135M-Instruct ([`load_smollm2`]).
        dtype (`torch.dtype`):
            Its dtype.

    Returns:
        `tuple`: Model (on the GPU if there is one) and tokenizer.
    """
    if folder is None:
        print("Loading SmolLM2-135M-Instruct (the first time: 93 MB to download, half a minute to convert) ...")
        model, tokenizer = load_smollm2(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_drafter(name: str, folder: str | os.PathLike[str] | None, dtype: torch.dtype, device: Any) -> Any:
    """
    Args:
        name (`str`):
            `"carryover"` or `"control"`.
        folder (`str` or `os.PathLike`, *optional*):
            Its checkpoint, by default the one that ships in `model_cards`.
        dtype (`torch.dtype`):
            Its dtype.
        device (`torch.device`):
            Where it goes.

    Returns:
        [`CarryoverDrafter`]: Ready to be passed as `assistant_model`.
    """
    # Imported here: the checks of prompts and outputs above need no drafter.
    from . import CarryoverDrafter

    path = DEFAULT_DRAFTERS[name] if folder is None else Path(folder)
    if not (path / "config.json").is_file():
        option = "--drafter" if name == "carryover" else "--control"
        raise FileNotFoundError(
            f"No {name} drafter at {path}. Run the demo from a clone of the repository, which ships it, or name a "
            f"checkpoint folder with {option}."
        )
    return CarryoverDrafter.from_pretrained(path, dtype=dtype).to(device).eval()


def _called_as() -> str:
    """How the user called the demo, for its usage line."""
    return sys.argv[0] if sys.argv[0].startswith("hf-carryover ") else "python -m hf_carryover.demo"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_called_as(), description=(__doc__ or "").split("\n")[1])
    parser.add_argument("--target", metavar="DIR", help="target model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", metavar="DIR", help="carryover drafter (default: the one in model_cards)")
    parser.add_argument("--control", metavar="DIR", help="control drafter (default: the one in model_cards)")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="one object with `turns` a line (default: bundled)")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="length of each answer")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--no-check", action="store_true", help="leave out the float32 check after a run in another dtype"
    )
    parser.add_argument("--seed", type=int, help="shuffles the prompts before --limit (default: file order)")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def choose(prompts: list[Prompt], limit: int | None, seed: int | None) -> list[Prompt]:
    """The first `limit` prompts, after a shuffle if there is a `seed`."""
    chosen = list(prompts)
    if seed is not None:
        random.Random(seed).shuffle(chosen)
    return chosen[:limit]


def load_systems(options: argparse.Namespace, dtype: torch.dtype, names: Sequence[str]) -> tuple[Any, Any, dict]:
    """Target, tokenizer and the drafters `names` in one dtype."""
    model, tokenizer = load_target(options.target, dtype)
    folders = {"control": options.control, "carryover": options.drafter}
    return model, tokenizer, {name: load_drafter(name, folders[name], dtype, model.device) for name in names}


def check_in_float32(options: argparse.Namespace, prompts: list[Prompt]) -> tuple[str, bool]:
    """The carryover drafter's answers against plain decoding's, in float32: closing lines, and whether all agree."""
    print("\nThe same answers in float32, where they have to be identical ...", flush=True)
    model, tokenizer, drafters = load_systems(options, torch.float32, ["carryover"])
    comparisons = []
    for prompt in prompts:
        comparisons += compare_systems(model, tokenizer, drafters, [prompt], options.max_new_tokens, echo=False)
        same = not any(comparison.differences for comparison in comparisons[-len(prompt.turns) :])
        print(f"  {prompt.name}: {'identical' if same else 'DIFFERENT'}", flush=True)
    return verdict(comparisons, "float32")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    dtype = DTYPES[options.dtype]
    # Bars of a second each would cut through the streamed text.
    transformers.utils.logging.disable_progress_bar()
    try:
        prompts = choose(load_prompts(options.prompts), options.limit, options.seed)
        model, tokenizer, drafters = load_systems(options, dtype, ["control", "carryover"])
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(environment(model))
    messages = sum(len(prompt.turns) for prompt in prompts)
    print(f"messages: {messages}, new tokens each: up to {options.max_new_tokens}, drafters: {', '.join(drafters)}")

    warm_up = [Prompt("warm-up", ["Hello!"])]
    compare_systems(model, tokenizer, drafters, warm_up, min(WARM_UP_TOKENS, options.max_new_tokens), echo=False)
    comparisons = compare_systems(model, tokenizer, drafters, prompts, options.max_new_tokens)

    closing, passed = verdict(comparisons, options.dtype)
    print(f"\n{table(comparisons)}\n\n{gains(comparisons)}\n{closing}")
    if dtype != torch.float32 and not options.no_check:
        closing, identical = check_in_float32(options, prompts)
        passed = passed and identical
        print(closing)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
