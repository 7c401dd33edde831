"""What the launch shape of a decode is picked by, for every format."""

from __future__ import annotations

import torch

import kvq_codecs
from kvq_attention.triton.side import Side
from kvq_attention.triton.tiles import Load
from kvq_codecs import Encoded


def loads(dim: int) -> dict[str, Load]:
    """What a format takes at a head_dim, by name; formats that cannot store it are left out."""
    found = {}
    for name in kvq_codecs.names():
        spec = kvq_codecs.get(name).spec
        if dim % spec.divisor:
            continue
        planes = {
            plane.name: torch.empty(
                1, 1, 16, plane.row_items(dim), dtype=getattr(torch, plane.dtype)
            )
            for plane in spec.planes
        }
        found[name] = Side.of(Encoded(spec, dim, planes), torch.bfloat16).load
    return found
