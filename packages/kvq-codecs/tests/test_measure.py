"""Measured errors: the published figures, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

import kvq_codecs
from kvq_codecs.measure import gaussian_rows, kurtotic_rows, measure

from . import tolerances


@pytest.mark.parametrize(
    ("name", "published"), [("q8_0", 0.0054), ("q6_0", 0.0219), ("q4_0", 0.0936)]
)
def test_relative_rms_is_the_published_one(name: str, published: float) -> None:
    got = measure(kvq_codecs.get(name), gaussian_rows()).relative_rms
    assert got == pytest.approx(published, rel=tolerances.PUBLISHED_FIGURE_RTOL)


@pytest.mark.parametrize(("name", "published"), [("iso3", 0.0339), ("iso4", 0.0182)])
def test_relative_mse_is_the_published_one(name: str, published: float) -> None:
    got = measure(kvq_codecs.get(name), gaussian_rows()).relative_mse
    assert got == pytest.approx(published, rel=tolerances.PUBLISHED_FIGURE_RTOL)


def test_figures_by_hand() -> None:
    rows = np.full((1, 32), 8, np.float32)  # q4_0 reads 7: an error of −1/8 everywhere
    error = measure(kvq_codecs.get("q4_0"), rows)
    assert error.relative_rms == 0.125
    assert error.relative_mse == 0.125**2
    assert error.mean_error == -0.125
    assert measure(kvq_codecs.get("fp32"), gaussian_rows()).relative_rms == 0


def test_rows_are_the_same_each_time_and_as_kurtotic_as_said() -> None:
    for make, low, high in ((gaussian_rows, 2.9, 3.1), (kurtotic_rows, 10, np.inf)):
        np.testing.assert_array_equal(make(), make())
        squares = make().astype(np.float64) ** 2
        kurtosis = np.mean(squares**2) / np.mean(squares) ** 2
        assert low < kurtosis < high
