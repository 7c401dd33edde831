"""How far decoded rows lie from the rows encoded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq_codecs.codec import Codec

Array = Any

SEED = 20
NUM_ROWS = 2048
DIM = 128


@dataclass(frozen=True, slots=True)
class Measured:
    """Errors of decoded values, in units of the rows' root mean square.

    Attributes
    ----------
    relative_rms : root mean square error
    relative_mse : mean square error in units of the mean square, relative_rms squared
    mean_error : mean of decoded − given
    mean_noise : standard error of that mean; a smaller mean_error is none
    """

    relative_rms: float
    relative_mse: float
    mean_error: float
    mean_noise: float


def gaussian_rows() -> Array:
    """Rows of independent Gaussian values: float32 [2048, 128], the same on every machine."""
    return np.random.RandomState(SEED).standard_normal((NUM_ROWS, DIM)).astype(np.float32)


def kurtotic_rows() -> Array:
    """Rows of Student t values, 3 degrees of freedom: float32 [2048, 128], always the same."""
    return np.random.RandomState(SEED).standard_t(3, (NUM_ROWS, DIM)).astype(np.float32)


def measure(codec: Codec, rows: Array) -> Measured:
    """Encode and decode NumPy rows [n, head_dim] of finite values, and compare in float64."""
    given = rows.astype(np.float64)
    error = codec.decode(codec.encode(rows)) - given
    size = math.sqrt(np.mean(given**2))
    mse = float(np.mean(error**2)) / size**2
    return Measured(
        relative_rms=math.sqrt(mse),
        relative_mse=mse,
        mean_error=float(np.mean(error)) / size,
        mean_noise=math.sqrt(mse / error.size),
    )
