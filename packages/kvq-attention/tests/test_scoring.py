"""The options of a call: what is refused, what a window means."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scale": float("nan")}, "scale must be a finite number, got nan"),
        ({"scale": 1.0, "window": 0}, "window counts the query's own position.*got 0"),
        ({"scale": 1.0, "softcap": 0.0}, "softcap must be a positive finite number, got 0.0"),
        ({"scale": 1.0, "softcap": float("inf")}, "softcap must be a positive finite number"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(AttentionError, match=said):
        Scoring(**options)  # type: ignore[arg-type]
