"""Where the tests of Triton's kernels run, and what they sweep.

On the CPU the kernels run in Triton's interpreter, which TRITON_INTERPRET=1 turns on before triton
is imported; without it those tests are skipped. On CUDA the compiled kernels run.
"""

from __future__ import annotations

import pytest

import kvq_codecs
from kvq_attention.triton.compat import unavailable

BACKEND = "triton"

_NO_INTERPRETER = unavailable("cpu")
interpreted = pytest.mark.skipif(_NO_INTERPRETER is not None, reason=str(_NO_INTERPRETER))
compiled = pytest.mark.skipif(
    _NO_INTERPRETER is None, reason="Triton's interpreter is on: kernels are not compiled"
)
on_cpu = pytest.param("cpu", marks=interpreted)
on_cuda = pytest.param("cuda", marks=[pytest.mark.gpu, compiled])
each_device = pytest.mark.parametrize("device", [on_cpu, on_cuda])
each_codec = pytest.mark.parametrize("codec", kvq_codecs.names())

DIMS = (64, 80, 96, 112, 128, 192, 256)


def dims_of(codec: str) -> tuple[int, ...]:
    """The head_dims of the kernels that a codec stores."""
    divisor = kvq_codecs.get(codec).spec.divisor
    return tuple(dim for dim in DIMS if dim % divisor == 0)
