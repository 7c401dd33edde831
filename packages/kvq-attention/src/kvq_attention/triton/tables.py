"""Tables that inline assembly looks values up in, eight bytes at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def byte_tables(values: npt.NDArray[np.float16]) -> dict[str, list[str]]:
    """Eight fp16 numbers as two tables of eight bytes: their low and their high bytes.

    Each is two 32-bit words in hexadecimal, entries 0 … 3 and 4 … 7, as prmt reads them.
    """
    if values.shape != (8,) or values.dtype != np.float16:
        raise ValueError(f"a byte table is of eight fp16 numbers, got {values!r}")
    octets = np.ascontiguousarray(values).view(np.uint8).reshape(8, 2)
    words = np.ascontiguousarray(octets.T).view("<u4")
    return {
        name: [f"0x{word:08x}" for word in row]
        for name, row in zip(("low", "high"), words, strict=True)
    }
