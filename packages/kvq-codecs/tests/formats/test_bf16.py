"""bf16 against the conversions of torch and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import torch

from ..backends import Backend, on_each_backend
from ..sixteen_bits import Theirs

THEIRS = Theirs(
    "bf16", torch.bfloat16, ml_dtypes.bfloat16, torch.float16, float.fromhex("0x1.fep127")
)


@on_each_backend
def test_every_exponent_rounds_as_theirs(backend: Backend) -> None:
    THEIRS.check_every_exponent(backend)


@on_each_backend
def test_every_word_decodes_as_theirs(backend: Backend) -> None:
    THEIRS.check_every_word(backend)


@on_each_backend
def test_finite_values_saturate_and_infinities_stay(backend: Backend) -> None:
    THEIRS.check_saturation(backend)


def test_p034_the_other_16_bit_type_is_converted() -> None:
    THEIRS.check_conversion_from_the_other()
