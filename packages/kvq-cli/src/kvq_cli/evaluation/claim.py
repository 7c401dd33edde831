"""One evaluation at a time writes a record: of two, each would drop what the other measured.

A lock is a file beside the one that it is of, as long as somebody holds it. The system keeps it,
not that file: one that a killed process left is taken over.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvq_cli.evaluation.record import RecordError
from kvq_cli.quoting import quoted


@contextmanager
def claimed(path: Path | None) -> Iterator[None]:
    """Nobody else claims the record meanwhile; refused at once where somebody does.

    FILE.kvq-lock is the lock.
    """
    if path is None:
        yield
        return
    lock = path.with_name(f"{path.name}.kvq-lock")
    try:
        descriptor = _locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RecordError(
            f"another kvq eval writes {quoted(str(path))} now{_holder(lock)}; wait for it, or give "
            "another file to --json"
        ) from error
    except OSError as error:
        raise RecordError(
            f"the record cannot be written to {quoted(str(path))}: {lock.name}: {error.strerror}"
        ) from error
    try:
        yield
    finally:
        _let_go(lock, descriptor)


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Nobody else has the file in turn meanwhile; waits for whoever does.

    For what takes a moment, like reading a file, adding to it and writing it. FILE.kvq-turn is the
    lock: whoever has claimed a record may take a turn at it. OSError where there can be none.
    """
    lock = path.with_name(f"{path.name}.kvq-turn")
    descriptor = _locked(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        _let_go(lock, descriptor)


def _let_go(lock: Path, descriptor: int) -> None:
    lock.unlink(missing_ok=True)  # before it is let go: whoever waits finds it is another
    os.close(descriptor)


def _locked(lock: Path, how: int) -> int:
    """The file, open and locked. BlockingIOError where another process has it and none waits."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, how)
            if _is_at(descriptor, lock):
                os.truncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # who had it has removed it in between


def _is_at(descriptor: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except FileNotFoundError:
        return False


def _holder(lock: Path) -> str:
    try:
        number = lock.read_text(encoding="ascii")[:20]
    except (OSError, ValueError):
        return ""
    return f" (process {number})" if number.isdecimal() else ""
