"""How often each backend ran each op in this process: the proof that a kernel ran.

Backends record where they launch, so a call that has nothing to do counts nothing. Replays of a
captured graph are not counted: the graph holds the launches, and they were counted at capture.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvq_attention import support

_lock = threading.Lock()
_counts: Counter[tuple[str, str]] = Counter()
_routes: Counter[tuple[str, str, str]] = Counter()
_passed_over: Counter[tuple[str, str, str]] = Counter()


def record(backend: str, op: str) -> None:
    """Count one launch; for backends, from any thread."""
    with _lock:
        _counts[backend, op] += 1


def counts() -> dict[str, dict[str, int]]:
    """Launches since the import, as backend → op → number; every backend and op is there."""
    with _lock:
        return {
            backend: {op: _counts[backend, op] for op in support.OPS}
            for backend in support.BACKENDS
        }


def record_route(backend: str, op: str, route: str) -> None:
    """Count one launch of a backend's op by one of the routes it has; from any thread."""
    with _lock:
        _routes[backend, op, route] += 1


def routes() -> dict[tuple[str, str, str], int]:
    """Launches since the import by (backend, op, route), where a call may take several."""
    with _lock:
        return dict(_routes)


def pass_over(backend: str, op: str, reason: str) -> None:
    """Count one call that `auto` took from a backend that refused it; from any thread."""
    with _lock:
        _passed_over[backend, op, reason] += 1


def passed_over() -> dict[tuple[str, str, str], int]:
    """Calls since the import that `auto` took elsewhere: (backend, op, its reason) → number."""
    with _lock:
        return dict(_passed_over)


@contextmanager
def counting() -> Iterator[dict[str, dict[str, int]]]:
    """Count the launches of a block, those of other threads included.

    The mapping given, backend → op → number, is empty inside the block and filled when it ends.
    """
    before = counts()
    launched: dict[str, dict[str, int]] = {}
    try:
        yield launched
    finally:
        for backend, ops in counts().items():
            launched[backend] = {op: n - before[backend][op] for op, n in ops.items()}
