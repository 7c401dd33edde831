import math

import pytest
import torch

from kvq_cli.engine.detokenize import Detokenizer
from kvq_cli.engine.params import RequestRejected, SamplingParams
from kvq_cli.engine.request import Request
from kvq_cli.engine.sampling import make_generator, sample


def request(**options):
    params = SamplingParams(**options)
    return Request("r", [1], params, 1, 8, Detokenizer(None), make_generator(params))


def frequencies(logits, draws=4000, **options):
    requests = [request(seed=7, **options)] * draws
    tokens = sample(logits.expand(draws, -1), requests)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / draws


LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 3.0])


def test_temperature_zero_is_argmax():
    assert sample(LOGITS[None], [request(temperature=0.0)]) == [4]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    got = frequencies(LOGITS, temperature=temperature)
    want = torch.softmax(LOGITS / temperature, -1)
    # 5 standard deviations of a proportion over 4,000 draws
    assert (got - want).abs().max() < 5 * math.sqrt(0.25 / 4000)


def test_top_k_keeps_the_k_most_likely():
    assert set(frequencies(LOGITS, top_k=2).nonzero().flatten().tolist()) == {0, 4}


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
    alone = [sample(LOGITS[None], [r])[0] for r in [request(seed=3)] for _ in range(20)]
    mine, other = request(seed=3), request(seed=4)
    together = [sample(torch.stack([LOGITS.flip(0), LOGITS]), [other, mine])[1] for _ in range(20)]
    assert alone == together
    assert len(set(alone)) > 1


def test_without_a_seed_two_requests_differ():
    a, b = request(), request()
    flat = torch.zeros(1, 1000)
    assert [sample(flat, [a])[0] for _ in range(8)] != [sample(flat, [b])[0] for _ in range(8)]


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-40, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature):
    assert set(sample(LOGITS.expand(20, -1), [request(temperature=temperature)] * 20)) == {4}


def test_extreme_logits_are_finite_choices():
    logits = torch.tensor([-math.inf, 1e30, 1e30, -math.inf])
    assert set(frequencies(logits).nonzero().flatten().tolist()) == {1, 2}


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
    ],
)
def test_bad_parameters_name_what_is_allowed(name, value):
    with pytest.raises(RequestRejected, match=name):
        SamplingParams(**{name: value})
