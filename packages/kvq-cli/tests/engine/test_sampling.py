import math
import random

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvq_cli.engine import sampling
from kvq_cli.engine.detokenize import Detokenizer
from kvq_cli.engine.params import RequestRejected, SamplingParams
from kvq_cli.engine.request import Request
from kvq_cli.engine.sampling import NO_TOKEN, _points, draw_key, sample


def request(said=0, prompt=(1,), choice=0, **options):
    """One whose answer has `said` tokens, or those."""
    params = SamplingParams(**options)
    answer = [0] * said if isinstance(said, int) else list(said)
    tokens = [*prompt, *answer]
    key = draw_key(params, choice)
    return Request("r", tokens, params, len(prompt), None, Detokenizer(None), key)


def tokens_of(logits, requests):
    return sample(logits, requests).tokens


def stream(logits, count, **options):
    """Draws of one request, each alone."""
    key = draw_key(SamplingParams(**options))
    requests = [request(n, **options) for n in range(count)]
    for each in requests:
        each.draw_key = key
    return [tokens_of(logits[None], [each])[0] for each in requests]


def frequencies(logits, draws=4000, **options):
    requests = [request(n, seed=7, **options) for n in range(draws)]
    tokens = tokens_of(logits.expand(draws, -1), requests)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / draws


def random_logits(rows, seed):
    return 4 * torch.randn(rows, 50, generator=torch.Generator().manual_seed(seed))


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 3.0])


def test_temperature_zero_is_argmax():
    assert tokens_of(LOGITS[None], [request(temperature=0.0)]) == [4]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    got = frequencies(LOGITS, temperature=temperature)
    want = torch.softmax(LOGITS / temperature, -1)
    # 5 standard deviations of a proportion over 4,000 draws
    assert (got - want).abs().max() < 5 * math.sqrt(0.25 / 4000)


def test_top_k_keeps_the_k_most_likely():
    assert set(frequencies(LOGITS, top_k=2).nonzero().flatten().tolist()) == {0, 4}


@pytest.mark.parametrize("most", [5, 6, 2**31, 2**63, 10**30])
def test_a_top_k_of_any_size_is_all_tokens_for_its_own_row_alone(most):
    requests = [request(0, seed=3, top_k=most), request(0, seed=3), request(0, seed=3, top_k=1)]
    huge, free, single = tokens_of(LOGITS.expand(3, -1), requests)
    assert huge == free and single == 4


def test_top_p_keeps_the_smallest_sufficient_set():
    # probabilities 4: .644, 0: .237, 2: .087, …
    assert set(frequencies(LOGITS, top_p=0.6).nonzero().flatten().tolist()) == {4}
    assert set(frequencies(LOGITS, top_p=0.7).nonzero().flatten().tolist()) == {0, 4}


def test_min_p_keeps_tokens_near_the_most_likely():
    # relative to the most likely: 0: .368, 2: .135
    assert set(frequencies(LOGITS, min_p=0.2).nonzero().flatten().tolist()) == {0, 4}


def test_top_p_and_top_k_together_renormalize_inside_top_k():
    assert set(frequencies(LOGITS, top_k=2, top_p=0.72).nonzero().flatten().tolist()) == {4}


def test_a_seed_fixes_a_request_whatever_its_company():
    alone = stream(LOGITS, 20, seed=3)
    mine = [request(n, seed=3) for n in range(20)]
    others = [
        [request(n, seed=4, top_p=0.5), request(5, temperature=0.0), request(n, top_k=1)]
        for n in range(20)
    ]
    together = [
        tokens_of(torch.stack([LOGITS.flip(0), LOGITS, LOGITS, LOGITS]), [a, b, c, d])[2]
        for (a, b, d), c in zip(others, mine, strict=True)
    ]
    assert alone == together
    assert len(set(alone)) > 1


@DEVICES
def test_a_row_is_drawn_alike_whatever_the_parameters_beside_it(device):
    """In one batch and in batches of one: 300 rows of every kind."""
    rng = random.Random(0)
    requests = [any_request(rng) for _ in range(300)]
    logits = random_logits(300, 0).to(device)
    together = tokens_of(logits, requests)
    alone = [tokens_of(row[None], [each])[0] for row, each in zip(logits, requests, strict=True)]
    assert together == alone


