"""The 16-bit floats against the conversions of torch, and of ml_dtypes or NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvq_codecs

from . import tolerances
from .backends import Backend
from .exact import assert_same


@dataclass(frozen=True)
class Theirs:
    """The same type in the other libraries; `other` is the 16-bit type that it is not."""

    name: str
    torch: torch.dtype
    numpy: Any
    other: torch.dtype
    largest: float

    def saturated(self, rows: np.ndarray) -> np.ndarray:
        """Finite values within the type's range; infinities and NaN as they are."""
        clamped = np.clip(rows, -self.largest, self.largest)
        return np.where(np.isfinite(rows), clamped, rows)

    def check_every_exponent(self, backend: Backend) -> None:
        """Encoding and decoding of floats of every exponent and sign, ties among them."""
        spread = np.arange(0, 2**32, 2**11 * 3, np.uint32)
        ties = np.arange(0, 2**32, 2**12, np.uint32)
        words = np.concatenate([spread, ties, ties + 1, ties - 1])
        rows = words[: len(words) // 128 * 128].view(np.float32).reshape(-1, 128)

        codec = kvq_codecs.get(self.name)
        encoded = codec.encode(backend.array(rows))
        decoded = backend.numpy(codec.decode(encoded))
        by_torch = torch.from_numpy(self.saturated(rows)).to(self.torch)
        with np.errstate(all="ignore"):
            by_numpy = self.saturated(rows).astype(self.numpy)
        assert_same(decoded, by_torch.to(torch.float32).numpy())
        assert_same(decoded, by_numpy.astype(np.float32))
        numbers = ~np.isnan(rows)
        stored = backend.numpy(encoded.planes["values"]).view(np.uint16)
        assert_same(stored[numbers], by_numpy.view(np.uint16)[numbers])

    def check_every_word(self, backend: Backend) -> None:
        """Decoding of all 65,536 words."""
        codec = kvq_codecs.get(self.name)
        words = np.arange(2**16, dtype=np.uint16).reshape(-1, 128)
        values = backend.array(words.view(codec.spec.plane("values").dtype))
        encoded = kvq_codecs.Encoded(codec.spec, 128, {"values": values})
        want = words.view(self.numpy).astype(np.float32)
        assert_same(backend.numpy(codec.decode(encoded)), want)

    def check_saturation(self, backend: Backend) -> None:
        """The largest finite floats, infinities and a negative zero."""
        biggest, largest = float(np.finfo(np.float32).max), self.largest
        rows = np.array([[biggest, -biggest, np.inf, -np.inf, largest, -0.0]], np.float32)
        want = np.array([[largest, -largest, np.inf, -np.inf, largest, -0.0]], np.float32)
        codec = kvq_codecs.get(self.name)
        assert_same(backend.numpy(codec.decode(codec.encode(backend.array(rows)))), want)

    def check_conversion_from_the_other(self) -> None:
        """Input of the other 16-bit type."""
        tensor = torch.linspace(-3, 3, 128).to(self.other)
        codec = kvq_codecs.get(self.name)
        got = codec.decode(codec.encode(tensor))
        assert torch.equal(got, tensor.to(torch.float32).to(self.torch).to(torch.float32))
        assert (got - tensor.to(torch.float32)).abs().max() <= tolerances.BF16_STEP_BELOW_4
