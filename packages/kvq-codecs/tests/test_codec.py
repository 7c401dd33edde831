"""What every codec does with input that it cannot take, with gradients, and with memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import kvq_codecs
from kvq_codecs import PlaneError, RowError

from .exact import assert_same

ROWS = np.random.default_rng(0).standard_normal((4, 128), np.float32)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.ones((2, 128), np.int32), "q4_0: rows must be one of float16.*, got int32"),
        (torch.ones(2, 128, dtype=torch.int8), "got int8"),
        (np.ones((2, 128), bool), "got bool"),
        (np.ones((2, 128), np.complex64), "got complex64"),
        (np.ones((2, 128), ">i4"), "got int32"),
        (torch.ones(2, 128).to(torch.float8_e4m3fn), "got float8_e4m3fn"),
        (np.float32(1), "0-d"),
        (np.array(1.0, np.float32), "0-d"),
        (torch.tensor(1.0), "0-d"),
        (np.ones((2, 100), np.float32), "100 is not a multiple of 32"),
        (np.ones((2, 0), np.float32), "positive integer, got 0"),
        ([[1.0] * 128], "NumPy, torch or CuPy array, got list"),
        (None, "got NoneType"),
    ],
)
def test_rows_that_cannot_be_encoded_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        kvq_codecs.get("q4_0").encode(rows)


def test_rows_of_another_codec_are_refused() -> None:
    encoded = kvq_codecs.get("q8_0").encode(ROWS)
    for use in (kvq_codecs.get("q4_0").decode, kvq_codecs.get("q4_0").to_blocks):
        with pytest.raises(PlaneError, match=r"q4_0 .* q8_0"):
            use(encoded)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (np.zeros((2, 50), np.int8), "uint8 array, got int8"),
        (np.zeros((2, 48), np.uint8), r"\[\.\.\., 50\], got \[2, 48\]"),
        (np.uint8(3), r"got \[\]"),
        (b"\0" * 50, "got bytes"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(blocks: Any, message: str) -> None:
    with pytest.raises(PlaneError, match=message):
        kvq_codecs.get("iso3").from_blocks(blocks, 128)


def test_blocks_of_a_refused_head_dim_are_refused() -> None:
    with pytest.raises(RowError, match="192 is not a multiple of 128"):
        kvq_codecs.get("iso3").from_blocks(np.zeros((2, 75), np.uint8), 192)


@pytest.mark.parametrize("given", [None, ROWS, {"codes": ROWS}, [], "rows"])
@pytest.mark.parametrize("use", ["decode", "to_blocks"])
def test_what_is_not_encoded_rows_is_refused(use: str, given: Any) -> None:
    with pytest.raises(PlaneError, match=f"must be of type Encoded, got {type(given).__name__}"):
        getattr(kvq_codecs.get("q4_0"), use)(given)


@pytest.mark.parametrize("name", kvq_codecs.names())
def test_tensors_of_a_graph_are_taken_and_bytes_have_no_gradient(name: str) -> None:
    codec = kvq_codecs.get(name)
    tensor = torch.from_numpy(ROWS).clone().requires_grad_()
    encoded = codec.encode(tensor * 1)
    assert not any(a.requires_grad for a in encoded.planes.values())
    decoded = codec.decode(encoded)
    assert not decoded.requires_grad
    assert_same(decoded.numpy(), codec.decode(codec.encode(ROWS)))
    with torch.inference_mode():
        assert_same(codec.decode(codec.encode(tensor)).numpy(), decoded.numpy())


def test_float64_rounds_to_float32_first() -> None:
    just_above_a_tie = np.full((1, 32), 1 + 2**-8 + 2**-40)
    codec = kvq_codecs.get("bf16")
    assert codec.decode(codec.encode(just_above_a_tie))[0, 0] == 1
    beyond = np.full((1, 32), 1e300)
    assert np.isnan(kvq_codecs.get("q8_0").encode(beyond).planes["scale"]).all()


@pytest.mark.parametrize("name", kvq_codecs.names())
def test_callers_that_forbid_floating_point_warnings_see_none(name: str) -> None:
    codec = kvq_codecs.get(name)
    hard = np.concatenate([ROWS * np.float32(s) for s in (1e-44, 1e-9, 1, 1e5, 5e37)])
    hard[0, 0], hard[5, 1], hard[10, 2] = np.nan, np.inf, -np.inf
    with np.errstate(all="raise"):
        codec.decode(codec.encode(hard))


@pytest.mark.parametrize("name", kvq_codecs.names())
def test_peak_memory_is_at_most_six_times_the_rows(name: str) -> None:
    codec = kvq_codecs.get(name)
    rows = np.ones((1 << 15, 128), np.float32)
    tracemalloc.start()
    try:
        encoded = codec.encode(rows)
        encode_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        codec.decode(encoded)
        decode_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(encode_peak, decode_peak) <= 6 * rows.nbytes
