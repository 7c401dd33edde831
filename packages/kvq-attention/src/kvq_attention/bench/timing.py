"""How long a group of calls takes: by CUDA events around replays of a graph that holds them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
Event: Any = torch.cuda.Event

WARM_UP = 3  # repetitions before the first that counts


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: its group's time divided by the calls of the group.

    Attributes
    ----------
    us, us_p10, us_p90 : median, and what a tenth of the repetitions were faster and slower than
    calls : calls of the group, each on inputs of its own
    how : graph (events around the replay of a CUDA graph), events (around eager calls), or clock
    """

    us: float
    us_p10: float
    us_p90: float
    calls: int
    how: str

    def gb_per_s(self, nbytes: float) -> float:
        """10⁹ bytes a second, if one call moves `nbytes`."""
        return nbytes / self.us / 1e3


def time_calls(calls: Sequence[Call], device: str, repeat: int, graph: bool) -> Timing:
    """Time the calls one after another as one group.

    `graph`: capture them first, for calls that read nothing on the host. Each call must have run
    before, so that nothing is compiled here.
    """
    if device != "cuda":
        return _summary([_clock(calls) for _ in range(repeat)], len(calls), "clock")
    torch.cuda.synchronize()
    if not graph:
        return _summary(_events(lambda: _each(calls), repeat), len(calls), "events")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        _each(calls)
    return _summary(_events(captured.replay, repeat), len(calls), "graph")


def issue_us(calls: Sequence[Call], device: str, repeat: int) -> float | None:
    """Median microseconds of the host until a call returns while its device has nothing to do.

    None where the host computes. Less than a GPU takes for the same call is hidden behind it.
    """
    if device != "cuda":
        return None
    times = []
    for call in list(calls) * repeat:
        torch.cuda.synchronize()
        times.append(_clock([call]))
    return round(statistics.median(times), 1)


def _each(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _clock(calls: Sequence[Call]) -> float:
    start = time.perf_counter()
    _each(calls)
    return (time.perf_counter() - start) * 1e6


def _events(work: Call, repeat: int) -> list[float]:
    """Microseconds of each repetition; the device is not waited for between them."""
    for _ in range(WARM_UP):
        work()
    marks = [(Event(enable_timing=True), Event(enable_timing=True)) for _ in range(repeat)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in marks]


def _summary(group_us: list[float], calls: int, how: str) -> Timing:
    times = sorted(us / calls for us in group_us)
    tenth = (len(times) - 1) // 10
    median = statistics.median(times)
    return Timing(median, times[tenth], times[len(times) - 1 - tenth], calls, how)
