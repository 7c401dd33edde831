"""Sizes, and what a layout may not be."""

from __future__ import annotations

import re

import numpy as np
import pytest

import kvq_codecs
from kvq_codecs import Encoded, Plane, RowError, Spec

ROW_BYTES = {  # at head_dim 128, added up by hand from the planes of each format
    "fp32": 512,
    "bf16": 256,
    "fp16": 256,
    "q8_0": 128 + 8,
    "q6_0": 64 + 32 + 8,
    "q4_0": 64 + 8,
    "fp8_e4m3": 128 + 8,
    "fp8": 128 + 4,
    "nvfp4": 64 + 8 + 4,
    "iso3": 32 + 16 + 2,
    "iso4": 64 + 2,
}


def test_row_bytes_are_those_of_the_formats() -> None:
    assert {n: kvq_codecs.get(n).spec.row_bytes(128) for n in kvq_codecs.names()} == ROW_BYTES


def test_interchange_bytes_count_dead_ones() -> None:
    assert kvq_codecs.get("iso4").spec.block_bytes(256) == 2 * 68
    assert kvq_codecs.get("iso3").spec.block_bytes(256) == 2 * 50
    assert kvq_codecs.get("q8_0").spec.block_bytes(64) == 2 * 34
    assert kvq_codecs.get("nvfp4").spec.block_bytes(128) == 76


@pytest.mark.parametrize(
    "dim", [0, -128, 128.0, True, np.True_, np.float32(64), np.int8(-1), None, "128", [64]]
)
def test_head_dim_must_be_a_positive_integer(dim: object) -> None:
    with pytest.raises(RowError, match="positive integer"):
        kvq_codecs.get("q4_0").spec.check(dim)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.int64, np.uint16, np.int32])
def test_head_dim_may_be_any_librarys_integer(kind: type[np.integer]) -> None:
    codec, dim = kvq_codecs.get("nvfp4"), kind(64)
    assert type(codec.spec.check(dim)) is int
    for size in (codec.spec.row_bytes(dim), codec.spec.block_bytes(dim)):
        assert type(size) is int
        assert size == 40
    encoded = codec.from_blocks(np.zeros((2, 40), np.uint8), dim)
    again = Encoded(codec.spec, dim, encoded.planes)
    assert type(encoded.dim) is int
    assert type(again.dim) is int
    assert codec.decode(again).shape == (2, 64)
    with pytest.raises(RowError, match="head_dim 65 is not a multiple"):
        codec.spec.check(kind(65))


def test_a_refused_head_dim_names_what_is_allowed() -> None:
    message = re.escape("iso3: head_dim 64 is not a multiple of 128")
    with pytest.raises(RowError, match=message):
        kvq_codecs.get("iso3").spec.row_bytes(64)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Plane("codes", "int8"),
        lambda: Plane("codes", "uint8", items=0),
        lambda: Plane("codes", "uint8", items=1.5),
        lambda: Plane("codes", "uint8", items=True),
        lambda: Plane("codes", "uint8", items=None),
        lambda: Plane("codes", "uint8", span=0),
        lambda: Plane("codes", "uint8", span=32.0),
        lambda: Plane("", "uint8"),
        lambda: Plane(3, "uint8"),
        lambda: Spec("", (Plane("a", "uint8"),), source=""),
        lambda: Spec(None, (Plane("a", "uint8"),), source=""),
        lambda: Spec("x", [Plane("a", "uint8")], source=""),
        lambda: Spec("x", ("a",), source=""),
        lambda: Spec("x", (Plane("a", "uint8"),), source="", interchange=("a", -3)),
        lambda: Spec("x", (Plane("a", "uint8"),), source="", interchange=("a", 0)),
        lambda: Spec("x", (Plane("a", "uint8"),), source="", interchange=("a", 1.5)),
        lambda: Spec("x", (Plane("a", "uint8"),), source="", interchange=("a", True)),
        lambda: Spec("x", (Plane("a", "uint8"),), source="", interchange=("a", None)),
        lambda: Spec("x", (), source=""),
        lambda: Spec("x", (Plane("a", "uint8"), Plane("a", "uint8")), source=""),
        lambda: Spec("x", (Plane("a", "uint8"),), source="", interchange=("b",)),
        lambda: Spec("x", (Plane("a", "uint8", span=None),), source="", interchange=("a",)),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(bad: object) -> None:
    with pytest.raises(ValueError):
        bad()  # type: ignore[operator]


def test_an_unknown_plane_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"low.*high.*scale"):
        kvq_codecs.get("q6_0").spec.plane("codes")
