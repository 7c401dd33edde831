"""fp8_e4m3 against the golden vectors."""

from __future__ import annotations

from .. import golden_vectors
from ..backends import Backend, on_each_backend
from ..golden_vectors import at_each_golden_dim


@on_each_backend
@at_each_golden_dim
def test_planes_and_decoded_values_are_the_golden_ones(dim: int, backend: Backend) -> None:
    golden_vectors.check_encode("fp8_e4m3", dim, backend)


@on_each_backend
@at_each_golden_dim
def test_golden_payloads_decode_to_the_golden_values(dim: int, backend: Backend) -> None:
    golden_vectors.check_payload("fp8_e4m3", dim, backend)


@at_each_golden_dim
def test_values_that_are_not_finite_poison_their_unit_and_nothing_else(dim: int) -> None:
    golden_vectors.check_non_finite_rows("fp8_e4m3", dim, {"scale": 0x7E00}, unit=32)
