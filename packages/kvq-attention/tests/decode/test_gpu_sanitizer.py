"""Kernels touch no foreign memory and read nothing unwritten: exercise.py in a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvq_codecs

from .cases import compiled
from .exercise import DONE

pytestmark = [pytest.mark.gpu, compiled]

SCRIPT = Path(__file__).with_name("exercise.py")
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
# The GPU's own virtual machine may not let a checker in; compute-sanitizer says so in these words.
REFUSED = "Device not supported"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, sys.executable, str(SCRIPT)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


def assert_done(process: subprocess.CompletedProcess[str]) -> None:
    said = (process.stdout + process.stderr)[-4000:]
    assert process.returncode == 0, said
    done = [line.split()[1] for line in process.stdout.splitlines() if line.startswith(DONE)]
    assert done == list(kvq_codecs.names()), said


def test_f11_slots_and_pages_that_are_not_there() -> None:
    """In a process of its own: a device assert would spoil every test after it."""
    assert_done(run())


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    """torch's caching allocator would hide both kinds of fault, so it is off."""
    process = run(
        *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
    said = process.stdout + process.stderr
    if REFUSED in said:
        pytest.skip(f"compute-sanitizer: {REFUSED}")
    found = ERRORS.findall(said)
    assert found and not any(int(count) for count in found), said[-4000:]
    assert_done(process)
