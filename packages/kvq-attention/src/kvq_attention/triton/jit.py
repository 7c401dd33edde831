"""`triton.jit`, of functions whose keys are the same in every process.

By its key a kernel is found that some process has compiled. Triton (3.6, 3.7) makes it of the
source of all that a function calls, and of a list of the constants that these use, from which those
of a callee are missing that has no key of its own yet. So the list would depend on what ran before,
and another process would compile the same kernel anew. Made when a function is defined, each key
has what it calls before it.

What stands below a function that names it would be in no key at all, and a kernel of older source
would be found on disk: it is refused. Constants are `tl.constexpr`s, named directly: a dtype or a
module's attribute would be in no key either.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Sequence
from typing import Any

import triton
from triton.runtime.jit import JITFunction


def jit(function: Callable[..., Any]) -> Any:
    """A function that kernels call; `NameError` if it stands above what it names."""
    return _with_key(function)


def kernel(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """A function that is launched, and that no other calls.

    do_not_specialize: integers for whose values it is not compiled anew.
    """

    def made(function: Callable[..., Any]) -> Any:
        found = _with_key(function, do_not_specialize=do_not_specialize)
        # Each launch would compare all constants of the key with what they are by then, 4 µs of
        # decode's; they do not change.
        found.used_global_vals = {}
        return found

    return made


def _with_key(function: Callable[..., Any], **options: Any) -> Any:
    code = dis.get_instructions(function)
    named = {each.argval for each in code if each.opname == "LOAD_GLOBAL"}
    below = named - {function.__name__, *function.__globals__, *vars(builtins)}
    if below:
        raise NameError(f"{function.__qualname__} stands above what it names: {sorted(below)}")
    made = triton.jit(function, **options)
    if isinstance(made, JITFunction):  # what Triton's interpreter runs has none
        _ = made.cache_key  # computed and kept here
    return made
