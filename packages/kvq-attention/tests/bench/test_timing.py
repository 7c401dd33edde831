import itertools
from functools import partial

import pytest

from kvq_attention.bench import timing
from kvq_attention.bench.timing import Timing, time_calls


def test_a_time_is_the_median_of_the_groups_a_call(monkeypatch):
    seconds = [3e-6 * n for n in (5, 1, 2, 9, 4, 3, 8, 7, 6, 11, 10)]  # of three calls each
    clock = itertools.chain.from_iterable((0.0, s) for s in seconds)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    ran = []
    calls = [partial(ran.append, n) for n in range(3)]
    found = time_calls(calls, "cpu", len(seconds), graph=False)
    assert (found.us, found.us_p10, found.us_p90) == pytest.approx((6, 2, 10))
    assert (found.calls, found.how) == (3, "clock")
    assert ran == [0, 1, 2] * len(seconds)


def test_one_repetition_has_no_spread():
    found = time_calls([int], "cpu", 1, graph=False)
    assert found.us_p10 == found.us == found.us_p90 > 0


def test_a_rate_counts_ten_to_the_ninth():
    assert Timing(250.0, 250.0, 250.0, 4, "graph").gb_per_s(1 << 30) == pytest.approx(4294.967)
