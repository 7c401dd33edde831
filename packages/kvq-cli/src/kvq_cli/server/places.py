"""How many answers the server computes, keeps waiting and delivers at the same time."""

from __future__ import annotations

import math
import time
from collections import deque

from kvq_cli.server.errors import ApiError, stopping

LONGEST_WAIT = 60  # seconds; what a client is told when nothing ended for long


class Places:
    """An answer has a place from its submission until its client has all of it, or is gone.

    Those beyond what the engine runs at the same time wait; when all places are taken, whoever
    comes is sent away with the time in which some will be free. So memory is bounded, whether
    the engine or a client is slow.
    """

    def __init__(self, running: int, queued: int) -> None:
        self.total = running + queued
        self.taken = 0
        self.closed = False
        self._given = deque([time.monotonic()], maxlen=32)

    def require(self, count: int, param: str) -> None:
        """See that a request finds places for its answers; `param` is what asks for so many.

        Raises `ApiError`: 503 when the server is stopping, 400 when there are never so many,
        429 when there are not so many now.
        """
        if self.closed:
            raise stopping()
        if count > self.total:
            raise ApiError(
                400,
                f"{param} asks for {count:,} answers at once; this server takes at most "
                f"{self.total:,}, running and waiting",
                param=param,
            )
        if self.taken + count > self.total:
            raise ApiError(
                429,
                f"the server is full: {self.taken:,} answers run or wait, of at most "
                f"{self.total:,}; try again later",
                code="queue_full",
                headers={"Retry-After": str(self._wait(self.taken + count - self.total))},
            )

    def take(self, count: int, param: str) -> None:
        """Take them; raises as `require` does."""
        self.require(count, param)
        self.taken += count

    def give(self, count: int) -> None:
        """Give places back."""
        self.taken -= count
        self._given.extend([time.monotonic()] * count)

    def _wait(self, count: int) -> int:
        """Whole seconds until so many places are free, at the pace of the last ones."""
        seconds = (time.monotonic() - self._given[0]) / len(self._given)
        return max(1, min(LONGEST_WAIT, math.ceil(count * seconds)))
