# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Acceptance length, speed and equality of several drafters and plain decoding, on the same prompts.

Systems take turns prompt by prompt, in rotating order, so that drift of the machine hits them alike. Prefill
(everything up to the first new token) is timed apart, by a streamer, the same way for every system. Greedy outputs are
compared with plain decoding as they come: in float32 any difference is a failure; in half precision a near tie of the
target is reported as such. Of a conversation, later turns go on from *plain* decoding's answers, so that all systems
see the same prompts.

Each prompt is written to a journal beside the report as soon as it is done; the same command goes on where an
interrupted one ended: `hf-carryover bench`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging
from transformers.generation.streamers import BaseStreamer

from ..demo import compare_outputs, encode, load_prompts
from ..modeling_carryover import CarryoverDrafter
from ..training.loading import load_recordings, split_recordings
from .machine import describe_machine, provenance, weights_digest
from .summary import HELD_OUT, PLAIN, markdown, public_record, summarize


WARM_UP_TOKENS = 16


class ClockStreamer(BaseStreamer):
    """Notes when the first new token arrived. `generate` first puts the prompt, then what it commits."""

    def __init__(self):
        self.calls = 0
        self.first_token_at: float | None = None

    def put(self, value):
        self.calls += 1
        if self.calls == 2:
            self.first_token_at = time.perf_counter()

    def end(self):
        pass


@dataclass(frozen=True)
class Item:
    """
    One prompt.

    Args:
        set (`str`): Its prompt set.
        name (`str`): Its id, unique within the set.
        turns (`list[str]`, *optional*): User messages, to be put through the chat template.
        tools (`list[dict]`, *optional*): Function schemas.
        prompt_ids (`list[int]`, *optional*): Token ids instead of messages.
    """

    set: str
    name: str
    turns: list[str] | None = None
    tools: list[dict] | None = None
    prompt_ids: list[int] | None = None

    @property
    def num_turns(self) -> int:
        return 1 if self.turns is None else len(self.turns)


