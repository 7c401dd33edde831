"""The emulator's kernels are compiled before the tests that want them, on all cores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from ..cuda import emulated
from .places import EMULATED
from .sweeps import capped, rows_at_once


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """What tests need is guessed; they compile what was not."""
    emulated.prepare(dict.fromkeys(ways(request.session.items)))


def ways(items: Iterable[pytest.Item]) -> Iterator[emulated.Way]:
    """How the kernels are compiled for these tests."""
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if given.get("place") != EMULATED:
            continue
        if "case" in given:
            case = given["case"]
            codec, dim, dtype = case["codec"], case["dim"], case["dtype"]
            rows = rows_at_once(case["group"], case["queries"])
            yield codec, codec, dim, dtype, rows, capped(case["scoring"], False)
        elif "codec" in given:
            codec = given["codec"]
            yield codec, codec, 128, EMULATED.dtype(codec), 1, False
