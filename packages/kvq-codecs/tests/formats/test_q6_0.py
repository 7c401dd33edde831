"""q6_0 against the golden vectors."""

from __future__ import annotations

from .. import golden_vectors, half_steps
from ..backends import Backend, on_each_backend
from ..golden_vectors import at_each_golden_dim


@on_each_backend
@at_each_golden_dim
def test_planes_and_decoded_values_are_the_golden_ones(dim: int, backend: Backend) -> None:
    golden_vectors.check_encode("q6_0", dim, backend)


@on_each_backend
@at_each_golden_dim
def test_golden_payloads_decode_to_the_golden_values(dim: int, backend: Backend) -> None:
    golden_vectors.check_payload("q6_0", dim, backend)


@at_each_golden_dim
def test_values_that_are_not_finite_poison_their_unit_and_nothing_else(dim: int) -> None:
    golden_vectors.check_non_finite_rows("q6_0", dim, {"scale": 0x7E00}, unit=32)


@on_each_backend
def test_f15_exact_half_steps_round_to_the_even_code(backend: Backend) -> None:
    half_steps.check("q6_0", 31, -31, 31, backend)
