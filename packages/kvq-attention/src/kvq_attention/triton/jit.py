"""`triton.jit`, of functions whose keys are the same in every process.

By its key a kernel is found that some process has compiled. Triton (3.6, 3.7) makes it of the
source and the constants of all that a function calls, but leaves out the constants of what has no
key yet: the key of a kernel would depend on those that ran before it, and another process would
compile it anew. Made when a function is defined, each key has what it calls before it. So a
function stands below all that it names, itself excepted, and its constants are `tl.constexpr`s that
it names directly: others would not be part of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton
from triton.runtime.jit import JITFunction


def jit(function: Callable[..., Any]) -> Any:
    """A function that kernels call."""
    return _with_key(triton.jit(function))


def kernel(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """A function that is launched, and that no other calls.

    do_not_specialize: integers for whose values it is not compiled anew.
    """

    def made(function: Callable[..., Any]) -> Any:
        found = _with_key(triton.jit(function, do_not_specialize=do_not_specialize))
        # Each launch would compare all constants of the key with what they are by then, 4 µs of
        # decode's; they do not change.
        found.used_global_vals = {}
        return found

    return made


def _with_key(function: Any) -> Any:
    if isinstance(function, JITFunction):  # what Triton's interpreter runs has none
        function.cache_key  # noqa: B018
    return function
