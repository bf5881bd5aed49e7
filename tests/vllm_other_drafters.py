"""
Run other drafters in vLLM and print what they did, as JSON. `test_vllm_plugin.py` starts this with and without the
plugin.

Usage: `python vllm_other_drafters.py TARGET DFLASH_FOLDER`
"""

import json
import sys

from vllm_helpers import engine, generate, greedy, model_runner, prompts


def run(target: str, speculative: dict) -> dict:
    texts, proposed = prompts([12, 30, 5, 40]), []
    with engine(target, speculative["model"], speculative=speculative) as llm:
        runner = model_runner(llm)
        propose = runner.drafter.propose

        def record(*args, **kwargs):
            tokens = propose(*args, **kwargs)
            proposed.append(tokens.tolist() if hasattr(tokens, "tolist") else [list(row) for row in tokens])
            return tokens

        runner.drafter.propose = record
        outputs = generate(llm, texts, greedy(40))
        counters = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
        lookahead = llm.llm_engine.vllm_config.num_lookahead_tokens
        kind = type(runner.drafter).__module__ + "." + type(runner.drafter).__name__
    return {"kind": kind, "outputs": outputs, "proposed": proposed, "counters": counters, "lookahead": lookahead}


def main() -> None:
    target, dflash = sys.argv[1:]
    ngram = {"method": "ngram", "model": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    results = {
        "dflash": run(target, {"method": "dflash", "model": dflash}),
        "ngram": run(target, ngram),
        "plugin": "hf_carryover.vllm.hooks" in sys.modules,
    }
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()
