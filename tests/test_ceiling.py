"""What is there to carry: the target's words at rejected rows, set against the proposals they compete with."""

import itertools
import json
import sys
from pathlib import Path

import torch
from tiny_targets import prompt_ids, tiny_drafter, tiny_llama


sys.path.insert(0, str(Path(__file__).parents[1]))  # `bench` is not part of the installed package

from bench.ceiling import Ceiling, WatchedReplay, aligned, table
from hf_carryover.evaluation.replay import Replay


def rows(target):
    prompt = prompt_ids()
    ids = target.generate(prompt, do_sample=False, max_new_tokens=40)[0].tolist()
    return [{"id": "qa-0", "input_ids": ids, "response_mask": [0] * prompt.shape[1] + [1] * 40}]


def test_words_stand_at_the_position_they_are_for():
    predictions = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    accepted = torch.tensor([0, 2, 3])
    rejected = torch.arange(1, 4) > accepted.unsqueeze(1)
    assert aligned(predictions, rejected, accepted).tolist() == [[1, 2, 3], [6, -1, -1], [-1, -1, -1]]


def test_words_are_the_targets():
    """Each is what a plain pass over the text with the rejected proposals says, and rounds are those without."""
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=4, carry=False)
    texts, seen = rows(target), []
    ceiling = Ceiling(drafter)
    ceiling.replay = WatchedReplay(drafter, target, observers=[ceiling, seen.append])
    (response,) = ceiling.replay(texts)
    (plain,) = Replay(drafter, target)(texts)
    assert response.accepted == plain.accepted
    ids, checked = texts[0]["input_ids"], 0
    for before, after in itertools.pairwise(seen):
        anchor, accepted = int(before.anchors[0]), int(before.accepted[0])
        block = [*ids[: anchor + 1], *before.proposals[0].tolist()]
        said = target(torch.tensor([block])).logits[0].argmax(dim=-1).tolist()
        words = said[anchor + accepted + 1 :]
        assert after.predictions[0].tolist() == words + [-1] * (4 - len(words))
        checked += len(words)
    assert checked > 20
    result = ceiling.result()
    assert result["tau"] == sum(response.committed) / response.rounds
    shares = result["first_position"]
    assert shares["all"]["rounds"] == sum(m < 4 for m in response.accepted[:-1])
    assert shares["all"]["rounds"] == sum(entry["rounds"] for kind, entry in shares.items() if kind != "all")
    assert json.loads(json.dumps(result)) == result
    assert "target's word right" in table({"drafters": {"control": result}})


def test_an_oracle_gains_what_the_words_have_beyond_the_proposals(monkeypatch):
    """A drafter that is never right, against words that are: the text goes on as the target says whatever stood."""
    target = tiny_llama()
    drafter = tiny_drafter(target, block_size=4, carry=False)
    texts = rows(target)
    ids = texts[0]["input_ids"]
    ceiling, beyond = Ceiling(drafter), []

    def count(seen):
        if seen.predictions is not None:
            beyond.append(max(0, min(4, int(seen.left[0])) - int(seen.accepted[0])))

    def words(self, recorded, streams, proposals, accepted, goes_on):
        start = int(streams.anchor[0] + accepted[0]) + 2
        return {}, torch.tensor([(ids + [-1] * 4)[start : start + 4]])

    ceiling.replay = WatchedReplay(drafter, target, observers=[ceiling, count])
    monkeypatch.setattr(WatchedReplay, "_carry", words)
    ceiling.replay(texts)
    counts = ceiling.counts
    assert counts["all/word"] == counts["all/n"] == len(beyond)
    assert counts["oracle"] == sum(beyond) > 20
