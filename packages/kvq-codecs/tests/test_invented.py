"""What a codec's own two functions return is held to its spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvq_codecs import Codec, PlaneError

from . import invented
from .backends import Backend, on_each_backend

ROWS = np.random.default_rng(0).standard_normal((4, 64), np.float32)

# Four rows of 64 values: low [4, 32], high [4, 8], scale [4, 2].
WRONG_PLANES = [
    (lambda p: {n: a for n, a in p.items() if n != "scale"}, r"return planes .*'scale'\], got"),
    (lambda p: {**p, "bias": p["scale"]}, r"return planes .*got .*'bias'"),
    (lambda p: {**p, 3: p["scale"]}, "return planes"),
    (lambda p: {**p, "low": p["low"][:1]}, r"'low' must be uint8 \[4, 32\], got uint8 \[1, 32\]"),
    (lambda p: {**p, "low": p["low"][:1, :1]}, r"'low' must be .*got uint8 \[1, 1\]"),
    (lambda p: {**p, "high": p["low"]}, r"'high' must be uint8 \[4, 8\], got uint8 \[4, 32\]"),
    (lambda p: {**p, "scale": p["low"][:, :2]}, r"'scale' must be float16 .*got uint8 \[4, 2\]"),
    (lambda p: {**p, "scale": 1.0}, "'scale' must be of type .*, got float"),
    (lambda p: {**p, "scale": None}, "'scale' must be of type .*, got NoneType"),
    (lambda p: None, "result of encode_rows must be of type Mapping, got NoneType"),
    (lambda p: list(p.values()), "result of encode_rows must be of type Mapping, got list"),
]

WRONG_ROWS = [
    (lambda r: r[:1], r"decoded rows must be float32 \[4, 64\], got float32 \[1, 64\]"),
    (lambda r: r[:, :1], r"decoded rows must be .*got float32 \[4, 1\]"),
    (lambda r: r > 0, r"decoded rows must be float32 .*got bool \[4, 64\]"),
    (lambda r: 0.0, "decoded rows must be of type .*, got float"),
    (lambda r: None, "decoded rows must be of type .*, got NoneType"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_PLANES)
@on_each_backend
def test_planes_that_the_spec_does_not_declare_are_refused(
    backend: Backend, change: Callable[[Any], Any], message: str
) -> None:
    codec = Codec(
        invented.SPEC, lambda xp, rows: change(invented.encode(xp, rows)), invented.decode
    )
    with pytest.raises(PlaneError, match=f"invented_5: .*{message}"):
        codec.encode(backend.array(ROWS))


@pytest.mark.parametrize(("change", "message"), WRONG_ROWS)
@on_each_backend
def test_decoded_rows_of_another_shape_or_dtype_are_refused(
    backend: Backend, change: Callable[[Any], Any], message: str
) -> None:
    def decode(xp: Any, planes: Any, dim: int) -> Any:
        return change(invented.decode(xp, planes, dim))

    codec = Codec(invented.SPEC, invented.encode, decode)
    with pytest.raises(PlaneError, match=f"invented_5: .*{message}"):
        codec.decode(codec.encode(backend.array(ROWS)))


def test_planes_of_another_library_are_refused() -> None:
    def encode(xp: Any, rows: Any) -> Any:
        return {n: torch.from_numpy(a) for n, a in invented.encode(xp, rows).items()}

    with pytest.raises(PlaneError, match="must be of type ndarray, got Tensor"):
        Codec(invented.SPEC, encode, invented.decode).encode(ROWS)
