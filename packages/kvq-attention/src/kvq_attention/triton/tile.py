"""What the decode kernel knows of a format: how a tile of its rows is loaded.

A row of codes is read in words that hold `split` neighbouring values each, and unpacked into that
many tiles of one shape: tile i holds values split · c + i in column c. The order of a contraction
is free, so the query is split the same way once and the codes are never moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A format's loader and what is left to do with the tiles it gives.

    Attributes
    ----------
    load : jit function (a, b, a_rows, b_rows, mask, DIM, ASM) → tuple of `split` tiles
        [tokens, columns]; a and b point to the first and second code plane, rows are int64
        [tokens] offsets in their items; values of rows where mask is false must be finite
    split : values that lie in one item of the first plane
    codes : code planes, name → torch dtype whose items the loader reads; one or two
    scale : name of the plane whose scale multiplies the values afterwards; None = the tiles are
        the values. It is applied to scores and probabilities, so it never rounds a tile.
    factor : value = tile · factor · scale
    largest : magnitude of what a codec writes beside its scale, at most; None = no such bound
    rotated : values were turned by iso's quaternions
    tokens : tokens a tile that a warp's registers have room for while they are unpacked
    """

    load: Any
    split: int
    codes: Mapping[str, torch.dtype]
    scale: str | None = None
    factor: float = 1.0
    largest: float | None = None
    rotated: bool = False
    tokens: int = 32
