"""q4_0 against the golden vectors."""

from __future__ import annotations

import numpy as np

import kvq_codecs

from .. import golden_vectors, half_steps
from ..backends import Backend, on_each_backend
from ..golden_vectors import at_each_golden_dim


@on_each_backend
@at_each_golden_dim
def test_planes_and_decoded_values_are_the_golden_ones(dim: int, backend: Backend) -> None:
    golden_vectors.check_encode("q4_0", dim, backend)


@on_each_backend
@at_each_golden_dim
def test_golden_payloads_decode_to_the_golden_values(dim: int, backend: Backend) -> None:
    golden_vectors.check_payload("q4_0", dim, backend)


@at_each_golden_dim
def test_values_that_are_not_finite_poison_their_unit_and_nothing_else(dim: int) -> None:
    golden_vectors.check_non_finite_rows("q4_0", dim, {"scale": 0x7E00}, unit=32)


@on_each_backend
def test_f15_exact_half_steps_round_to_the_even_code(backend: Backend) -> None:
    half_steps.check("q4_0", 8, -8, 7, backend)


@on_each_backend
def test_f17_a_positive_extreme_reads_seven_eighths_and_a_negative_one_itself(
    backend: Backend,
) -> None:
    rows = np.zeros((2, 32), np.float32)
    rows[0, 3], rows[1, 3] = 2.5, -2.5
    codec = kvq_codecs.get("q4_0")
    decoded = backend.numpy(codec.decode(codec.encode(backend.array(rows))))
    assert decoded[0, 3] == 2.5 * 7 / 8
    assert decoded[1, 3] == -2.5
    assert np.count_nonzero(decoded) == 2


def test_bytes_are_not_those_of_gguf() -> None:
    """Value 2j shares a byte with 2j + 1; GGUF pairs j with j + 16."""
    rows = np.zeros((1, 32), np.float32)
    rows[0, :2] = 3, -8
    codes = kvq_codecs.get("q4_0").encode(rows).planes["codes"]
    assert codes[0, 0] == 0x83
    assert not codes[0, 1:].any()
