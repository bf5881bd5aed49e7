"""
The V2 runner's code where no GPU is: vLLM's own preparation kernel and ours in Triton's interpreter, on CPU tensors.

The whole V2 runner can't run here. What is run is every line that decides where a row goes or what is drawn.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_helpers import NEEDS_VLLM


pytestmark = NEEDS_VLLM

# vLLM's CPU build uses Triton only if it has a backend for CPUs; the interpreter needs none.
PREAMBLE = """
import sys
from types import SimpleNamespace
from triton.backends import backends
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
sys.path.insert(0, sys.argv[1])
import numpy as np
import torch
from hf_carryover.vllm import speculator
from hf_carryover.vllm.layout import PADDING_SLOT, block_layout
from hf_carryover.vllm.sampling import draw_blocks
from test_vllm_layout import CASES, PAGE, batch
from vllm.v1.worker.gpu.input_batch import InputBuffers

def build(carry, block_rows=5, requests=6, tokens=96):
    made = object.__new__(speculator.CarryoverSpeculator)
    made.carry, made.num_query_per_req, made.num_speculative_steps = carry, block_rows, block_rows - 1
    made.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
    if not isinstance(getattr(type(made), "max_model_len", None), property):
        made.max_model_len = 64
    made.input_buffers = InputBuffers(requests, tokens, torch.device("cpu"))
    made.input_buffers.carryover_speculator = made
    made.carried = torch.ones(tokens, dtype=torch.bool)
    return made
"""

PREPARE = (
    PREAMBLE
    + """
prepare = speculator.wrap_prepare(speculator.host.prepare_dflash_inputs)
for name, case in CASES.items():
    for carry in (True, False):
        starts, lengths, positions, rejected, table = batch(*case)
        n, rows = len(lengths), len(positions)
        made = build(carry)
        given = SimpleNamespace(
            num_reqs=n, num_scheduled_tokens=np.diff(starts.numpy()), positions=positions, query_start_loc=starts,
            idx_mapping=torch.arange(n),
        )
        slots, context = torch.full((96,), 777), torch.full((96,), 777)
        places = torch.full((96,), 777)
        samples = [torch.zeros(24, dtype=torch.long) for _ in range(3)]
        state = [torch.zeros(6), torch.zeros(6, dtype=torch.long)]
        prepare(
            made.input_buffers, slots, places, context, *samples, *state, given,
            torch.ones(n, dtype=torch.int32), rejected, torch.arange(6), torch.zeros(6, dtype=torch.long), *state,
            table, PAGE, 0, 1, 1, 9, 5, 4, 6, 96, 64, False,
        )
        options = {"page_size": PAGE, "block_rows": 5, "limit": 64}
        expected = block_layout(starts, lengths, positions, rejected, table, carry=carry, **options)
        lost = block_layout(starts, lengths, positions, rejected, table, carry=True, **{**options, "limit": 999})
        lost = lost.carried
        # Near the end of `max_model_len` vLLM's kernel has its own way; ours moves nothing there.
        fits = lengths + 5 <= 64
        buffers = made.input_buffers
        assert buffers.seq_lens[:n].tolist() == expected.seq_lens.tolist(), name
        assert slots[: 5 * n].view(n, 5)[fits].tolist() == expected.slots[fits].tolist(), name
        found = buffers.positions[: 5 * n].view(n, 5)
        assert found.tolist() == expected.positions.clamp(max=63).tolist(), name
        stored = expected.carried | ~lost
        assert context[:rows][stored].tolist() == expected.window_slots[stored].tolist(), name
        assert (context[:rows][~stored] == PADDING_SLOT).all(), name
        assert places[:rows][stored].tolist() == positions[stored].tolist(), name
        assert not carry or made.carried.tolist() == expected.carried.tolist() + [False] * (96 - rows), name
        assert buffers.input_ids[: 5 * n].view(n, 5)[:, 1:].eq(9).all(), name
print("DONE")
"""
)

DRAW = (
    PREAMBLE
    + """
from hf_carryover.vllm.model import CarryoverForVLLM

class Model:
    # Of the drafter only what is drawn from: logits, Markov bias, vocabulary.
    config = SimpleNamespace(vocab_size=10)
    ids = torch.tensor([0, 2, 3, 5, 8, 9])
    table = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    draft_logits = staticmethod(lambda hidden: hidden)
    markov_bias = classmethod(lambda cls, previous: cls.table[previous.long()])
    draft_token_ids = classmethod(lambda cls: cls.ids)
    in_target_vocabulary = CarryoverForVLLM.in_target_vocabulary

