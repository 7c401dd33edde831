"""Products of Triton's interpreter, added up in one order wherever a row lies.

NumPy leaves them to BLAS, some of whose kernels (OpenBLAS's for Haswell among them) add up a row's
products in an order that depends on the row's place in the matrix. No tensor core does, and tests
of bits that may not depend on a request's place would fail by it on some CPUs.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def products_in_order() -> Any:
    """While the interpreter is on, its products are sums in the order of their terms."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        yield
        return
    interpreter = import_module("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _create_dot)
        yield


def _create_dot(
    _builder: Any, a: Any, b: Any, d: Any, _input_precision: Any, _max_num_imprecise_acc: Any
) -> Any:
    """a [..., M, K] · b [..., K, N] + d, in d's dtype."""
    for side in (a, b):
        assert side.data.dtype.kind == "f", f"{side.dtype} is no dtype that NumPy multiplies"
    x, y = (side.data.astype(d.data.dtype) for side in (a, b))
    sums = np.add.reduce(x[..., :, :, None] * y[..., None, :, :], axis=-2)
    return type(d)(sums + d.data, d.dtype.scalar)
