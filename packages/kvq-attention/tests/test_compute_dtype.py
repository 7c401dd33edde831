"""What a cache is stored as and what is computed with are two things."""

from __future__ import annotations

import pytest
import torch

import kvq_codecs
from kvq_attention import ops
from kvq_attention.accuracy import MAX_ERROR

from .oracle import relative_error
from .scene import TIER, Geometry, build

ON = "cuda" if torch.cuda.is_available() else "cpu"  # where the interpreter stands for the GPU
BACKENDS = [("reference", codec) for codec in kvq_codecs.names()] + [
    ("triton", codec) for codec in ("bf16", "fp8", "nvfp4")
]


@pytest.mark.parametrize(("backend", "codec"), BACKENDS)
def test_p088_the_queries_say_what_is_computed_in_and_the_codec_what_is_stored(
    backend: str, codec: str
) -> None:
    stored = {p.name: getattr(torch, p.dtype) for p in kvq_codecs.get(codec).spec.planes}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        shape = Geometry(codec, heads=4, dim=128, lengths=(17,), dtype=dtype)
        scene = build(shape, ON, stored_queries=False)
        batch = scene.batch()
        slots = batch.tables[TIER].slot_mapping
        ops.store(*scene.fresh(), *scene.caches, slots, backend=backend)
        out = ops.decode(scene.q, *scene.caches, batch, TIER, scale=scene.scale, backend=backend)
        assert out.dtype == dtype
        assert {n: plane.dtype for n, plane in scene.k_cache.planes.items()} == stored
        assert relative_error(out, scene.expected(fresh=False)) <= MAX_ERROR[dtype]
