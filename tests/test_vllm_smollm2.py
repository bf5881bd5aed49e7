"""The shipped drafters on SmolLM2 in vLLM: rounds as in `generate`, and the OpenAI server as users start it."""

import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from vllm_helpers import NEEDS_VLLM, Recorder, Reference, engine, full_rounds, generate, greedy


sys.path.insert(0, str(Path(__file__).parents[1]))  # `bench` is not part of the installed package

from bench.vllm_server import Server


pytestmark = NEEDS_VLLM

CARDS = Path(__file__).parents[1] / "model_cards"
QUESTIONS = [
    "Explain photosynthesis to a child.",
    "Write a Python function that adds two numbers.",
    "What is the capital of France?",
]
TOKENS = 32


@pytest.fixture(scope="module")
def smollm2():
    from hf_carryover.smollm2 import prepare_smollm2

    return prepare_smollm2()


@pytest.fixture(scope="module")
def texts(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]


@pytest.mark.parametrize("kind", ["lookup-carryover", "markov-control"])
def test_rounds_equal_those_of_generate(kind, smollm2, texts):
    """Float32: the same text, and in every round the same number of accepted proposals, one by one and in a batch."""
    from transformers import AutoModelForCausalLM

    from hf_carryover import CarryoverDrafter

    folder = CARDS / f"smollm2-135m-{kind}"
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    drafter = CarryoverDrafter.from_pretrained(folder, dtype=torch.float32)
    reference, expected, rounds = Reference(model, drafter), [], []
    for ids in texts:
        options = {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": None}
        # The mask is given: without an EOS, `generate` would take the <|im_end|> in the prompt for padding.
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        output = model.generate(**inputs, assistant_model=drafter, **options)
        expected.append(output[0, len(ids) :].tolist())
        rounds.append(full_rounds(drafter.last_report, proposals=7))
    with engine(smollm2, folder, proposals=7, max_model_len=1024) as llm:
        for batch in ([[ids] for ids in texts], [texts]):
            with Recorder(llm) as recorder:
                outputs = [out for ids in batch for out in generate(llm, ids, greedy(TOKENS, ignore_eos=True))]
            drafts = recorder.by_request()
            accepted = [
                [len(draft.window) - 1 - draft.rejected for draft in drafts[request][1:]]
                for request in sorted(drafts, key=int)
            ]
            assert outputs == expected
            reference.check(
                recorder, {key: ids + out for key, ids, out in zip(sorted(drafts, key=int), texts, outputs)}
            )
            assert [row[: len(known)] for row, known in zip(accepted, rounds)] == rounds
    assert sum(map(sum, rounds)) > 5


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    """`vllm serve`, as a user starts it, with the method and the number of proposals left out."""
    arguments = ["--max-model-len", "1024", "--max-num-seqs", "32", "--enforce-eager", "--dtype", "bfloat16"]
    arguments += ["--speculative-config", json.dumps({"model": str(CARDS / "smollm2-135m-lookup-carryover")})]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with Server(str(smollm2), arguments, tmp_path_factory.mktemp("server") / "log", env) as started:
        yield started.wait()


def test_server_streams_32_at_once_and_shuts_down(server):
    openai = pytest.importorskip("openai", reason="comes with vLLM")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
    single = stream(client, QUESTIONS[0], 24)
    texts: dict[int, list[str]] = {}

    def ask(i: int) -> None:
        texts[i] = stream(client, QUESTIONS[i % 3] + " " * (i // 3), 8 + i % 5)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 32 and all("".join(pieces) for pieces in texts.values())
    assert len(single) > 1  # it did stream
    counted = server.counters()
    assert counted["num_drafts"] > 32
    assert 0 < counted["num_accepted_tokens"] < counted["num_draft_tokens"]
    assert counted["num_carried_rows"] == counted["num_draft_tokens"] - counted["num_accepted_tokens"]
    # Before the end: on SIGTERM vLLM's own engine process may go first, which its server then logs with a traceback.
    assert "Traceback" not in server.log.read_text()
    assert server.shut_down() == 0, server.log.read_text()[-4000:]


def stream(client, question: str, tokens: int) -> list[str]:
    """The pieces of a streamed answer, in order."""
    chunks = client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": question}],
        max_tokens=tokens,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
