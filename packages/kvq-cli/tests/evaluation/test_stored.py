"""Errors of rows and channels that stand out."""

import pytest
import torch

import kvq_codecs
from kvq_cli.evaluation.stored import RowErrors, outlier_ratio


def test_the_largest_channel_beside_the_median_of_its_own_head():
    means = torch.tensor([[1.0, 2.0, 3.0, 8.0], [10.0, 10.0, 10.0, 20.0]])
    assert outlier_ratio(means) == pytest.approx(8.0 / 2.5)


def test_errors_are_those_of_all_rows_whatever_steps_they_came_in():
    torch.manual_seed(0)
    rows = torch.randn(50, 2, 64) + 0.3
    errors = RowErrors({"k": ["q4_0"], "v": ["q8_0"]})
    for part in rows.split(17):
        errors.add("k", 3, part)
        errors.add("v", 3, part)
    codec = kvq_codecs.get("q4_0")
    difference = codec.decode(codec.encode(rows)) - rows
    found = errors.layer("k", 3, "q4_0")
    assert found["relative_error"] == pytest.approx(
        float(difference.norm() / rows.norm()), rel=1e-4
    )
    assert found["mean_error"] == pytest.approx(
        float(difference.sum() / rows.abs().sum()), rel=1e-2
    )
    assert errors.layer("v", 3, "q8_0")["relative_error"] < found["relative_error"] / 5
    assert errors.outliers() == {3: pytest.approx(outlier_ratio(rows.abs().mean(0)), rel=1e-5)}


def test_layers_weigh_by_the_size_of_their_rows():
    errors = RowErrors({"k": ["q4_0"]})
    torch.manual_seed(0)
    small, large = torch.randn(2, 20, 1, 32)
    errors.add("k", 0, small * 1e-3)
    errors.add("k", 1, large)
    one = errors.layer("k", 1, "q4_0")["relative_error"]
    assert errors.total("k", {0: "q4_0", 1: "q4_0"}) == pytest.approx(one, rel=1e-3)
    assert errors.total("k", {0: "q4_0"}) == errors.layer("k", 0, "q4_0")["relative_error"]


def test_clipping_on_one_side_shows_as_a_mean_error():
    """q4_0 keeps a block's largest value if it is negative, and 7/8 of it if it is positive."""
    errors = RowErrors({"k": ["q4_0", "q8_0"]})
    errors.add("k", 0, torch.full((10, 1, 32), 8.0))
    errors.add("k", 1, torch.full((10, 1, 32), -8.0))
    found = [errors.layer("k", layer, "q4_0")["mean_error"] for layer in (0, 1)]
    assert found == [-1 / 8, 0.0]
    assert errors.layer("k", 0, "q8_0")["mean_error"] == pytest.approx(0.0, abs=1e-3)
