"""Scripts of kernels run in processes of their own, alone or under compute-sanitizer's tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from .exercise import DONE

TOOLS = ("memcheck", "initcheck", "racecheck")
# How each tool ends: racecheck counts hazards, warnings among them.
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?\b|RACECHECK SUMMARY: (\d+) hazards?\b")
SAID_LINES = 60  # of its findings that a failure tells
# The GPU's own virtual machine may not let a checker in; compute-sanitizer says so in these words.
REFUSED = "Device not supported"

needs_sanitizer = pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer"
)


def run(
    script: Path, *args: str, under: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A script's process, under a tool or none."""
    return subprocess.run(
        [*under, sys.executable, str(script), *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


def assert_done(process: subprocess.CompletedProcess[str], codecs: Sequence[str]) -> None:
    """The script ended well and exercised these codecs."""
    said = (process.stdout + process.stderr)[-4000:]
    assert process.returncode == 0, said
    done = [line.split()[1] for line in process.stdout.splitlines() if line.startswith(DONE)]
    assert done == list(codecs), said


def check(
    tool: str, script: Path, *args: str, kernels: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """A script under a tool that finds nothing in these kernels, or in any.

    torch's caching allocator would hide faults, so it is off. Skips where the GPU lets no tool in.
    """
    under = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    under += ["--print-limit", "8"]  # each takes seconds, as torch has many symbols
    if tool == "racecheck":
        under += ["--racecheck-report", "all"]
    for kernel in kernels:
        under += ["--kernel-name", f"kne={kernel}"]
    process = run(script, *args, under=under, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    said = process.stdout + process.stderr
    if REFUSED in said:
        pytest.skip(f"compute-sanitizer: {REFUSED}")
    assert count_of_findings(said) == 0, findings(said)
    return process


def count_of_findings(said: str) -> int | None:
    """What the tool counted, of all processes; None where it does not say."""
    found = [int(errors or hazards) for errors, hazards in SUMMARY.findall(said)]
    return sum(found) if found else None


def findings(said: str) -> str:
    """The first lines that the tool itself wrote, and its summary."""
    lines = [line for line in said.splitlines() if line.startswith("=========")]
    return "\n".join([*lines[:SAID_LINES], "…", *lines[-1:]]) if lines else said[-4000:]