def test_rows_are_drawn_in_parts_where_the_vocabulary_is_large(monkeypatch):
    rng = random.Random(1)
    requests = [any_request(rng, logprobs=2) for _ in range(40)]
    logits = random_logits(40, 1)
    whole = sample(logits, requests)
    monkeypatch.setattr("kvq_cli.engine.sampling.DRAWN_VALUES", 170)  # three rows
    assert sample(logits, requests) == whole


def test_without_a_seed_two_requests_differ():
    flat = torch.zeros(1000)
    assert stream(flat, 8) != stream(flat, 8)


def test_choices_of_one_prompt_differ_and_the_first_draws_as_it_would_alone():
    flat = torch.zeros(4, 1000)
    tokens = tokens_of(flat, [request(seed=5, choice=n) for n in range(4)])
    assert len(set(tokens)) == 4
    assert tokens[:1] == tokens_of(flat[:1], [request(seed=5)])


def test_neighbouring_seeds_and_positions_draw_evenly():
    """64 seeds × 64 positions fill 16 equal parts of [0, 1) alike."""
    requests = [request(n, seed=seed) for seed in range(-32, 32) for n in range(64)]
    counts = np.bincount((16 * _points(requests)).astype(int), minlength=16)
    # 5 standard deviations of a count whose mean is 256
    assert abs(counts - 256).max() < 5 * math.sqrt(256 * 15 / 16)


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-40, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature):
    requests = [request(n, temperature=temperature) for n in range(20)]
    assert set(tokens_of(LOGITS.expand(20, -1), requests)) == {4}


def test_extreme_logits_are_finite_choices():
    logits = torch.tensor([-math.inf, 1e30, 1e30, -math.inf])
    assert set(frequencies(logits).nonzero().flatten().tolist()) == {1, 2}


@pytest.mark.parametrize("spread", [0.1, 1.0])
@pytest.mark.parametrize("rounded", [True, False])
def test_a_cpu_that_looks_at_candidates_keeps_what_sorting_keeps(monkeypatch, spread, rounded):
    """Rows that they decide, flat ones that they do not, and equal scores."""
    rng = random.Random(4)
    requests = [any_request(rng) for _ in range(300)]
    logits = spread * random_logits(300, 4)
    logits = logits.round() if rounded else logits
    want = tokens_of(logits, requests)
    decided = []
    cut = sampling._cut_candidates

    def counted(*arguments):
        found = cut(*arguments)
        decided.append(found[1].float().mean())
        return found

    monkeypatch.setattr(sampling, "_cut_candidates", counted)
    monkeypatch.setattr(sampling, "CANDIDATES", 12)
    if rounded:  # equal ones on both sides of the candidates' end may change places
        same = sum(a == b for a, b in zip(tokens_of(logits, requests), want, strict=True))
        assert same > 200
    else:
        assert tokens_of(logits, requests) == want
    assert 0.1 < decided[0] < 0.9


@DEVICES
def test_draws_are_the_same_on_every_device_and_in_every_type_that_holds_the_logits(device):
    rng = random.Random(3)
    requests = [any_request(rng) for _ in range(300)]
    logits = random_logits(300, 3).bfloat16()
    want = tokens_of(logits.float(), requests)
    got = tokens_of(logits.to(device), requests)
    # where a point falls on a border, another order of a sum may decide otherwise
    assert sum(a != b for a, b in zip(got, want, strict=True)) <= (0 if device == "cpu" else 1)