def choose_evenly(items: Sequence, count: int | None) -> list:
    """`count` items at even distances, the first among them; all if there are no more than that (or no `count`)."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def load_items(prompts: Sequence[str], recordings: str | None, options: argparse.Namespace) -> list[Item]:
    """Items of the prompt files (or folders of them), then those of the held-out recordings."""
    paths = [Path(path) for path in prompts]
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    items = []
    for file in files:
        chosen = choose_evenly(load_prompts(file), options.num_prompts)
        items += [Item(file.stem, prompt.name, prompt.turns, prompt.tools) for prompt in chosen]
    if recordings is not None:
        _, held_out = split_recordings(load_recordings(recordings), options.held_out, seed=0)
        for row in choose_evenly(range(len(held_out)), options.num_held_out):
            recording = held_out[row]
            first = list(recording["response_mask"]).index(1)
            items.append(Item(HELD_OUT, str(recording["id"]), prompt_ids=list(recording["input_ids"][:first])))
    if not items:
        raise ValueError(
            f"No prompts in {[path.name for path in paths]}. Name JSONL files or folders of them, or recordings."
        )
    keys = [(item.set, item.name) for item in items]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ValueError(f"Each prompt needs an id of its own within its set, repeated: {repeated[:4]}.")
    return items


class Journal:
    """
    Finished prompts, one JSON object a line after a line of settings.

    Args:
        path (`Path`): The file; it is created, or continued if its settings are the same.
        settings (`dict`): Everything that makes records comparable.

    Raises:
        ValueError: If the file was written with other settings.
    """

    def __init__(self, path: Path, settings: dict):
        self.path = path
        self.records: dict[tuple, dict] = {}
        settings = json.loads(json.dumps(settings))
        if path.exists():
            self._load(settings)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")

    def _load(self, settings: dict) -> None:
        text = self.path.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]  # an interrupted write leaves half a line
        lines = [json.loads(line) for line in complete.splitlines()]
        before = lines[0]["settings"] if lines else None
        if before != settings:
            changed = sorted(key for key in settings if before is None or before.get(key) != settings[key])
            raise ValueError(
                f"{self.path.name} was written with other settings ({', '.join(changed)} differ). Use another "
                "--output, or delete it to start anew."
            )
        if complete != text:
            self.path.write_text(complete, encoding="utf-8")
        self.records = {self.key(record): record for record in lines[1:]}

    @staticmethod
    def key(record: dict) -> tuple:
        return record["set"], record["prompt"], record["turn"], record["seed"]

    def add(self, record: dict) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.records[self.key(record)] = record


class Evaluation:
    """
    Runs systems on prompts.

    Args:
        target (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase` or `None`): Its tokenizer; prompts of token ids need none.
        drafters (`dict[str, CarryoverDrafter]`): Named drafters; plain decoding comes with them.
        max_new_tokens (`int`): Length limit of an answer.
        max_turns (`int`, *optional*, defaults to 1): Turns of a conversation that are asked.
        temperature (`float`, *optional*, defaults to 0.0): 0 is greedy; otherwise the softmax is sampled as it is.
    """

    def __init__(self, target, tokenizer, drafters, max_new_tokens: int, max_turns: int = 1, temperature: float = 0.0):
        if PLAIN in drafters:
            raise ValueError(f"{PLAIN!r} is plain decoding, expected another name for the drafter.")
        self.target, self.tokenizer, self.drafters = target, tokenizer, drafters
        self.max_new_tokens, self.max_turns, self.temperature = max_new_tokens, max_turns, temperature
        self.systems = [PLAIN, *drafters]
        self._warm = False

    def settings(self) -> dict:
        """What two records must share to be comparable, weights aside."""
        return {
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "systems": self.systems,
            "threads": torch.get_num_threads(),
        }

    def run(self, items: list[Item], seeds: list[int], journal: Journal, log=print) -> list[dict]:
        """Records of all items; those in the journal are taken from it, the others are added to it."""
        records: list[dict] = []
        for item in items:
            for seed in seeds:
                messages: list[dict] = []
                for turn in range(min(item.num_turns, self.max_turns)):
                    inputs = self._inputs(item, turn, messages)
                    head = {"set": item.set, "prompt": item.name, "turn": turn, "seed": seed}
                    if journal.key(head) not in journal.records:
                        systems = self._run_systems(inputs, seed, shift=len(records))
                        journal.add({**head, "prompt_tokens": inputs["input_ids"].shape[1], "systems": systems})
                        log(progress(journal.records[journal.key(head)]))
                    records.append(journal.records[journal.key(head)])
                    if item.turns is not None:
                        answer = records[-1]["systems"][PLAIN]["token_ids"]
                        text = self.tokenizer.decode(answer, skip_special_tokens=True)
                        messages.append({"role": "assistant", "content": text})
        return records

    def _inputs(self, item: Item, turn: int, messages: list[dict]) -> dict[str, torch.Tensor]:
        """Token ids and mask of the conversation so far; the user's message is appended to `messages`."""
        if item.turns is None:
            input_ids = torch.tensor([item.prompt_ids], device=self.target.device)
            return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        messages.append({"role": "user", "content": item.turns[turn]})
        return dict(encode(self.tokenizer, messages, item.tools, self.target.device))

    def _run_systems(self, inputs: dict, seed: int, shift: int) -> dict[str, dict]:
        """Numbers of all systems on one prompt, run in an order rotated by `shift`."""
        if not self._warm:
            for system in self.systems:
                self._generate(system, inputs, seed, min(WARM_UP_TOKENS, self.max_new_tokens))
            self._warm = True
        shift %= len(self.systems)
        order = self.systems[shift:] + self.systems[:shift]
        numbers = {system: self._generate(system, inputs, seed, self.max_new_tokens) for system in order}
        plain = numbers[PLAIN]["token_ids"]
        for place, system in enumerate(order):
            numbers[system]["order"] = place
            if system != PLAIN and not self.temperature:
                tokens = numbers[system]["token_ids"]
                with torch.no_grad():
                    difference = compare_outputs(self.target, inputs["input_ids"], plain, tokens)
                numbers[system]["difference"] = None if difference is None else vars(difference)
        return {system: numbers[system] for system in self.systems}

    def _generate(self, system: str, inputs: dict, seed: int, max_new_tokens: int) -> dict:
        """One `generate` call: tokens, milliseconds, and the drafter's report."""
        drafter = self.drafters.get(system)
        arguments: dict[str, Any] = {} if drafter is None else {"assistant_model": drafter}
        if self.temperature:
            arguments |= {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(seed)
        else:
            arguments["do_sample"] = False
        clock = ClockStreamer()
        start = time.perf_counter()
        output = self.target.generate(**inputs, **arguments, max_new_tokens=max_new_tokens, streamer=clock)
        end = time.perf_counter()
        tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
        first = clock.first_token_at if clock.first_token_at is not None else end
        numbers = {
            "new_tokens": len(tokens),
            "prefill_ms": 1000 * (first - start),
            "decode_ms": 1000 * (end - first),
            "wall_ms": 1000 * (end - start),
            "token_ids": tokens,
        }
        return numbers if drafter is None else numbers | report_numbers(drafter.last_report)


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
    }


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


def named_folder(text: str) -> tuple[str, str]:
    """`NAME=DIR`."""
    name, sign, folder = text.partition("=")
    if not sign or not name or not folder:
        raise argparse.ArgumentTypeError(f"expected NAME=DIR, got {text!r}")
    return name, folder


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, metavar="DIR", help="target model with its tokenizer")
    parser.add_argument(
        "--drafter", action="append", default=[], type=named_folder, metavar="NAME=DIR", help="a drafter; repeatable"
    )
    parser.add_argument("--prompts", nargs="+", default=[], metavar="PATH", help="JSONL files, or folders of them")
    parser.add_argument("--num_prompts", type=int, default=10, help="prompts of each set (default: 10)")
    parser.add_argument("--recordings", metavar="FILE", help="recordings, of which held-out ones are asked")
    parser.add_argument("--held_out", type=int, default=100, help="size of the split, as in training (default: 100)")
    parser.add_argument("--num_held_out", type=int, default=20, help="held-out recordings to ask (default: 20)")
    parser.add_argument("--max_turns", type=int, default=1, help="turns of a conversation (default: 1)")
    parser.add_argument("--max_new_tokens", type=int, default=96, help="length of an answer (default: 96)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of sampling; several repeat every prompt")
    parser.add_argument(
        "--compare",
        action="append",
        type=lambda text: tuple(text.split("-", 1)),
        metavar="A-B",
        help="differences to report (default: carryover-control and control-baseline, where they were run)",
    )
    parser.add_argument(
        "--output", required=True, metavar="FILE.json", help="report; .md and .journal.jsonl beside it"
    )
    options = parser.parse_args(argv)
    for path in [*options.prompts, *([] if options.recordings is None else [options.recordings])]:
        if not Path(path).exists():
            parser.error(f"{path} does not exist")
    return options


def comparisons(wanted: list[tuple[str, str]] | None, drafters: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of drafters whose difference is reported; an unknown name is an error."""
    if wanted is None:
        usual = [("carryover", "control"), ("control", "baseline")]
        return [pair for pair in usual if set(pair) <= set(drafters)]
    unknown = sorted({name for pair in wanted for name in pair} - set(drafters))
    if unknown or any(len(pair) != 2 for pair in wanted):
        raise ValueError(
            f"--compare takes A-B with names of drafters ({', '.join(drafters)}), got {unknown or wanted}."
        )
    return wanted


def failures(records: list[dict]) -> list[str]:
    """Greedy outputs that differ from plain decoding and are no near tie."""
    return [
        f"{record['set']} {record['prompt']} turn {record['turn']}, {name}: "
        f"position {numbers['difference']['position']}, margin {numbers['difference']['margin']}"
        for record in records
        for name, numbers in record["systems"].items()
        if numbers.get("difference") is not None and not numbers["difference"]["near_tie"]
    ]


def write_report(path: Path, report: dict) -> None:
    """The report, with one line per prompt so that it can be read and compared."""
    head = json.dumps({**report, "prompts": []}, indent=1)
    lines = ",\n".join(json.dumps(record) for record in report["prompts"])
    if not head.endswith('"prompts": []\n}'):
        raise ValueError("`prompts` must be the last entry of the report.")
    path.write_text(head.removesuffix("]\n}") + "\n" + lines + "\n]\n}\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when a greedy output differs from plain decoding without being a near tie."""
    options = parse(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    drafter_folders = dict(options.drafter)
    pairs = comparisons(options.compare, list(drafter_folders))
    items = load_items(options.prompts, options.recordings, options)
    dtype = getattr(torch, options.dtype)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval().to(options.device)
    drafters = {
        name: CarryoverDrafter.from_pretrained(folder, dtype=dtype).eval().to(options.device)
        for name, folder in drafter_folders.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    run = Evaluation(target, tokenizer, drafters, options.max_new_tokens, options.max_turns, options.temperature)
    weights = {name: weights_digest(folder) for name, folder in drafter_folders.items()}
    settings = {"target": Path(options.target).resolve().name, **run.settings(), "weights": weights}
    output = Path(options.output)
    code = provenance()  # before the run: a checkout may move on meanwhile
    records = run.run(items, options.seeds, Journal(output.with_suffix(".journal.jsonl"), settings))

    report = {
        "settings": settings,
        "arguments": {
            name: getattr(options, name)
            for name in ("num_prompts", "held_out", "num_held_out", "max_turns", "max_new_tokens", "seeds", "device")
        },
        "machine": describe_machine(),
        **code,
        "summary": summarize(records, pairs),
        "prompts": [public_record(record) for record in records],
    }
    write_report(output, report)
    text = markdown(report)
    output.with_suffix(".md").write_text(text, encoding="utf-8")
    print("\n" + text)
    wrong = failures(records)
    for line in wrong:
        print(f"DIFFERENT FROM PLAIN: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
