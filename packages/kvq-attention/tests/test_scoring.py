"""The options of a call: what is refused, what a window means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_attention import AttentionError, Scoring


def test_a_window_counts_the_query_itself() -> None:
    assert [Scoring(1.0, window=3).first_visible(p) for p in (0, 2, 3, 10)] == [0, 0, 1, 8]
    assert Scoring(1.0).first_visible(10) == 0


def test_features_are_the_parts_in_use() -> None:
    assert Scoring(1.0).features == frozenset()
    full = Scoring(1.0, window=1, softcap=0.5, sinks=torch.zeros(2))
    assert full.features == {"window", "softcap", "sinks"}


BEYOND_FLOAT32 = [float("nan"), float("inf"), 1e39, 10**400]
NO_NUMBER = ["1", True, 1j, torch.tensor(1.0)]


@pytest.mark.parametrize("bad", [*BEYOND_FLOAT32, -1e39, *NO_NUMBER, None])
def test_a_scale_is_a_number_that_float32_holds(bad: Any) -> None:
    with pytest.raises(AttentionError, match=r"scale must be a number in ±3\.403e\+38"):
        Scoring(bad)


@pytest.mark.parametrize("bad", [*BEYOND_FLOAT32, -1.0, 0.0, 1e-46, 1e-39, *NO_NUMBER])
def test_a_softcap_is_a_positive_number_that_float32_holds(bad: Any) -> None:
    with pytest.raises(AttentionError, match=r"softcap must be a number of 1\.175e-38 … 3\.403e"):
        Scoring(1.0, softcap=bad)


@pytest.mark.parametrize("bad", [0, -1, 1.5, 2.0, True, "8", 2**63, 2**70, float("inf")])
def test_a_window_is_an_int_that_positions_hold(bad: Any) -> None:
    with pytest.raises(AttentionError, match=r"window counts .* must be an int of 1 …"):
        Scoring(1.0, window=bad)


def test_the_edges_of_what_is_allowed() -> None:
    for scale in (0, -1.0, 3.4e38, -3.4e38, 1e-300):
        assert Scoring(scale).scale == scale
    for softcap in (1.2e-38, 50, 3.4e38):
        assert Scoring(1.0, softcap=softcap).softcap == softcap
    assert Scoring(1.0, window=2**63 - 1).first_visible(10) == 0
