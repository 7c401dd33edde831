"""How an extend launch is shaped: rows, tokens, warps. Pure arithmetic on sizes."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_attention.triton.extending.items import MOST_PARTS

# Tokens of a part at least: a part costs a launch's share and its share of the merge.
LEAST_PART = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of an extend launch.

    Attributes
    ----------
    rows : query rows of a program
    tokens : tokens a tile
    warps : warps a program
    stages : tiles in flight
    """

    rows: int
    tokens: int
    warps: int
    stages: int


def pick(width: int, product_bytes: int, *, shared_bytes: int) -> Shape:
    """The launch shape for rows of so many values, multiplied in numbers of so many bytes.

    width: values of the wider of a key and a value row, padded to a power of two; shared_bytes: of
    a multiprocessor.
    """
    large = shared_bytes >= 160 << 10
    if product_bytes > 2:
        return Shape(64 if large and width <= 128 else 32, 32, 4, 1)
    if width > 128:
        return Shape(128, 32, 8, 2) if large else Shape(32, 32, 4, 1)
    return Shape(128, 64, 8, 2) if large else Shape(64, 32, 4, 1)


def most_items(
    num_tokens: int, requests: int, group: int, visible: int, rows: int
) -> tuple[int, int]:
    """Items of a KV head, and rows of partial results, that a step has at most.

    A bound of what `items.partings` counts on the device for requests that see up to `visible`
    tokens of the past; rows is 0 where none is cut into parts.
    """
    asking = min(requests, num_tokens)
    tiles = num_tokens * group // rows + asking
    if visible <= LEAST_PART:
        return tiles, 0
    parts = min(MOST_PARTS.value, -(-visible // LEAST_PART))
    items = min(tiles * parts, asking * MOST_PARTS.value + tiles)
    return items, min(asking * rows * MOST_PARTS.value, num_tokens * group * parts)
