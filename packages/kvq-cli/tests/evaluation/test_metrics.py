"""Figures from predictions that are known by heart."""

import math

import numpy as np
import pytest
import torch

from kvq_cli.evaluation.metrics import Divergence, agreeing_tokens, answer_nll, is_finite


def logits_of(*rows):
    """Logits whose softmax is each row."""
    return torch.tensor(rows).log()


def test_perplexity_is_the_exponential_of_the_mean_surprise():
    found = Divergence()
    halves = logits_of([0.5, 0.25, 0.25], [0.125, 0.125, 0.75])
    found.add(halves, halves, torch.tensor([0, 1]))
    summary = found.summary()
    assert summary["perplexity"] == 4.0  # of 1/2 and 1/8
    assert (summary["kl_mean"], summary["kl_999"], summary["top1_agreement"]) == (0.0, 0.0, 1.0)


def test_kl_is_of_the_reference_from_the_format():
    found = Divergence()
    found.add(logits_of([0.25, 0.75]), logits_of([0.5, 0.5]), torch.tensor([0]))
    wanted = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.summary()["kl_mean"] == pytest.approx(wanted, rel=1e-5)
    assert wanted != pytest.approx(0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(1.5), rel=1e-2)


def test_quantiles_are_numpys_over_all_that_was_added():
    torch.manual_seed(0)
    found, kl = Divergence(), []
    for rows in (70, 130):
        ours, theirs = torch.randn(2, rows, 11)
        found.add(ours, theirs, torch.zeros(rows, dtype=torch.long))
        p, q = (x.double().softmax(-1) for x in (theirs, ours))
        kl += (p * (p / q).log()).sum(-1).tolist()
    summary = found.summary()
    for key, share in (("kl_99", 0.99), ("kl_999", 0.999)):
        assert summary[key] == pytest.approx(np.quantile(kl, share), rel=1e-5)
    assert summary["kl_mean"] == pytest.approx(np.mean(kl), rel=1e-5)


def test_a_shift_of_all_logits_is_no_divergence():
    found, logits = Divergence(), torch.tensor([[30.0, 29.0, -4.0]])
    found.add(logits + 64.0, logits, torch.tensor([0]))
    assert found.summary()["kl_mean"] == 0.0


def test_a_token_that_the_reference_excludes_adds_nothing():
    found = Divergence()
    found.add(logits_of([0.5, 0.5]), torch.tensor([[0.0, -torch.inf]]), torch.tensor([0]))
    assert found.summary()["kl_mean"] == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("row", "finite"),
    [
        ([0.0, -math.inf, 1.0], True),  # a token that is excluded
        ([0.0, math.nan, 1.0], False),
        ([0.0, math.inf, 1.0], False),
        ([-math.inf] * 3, False),
    ],
)
def test_what_is_a_prediction(row, finite):
    assert is_finite(torch.tensor([[0.0, 1.0, 2.0], row])) is finite


@pytest.mark.parametrize(("chosen", "agreeing"), [([1, 2, 0], 3), ([1, 0, 0], 1), ([0, 2, 0], 0)])
def test_greedy_decoding_agrees_up_to_its_first_other_token(chosen, agreeing):
    logits = torch.nn.functional.one_hot(torch.tensor(chosen), 4).float()
    assert agreeing_tokens(logits, torch.tensor([1, 2, 0])) == agreeing


def test_an_answer_is_found_when_each_of_its_tokens_is_the_likeliest():
    logits = logits_of([0.5, 0.25, 0.25], [0.25, 0.5, 0.25])
    assert answer_nll(logits, torch.tensor([0, 1])) == (True, pytest.approx(math.log(2)))
    assert answer_nll(logits, torch.tensor([0, 2]))[0] is False
