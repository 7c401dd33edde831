"""The window rule against brute force over every position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq_pools import PageError, first_visible, window_pages_per_request

small = st.integers(1, 20)


def sees(position: int, window: int) -> list[int]:
    """Positions that a query sees: (position - window, position]."""
    return [p for p in range(position + 1) if position - window < p <= position]


@given(position=st.integers(0, 60), window=st.integers(1, 70))
def test_first_visible_is_the_first_of_window_positions(position: int, window: int) -> None:
    visible = sees(position, window)
    assert first_visible(position, window) == visible[0]
    assert len(visible) == min(window, position + 1)


@given(window=small, step=small, page_tokens=small)
def test_pages_per_request_is_the_exact_worst_case(
    window: int, step: int, page_tokens: int
) -> None:
    most = 0
    for computed in range(window + step + 2 * page_tokens):
        for count in range(1, step + 1):
            stop = computed + count  # this step computes [computed, stop)
            seen = {p for q in range(computed, stop) for p in sees(q, window)}
            most = max(most, len({p // page_tokens for p in seen}))
    assert window_pages_per_request(window, step, page_tokens) == most


def test_a_window_and_a_step_that_fill_pages_need_one_more() -> None:
    assert window_pages_per_request(512, 512, 16) == 65
    assert window_pages_per_request(512, 1, 16) == 33
    assert window_pages_per_request(1, 1, 16) == 1


@pytest.mark.parametrize("bad", [0, -1, 1.5])
def test_windows_steps_and_pages_of_nothing(bad: int) -> None:
    for arguments in ((bad, 1, 1), (1, bad, 1), (1, 1, bad)):
        with pytest.raises(PageError, match="at least 1"):
            window_pages_per_request(*arguments)
    with pytest.raises(PageError, match="window"):
        first_visible(3, bad)
    with pytest.raises(PageError, match="position"):
        first_visible(-1, 4)
