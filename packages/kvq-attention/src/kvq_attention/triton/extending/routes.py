"""Which requests of an extend are read through a scratch, by their query rows: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_attention.routes import PLAIN
from kvq_attention.triton.extending import scratch

# Query rows (query token × head of a KV head's group) from which on a request's past is decoded
# once instead of by each tile of rows.
BREAK_EVEN = 2048


@dataclass(frozen=True, slots=True)
class Route:
    """How the requests of a step are served.

    Attributes
    ----------
    fewest : query rows from which on a request goes through the scratch, others decode within the
        loop
    requests : that go through it at most
    plan : how the scratch is used; None = no request goes through one
    """

    fewest: int = 0
    requests: int = 0
    plan: scratch.Plan | None = None


def packed(formats: tuple[str, str]) -> tuple[bool, bool]:
    """Whether K and V, of these codecs, are decoded into a scratch."""
    k, v = (codec not in PLAIN for codec in formats)
    return k, v


def choose(
    formats: tuple[str, str],
    dims: tuple[int, int],
    *,
    num_tokens: int,
    requests: int,
    kv_heads: int,
    group: int,
    visible: int,
    tile: int,
    scratch_bytes: int,
    break_even: int,
) -> Route:
    """The route of a step.

    A request's route follows from its own rows, so that its bits do not depend on its company, as
    long as there is room for `scratch.LEAST_SHARE` tokens of one head of all that may need it.

    Parameters
    ----------
    formats : codec names (of K, of V)
    dims : values a row of K and of V
    num_tokens, requests : of the step
    kv_heads, group : KV heads, query heads a KV head
    visible : tokens of a past that are looked at, at most
    tile : tokens a tile of the kernel
    scratch_bytes : that the scratch takes at most
    break_even : query rows from which on a scratch is used
    """
    rows, fewest = num_tokens * group, max(1, break_even)
    most = min(requests, rows // fewest)
    is_packed = packed(formats)
    if most < 1 or visible < 1 or not any(is_packed):
        return Route()
    through = tuple(dim for dim, wanted in zip(dims, is_packed, strict=True) if wanted)
    plan = scratch.plan(rows, dims[1], most, kv_heads, through, visible, tile, scratch_bytes)
    return Route() if plan is None else Route(fewest, most, plan)
