"""Whether the rows of SUPPORT were proven by the run: what conftest.py's hooks decide with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from kvq_attention.needs import Row

Outcomes = Mapping[str, set[str]]  # row id → outcomes of the tests that prove it

# Options that choose among the tests; what they leave out is nobody's fault.
SELECTING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")


def wrong_marker(rows: Iterable[Row], row_id: str, test: str) -> str | None:
    """Why a test may not say that it proves a row; None if the row names that test."""
    named = {row.id: row.proof for row in rows}
    if row_id not in named:
        return f"{test} proves {row_id!r}, which is no row of SUPPORT: {sorted(named)}"
    if named[row_id] != test:
        return f"{test} proves {row_id!r}, but that row of SUPPORT names {named[row_id]}"
    return None


def unproven(rows: Iterable[Row], outcomes: Outcomes, devices: Iterable[str]) -> list[str]:
    """Rows whose test did not run and pass, each with what happened instead.

    The test of a row that holds for none of the devices there are may be skipped.
    """
    missing, here = [], set(devices)
    for row in rows:
        seen = outcomes.get(row.id, set())
        elsewhere = row.devices is not None and here.isdisjoint(row.devices)
        if "failed" in seen or ("passed" not in seen and not (elsewhere and "skipped" in seen)):
            happened = " and ".join(sorted(seen)) or "did not run"
            missing.append(f"{row.id}: {row.proof} {happened}")
    return missing


def is_full_run(
    args: Iterable[str], options: Mapping[str, object], tests: Path, where: Path
) -> bool:
    """True if the user asked for all tests below `tests` (a folder), or for more."""
    if any(options.get(name) for name in SELECTING):
        return False
    asked = [(where / arg).resolve() for arg in args if "::" not in arg]
    return any(path == tests or path in tests.parents for path in asked)
