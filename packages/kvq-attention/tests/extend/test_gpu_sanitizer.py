"""Extend's kernels touch no foreign memory, read nothing unwritten and do not race.

exercise_extend.py in a process, a codec at a time: kernels are compiled for seconds, and those of
the first test lie in Triton's cache when a tool runs them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .. import sanitizer
from ..decode.places import TRITON, Place, each_codec
from ..sanitizer import TOOLS, assert_done

SCRIPT = Path(__file__).parents[1] / "exercise_extend.py"
LAUNCHED = "launched"  # as the script says it
# Scales: none, one a block (8 bits a value, 4), two, one a block of turned rows, one a row.
CODECS = ("bf16", "q8_0", "q4_0", "nvfp4", "iso3", "fp8")
PLAIN = ("attend_new", "merge_parts", "gather", "join", "place")
PACKED = (*PLAIN, "find_peaks", "unpack")


def kernels_of(codec: str) -> tuple[str, ...]:
    """What all routes launch: bf16 rows are multiplied as they are."""
    return PLAIN if codec == "bf16" else PACKED


def launched(said: str) -> set[str]:
    """The kernels that the script launched, for each of its codecs."""
    lines = [line.split() for line in said.splitlines() if line.startswith(LAUNCHED)]
    return {name for _, *names in lines for name in names}


@each_codec(CODECS, [TRITON])
def test_every_route_runs_with_pages_that_are_not_there(codec: str, place: Place) -> None:
    process = sanitizer.run(SCRIPT, codec)
    assert_done(process, [codec])
    assert launched(process.stdout) == {*kernels_of(codec)}


@sanitizer.needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
@each_codec(CODECS, [TRITON])
def test_compute_sanitizer_finds_nothing(tool: str, codec: str, place: Place) -> None:
    """In our kernels: those of torch that attend densely have barriers that racecheck knows not.

    memcheck sees all of them, as they are given our strides and sizes.
    """
    kernels = () if tool == "memcheck" else kernels_of(codec)
    process = sanitizer.check(tool, SCRIPT, codec, kernels=kernels)
    assert_done(process, [codec])
    assert launched(process.stdout) == {*kernels_of(codec)}
