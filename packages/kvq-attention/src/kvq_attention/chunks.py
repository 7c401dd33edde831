"""How many chunks a request's tokens are cut into for a decode: one rule for all kernels.

One chunk's time is what a lone request waits for, so that its chunks are to be small, and as many
as the device works on at once. Where requests fill the device, each further chunk only costs the
way of its partial result through memory.
"""

from __future__ import annotations

# Taken where calls do not say how many requests they usually have.
USUAL_REQUESTS = 8


def wanted(requests: int | None, pieces: int, at_once: int) -> int:
    """Chunks by which so many requests fill a device, at least 1.

    Parameters
    ----------
    requests : that calls usually have; None = nobody knows
    pieces : of a chunk: KV heads × groups that a KV head's query heads are cut into
    at_once : pieces that the device works on at a time
    """
    return max(1, at_once // ((requests or USUAL_REQUESTS) * pieces))


def count(visible: int, wanted: int, *, alone: int, smallest: int, largest: int, most: int) -> int:
    """Chunks of so many tokens; it never shrinks as they grow.

    Parameters
    ----------
    wanted : see above
    alone : tokens that are one chunk, whatever is wanted
    smallest, largest : tokens a chunk
    most : chunks, even if each is larger than `largest`
    """
    if visible <= alone:
        return 1
    return min(max(min(wanted, visible // smallest), -(-visible // largest)), most)
