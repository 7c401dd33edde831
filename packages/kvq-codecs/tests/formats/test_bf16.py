"""bf16 against the conversions of torch and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

import kvq_codecs

from ..backends import TORCH, Backend, on_each_backend
from ..exact import assert_same

LARGEST = float.fromhex("0x1.fep127")


def dense() -> np.ndarray:
    """Floats of every exponent and sign, ties between two words among them: [n, 128]."""
    spread = np.arange(0, 2**32, 2**11 * 3, np.uint32)
    ties = np.arange(0, 2**32, 2**12, np.uint32)
    words = np.concatenate([spread, ties, ties + 1, ties - 1])
    return words[: len(words) // 128 * 128].view(np.float32).reshape(-1, 128)


def saturated(rows: np.ndarray) -> np.ndarray:
    """Finite values within the type's range; infinities and NaN as they are."""
    return np.where(np.isfinite(rows), np.clip(rows, -LARGEST, LARGEST), rows)


@on_each_backend
def test_every_exponent_rounds_as_torch_and_the_other_library_round(backend: Backend) -> None:
    rows = dense()
    codec = kvq_codecs.get("bf16")
    encoded = codec.encode(backend.array(rows))
    by_torch = torch.from_numpy(saturated(rows)).to(torch.bfloat16)
    with np.errstate(all="ignore"):
        by_numpy = saturated(rows).astype(ml_dtypes.bfloat16)
    decoded = backend.numpy(codec.decode(encoded))
    assert_same(decoded, by_torch.to(torch.float32).numpy())
    assert_same(decoded, by_numpy.astype(np.float32))
    words = backend.numpy(encoded.planes["values"]).view(np.uint16)
    regular = ~np.isnan(rows)
    assert_same(words[regular], by_numpy.view(np.uint16)[regular])


def test_every_word_decodes_as_theirs() -> None:
    words = np.arange(2**16, dtype=np.uint16).reshape(-1, 128)
    spec = kvq_codecs.get("bf16").spec
    encoded = kvq_codecs.Encoded(spec, 128, {"values": words.view("uint16")})
    want = words.view(ml_dtypes.bfloat16).astype(np.float32)
    assert_same(kvq_codecs.get("bf16").decode(encoded), want)


def test_finite_values_saturate_and_infinities_stay() -> None:
    biggest = np.finfo(np.float32).max
    rows = np.array([[biggest, -biggest, np.inf, -np.inf, LARGEST, -0.0]], np.float32)
    codec = kvq_codecs.get("bf16")
    want = np.array([[LARGEST, -LARGEST, np.inf, -np.inf, LARGEST, -0.0]], np.float32)
    assert_same(codec.decode(codec.encode(rows)), want)


def test_p034_the_other_16_bit_type_is_converted() -> None:
    other = torch.float16
    tensor = torch.linspace(-3, 3, 128).to(other)
    codec = kvq_codecs.get("bf16")
    got = TORCH.numpy(codec.decode(codec.encode(tensor)))
    assert_same(got, tensor.to(torch.float32).to(torch.bfloat16).to(torch.float32).numpy())
    assert np.abs(got - tensor.to(torch.float32).numpy()).max() < 0.01
