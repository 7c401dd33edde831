"""Kernels compiled by several processes before they are needed: compiling keeps one core busy.

Triton and CuPy keep what they compiled on disk, where this process finds it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

# Each holds a context on the device beside its kernels.
USUAL_JOBS = min(8, (os.cpu_count() or 1) // 2)


def ahead(jobs: int, work: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> None:
    """Do some work with each of these arguments in up to `jobs` processes; 0 = not at all.

    What fails there fails again where it is needed, and is reported there. `work` is found by its
    name, in a module that is imported anew.
    """
    asked = list(calls)
    if jobs < 1 or not asked:
        return
    workers = ProcessPoolExecutor(
        min(jobs, len(asked)),
        mp_context=multiprocessing.get_context("spawn"),  # a fork would inherit the device's state
        initializer=_begin,
    )
    try:
        for each in [workers.submit(work, *given) for given in asked]:
            each.exception()
    except BrokenProcessPool:  # one has crashed, and the others with it
        pass
    finally:
        workers.shutdown(cancel_futures=True)


def _begin() -> None:
    """Be one of several: one thread each, or all would wait for each other's."""
    torch.set_num_threads(1)
    # An interrupt is for the whole group: this one ends at once, without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed says nothing, and a context holds memory of the device."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
