"""Kernels compiled by several processes before they are needed: compiling keeps one core busy.

Triton and CuPy keep what they compiled on disk, where this process finds it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

# Each holds a context on the device beside its kernels.
MOST_JOBS = 8


def usual_jobs() -> int:
    """As many as half the cores that this process may use; 0 where that is but one."""
    half = len(os.sched_getaffinity(0)) // 2
    return min(MOST_JOBS, half) if half > 1 else 0


def ahead(jobs: int, work: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> None:
    """Do some work with each of these arguments in up to `jobs` processes; 0 = not at all.

    What fails there fails again where it is needed, and is reported there. Processes begin by
    importing what the program has as `__main__`, as Python's `multiprocessing` says, and find
    `work` by its name: a script must call this below `if __name__ == "__main__"`.
    """
    asked = list(calls)
    if jobs < 1 or not asked:
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit the device's state
    ended, ending = context.Pipe(duplex=False)
    workers = ProcessPoolExecutor(
        min(jobs, len(asked)), mp_context=context, initializer=_begin, initargs=(ended,)
    )
    try:
        with _uninterrupted():
            futures = [workers.submit(work, *given) for given in asked]
        for each in futures:
            each.exception()
    except BrokenProcessPool:  # one has crashed, and the others with it
        pass
    except BaseException:
        ending.close()
        raise
    finally:
        workers.shutdown(cancel_futures=True)
        ending.close()
        ended.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes are begun whole; they never see an interrupt, which a terminal sends to all.

    It waits until they are under way, when this process ends them.
    """
    caught: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if is_main:  # of all threads it alone can have handlers, and it alone is interrupted
        signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main:
            signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
    if caught:
        signal.raise_signal(signal.SIGINT)


def _begin(ended: Connection) -> None:
    """Be one of several: one thread each, or all would wait for each other's."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(ended,), daemon=True).start()


def _end_with(ended: Connection) -> None:
    """Whatever is under way: whoever asked has closed the other end, or was killed."""
    ended.poll(None)
    os._exit(1)
