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
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
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
    process = run(
        place,
        *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
        codecs=codecs,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
    said = process.stdout + process.stderr
    if REFUSED in said:
        pytest.skip(f"compute-sanitizer: {REFUSED}")
    found = ERRORS.findall(said)
    assert found and not any(int(count) for count in found), said[-4000:]
    assert_done(process, codecs)
