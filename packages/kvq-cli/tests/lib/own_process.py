"""Calls in a process of their own, and what memory is a process's own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

import psutil

P = ParamSpec("P")
T = TypeVar("T")


def own_bytes(process: psutil.Process) -> int:
    """Memory that is no file's: of mapped weights a system keeps as much as it likes."""
    used = process.memory_info()
    return int(used.rss - used.shared)


def alone(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """What a helper module's function returns, or raises, in a new process.

    For what may leave a process unfit for other tests, and for its memory: one that has run others
    has kept some that they freed, and what is then made takes less of the system than it has.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as one:
        return one.submit(call, *arguments, **named).result()
