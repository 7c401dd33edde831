"""On the GPU a request gets the same bits in any company, whatever runs beside it."""

from __future__ import annotations

import pytest
import torch

from ..scene import Geometry
from . import big
from .cases import attend, compiled, each_codec
from .test_decode_batches import company

pytestmark = [pytest.mark.gpu, compiled]


@each_codec
def test_batch_invariance_at_real_sizes(codec: str) -> None:
    lengths, queries = (3, 9000, 513, 2047, 640, 1), (1, 2, 1, 7, 8, 1)
    shape = Geometry(
        codec, heads=16, kv_heads=4, dim=128, lengths=lengths, queries=queries, dtype=torch.bfloat16
    )
    scene = big.build(shape, seed=len(codec))
    together = attend(scene).split(queries)
    for requests in ([1], [1, 1], [5, 3, 1, 4], [2, 0, 1, 1, 1, 1, 3, 3, 3, 4, 4, 5, 5] * 5):
        for spare in (0, 500):
            q, batch = company(scene, requests, spare)
            outs = attend(scene, batch=batch, q=q).split([queries[r] for r in requests])
            for r, out in zip(requests, outs, strict=True):
                assert torch.equal(out, together[r]), f"request {r} among {len(requests)}"


@each_codec
def test_fifty_calls_give_the_same_bits(codec: str) -> None:
    """Nothing depends on the order in which programs finish."""
    shape = Geometry(codec, heads=16, kv_heads=4, dim=128, lengths=(5000, 77, 1200), queries=2)
    scene = big.build(shape, seed=len(codec))
    q, batch = scene.q, scene.batch()
    first = attend(scene, q=q, batch=batch)
    for _ in range(50):
        assert torch.equal(attend(scene, q=q, batch=batch), first)
