"""A codec registered a moment ago works with every op, and nothing was edited for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvq_codecs
from kvq_attention import UnsupportedError, ops, support
from kvq_attention.needs import Need

from . import invented
from .oracle import relative_error
from .scene import TIER, Geometry, assert_same_bytes, build, poisoned, put
from .tolerances import OUTPUT

NAME = invented.SPEC.name


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    kvq_codecs.register(invented.CODEC)
    yield
    kvq_codecs.unregister(NAME)


@pytest.mark.parametrize("other", [NAME, "q4_0"])
@pytest.mark.parametrize("dim", [80, 128])
def test_an_invented_codec_stores_and_attends(dim: int, other: str, device: str) -> None:
    if dim % kvq_codecs.get(other).spec.divisor:
        dim = 96
    sizes: dict[str, int] = {"head_dim": dim, "page_tokens": 16}
    given = [(NAME, other)]
    choice = support.choose(formats=given, **sizes, device=device, dtype=torch.float32)
    assert set(choice.by_op().values()) == {"reference"}
    shape = Geometry(NAME, other, heads=6, dim=dim, queries=(1, 3, 16, 5, 20))

    scene = build(shape, device, stored_queries=False)
    out = ops.extend(
        scene.q, *scene.fresh(), *scene.caches, scene.batch(), TIER, scale=scene.scale, window=19
    )
    assert relative_error(out, scene.expected(fresh=True, window=19)) <= OUTPUT[torch.float32]

    ops.store(*scene.fresh(), *scene.caches, scene.batch().tables[TIER].slot_mapping)
    complete = build(shape, device, stored_queries=True)
    for got, wanted in zip(scene.caches, complete.caches, strict=True):
        assert_same_bytes(got, wanted)
    out = ops.decode(scene.q, *scene.caches, scene.batch(), TIER, scale=scene.scale)
    assert relative_error(out, scene.expected(fresh=False)) <= OUTPUT[torch.float32]


@pytest.mark.parametrize("op", support.MODEL_OPS)
def test_only_the_reference_serves_an_invented_codec(op: str) -> None:
    need = Need(op, NAME, "q8_0", 128, 128, 16, "cuda")
    assert support.pick("auto", [need]) == "reference"
    with pytest.raises(
        UnsupportedError, match=f"triton lacks {op} for codec {NAME}.*can: reference"
    ):
        support.pick("triton", [need])


def test_the_invented_codec_has_five_bits() -> None:
    assert invented.SPEC.row_bytes(128) == 128 * 5 // 8 + 128 // 16 * 4
    rows = torch.randn(7, 2, 128, generator=torch.Generator().manual_seed(0))
    cache = poisoned(NAME, 1, 2, 16, 128, "cpu")
    put(cache, rows, list(range(7)))
    read = invented.CODEC.decode(cache.map(lambda plane: plane[0, :, :7]))
    assert 0.02 < (read.transpose(0, 1) - rows).norm() / rows.norm() < 0.06
