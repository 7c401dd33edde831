"""Sizes, and what a layout may not be."""

from __future__ import annotations

import re

import pytest

import kvq_codecs
from kvq_codecs import Plane, RowError, Spec

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


@pytest.mark.parametrize("dim", [0, -128, 128.0, True, None, "128"])
def test_head_dim_must_be_a_positive_integer(dim: object) -> None:
    with pytest.raises(RowError, match="positive integer"):
        kvq_codecs.get("q4_0").spec.check(dim)  # type: ignore[arg-type]


def test_a_refused_head_dim_names_what_is_allowed() -> None:
    message = re.escape("iso3: head_dim 64 is not a multiple of 128")
    with pytest.raises(RowError, match=message):
        kvq_codecs.get("iso3").spec.row_bytes(64)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Plane("codes", "int8"),
        lambda: Plane("codes", "uint8", items=0),
        lambda: Plane("codes", "uint8", span=0),
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
