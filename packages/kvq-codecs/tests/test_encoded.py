"""Encoded rows hold exactly the planes of their spec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvq_codecs
from kvq_codecs import Encoded, PlaneError, RowError

SPEC = kvq_codecs.get("q4_0").spec


def planes(**changed: Any) -> dict[str, Any]:
    good = {"codes": np.zeros((3, 32), np.uint8), "scale": np.zeros((3, 2), np.float16)}
    return {n: a for n, a in {**good, **changed}.items() if a is not None}


def test_shape_and_lead() -> None:
    encoded = Encoded(SPEC, 64, planes())
    assert encoded.lead == (3,)
    assert encoded.shape == (3, 64)
    assert encoded.map(lambda a: a[1:]).shape == (2, 64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale": None}, r"planes must be \['codes', 'scale'\], got \['codes'\]"),
        ({"extra": np.zeros((3, 1), np.uint8)}, "planes must be"),
        ({"codes": np.zeros((3, 32), np.int8)}, "'codes' must be uint8, got int8"),
        ({"scale": np.zeros((3, 2), np.float32)}, "'scale' must be float16, got float32"),
        ({"scale": torch.zeros(3, 2, dtype=torch.bfloat16)}, "float16, got bfloat16"),
        ({"codes": np.zeros((3, 64), np.uint8)}, r"\[\.\.\., 32\], got \[3, 64\]"),
        ({"scale": np.zeros((2,), np.float16)}, "share their leading shape"),
        ({"scale": np.zeros((4, 2), np.float16)}, "share their leading shape"),
        ({"codes": np.zeros((), np.uint8)}, r"\[\.\.\., 32\], got \[\]"),
        ({"codes": [[0] * 32] * 3}, "array, got list"),
        (
            {"scale": torch.zeros(3, 2, dtype=torch.float16)},
            "'scale' is torch on cpu, 'codes' is numpy on cpu",
        ),
    ],
)
def test_planes_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PlaneError, match=message):
        Encoded(SPEC, 64, planes(**changed))


@pytest.mark.parametrize("given", [None, [], [np.zeros((3, 32), np.uint8)], "codes", 3])
def test_planes_that_are_no_mapping_are_refused(given: Any) -> None:
    with pytest.raises(PlaneError, match=f"q4_0: planes must be .*got {type(given).__name__}"):
        Encoded(SPEC, 64, given)


def test_planes_of_names_that_are_no_strings_are_refused() -> None:
    with pytest.raises(PlaneError, match=r"got \['codes', 3\]"):
        Encoded(SPEC, 64, {"codes": planes()["codes"], 3: planes()["scale"]})  # type: ignore[dict-item]


@pytest.mark.parametrize("spec", [None, "q4_0", kvq_codecs.get("q4_0")])
def test_a_spec_that_is_none_is_refused(spec: Any) -> None:
    with pytest.raises(PlaneError, match=f"spec must be of type Spec, got {type(spec).__name__}"):
        Encoded(spec, 64, planes())


def test_planes_on_two_devices_are_refused() -> None:
    scale = torch.zeros(3, 2, dtype=torch.float16, device="meta")
    with pytest.raises(PlaneError, match="'scale' is torch on meta, 'codes' is torch on cpu"):
        Encoded(SPEC, 64, planes(codes=torch.zeros(3, 32, dtype=torch.uint8), scale=scale))


def test_a_dim_that_the_codec_refuses_is_refused() -> None:
    with pytest.raises(RowError, match="48 is not a multiple of 32"):
        Encoded(SPEC, 48, planes())
