"""Kernels touch no foreign memory and read nothing unwritten: exercise.py in a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from .. import sanitizer
from ..sanitizer import SAID_LINES, TOOLS, assert_done, count_of_findings, findings
from .places import KINDS, ON_GPU, Place, each_place

SCRIPT = Path(__file__).parents[1] / "exercise.py"


@each_place(ON_GPU)
def test_f11_slots_and_pages_that_are_not_there(place: Place) -> None:
    """In a process of its own: a device assert would spoil every test after it."""
    assert_done(sanitizer.run(SCRIPT, place.backend, *place.codecs), place.codecs)


@sanitizer.needs_sanitizer
@pytest.mark.parametrize("tool", TOOLS)
@each_place(ON_GPU)
def test_compute_sanitizer_finds_nothing(tool: str, place: Place) -> None:
    codecs = [codec for codec in place.codecs if tool != "racecheck" or codec in KINDS]
    assert_done(sanitizer.check(tool, SCRIPT, place.backend, *codecs), codecs)


RACES = """exercised bf16
========= COMPUTE-SANITIZER
========= Warning: Race reported between Write access at decode+0x6d10
=========     and Read access at decode+0x6fb0 [72 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""


@pytest.mark.parametrize(
    ("said", "count"),
    [
        (RACES, 1),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n========= ERROR SUMMARY: 12 errors\n", 13),
        ("========= COMPUTE-SANITIZER\n", None),
        ("", None),
    ],
)
def test_what_each_tool_counted_is_read(said: str, count: int | None) -> None:
    assert count_of_findings(said) == count
    assert "exercised" not in findings(RACES)
    assert "decode+0x6fb0 [72 hazards]" in findings(RACES)
    many = findings("========= a finding\n" * 100 + RACES)
    assert many.count("a finding") == SAID_LINES and many.endswith("(0 errors, 1 warning)")
