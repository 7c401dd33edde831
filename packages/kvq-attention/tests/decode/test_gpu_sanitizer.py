"""Kernels touch no foreign memory and read nothing unwritten: exercise.py in a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..exercise import DONE
from .places import KINDS, ON_GPU, Place, each_place

SCRIPT = Path(__file__).parents[1] / "exercise.py"
# How each tool ends: racecheck counts hazards, warnings among them.
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?\b|RACECHECK SUMMARY: (\d+) hazards?\b")
SAID_LINES = 60  # of its findings that a failure tells
# The GPU's own virtual machine may not let a checker in; compute-sanitizer says so in these words.
REFUSED = "Device not supported"


def run(
    place: Place, *command: str, codecs: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, sys.executable, str(SCRIPT), place.backend, *(codecs or place.codecs)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


def assert_done(process: subprocess.CompletedProcess[str], codecs: Sequence[str]) -> None:
    said = (process.stdout + process.stderr)[-4000:]
    assert process.returncode == 0, said
    done = [line.split()[1] for line in process.stdout.splitlines() if line.startswith(DONE)]
    assert done == list(codecs), said


@each_place(ON_GPU)
def test_f11_slots_and_pages_that_are_not_there(place: Place) -> None:
    """In a process of its own: a device assert would spoil every test after it."""
    assert_done(run(place), place.codecs)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck"])
@each_place(ON_GPU)
def test_compute_sanitizer_finds_nothing(tool: str, place: Place) -> None:
    """torch's caching allocator would hide both kinds of fault, so it is off."""
    codecs = [codec for codec in place.codecs if tool != "racecheck" or codec in KINDS]
    options = ("--racecheck-report", "all") if tool == "racecheck" else ()
    process = run(
        place,
        *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *options),
        codecs=codecs,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
    said = process.stdout + process.stderr
    if REFUSED in said:
        pytest.skip(f"compute-sanitizer: {REFUSED}")
    assert count_of_findings(said) == 0, findings(said)
    assert_done(process, codecs)


def count_of_findings(said: str) -> int | None:
    """What the tool counted, of all processes; None where it does not say."""
    found = [int(errors or hazards) for errors, hazards in SUMMARY.findall(said)]
    return sum(found) if found else None


def findings(said: str) -> str:
    """The first lines that the tool itself wrote, and its summary."""
    lines = [line for line in said.splitlines() if line.startswith("=========")]
    return "\n".join([*lines[:SAID_LINES], "…", *lines[-1:]]) if lines else said[-4000:]


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
