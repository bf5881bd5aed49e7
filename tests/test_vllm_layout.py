"""The parts of the vLLM plugin that need no vLLM: where rows go, and how blocks are drawn."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_carryover.vllm.layout import PADDING_SLOT, block_layout
from hf_carryover.vllm.sampling import draw_blocks


PAGE = 4


def batch(rows, computed, rejected, width=16, seed=0):
    """Requests with `rows` window rows behind `computed` ones, and a block table of shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    table = 1 + torch.randperm(width * len(rows), generator=generator).view(len(rows), width).int()
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor([c + r for c, r in zip(computed, rows)], dtype=torch.int32)
    positions = torch.cat([torch.arange(c, c + r) for c, r in zip(computed, rows)])
    return starts, lengths, positions, torch.tensor(rejected, dtype=torch.int32), table


def slow_layout(starts, lengths, positions, rejected, table, block_rows, carry, limit):
    """The rule, row by row."""

    def slot(request, index):
        return int(table[request, index // PAGE]) * PAGE + index % PAGE if index < limit else PADDING_SLOT

    carried, window, places, block, attended = [], [], [], [], []
    for i, length in enumerate(lengths.tolist()):
        start, end, lost = int(starts[i]), int(starts[i + 1]), int(rejected[i])
        carries = carry and length + block_rows <= limit
        for row in range(start, end):
            carried.append(carries and row >= end - lost)
            window.append(slot(i, length - (end - row)))
        first = length if carries else length - lost
        anchor = int(positions[end - 1 - lost]) + 1
        places.append([anchor + k for k in range(block_rows)])
        block.append([slot(i, first + k) for k in range(block_rows)])
        attended.append(min(first + block_rows, limit))
    return carried, window, places, block, attended


CASES = {
    # rows of the windows, rows before them, rejected rows
    "all-of-it": ([5, 5, 5, 5], [8, 3, 20, 11], [0, 1, 3, 4]),
    "prefill-beside-decode": ([5, 30, 1, 12], [9, 0, 40, 24], [2, 0, 0, 0]),
    "fewer-drafts-than-proposed": ([2, 1, 4], [7, 12, 30], [1, 0, 3]),
    "at-the-limit": ([5, 5, 3], [52, 50, 61], [4, 1, 2]),
}


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_layout_follows_the_rule(name, carry):
    given = batch(*CASES[name])
    found = block_layout(*given, page_size=PAGE, block_rows=5, carry=carry, limit=64)
    carried, window, places, block, attended = slow_layout(*given, 5, carry, 64)
    assert found.carried.tolist() == carried
    assert found.window_slots.tolist() == window
    assert found.positions.tolist() == places
    assert found.slots.tolist() == block
    assert found.seq_lens.tolist() == attended
    assert found.seq_lens.dtype == torch.int32


def test_no_row_is_written_twice_and_only_written_rows_are_attended_to():
    starts, lengths, positions, rejected, table = batch(*CASES["all-of-it"])
    found = block_layout(
        starts, lengths, positions, rejected, table, page_size=PAGE, block_rows=5, carry=True, limit=64
    )
    written = torch.cat([found.window_slots, found.slots.flatten()])
    assert len(set(written.tolist())) == len(written)
    for i, length in enumerate(found.seq_lens.tolist()):
        seen = {int(table[i, s // PAGE]) * PAGE + s % PAGE for s in range(length)}
        before = {int(table[i, s // PAGE]) * PAGE + s % PAGE for s in range(int(lengths[i]))}
        assert seen == before | set(found.slots[i].tolist())


def test_without_rejections_none_needs_no_tensor():
    starts, lengths, positions, _, table = batch([5, 9], [3, 0], [0, 0])
    options = {"page_size": PAGE, "block_rows": 5, "carry": True, "limit": 64}
    found = block_layout(starts, lengths, positions, None, table, **options)
    expected = block_layout(starts, lengths, positions, torch.zeros(2), table, **options)
    assert torch.equal(found.slots, expected.slots) and not found.carried.any()


class TestDrawing:
    def setup_method(self):
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(3, 4, 6, generator=generator)
        self.table = torch.randn(10, 6, generator=generator)
        self.ids = torch.tensor([0, 2, 3, 5, 8, 9])
        self.anchors = torch.tensor([1, 4, 7])

    def bias(self, previous):
        return self.table[previous]

    def test_greedy_is_left_to_right(self):
        tokens, probs = draw_blocks(self.logits, self.anchors, self.bias, self.ids, 10)
        assert probs is None
        for row, anchor, logits in zip(tokens.tolist(), self.anchors.tolist(), self.logits):
            previous = anchor
            for token, scores in zip(row, logits):
                previous = int(self.ids[int((scores + self.table[previous]).argmax())])
                assert token == previous

    def test_what_is_returned_is_what_was_drawn_from(self):
        requests = 4000
        logits = self.logits[:1].expand(requests, -1, -1)
        anchors, temperature = self.anchors[:1].expand(requests), torch.full((requests,), 0.7)
        torch.manual_seed(0)
        tokens, probs = draw_blocks(logits, anchors, self.bias, self.ids, 10, temperature)
        first = torch.softmax((self.logits[0, 0] + self.table[1]) / 0.7, dim=-1)
        torch.testing.assert_close(probs[0, 0, self.ids], first)
        assert probs[..., [1, 4, 6, 7]].abs().max() == 0  # not in the draft vocabulary
        counts = torch.bincount(tokens[:, 0], minlength=10).float() / requests
        torch.testing.assert_close(counts, probs[0, 0], atol=0.03, rtol=0)  # 4 standard errors
        previous = tokens[:, 0]
        expected = torch.softmax((self.logits[0, 1] + self.table[previous]) / 0.7, dim=-1)
        torch.testing.assert_close(probs[:, 1, self.ids], expected)

    def test_greedy_requests_of_a_sampling_batch_and_seeds(self):
        temperature = torch.tensor([0.0, 1.0, 1.0])
        greedy, _ = draw_blocks(self.logits, self.anchors, self.bias, self.ids, 10)

        def draw():
            generators = {2: torch.Generator().manual_seed(5)}
            return draw_blocks(self.logits, self.anchors, self.bias, self.ids, 10, temperature, generators)[0]

        first, second = draw(), draw()
        assert torch.equal(first[0], greedy[0])
        assert torch.equal(first[2], second[2])

    def test_no_proposals(self):
        tokens, probs = draw_blocks(self.logits[:, :0], self.anchors, self.bias, self.ids, 10)
        assert tokens.shape == (3, 0) and probs is None


KERNEL = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from test_vllm_layout import CASES, PAGE, batch
from hf_carryover.vllm.kernels import place_carried
from hf_carryover.vllm.layout import PADDING_SLOT, block_layout

for name, case in CASES.items():
    starts, lengths, positions, rejected, table = batch(*case)
    options = {"page_size": PAGE, "block_rows": 5, "limit": 64}
    before = block_layout(starts, lengths, positions, rejected, table, carry=False, **options)
    after = block_layout(starts, lengths, positions, rejected, table, carry=True, **options)
    # As vLLM's kernel leaves them: rejected rows are not stored.
    lost = block_layout(starts, lengths, positions, rejected, table, carry=True, **{**options, "limit": 999})
    slots, seq_lens = before.slots.flatten().clone(), before.seq_lens.clone()
    context = torch.where(lost.carried, PADDING_SLOT, before.window_slots)
    places = torch.where(lost.carried, 0, positions)
    carried = torch.ones(len(positions) + 7, dtype=torch.bool)  # stale marks, and rows behind the batch
    place_carried(
        slots, seq_lens, places, context, carried, positions, starts, rejected, table,
        requests=len(lengths), page_size=PAGE, block_rows=5, limit=64, padding=PADDING_SLOT,
    )
    assert slots.tolist() == after.slots.flatten().tolist(), name
    assert seq_lens.tolist() == after.seq_lens.tolist(), name
    assert carried[: len(positions)].tolist() == after.carried.tolist(), name
    assert not carried[len(positions) :].any(), name
    stored = after.carried | ~lost.carried
    assert context[stored].tolist() == after.window_slots[stored].tolist(), name
    assert (context[~stored] == PADDING_SLOT).all(), name
    assert places[stored].tolist() == positions[stored].tolist(), name
print("same", len(CASES))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which comes with vLLM")
def test_kernel_follows_the_layout():
    """The kernel of the V2 runner in Triton's interpreter, against the layout that the V1 runner uses."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", KERNEL, str(Path(__file__).parent)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith(f"same {len(CASES)}")
