"""q8_0 against the golden vectors."""

from __future__ import annotations

import kvq_codecs
from kvq_codecs.measure import gaussian_rows

from .. import golden_vectors, half_steps
from ..backends import Backend, on_each_backend
from ..exact import assert_same
from ..golden_vectors import at_each_golden_dim


@on_each_backend
@at_each_golden_dim
def test_planes_and_decoded_values_are_the_golden_ones(dim: int, backend: Backend) -> None:
    golden_vectors.check_encode("q8_0", dim, backend)


@on_each_backend
@at_each_golden_dim
def test_golden_payloads_decode_to_the_golden_values(dim: int, backend: Backend) -> None:
    golden_vectors.check_payload("q8_0", dim, backend)


@at_each_golden_dim
def test_values_that_are_not_finite_poison_their_unit_and_nothing_else(dim: int) -> None:
    golden_vectors.check_non_finite_rows("q8_0", dim, {"scale": 0x7E00}, unit=32)


@on_each_backend
def test_f15_exact_half_steps_round_to_the_even_code(backend: Backend) -> None:
    half_steps.check("q8_0", 127, -127, 127, backend)


def test_interchange_blocks_read_as_the_gguf_package_reads_them() -> None:
    import gguf

    codec = kvq_codecs.get("q8_0")
    vectors = golden_vectors.arrays("q8_0.npz")
    for rows in (vectors["d128_input"], vectors["d256_input"]):
        encoded = codec.encode(rows)
        theirs = gguf.quants.dequantize(codec.to_blocks(encoded), gguf.GGMLQuantizationType.Q8_0)
        assert_same(theirs, codec.decode(encoded))


def test_blocks_that_the_gguf_package_wrote_are_read() -> None:
    import gguf

    blocks = gguf.quants.quantize(gaussian_rows(), gguf.GGMLQuantizationType.Q8_0)
    codec = kvq_codecs.get("q8_0")
    theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    assert_same(codec.decode(codec.from_blocks(blocks, 128)), theirs)
