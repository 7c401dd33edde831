"""No decoded K or V outlives one layer's call, and scores fit their workspace."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvq_attention import ops, reference

from .scene import TIER, Geometry, Scene, build

DIM, KV_HEADS = 64, 2


class Allocations(TorchDispatchMode):
    """Bytes of the storages that ops make and hold: live, at most at once, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._holders: Counter[int] = Counter()  # storage → living tensors that share it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        foreign = given - self._holders.keys()  # caches, queries, tables: made before
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in foreign:
                self._hold(leaf)
        return out

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if self._holders[key] == 0:
            self.live += size
            self.peak = max(self.peak, self.live)
            self.largest = max(self.largest, size)
        self._holders[key] += 1
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.live -= size


def scene_of(context: int, codec: str = "q4_0", queries: int = 1, requests: int = 1) -> Scene:
    geometry = Geometry(
        codec,
        heads=4,
        kv_heads=KV_HEADS,
        dim=DIM,
        lengths=(context,) * requests,
        queries=queries,
    )
    return build(geometry, stored_queries=True)


def decoded_bytes(context: int) -> int:
    """K and V of one layer of one request, float32."""
    return 2 * context * KV_HEADS * DIM * 4


def measure(scene: Scene, layers: int = 1, op: str = "decode", **scoring: Any) -> Allocations:
    """Run an op as a model runs its layers: outputs are dropped, nothing else is kept."""
    batch, q, (k, v) = scene.batch(), scene.q, scene.fresh()
    fresh = (k, v) if op == "extend" else ()
    gc.collect()
    with Allocations() as allocations:
        for _ in range(layers):
            getattr(ops, op)(q, *fresh, *scene.caches, batch, TIER, scale=0.125, **scoring)
    return allocations


@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "q4_0", "nvfp4"])
def test_no_decoded_rows_outlive_a_layer(op: str, codec: str) -> None:
    scene = scene_of(2048, codec, queries=1 if op == "decode" else 8)
    one, many = measure(scene, 1, op), measure(scene, 6, op)
    assert one.peak > decoded_bytes(2048), "the instrument sees the decoded rows"
    assert many.peak == one.peak
    assert many.live == 0


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_one_request_is_decoded_at_a_time(op: str) -> None:
    alone, many = (measure(scene_of(1024, queries=4, requests=n), op=op) for n in (1, 5))
    more = many.peak - alone.peak
    assert more < decoded_bytes(1024) / 10, "pages and outputs of the others, no decoded rows"


@pytest.mark.parametrize("codec", ["fp32", "bf16", "q4_0"])
def test_decode_grows_with_context_by_one_layers_decoded_rows(codec: str) -> None:
    short, long = 8192, 16384  # past the codecs' chunk, whose temporaries are of fixed size
    grown = measure(scene_of(long, codec), 6).peak - measure(scene_of(short, codec), 6).peak
    one_layer = decoded_bytes(long) - decoded_bytes(short)
    # Beside the decoded rows there are, at one time, the packed pages of K or V (gathered, then
    # put in order) and scores; both are smaller than the rows they belong to.
    packed = scene_of(1, codec).k_cache.spec.row_bytes(DIM) / (4 * DIM)
    assert one_layer <= grown <= one_layer * (1 + packed + 0.1)


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_memory_does_not_grow_with_context_behind_a_window(op: str) -> None:
    short, long = (measure(scene_of(n, queries=4), 2, op, window=64) for n in (512, 4096))
    assert long.peak == short.peak


def test_scores_fit_their_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = 2 * reference.BLOCK_ROWS
    scene = scene_of(2048, queries=queries)
    row = 4 * 2048 * 4  # scores of one query, all heads
    wide = measure(scene, op="extend")
    assert wide.largest == row * reference.BLOCK_ROWS
    monkeypatch.setattr(reference, "SCORE_BYTES", 10 * row + 1)
    narrow = measure(scene, op="extend")
    decoded_keys = decoded_bytes(2048 - queries) / 2
    assert narrow.largest == decoded_keys < wide.largest, "now it is the decoded K"
    assert narrow.peak < wide.peak


def test_a_decode_has_scores_of_one_query_at_a_time() -> None:
    one, many = measure(scene_of(2048)), measure(scene_of(2048, queries=40))
    assert many.largest == one.largest
    assert many.peak - one.peak < 40 * 4 * DIM * 4 * 2, "queries and outputs, no scores"


def test_joined_scores_fit_their_workspace_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of(2048, queries=40)
    monkeypatch.setattr(reference, "SCORE_BYTES", 1)
    least = measure(scene, op="extend").peak
    row = 4 * 2048 * 4
    for rows in (10, 30):
        monkeypatch.setattr(reference, "SCORE_BYTES", rows * row)
        grown = measure(scene, op="extend").peak - least
        assert grown <= rows * row * 1.1, "scores, their copy, and small change"


def test_the_workspace_is_at_most_64_mib() -> None:
    assert reference.SCORE_BYTES <= 64 * 2**20
