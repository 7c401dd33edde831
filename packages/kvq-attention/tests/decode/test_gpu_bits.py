"""On the GPU a request gets the same bits in any company, whatever runs beside it."""

from __future__ import annotations

import torch

from .. import big
from ..scene import Geometry
from .places import ON_GPU, Place, each_codec
from .test_batches import company
from .test_gpu import SHAPE, seed_of


@each_codec(places=ON_GPU)
def test_p074_batch_invariance_at_real_sizes(codec: str, place: Place) -> None:
    """Alone; among eight in another order, some twice; with a table of far more columns."""
    lengths, queries = (3, 9000, 513, 2047, 640, 1, 90, 1024), (1, 2, 1, 7, 8, 1, 3, 1)
    scene = big.build(Geometry(codec, **SHAPE, lengths=lengths, queries=queries), seed_of(codec))
    together = place.attend(scene).split(queries)
    for requests in ([1], [4], [5, 3, 1, 4, 4, 1, 0], [7, 6, 5, 4, 3, 2, 1, 0]):
        for spare_columns in (0, 500):
            q, batch = company(scene, requests, spare_columns)
            outs = place.attend(scene, batch=batch, q=q).split([queries[r] for r in requests])
            for r, out in zip(requests, outs, strict=True):
                assert torch.equal(out, together[r]), f"request {r} among {requests}"


@each_codec(places=ON_GPU)
def test_fifty_calls_give_the_same_bits(codec: str, place: Place) -> None:
    """Nothing depends on the order in which programs finish."""
    shape = Geometry(codec, **SHAPE, lengths=(5000, 77, 1200, 1, 600), queries=2)
    scene = big.build(shape, seed_of(codec, 50))
    q, batch = scene.q, scene.batch()
    first = place.attend(scene, q=q, batch=batch)
    for _ in range(50):
        assert torch.equal(place.attend(scene, q=q, batch=batch), first)
