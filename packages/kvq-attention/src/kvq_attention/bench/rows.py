"""Rows of the record: figures rounded to what a measurement can tell, keys in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvq_attention import launches
from kvq_attention.bench.timing import Timing, time_calls

Row = dict[str, Any]

# It reads lengths and tables on the host, which no graph can hold.
EAGER = "reference"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the memory of the device gives at best in GB/s; None where it was not measured.

    Attributes
    ----------
    read : reading pages of 1 KiB in random order
    copy : copying on the device, bytes read and written
    """

    read: float | None = None
    copy: float | None = None


def run_and_time(
    op: str, calls: Sequence[Callable[[], Any]], device: str, repeat: int
) -> tuple[str, Timing]:
    """The backend that ran the calls, as it counted itself, and their timing."""
    with launches.counting() as launched:
        for call in calls:
            call()
    ran = [backend for backend, ops in launched.items() if ops[op]]
    timing = time_calls(calls, device, repeat, graph=EAGER not in ran)
    return " and ".join(ran), timing


def timed(timing: Timing) -> Row:
    """How long one call takes, how that was found, and how much it varied."""
    return {
        "how": timing.how,
        "calls": timing.calls,
        "us": round(timing.us, 2),
        "us_p10": round(timing.us_p10, 2),
        "us_p90": round(timing.us_p90, 2),
    }


def moved(timing: Timing, nbytes: int, ceiling: float | None, name: str) -> Row:
    """Bytes, the rate at which they moved, and what the ceiling says of it."""
    rate = timing.gb_per_s(nbytes)
    return {
        "bytes": nbytes,
        "gb_per_s": round(rate, 1),
        f"share_of_{name}": None if ceiling is None else round(rate / ceiling, 4),
        "floor_us": None if ceiling is None else round(nbytes / ceiling / 1e3, 2),
    }


def significant(error: float) -> float:
    """Two digits of an error."""
    return float(f"{error:.2g}")
