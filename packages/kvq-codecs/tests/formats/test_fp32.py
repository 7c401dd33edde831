"""fp32 rounds nothing."""

from __future__ import annotations

import numpy as np

import kvq_codecs

from ..backends import Backend, on_each_backend
from ..exact import assert_same


@on_each_backend
def test_every_kind_of_float_comes_back_as_it_was(backend: Backend) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, (64, 128), np.uint32)
    bits[0, :4] = [0x7F800000, 0xFF800000, 0x80000000, 0x00000001]
    given = bits.view(np.float32)
    codec = kvq_codecs.get("fp32")
    encoded = codec.encode(backend.array(given))
    assert_same(backend.numpy(encoded.planes["values"]), given)
    assert_same(backend.numpy(codec.decode(encoded)), given)
