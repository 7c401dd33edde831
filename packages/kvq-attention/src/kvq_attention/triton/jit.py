"""`triton.jit`, of functions whose keys are the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

from kvq_attention.triton.compat import INTERPRETED


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, with or without options; a function must stand below all that it names.

    By its key a kernel is found that some process has compiled. Triton (3.6, 3.7) makes it of the
    source and the constants of all that a function calls, but leaves out the constants of what has
    no key yet: the key of a kernel would depend on those that ran before it, and another process
    would compile it anew. Made when a function is defined, each key has what it calls before it.
    """
    if function is None:
        return lambda function: jit(function, **options)
    kernel = triton.jit(function, **options)
    if not INTERPRETED:
        kernel.cache_key  # noqa: B018
    return kernel