torch.manual_seed(0)
logits, anchors = torch.randn(3, 4, 6), torch.tensor([1, 4, 7])
made = build(True)
made.model, made.draft_logits, made.use_fp64_gumbel = Model(), None, False
made.draft_tokens = torch.zeros(6, 4, dtype=torch.long)
made.sample_idx_mapping = torch.arange(6).repeat_interleave(4)
made.sample_pos = torch.arange(24)
made.step_columns = torch.arange(4, dtype=torch.int32)
made.temperature, made.seeds = torch.ones(6), torch.arange(6)
made.input_buffers.input_ids[:15:5] = anchors.int()
made._draw(3, logits.flatten(0, 1))
expected, _ = draw_blocks(logits, anchors, Model.markov_bias, Model.ids, 10)
assert made.draft_tokens[:3].tolist() == expected.tolist()

# vLLM's sampling kernel does not run in the interpreter: here is what it does, with torch's noise.
def gumbel_sample(logits, rows, temperature, seeds, places, **options):
    assert options["apply_temperature"] and options["is_drafting"] and options["logits_cache"] is made.draft_logits
    options["logits_cache"][rows, options["logits_cache_col"].long()] = logits
    return torch.multinomial(torch.softmax(logits / temperature[rows].unsqueeze(1), dim=-1), 1).squeeze(1)

speculator.gumbel_sample = gumbel_sample
# Drawn: what is kept to verify with is what was drawn from, before the temperature.
made.draft_logits = torch.zeros(6, 4, 10)
made._draw(3, logits.flatten(0, 1))
tokens = made.draft_tokens[:3]
previous = anchors
for k in range(4):
    scores = logits[:, k] + Model.table[previous]
    kept = made.draft_logits[:3, k]
    torch.testing.assert_close(kept[:, Model.ids], scores)
    assert torch.isinf(kept[:, [1, 4, 6, 7]]).all()
    previous = tokens[:, k]
assert set(tokens.flatten().tolist()) <= set(Model.ids.tolist())

# The window is stored with the carry embedding in the carried rows, and in no others.
class Stored:
    carry_embedding = torch.full((3,), 5.0)
    add_carry = CarryoverForVLLM.add_carry
    def precompute_and_store_context_kv(self, states, positions, slots):
        self.states = states.clone()

made.model, made._layer_group_idx = Stored(), None
made.hidden_states, made.context_positions = torch.zeros(96, 3), torch.zeros(96, dtype=torch.long)
made._context_slot_mappings = torch.zeros(1, 96, dtype=torch.long)
made.carried = torch.arange(96) % 7 == 3
made._precompute_context_kv(4, 20)
assert made.model.states[:, 0].tolist() == [5.0 if row % 7 == 3 else 0.0 for row in range(4, 20)]
assert made.hidden_states[20:].abs().max() == 0
print("DONE")
"""
)

CHOICE = (
    PREAMBLE
    + """
from hf_carryover.vllm import hooks
names = [(owner.__name__.rsplit(".")[-1], name) for owner, name, _ in hooks.HOOKS]
assert ("DFlashSpeculator", "__new__") in names and ("speculator", "prepare_dflash_inputs") in names
hooks.install()
hooks.install()
ours = SimpleNamespace(speculative_config=SimpleNamespace(
    draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=["DFlashCarryoverDrafter"]))
))
other = SimpleNamespace(speculative_config=SimpleNamespace(
    draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=["DFlashDraftModel"]))
))
host = speculator.DFlashSpeculator
assert type(host.__new__(host, ours, None)) is speculator.CarryoverSpeculator
assert type(host.__new__(host, other, None)) is host
class Another(host): pass
assert type(Another.__new__(Another, ours, None)) is Another
config = SimpleNamespace(num_speculative_tokens=3, enable_adaptive_verification=False)
parallel = SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1)
whole = SimpleNamespace(speculative_config=config, parallel_config=parallel)
drafter = SimpleNamespace(block_size=4, lookup_ngram_size=3, carry_pointer=False)
for change, message in (
    ({}, "must be the drafter's `block_size`, 4, got 3"),
    ({"num_speculative_tokens": 4}, "`lookup_ngram_size` is 3; vLLM's V2 model runner does not"),
    ({"enable_adaptive_verification": True}, "enable_adaptive_verification"),
):
    vars(config).update(change)
    drafter.lookup_ngram_size = 0 if "enable_adaptive_verification" in change else 3
    try:
        speculator.CarryoverSpeculator._refuse_unsupported(whole, drafter)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
print("DONE")
"""
)


@pytest.mark.parametrize("program", [PREPARE, DRAW, CHOICE], ids=["prepare", "draw", "choice"])
def test_in_the_interpreter(program):
    env = {**os.environ, "TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("DONE")