def test_a_row_that_is_no_numbers_has_no_token_and_harms_no_other():
    rows = torch.stack([LOGITS, LOGITS, torch.full_like(LOGITS, -math.inf), LOGITS])
    rows[1, 2] = math.nan
    for options in ({"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.5}, {"top_k": 1}):
        tokens = tokens_of(rows, [request(**options, logprobs=1) for _ in range(4)])
        assert tokens[1:3] == [NO_TOKEN, NO_TOKEN]
        assert min(tokens[0], tokens[3]) >= 0


# ---- against transformers -----------------------------------------------------------------------


def any_request(rng, vocabulary=50, **more):
    """Every parameter on or off."""

    def some(value, neutral):
        return value if rng.random() < 0.5 else neutral

    return request(
        [rng.randrange(vocabulary) for _ in range(rng.randrange(8))],
        [rng.randrange(vocabulary) for _ in range(1 + rng.randrange(8))],
        seed=rng.randrange(2**63),
        temperature=some(rng.uniform(0.2, 3.0), rng.choice([0.0, 1.0])),
        top_k=some(rng.randrange(1, 2 * vocabulary), 0),
        top_p=some(rng.uniform(0.05, 0.999), 1.0),
        min_p=some(rng.uniform(0.01, 0.9), 0.0),
        repetition_penalty=some(rng.uniform(0.5, 2.0), 1.0),
        presence_penalty=some(rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(rng.uniform(-2, 2), 0.0),
        logit_bias=some(tuple((n, rng.uniform(-9, 9)) for n in rng.sample(range(50), 3)), ()),
        **more,
    )


def theirs(row, request):
    """Probabilities float64 [V] of transformers' processors, in the order of its `generate`."""
    params, answer = request.params, request.tokens[request.prompt_tokens :]
    ids, scores = torch.tensor([request.tokens]), row[None].double()
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias}
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in set(answer):  # OpenAI's formula; transformers has none
        scores[0, token] -= params.presence_penalty
        scores[0, token] -= params.frequency_penalty * answer.count(token)
    if params.temperature == 0.0:
        return torch.nn.functional.one_hot(scores[0].argmax(), len(row)).double()
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0].softmax(-1)


@DEVICES
def test_every_draw_is_from_transformers_distribution(device):
    """The token in whose part of it the point falls: 1,000 rows of any parameters, exactly."""
    rng = random.Random(2)
    requests = [any_request(rng) for _ in range(1000)]
    logits = random_logits(1000, 2)
    sampled = tokens_of(logits.to(device), requests)
    drawn = [each for each in requests if each.draw_key is not None]
    points = dict(zip(map(id, drawn), _points(drawn), strict=True))
    assert 300 < len(drawn) < 1000
    for row, each, token in zip(logits, requests, sampled, strict=True):
        probs = theirs(row, each)
        assert probs[token] > 0
        below, upto = probs[:token].sum(), probs[: token + 1].sum()
        point = points.get(id(each), 0.5 * float(below + upto))
        # what float32 rounds of the probabilities
        assert below - 1e-5 <= point <= upto + 1e-5


def test_penalties_change_no_other_row_and_not_the_logits():
    logits = LOGITS.expand(3, -1).clone()
    one = request([4, 4], prompt=[0], temperature=0.0, frequency_penalty=1.5)
    assert tokens_of(logits, [request(temperature=0.0), one, request(temperature=0.0)]) == [4, 0, 4]
    assert torch.equal(logits, LOGITS.expand(3, -1))


def test_a_history_follows_an_answer_as_it_grows():
    each = request(prompt=[0, 4], temperature=0.0, presence_penalty=2.0)
    seen = []
    for _ in range(3):
        [token] = tokens_of(LOGITS[None], [each])
        seen.append(token)
        each.tokens.append(token)
    # the prompt's 4 does not count; 4 then falls to 1.0, and 0 to 0.0
    assert seen == [4, 0, 2]


# ---- logprobs -----------------------------------------------------------------------------------


@DEVICES
def test_logprobs_are_the_models_own_before_penalties_and_temperature(device):
    requests = [
        request(said=[4], temperature=0.0, presence_penalty=2.0, logprobs=3),
        request(temperature=0.0),
        request(temperature=0.1, top_k=1, seed=1, logprobs=0),
    ]
    found = sample(LOGITS.expand(3, -1).to(device), requests)
    want = torch.log_softmax(LOGITS.double(), -1)
    first, second, third = found.logprobs
    assert second is None
    assert (first.token_id, third.token_id, third.top) == (0, 4, ())
    assert [first.logprob, third.logprob] == pytest.approx(want[[0, 4]].tolist(), abs=1e-6)
    assert [token for token, _ in first.top] == [4, 0, 2]
    assert [value for _, value in first.top] == pytest.approx(want[[4, 0, 2]].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2.0),
        ("stop", ("",)),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("logit_bias", ((3, 100.5),)),
    ],
)
def test_bad_parameters_name_what_is_allowed(name, value):
    with pytest.raises(RequestRejected, match=name):
        SamplingParams(**{name: value})
