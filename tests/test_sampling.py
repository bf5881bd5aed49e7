"""
Sampling with a drafter draws from the target's own distribution (R3).

The distribution is enumerated over four tokens of a vocabulary of six, the carried rows of a rejected proposal
reaching the third and fourth. Three marginals are compared with draws by a chi-square test: the second token, the
pair (second, third) and the pair (third, fourth). A test fails above the 99.9 % quantile; seeds are fixed, so the
outcome is too. Cells expected less than five times are joined.
"""

import functools

import pytest
import torch
from tiny_targets import counting_target, follow_script, prompt_ids, tiny_drafter, tiny_llama
from training_helpers import fit_drafter
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import MinPLogitsWarper, TopPLogitsWarper

from hf_carryover import CarryoverConfig
from hf_carryover.generation import CarryoverCandidateGenerator


V, STEPS = 6, 4
PROMPT = torch.tensor([[3, 1, 4, 2]])


@functools.cache
def soft_target(scale: float = 0.3):
    """A target of two layers over six tokens, none of which is certain."""
    target = tiny_llama(vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    with torch.no_grad():
        target.lm_head.weight.mul_(scale)
    return target


def soft_drafter(**options):
    values = {"block_size": 2, "num_hidden_layers": 1, "target_layer_ids": [0, 1], "std": 0.6}
    return tiny_drafter(soft_target(), **{**values, **options})


WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


@torch.no_grad()
def enumerate_target(target, options: dict) -> torch.Tensor:
    """Exact probabilities `(V,) * STEPS` of all continuations, by one plain pass per step over all prefixes."""
    warpers = LogitsProcessorList([WARPERS[name](value) for name, value in options.items() if value])
    prefixes, probability = PROMPT, torch.ones(1)
    for _ in range(STEPS):
        scores = warpers(prefixes, target(prefixes, attention_mask=torch.ones_like(prefixes)).logits[:, -1].float())
        probability = (probability.unsqueeze(1) * scores.softmax(dim=-1)).flatten()
        following = torch.arange(V).repeat(len(prefixes)).unsqueeze(1)
        prefixes = torch.cat([prefixes.repeat_interleave(V, dim=0), following], dim=1)
    return probability.view((V,) * STEPS)


def chi_square_limit(freedom: int) -> float:
    """The 99.9 % quantile of the chi-square distribution, by Wilson and Hilferty's approximation (error below 1 %)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.0902 * spread**0.5) ** 3


def check_marginal(counts: torch.Tensor, probability: torch.Tensor) -> None:
    counts, expected = counts.flatten().double(), probability.flatten().double() * counts.sum()
    assert int(counts[expected < 1e-4].sum()) == 0  # nothing outside the support
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum().view(1)])
    wanted = torch.cat([expected[large], expected[~large].sum().view(1)])
    if wanted[-1] < 5:  # too few even together: joined with the smallest
        observed[-2], wanted[-2] = observed[-2:].sum(), wanted[-2:].sum()
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 1
    assert float(((observed - wanted) ** 2 / wanted).sum()) < chi_square_limit(len(wanted) - 1)


def check_distribution(drafter, options: dict, draws: int, **generate_options) -> torch.Tensor:
    target = soft_target()
    probability = enumerate_target(target, options)
    counts = torch.zeros((V,) * STEPS, dtype=torch.long)
    torch.manual_seed(1234)
    rejected = carried = 0
    mask = torch.ones_like(PROMPT)
    for _ in range(draws):
        text = target.generate(
            PROMPT,
            attention_mask=mask,
            assistant_model=drafter,
            do_sample=True,
            max_new_tokens=STEPS,
            **{"top_k": 0, **options, **generate_options},
        )
        counts[tuple(text[0, PROMPT.shape[1] :].tolist())] += 1
        report = drafter.last_report
        rejected += sum(report.proposed) - sum(report.accepted)
        carried += sum(report.carried)
    for kept in ((1,), (1, 2), (2, 3)):
        dropped = tuple(axis for axis in range(STEPS) if axis not in kept)
        check_marginal(counts.sum(dim=dropped), probability.sum(dim=dropped))
    assert rejected > draws / 20  # otherwise the residual distribution was hardly used
    assert carried > draws / 20 or not drafter.config.carry
    return counts


QUICK = {
    "temperature_top_k_markov": ({"temperature": 0.7, "top_k": 3}, {"markov_rank": 2}),
    "looks_up_and_points": ({}, {"lookup_ngram_size": 2, "carry_pointer": True, "markov_rank": 2}),
    "reduced_vocabulary": ({}, {"draft_token_ids": torch.tensor([0, 2, 5]), "markov_rank": 2}),
}
SLOW = {
    "unprocessed": ({}, {}),
    "unprocessed_without_carry": ({}, {"carry": False}),
    "temperature_top_p": ({"temperature": 0.7, "top_p": 0.8}, {}),
    "min_p": ({"min_p": 0.3}, {"markov_rank": 2}),
    "hot": ({"temperature": 1.5}, {"markov_rank": 2}),
    "one_proposal": ({}, {"block_size": 1}),
    "argmax": ({}, {"draft_sampling": "argmax", "markov_rank": 2}),
    "argmax_top_k": ({"top_k": 3}, {"draft_sampling": "argmax"}),
    "top_k_and_reduced_vocabulary": ({"top_k": 3}, {"draft_token_ids": torch.tensor([0, 2, 5])}),
    "carries_predictions": ({}, {"carry_from": "states_and_predictions", "markov_rank": 2}),
    "looks_up_top_k": ({"top_k": 3}, {"lookup_ngram_size": 3, "carry": False}),
    "points_argmax": ({}, {"carry_pointer": True, "draft_sampling": "argmax"}),
    "carries_proposals": ({}, {"carry_from": "proposals"}),
    **QUICK,
}


@pytest.mark.parametrize(("options", "drafter_options"), QUICK.values(), ids=QUICK)
def test_distribution(options, drafter_options):
    check_distribution(soft_drafter(**drafter_options), options, draws=400)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "drafter_options"), SLOW.values(), ids=SLOW)
def test_distribution_with_many_draws(options, drafter_options):
    check_distribution(soft_drafter(**drafter_options), options, draws=2000)


UNSURE = {"assistant_confidence_threshold": 0.3}


@pytest.mark.parametrize(
    "drafter_options", [{"markov_rank": 2}, {"draft_sampling": "argmax"}], ids=lambda options: next(iter(options))
)
def test_distribution_of_blocks_that_end_where_the_drafter_is_unsure(drafter_options):
    """How long a block is depends on what was drawn; the last token drawn is verified whatever it is."""
    drafter = soft_drafter(block_size=3, std=1.5, **drafter_options)
    lengths = set()
    for _ in range(20):
        soft_target().generate(PROMPT, assistant_model=drafter, do_sample=True, top_k=0, max_new_tokens=9, **UNSURE)
        lengths |= set(drafter.last_report.proposed)
    assert {1, 2, 3} <= lengths
    check_distribution(drafter, {}, 800, **UNSURE)


@pytest.mark.slow
def test_wrong_q_is_detected(monkeypatch):
    """The test above has the power it needs: logits that are not those drawn from, as R3 reports them, fail it."""
    original = CarryoverCandidateGenerator.draw_processed

    def flattened(self, input_ids, base):
        candidates, logits = original(self, input_ids, base)
        return candidates, None if logits is None else logits * 0.5

    monkeypatch.setattr(CarryoverCandidateGenerator, "draw_processed", flattened)
    with pytest.raises(AssertionError):
        check_distribution(soft_drafter(markov_rank=2), {}, draws=2000)


def make_generator(drafter, target=None, logits_processor=None, **options) -> CarryoverCandidateGenerator:
    """A candidate generator as `generate` makes it, for calling its parts."""
    target = soft_target() if target is None else target
    config, _ = target._prepare_generation_config(None, do_sample=True, max_length=64, **options)
    return CarryoverCandidateGenerator(target, drafter, config, logits_processor)


@pytest.mark.compat
@pytest.mark.parametrize("rank", [0, 2], ids=["dflash", "markov"])
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_returned_logits_are_those_drawn_from(rank, reduced):
    """Redrawing from the returned `q` with the same seed gives the same proposals; outside the vocabulary `q` is 0."""
    ids = torch.tensor([0, 2, 5]) if reduced else None
    drafter = soft_drafter(block_size=8, markov_rank=rank, draft_token_ids=ids)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(2)])
    generator = make_generator(drafter, logits_processor=warpers)
    base = torch.randn(8, 3 if reduced else V, generator=torch.Generator().manual_seed(0))
    for seed in range(20):
        torch.manual_seed(seed)
        candidates, logits = generator.draw_processed(PROMPT, base.clone())
        assert isinstance(generator, CandidateGenerator) and logits.dtype == torch.float32
        torch.manual_seed(seed)
        q = logits.softmax(dim=-1)[0]
        again = [int(torch.multinomial(row.unsqueeze(0), num_samples=1)) for row in q]
        assert candidates[0, PROMPT.shape[1] :].tolist() == again
        assert bool((q > 0).sum(dim=-1).eq(2).all())
        if reduced:
            assert float(q[:, [1, 3, 4]].sum()) == 0.0


def test_markov_bias_follows_the_drawn_token():
    """`logits_k = base_k + W2 · W1[y_{k-1}]`, `y_0` the anchor, over target ids in `W1` and draft ids in `W2`."""
    drafter = soft_drafter(block_size=4, markov_rank=2, draft_token_ids=torch.tensor([0, 2, 5]))
    generator = make_generator(drafter)
    base = torch.randn(4, 3)
    torch.manual_seed(0)
    candidates, logits = generator.draw_processed(PROMPT, base.clone())
    previous = candidates[0, PROMPT.shape[1] - 1 : -1]
    head = drafter.markov_head
    want = base + head.markov_w1.weight[previous] @ head.markov_w2.weight.T
    torch.testing.assert_close(logits[0][:, [0, 2, 5]], want.detach())


def test_argmax_drafting_returns_a_one_point_distribution():
    """R4: proposals are the likeliest tokens, and `q` says so."""
    drafter = soft_drafter(block_size=3, draft_sampling="argmax")
    base = torch.tensor([[0.0, 3, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]])
    candidates, logits = make_generator(drafter).draw_processed(PROMPT, base)
    assert candidates[0, PROMPT.shape[1] :].tolist() == [1, 0, 5]
    assert logits.softmax(dim=-1)[0].tolist() == torch.eye(V)[[1, 0, 5]].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [8.0, 1.3], ids=["certain", "noisy"])
def test_independent_slots_at_temperature_one(scale, tmp_path):
    """
    R4: a trained pair without a Markov head, 20 prompts of 64 tokens. Where the target is sure of itself the default
    keeps four fifths of greedy's tokens per round; where slots that are drawn apart do not fit together, `"argmax"`
    is the way out.
    """
    target = counting_target(scale)
    torch.manual_seed(0)
    start, options = torch.randint(0, 64, (96, 2)), {"do_sample": True, "top_k": 0}
    mask = torch.ones_like(start)
    texts = target.generate(start, attention_mask=mask, max_new_tokens=38, **options).tolist()
    drafter = tiny_drafter(target, carry=False, block_size=5, num_hidden_layers=1, std=0.1)
    training = {"stage": "baseline", "per_device_train_batch_size": 16, "anchors_per_response": 8}
    fit_drafter(target, drafter, texts, [2] * 96, tmp_path, max_steps=240, learning_rate=1e-2, **training)

    def tokens_per_round(sampling, **options):
        drafter.config.draft_sampling = sampling
        torch.manual_seed(3)
        committed = rounds = 0
        for i in range(0, 60, 3):
            target.generate(torch.tensor([[i, i + 1]]), assistant_model=drafter, max_new_tokens=64, **options)
            committed += sum(drafter.last_report.committed)
            rounds += drafter.last_report.rounds
        return committed / rounds

    usual = CarryoverConfig().draft_sampling
    greedy, default = tokens_per_round(usual, do_sample=False), tokens_per_round(usual, **options)
    assert greedy > 2.5
    if scale == 8.0:
        assert default >= 0.8 * greedy
    else:
        assert tokens_per_round("argmax", **options) > 1.05 * default > 1.05 * 1.2


def test_sampling_from_a_certain_target_accepts_the_oracle():
    """With `top_k=1` sampling is greedy: a drafter that is right is accepted throughout, in every draw."""
    target = soft_target()
    mask = torch.ones_like(PROMPT)
    want = target.generate(PROMPT, attention_mask=mask, do_sample=False, max_new_tokens=12)
    for sampling in ("sample", "argmax"):
        drafter = follow_script(soft_drafter(block_size=3, draft_sampling=sampling, markov_rank=2), want, 3)
        options = {"attention_mask": mask, "do_sample": True, "top_k": 1, "max_new_tokens": 12}
        assert target.generate(PROMPT, assistant_model=drafter, **options).tolist() == want.tolist()
        assert drafter.last_report.accepted == [3, 3, 2]


@pytest.mark.parametrize("where", ["fc.weight", "norm.weight", "markov_head.markov_w1.weight", "carry_embedding"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sample"])
def test_broken_drafter_changes_nothing(where, value, do_sample):
    """A drafter full of NaN or infinities proposes little or nonsense; the text is the target's."""
    target = tiny_llama()
    drafter = tiny_drafter(target, markov_rank=3)
    with torch.no_grad():
        drafter.get_parameter(where).fill_(value)
    options = {"max_new_tokens": 12, "do_sample": do_sample, "top_k": 1 if do_sample else None}
    for extra in ({}, {"repetition_penalty": 1.2}):
        want = target.generate(prompt_ids(), **options, **extra)
        got = target.generate(prompt_ids(), assistant_model=drafter, **options, **extra)
        assert got.tolist() == want.tolist()
    if where == "fc.weight" and do_sample:
        assert sum(drafter.last_report.proposed) == 0


def test_block_ends_where_nothing_can_be_drawn():
    """NaN in the third row leaves two proposals, with their logits."""
    drafter = soft_drafter(block_size=4)
    base = torch.zeros(4, V)
    base[2] = float("nan")
    candidates, logits = make_generator(drafter).draw_processed(PROMPT, base)
    assert candidates.shape[1] == PROMPT.shape[1] + 2
    assert logits.shape == (1, 2, V)
    candidates, logits = make_generator(drafter).draw_processed(PROMPT, torch.full((4, V), float("nan")))
    assert candidates.tolist() == PROMPT.tolist()
    assert logits is None
